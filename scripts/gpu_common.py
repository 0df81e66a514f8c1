"""What the sections of gpu_check.py share: sizes, records and their tables, handling of failures and of lack of time, and timing."""

import gc
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
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
    """The sizes that are measured: full ones, or those that a dry run does in seconds.

    attention  (B, NH, T, HS) of each shape     larger  (name, config, batches to choose from, largest first)
    small      batches so small that a step waits for the host more than for the device
    warmup     at least 3 for graphs: the first step runs eagerly, the second is captured, the third shows that it replays
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
    """Name -> (inner, outer) sizes of a block's matmuls."""
    return {"qkv": (C, 3 * C), "attproj": (C, C), "fc": (C, 4 * C), "fcproj": (4 * C, C)}


def factors(form, x, dout, weight):
    """The factors (M, K) and (K, N) that a linear layer multiplies: in forward, or in backward for the gradient of its input or weight."""
    return {"forward": (x, weight.t()), "dinput": (dout, weight), "dweight": (dout.t(), x)}[form]


def zeros_of(tensors, device) -> dict:
    """Name -> zeros with the shape and type of each of these tensors of a plan."""
    return {t.name: torch.zeros(t.shape, dtype=TORCH_DTYPE[t.dtype], device=device) for t in tensors}


def relative_difference(ours, reference) -> float:
    """The norm of the difference of two results, over the norm of the reference."""
    ours, reference = ours.float(), reference.float()
    return ((ours - reference).norm() / reference.norm()).item()


def random_tokens(config, B, T):
    """Inputs and targets: the same in every section."""
    return np.random.default_rng(0).integers(0, config.vocab_size, (2, B, T))


# ----------------------------------------------------------------------------
# records: a section adds rows to its tables in place, so that an error or a kill leaves the rows made so far


class Skip(Exception):
    """Raised by a section that cannot run here; says why."""


def new_record(title, status="skipped", reason="") -> dict:
    """The record of a section. errors: {"what", "lines"} of each part that failed; not_run: sentences; tables: title -> rows."""
    return dict(title=title, status=status, reason=reason, seconds=0.0, tables={}, notes=[], not_run=[], errors=[])


def check_cublaslt(run, what):
    """Raise Skip if there is no cuBLASLt to call. what: the beginning of the sentence that says why."""
    if not run.cuda:
        raise Skip(f"{what} cuBLASLt's, and there is no CUDA device")
    if why := cublaslt.why_no_cublaslt():
        raise Skip(why)


def table(record, title) -> list:
    return record["tables"].setdefault(title, [])


def while_time(run, record, items, seconds, name=str):
    """Yield items until fewer than `seconds` are left; the rest are recorded as not run."""
    items = list(items)
    for i, item in enumerate(items):
        if not run.has(seconds):
            record["not_run"] += [f"{name(x)}: {run.left():.0f} s were left" for x in items[i:]]
            return
        yield item
        run.write()


@contextmanager
def attempt(record, what):
    """Record an exception raised inside. The section goes on, unless the device is lost."""
    try:
        yield
    except Exception as error:
        record["errors"].append({"what": what, "lines": last_lines(error)})
        if device_is_lost():
            raise


def cause_of(error) -> str:
    """The error's type and its message's first line: CUDA's errors continue with general advice."""
    return traceback.format_exception_only(error)[-1].splitlines()[0]


def last_lines(error, lines=8) -> str:
    """The end of an error's traceback; and where its message is longer, as torch's may be, its cause before that."""
    last = "".join(traceback.format_exception(error)).strip().splitlines()[-lines:]
    cause = cause_of(error)
    return "\n".join(last if cause in last else [cause, "...", *last])


def device_is_lost() -> bool:
    """Whether nothing can run on the device in this process any more, as after a kernel that made an illegal memory access."""
    if not torch.cuda.is_initialized():
        return False
    try:
        torch.ones(1, device="cuda").item()
        return False
    except Exception as error:
        return not isinstance(error, torch.cuda.OutOfMemoryError)


def free_memory():
    gc.collect()  # a failed section's error refers to its frames, and those to their models
    torch.cuda.empty_cache()


# ----------------------------------------------------------------------------
# time


def time_each(backend, calls) -> list[float]:
    """Milliseconds of each call, one after the other: between events on the device's clock; on a CPU by the host's clock."""
    if backend.kind != "cuda":
        times = []
        for call in calls:
            start = time.perf_counter()
            call()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in calls]
    torch.cuda._sleep(2_000_000)  # about a millisecond in which the host gets ahead, so that no gap between launches is counted
    for call, (before, after) in zip(calls, events):
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def measure(run, *calls) -> tuple[float, float]:
    """(median milliseconds, interquartile range over the median), of the same call on several sets of inputs in turn.

    Sets are so large that nothing of a set is left in the cache when its turn comes.
    """
    return measure_in_turn(run, calls)[0]


def measure_in_turn(run, *operations) -> list[tuple[float, float]]:
    """The same of several operations, each of them such calls. They take turns, so that a drift of the card's clocks affects all alike."""
    for call in chain.from_iterable(operations * run.sizes.warmup):
        call()
    run.backend.synchronize()
    times, enough = [[] for _ in operations], time.monotonic() + len(operations)
    while len(times[-1]) < run.sizes.repeats and (len(times[-1]) < 4 or time.monotonic() < enough):
        for calls, of_one in zip(operations, times):
            of_one += time_each(run.backend, calls)
    return [summarize(of_one) for of_one in times]


def summarize(times) -> tuple[float, float]:
    low, middle, high = quantiles(times, n=4) if len(times) > 1 else times * 3
    return middle, (high - low) / middle
