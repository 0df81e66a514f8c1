"""What the sections of gpu_check.py share: sizes, records and their tables, what fails or does not fit, time on the device."""

import gc
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import numpy as np
import torch

from llmc.config import ModelConfig, config_from_descriptor
from llmc.kernels import cublaslt
from llmc.memory.arena import TORCH_DTYPE

REPO = Path(__file__).resolve().parent.parent
BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: the real thing, or what a dry run does in seconds.

    attention  (B, NH, T, HS) of each shape     larger  (name, config, batches to choose from, largest first)
    small      batches that wait for the host more than for the device
    warmup     at least 3 for graphs: the first step runs as it comes, the second is captured, the third shows that it replays
    """

    config: ModelConfig
    B: int
    T: int
    copy_bytes: int
    matmul: int
    warmup: int
    repeats: int
    steps: int
    attention: tuple
    larger: tuple
    small: tuple


D24, D48 = config_from_descriptor("d24"), config_from_descriptor("d48")
FULL = Sizes(config_from_descriptor("d12"), 64, 1024, 1 << 30, 8192, 3, 20, 10, ((64, 12, 1024, 64), (16, 25, 1024, 64)),
             (("d24", D24, (64, 48, 32, 24, 16, 8, 4, 2, 1)), ("d48", D48, (32, 24, 16, 12, 8, 4, 2, 1))), (4, 16))  # fmt: skip
TINY = ModelConfig(max_seq_len=32, vocab_size=50, num_layers=1, num_heads=2, channels=32, padded_vocab_size=64)
DRY = Sizes(TINY, 2, 8, 1 << 16, 64, 0, 1, 1, ((2, 2, 32, 32),), (("tiny", TINY, (2, 1)),), (1,))


def block_matmuls(C) -> dict:
    """Name -> (inner, outer) of a block's matmuls."""
    return {"qkv": (C, 3 * C), "attproj": (C, C), "fc": (C, 4 * C), "fcproj": (4 * C, C)}


def factors(form, x, dout, weight):
    """The (M, K) and (K, N) that a linear layer multiplies, forward, and backward for its input's or its weight's gradient."""
    return {"forward": (x, weight.t()), "dinput": (dout, weight), "dweight": (dout.t(), x)}[form]


def zeros_of(tensors, device) -> dict:
    """Name -> memory for each of these tensors of a plan."""
    return {t.name: torch.zeros(t.shape, dtype=TORCH_DTYPE[t.dtype], device=device) for t in tensors}


def relative_difference(ours, reference) -> float:
    """Of two results, in norm."""
    ours, reference = ours.float(), reference.float()
    return ((ours - reference).norm() / reference.norm()).item()


def random_tokens(config, B, T):
    """Inputs and targets: the same in every section."""
    return np.random.default_rng(0).integers(0, config.vocab_size, (2, B, T))


# ----------------------------------------------------------------------------
# records: a section adds rows to its tables in place, so that an error or a kill leaves what there was


class Skip(Exception):
    """A section that cannot run here, and why."""


def new_record(title, status="skipped", reason="") -> dict:
    """Of a section. errors: {"what", "lines"} of each part that failed; not_run: sentences; tables: title -> rows."""
    return dict(title=title, status=status, reason=reason, seconds=0.0, tables={}, notes=[], not_run=[], errors=[])


def check_cublaslt(run, what):
    """Skip where there is no cuBLASLt to call. what: a sentence's beginning."""
    if not run.cuda:
        raise Skip(f"{what} cuBLASLt's, and there is no CUDA device")
    if why := cublaslt.available():
        raise Skip(why)


def table(record, title) -> list:
    return record["tables"].setdefault(title, [])


def while_time(run, record, items, seconds, name=str):
    """Items, until fewer than `seconds` are left; the rest are recorded as not run."""
    items = list(items)
    for i, item in enumerate(items):
        if not run.has(seconds):
            record["not_run"] += [f"{name(x)}: {run.left():.0f} s were left" for x in items[i:]]
            return
        yield item
        run.write()


@contextmanager
def attempt(record, what):
    """An exception inside is recorded; the section goes on, unless the device is gone."""
    try:
        yield
    except Exception as error:
        record["errors"].append({"what": what, "lines": last_lines(error)})
        if device_is_lost():
            raise


def cause_of(error) -> str:
    """Its kind and the first line it says: CUDA's errors go on with general advice."""
    return traceback.format_exception_only(error)[-1].splitlines()[0]


def last_lines(error, lines=8) -> str:
    return "\n".join("".join(traceback.format_exception(error)).strip().splitlines()[-lines:])


def device_is_lost() -> bool:
    """Whether nothing can run any more in this process, as after a kernel that touched memory it should not."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.ones(1, device="cuda").item()
        return False
    except Exception as error:
        return not isinstance(error, torch.cuda.OutOfMemoryError)


def free_memory():
    gc.collect()  # a failed section's error refers to its frames, and they to their models
    torch.cuda.empty_cache()


# ----------------------------------------------------------------------------
# time


def time_each(backend, calls) -> list[float]:
    """Milliseconds of each call, in turn: between events on the device's own clock; on a CPU by the host's."""
    if backend.kind != "cuda":
        times = []
        for call in calls:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
    torch.cuda._sleep(2_000_000)  # a millisecond in which the host gets ahead, so that no gap between launches is counted
    for call, (before, after) in zip(calls, events):
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def measure(run, *calls) -> tuple[float, float]:
    """(median milliseconds, half of all times lie within this share of it), of the same call over several sets of inputs in turn.

    Sets are so large that by its turn none of a set is left in the cache.
    """
    for call in calls * run.sizes.warmup:
        call()
    run.backend.synchronize()
    times, enough = [], time.monotonic() + 1.0
    while len(times) < run.sizes.repeats and (len(times) < 4 or time.monotonic() < enough):
        times += time_each(run.backend, calls)
    return summarize(times)


def summarize(times) -> tuple[float, float]:
    low, middle, high = quantiles(times, n=4) if len(times) > 1 else times * 3
    return middle, (high - low) / middle
