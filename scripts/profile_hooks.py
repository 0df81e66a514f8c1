"""What profile.py puts around the operations of a step: hooks that time them, and count the bytes and FLOPs that they need."""

from collections import defaultdict
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

# matmul -> positions of an argument with a row for every token, and of the weight or its gradient
MATMULS = {"matmul_forward": (0, 2), "matmul_dinput": (0, 2), "matmul_dweight": (1, 0),
           "matmul_gelu_forward": (0, 3), "matmul_gelu_backward": (0, 2)}  # fmt: skip
# with --matmul fp8, position of an argument -> bytes per element beyond bf16's two: it is read again, and written and read in FP8. dout is
# written in two layouts by matmul_dout, and after that only read in FP8, hence -1
FP8_BYTES = {"matmul_forward": {1: 4, 2: 4}, "matmul_dout": {0: 4}, "matmul_dinput": {1: -1, 2: 4}, "matmul_dweight": {1: -1, 2: 4}}
FP8_SPEED = 2  # of a card's matmuls, relative to bf16
CALLED_BY_NAME = ("residual_",)  # prefixes of functions that llmc.gpt2 calls by name, not through model.ops
# operation -> how many of its first tensors it both reads and overwrites
IN_PLACE = {"residual_layernorm_forward": 1, "residual_add_inplace": 1, "gelu_backward_inplace": 1, "layernorm_backward": 1,
            "fused_classifier_inplace": 2, "encoder_backward": 1}  # fmt: skip
EMBEDDINGS = {"encoder_forward": (2, 3), "encoder_backward": (0, 1)}  # positions of wte and wpe, or of their gradients
# methods of the model -> the stage they are, for those that the lists of passes do not name
STAGES = {"_ln1_forward": "ln1_forward", "_fcproj": "fcproj", "_head_backward": "head", "_norm_backward": "lnf_backward",
          "grad_norm": "norm", "update": "update"}  # fmt: skip


# ----------------------------------------------------------------------------
# limits and costs


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine does at best: a large copy, bytes read and written, and a large matmul."""

    copy_gb_s: float
    matmul_tflops: float

    def floor_ms(self, n_bytes: int, flops: float) -> float:
        """The least time for this many bytes and FLOPs, when copying and computing overlap."""
        return max(n_bytes / self.copy_gb_s / 1e6, flops / self.matmul_tflops / 1e9)


@dataclass(slots=True)
class Cost:
    """What all calls of an operation in one step add up to."""

    calls: int = 0
    n_bytes: int = 0
    flops: int = 0
    floor_ms: float = 0.0


def tensors_in(values):
    """The tensors among values, in order, also those in lists and tuples. A dictionary holds scratch buffers, so it is skipped."""
    import torch

    for value in values:
        if isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, torch.Tensor):
            yield value


def count_bytes(name: str, args, kwargs, result, embedding_rows) -> int:
    """Bytes that one call must read and write, counted as the top of profile.py says; embedding_rows: those of wte and wpe in use."""
    if name == "adamw_update":
        return count_update_bytes(args[0])
    tensors = list(tensors_in([*args, *kwargs.values(), result]))
    sizes = [t.nbytes for t in tensors]
    for place, rows in zip(EMBEDDINGS.get(name, ()), embedding_rows):
        sizes[place] = sizes[place] // len(tensors[place]) * rows
    twice = int(kwargs["accumulate"]) if name == "matmul_dweight" else IN_PLACE.get(name, 0)
    operands = FP8_BYTES[name] if in_fp8(name, args, kwargs) else {}
    return sum(sizes) + sum(sizes[:twice]) + sum(more * args[place].numel() for place, more in operands.items())


def in_fp8(name: str, args, kwargs) -> bool:
    """Whether this is a matmul that first makes its factors in FP8: one with scratch for them."""
    scratch = kwargs.get("scratch", args[-1]) if name in FP8_BYTES else None
    return isinstance(scratch, dict) and "fp8_inp" in scratch


def count_update_bytes(flat: dict) -> int:
    """Bytes of the update: gradients are read; m, v, master and weights are read and written, but weights with a master only written."""
    once = {"gradients", "parameters"} if "master" in flat else {"gradients"}
    return sum(t.nbytes * (1 if name in once else 2) for name, t in flat.items())


def count_flops(name: str, args, attention: int) -> int:
    """FLOPs of one call; attention is B T T C."""
    if name in MATMULS:
        x, weight = (args[place] for place in MATMULS[name])
        return 2 * x.numel() // x.shape[-1] * weight.numel()
    return (2 if "forward" in name else 5) * attention if name.startswith("attention") else 0


# ----------------------------------------------------------------------------
# hooks


class Recorder:
    """What the hooks around stages and operations write to. A key is (phase, stage, operation).

    recording  whether the hooks do anything; counting: whether they add up costs too, which takes time itself
    phase      forward, backward or update, set by the step      range_of  name -> a context in which that runs
    costs      key -> Cost, in the order of the step             spans     [(key, start, end)] of a step, as the backend's marks
    """

    def __init__(self, backend, limits: Limits, forward_stages, attention: int, embedding_rows):
        self.backend, self.limits, self.forward_stages = backend, limits, forward_stages
        self.attention, self.embedding_rows = attention, embedding_rows
        self.recording = self.counting = self.inside = False
        self.phase = self.stage = ""
        self.range_of = nullcontext
        self.costs, self.spans = defaultdict(Cost), []

    def stage_hook(self, name: str, method):
        """The method, recorded as a stage; inside another stage it is part of that one."""

        def run(*args, **kwargs):
            if not self.recording or self.stage:
                return method(*args, **kwargs)
            self.stage = f"{name} again" if self.phase == "backward" and name in self.forward_stages else name
            with self.range_of(self.stage):
                result = method(*args, **kwargs)
            self.stage = ""
            return result

        return run

    def operation_hook(self, name: str, function):
        """The function, timed; inside another operation it is part of that one, and outside any stage it is a stage itself."""

        def run(*args, **kwargs):
            if not self.recording or self.inside:
                return function(*args, **kwargs)
            stage = self.stage or name.removesuffix("_forward")
            self.inside = True
            with self.range_of(f"{stage}: {name}"):
                start = self.backend.mark()
                result = function(*args, **kwargs)
                end = self.backend.mark()
            self.inside = False
            key = ("head" if stage == "head" else self.phase, stage, name)
            self.spans.append((key, start, end))
            if self.counting:
                self.count(key, args, kwargs, result)
            return result

        return run

    def count(self, key, args, kwargs, result):
        """Add one call to the costs."""
        n_bytes = count_bytes(key[-1], args, kwargs, result, self.embedding_rows)
        flops = count_flops(key[-1], args, self.attention)
        cost = self.costs[key]
        cost.calls, cost.n_bytes, cost.flops = cost.calls + 1, cost.n_bytes + n_bytes, cost.flops + flops
        cost.floor_ms += self.limits.floor_ms(n_bytes, flops / FP8_SPEED if in_fp8(key[-1], args, kwargs) else flops)

    def measure(self, step) -> tuple[dict, float]:
        """Milliseconds of each key, and of the whole step. Waits for the device before and after the step, but not within it."""
        self.spans.clear()
        self.backend.synchronize()
        self.recording = True
        start = self.backend.mark()
        step()
        end = self.backend.mark()
        self.recording = False
        self.backend.synchronize()
        times = defaultdict(float)
        for key, *marks in self.spans:
            times[key] += self.backend.seconds_between(*marks) * 1e3
        return times, self.backend.seconds_between(start, end) * 1e3


@contextmanager
def hooked(model, recorder: Recorder):
    """Put hooks around all that the model runs in a step: model.ops, functions that llmc.gpt2 calls by name, and the stages."""
    from llmc import gpt2

    with ExitStack() as undo:

        def put(owner, name, value):
            undo.callback(*((setattr, owner, name, vars(owner)[name]) if name in vars(owner) else (delattr, owner, name)))
            setattr(owner, name, value)

        def hook(owner, name):
            put(owner, name, recorder.operation_hook(name.removeprefix("launch_"), getattr(owner, name)))

        for name in [n for n in vars(model.ops) if not n.startswith("stage_")]:  # these copy in what the launch_ ones need
            hook(model.ops, name)
        for name in [n for n in vars(gpt2) if n.startswith(CALLED_BY_NAME)]:
            hook(gpt2, name)
        for name, stage in STAGES.items():
            put(model, name, recorder.stage_hook(stage, getattr(model, name)))
        for name in ("forward_passes", "backward_passes"):
            put(model, name, [recorder.stage_hook(method.__name__.lstrip("_"), method) for method in getattr(model, name)])
        yield
