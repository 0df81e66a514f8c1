"""Sections of gpu_check.py that only --tune runs: other values of constants and launch options of Triton's kernels."""

from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module

import torch

from llmc.memory.scratch_sizes import head_chunk_rows
from scripts.gpu_common import Skip, attempt, free_memory, measure, table, while_time
from scripts.gpu_compared import measure_steps_in_turn
from scripts.gpu_kernels import KERNELS, STAGED, Attention, Room, evaluate, letters
from scripts.gpu_steps import our_step

# options of a launch, which are given at door.launch, are treated as constants too: of "door" for every kernel, or of a kernel's name for
# that one
SOURCE = "source"  # as if it were an option: lines of a kernel's source, and what takes their place
LAUNCH_OPTIONS = {"num_warps", "num_stages", "maxnreg", "WHOLE", SOURCE}
ROWS, PARTIALS = ("door", "ROW_ELEMENTS", (1024, 2048, 4096, 8192, 16384)), ("", "column partials", (128, 256, 512, 1024))
WARPS, TILE_ROWS, TILE_COLUMNS = ("door", "num_warps", (2, 4, 8, 16, 32)), (4, 8, 16, 32), (128, 256, 512, 1024)
# operation -> (module of llmc.kernels, constant, values to try)
SWEEPS = {
    "encoder_forward": (ROWS,),
    "encoder_backward": (
        ("encoder", "COLUMNS", (256, 512, 1024)), ("encoder", "TOKEN_UNROLL", (4, 8, 16, 32)),
        ("encoder", "POSITION_UNROLL", (2, 4, 8, 16)),
    ),
    "layernorm_forward": (ROWS,), "residual_layernorm_forward": (ROWS,), "layernorm_normalize": (ROWS,),
    "layernorm_backward": (ROWS, PARTIALS),
    "gelu_forward": (("gelu", "ELEMENTS", (1024, 2048, 4096, 8192)),),
    "gelu_backward_inplace": (("gelu", "TILE_ROWS", TILE_ROWS), ("gelu", "TILE_COLUMNS", TILE_COLUMNS), PARTIALS),
    "pack_gradients": (("attention", "TILE_ROWS", TILE_ROWS), ("attention", "TILE_COLUMNS", TILE_COLUMNS), PARTIALS),
    "matmul_dbias": (("columns", "SUM_TILE_ROWS", TILE_ROWS), ("columns", "SUM_TILE_COLUMNS", TILE_COLUMNS)),
    # first nothing fetched ahead, as before, two programs to a multiprocessor of sm90; then fewer threads, with two, three and four
    "fused_classifier_inplace": ((
        "fused_classifier", ("BLOCK", "AHEAD", "WARPS"),
        ((32 << 10, 0, 16), (16 << 10, 96 << 10, 8), (16 << 10, 64 << 10, 8), (16 << 10, 48 << 10, 8)),
    ),),
    "global_norm": (("global_norm", "ELEMENTS", (1024, 2048, 4096, 8192)),),
    "adamw_update": (("adamw", "ELEMENTS", (512, 1024, 2048, 4096)),),
    "fp8_operand": (("fp8", "ELEMENTS", (2048, 4096, 8192)), ("fp8", "ROWS", (64, 128, 256)), ("fp8", "COLUMNS", (64, 128, 256))),
}  # fmt: skip


def tune(run, record):
    """One constant after the other, the best value so far kept."""
    if run.args.tune is None:
        raise Skip("only with --tune")
    if run.no_triton:
        raise Skip(run.no_triton)
    values, wanted = letters(run.sizes.config, run.sizes.B, run.sizes.T), run.args.tune or SWEEPS
    kernels = [k for k in KERNELS if k.operation in wanted and (not k.forms or k.operation == "fp8_operand")]
    for kernel in while_time(run, record, kernels, 15, name=lambda k: k.name):
        with attempt(record, kernel.name):
            room = Room(run, "triton", **dict(kernel.forms))
            sets = room.sets(kernel, evaluate(kernel.n_bytes, values))
            default, _ = measure(run, *sets)
            best, now = default, {}
            for module, name, tried in (*SWEEPS[kernel.operation], WARPS):
                times = {}
                for value in tried[:2] if run.dry else tried:
                    if not run.has(5):
                        break
                    with attempt(record, f"{kernel.name}, {name} {value}"), constants(room, {**now, (module, name): value}):
                        if kernel.operation in STAGED:  # what it puts on the device depends on the constants
                            STAGED[kernel.operation](room)
                        times[value], _ = measure(run, *sets)
                        table(record, "all").append({"kernel": kernel.name, "constant": name, "value": value, "ms": times[value]})
                value = min(times, key=times.get, default=None)
                if value is not None and times[value] < best:
                    best, now[module, name] = times[value], value
            found = ", ".join(f"{name} {value}" for (_, name), value in now.items()) or "as it is"
            table(record, "").append({"kernel": kernel.name, "ms as it is": default, "best ms": best, "best": found})


@dataclass(frozen=True)
class WholeHeads:
    """The attention_backward of gpu_heads.py with these tiles, to be set in the module functions."""

    keys: int
    queries: int
    warps: int
    __name__ = "attention_backward"

    def __call__(self, *args, **options):
        from scripts.gpu_heads import attention_backward  # here: kernels are defined only when it is known whether they are interpreted

        attention_backward(*args, **options, **asdict(self))


# for Triton's attention, sets of changes made together: {(module or kernel, constant): value}, the most promising first. The second of
# two values is for heads of more than 64 channels, which no shape here has. Compiled for sm90 by Triton 3.6, the kernel of keys takes 164
# registers, so a multiprocessor has room for three of its programs; with 128 for four, and what it spills then its main loop does not read.
# The other two kernels have room for four; with 96 registers, at which they spill nothing, and less shared memory for forward, for five
KEYS, QUERIES, FORWARD = "_attention_backward_keys", "_attention_backward_queries", "_attention_forward"
MORE_KEYS, MORE_QUERIES = {(KEYS, "maxnreg"): 128}, {(QUERIES, "maxnreg"): 96}
MORE_FORWARD = {(FORWARD, "maxnreg"): 96, (FORWARD, "num_stages"): 2}
ASKED = {(kernel, "WHOLE"): False for kernel in (KEYS, QUERIES, FORWARD)}
# Backward by whole heads, with large tiles and with small ones: as many registers as it likes leave room for one program of eight warps, or
# two of four. With a limit there is room for one more; 7 and 15 numbers are then read back in a turn of its main loop
HEADS = "_attention_backward_heads"
LARGE_HEADS, SMALL_HEADS = ({("functions", "attention_backward"): WholeHeads(*tiles)} for tiles in ((128, 32, 8), (64, 32, 4)))
MORE_LARGE_HEADS, MORE_SMALL_HEADS = LARGE_HEADS | {(HEADS, "maxnreg"): 128}, SMALL_HEADS | {(HEADS, "maxnreg"): 168}
ATTENTION_SWEEP = (
    MORE_LARGE_HEADS, LARGE_HEADS, MORE_SMALL_HEADS, SMALL_HEADS,
    ASKED, MORE_KEYS | MORE_QUERIES | MORE_FORWARD, MORE_KEYS, MORE_QUERIES, MORE_FORWARD,
    *({(kernel, "num_stages"): stages} for kernel in (KEYS, QUERIES, FORWARD) for stages in (2, 4)),
    *({("attention", "FORWARD_KEYS"): (rows, 32)} for rows in (32, 128)),
    *({("attention", "BACKWARD_KEYS"): (rows, 32)} for rows in (64, 128)),
    *({("attention", "BACKWARD_QUERIES"): (rows, 16)} for rows in (16, 64)), {("attention", "WARPS"): (8, 8)},
)  # fmt: skip


def tune_attention(run, record):
    """Forward and backward as they are, and with each set of changes alone; the numbers of rows are the plan's."""
    if run.args.tune is None:
        raise Skip("only with --tune")
    if run.no_triton or not run.cuda:
        raise Skip(run.no_triton or "these kernels are a GPU's, and there is no CUDA device")
    room = Room(run, "triton")
    cases = [(shape, change) for shape in run.sizes.attention for change in ({}, *ATTENTION_SWEEP)]
    for shape, change in while_time(run, record, cases, 10, name=str):
        what = ", ".join(f"{owner} {name} {value}" for (owner, name), value in change.items()) or "nothing"
        with attempt(record, f"{shape}, {what}"), constants(room, change):
            sets = [Attention(run, shape, "triton") for _ in range(2)]
            (forward, _), (backward, _) = (measure(run, *(getattr(one, way) for one in sets)) for way in ("forward", "backward"))
            row = {"B": shape[0], "NH": shape[1], "changed": what, "forward ms": forward, "backward ms": backward}
            table(record, "").append(row)


# for whole steps, as a kernel measured alone does not show what others find in the L2: kernels that begin with what the one before wrote
# last, and end with what the next reads first; and numbers that are not read again soon leaving the L2 before others. The classifier reads
# a row of logits twice: the first time it asks the L2 to keep them, the second time to let them go (of loads that are staged, as these are,
# Triton 3.6 drops what is asked)
LAST_FIRST = (("tl.program_id(0)", "(tl.num_programs(0) - 1 - tl.program_id(0))"),)
LEAVES, STAYS = ', eviction_policy="evict_first")', ', eviction_policy="evict_last")'
READ_ONCE = {
    ("_gelu_forward", SOURCE): (("load(inp + at, at < n)", f"tl.load(inp + at, mask=at < n{LEAVES}.to(tl.float32)"),),
    ("_layernorm_forward", SOURCE): (("load(residual + at, mask)", f"tl.load(residual + at, mask=mask, other=0.0{LEAVES}.to(tl.float32)"),),
    ("_classify", SOURCE): (
        ("tl.load(logits + at + tl.arange(0, COLUMNS))", f"tl.load(logits + at + tl.arange(0, COLUMNS){STAYS}"),
        ("tl.load(logits + column)", f"tl.load(logits + column{LEAVES}"),
    ),
}
WRITTEN = "narrow(exp(x - largest) * scale, logits.dtype.element_ty)"
LOGITS_LEAVE = READ_ONCE["_classify", SOURCE] + ((f"{WRITTEN})", f"{WRITTEN}{LEAVES}"),)
STEP_SWEEP = (
    ("last rows first", {(kernel, SOURCE): LAST_FIRST for kernel in ("_layernorm_forward", "_gelu_forward", "_classify")}),
    ("backward by whole heads", MORE_LARGE_HEADS), ("backward by small whole heads", MORE_SMALL_HEADS),
    ("more programs of attention", MORE_KEYS | MORE_QUERIES | MORE_FORWARD), ("attention that asks whether rows exist", ASKED),
    ("what is read once leaves the L2 first", READ_ONCE),
    ("what is read once, and logits' gradients, leave the L2 first", READ_ONCE | {("_classify", SOURCE): LOGITS_LEAVE}),
)  # fmt: skip


def tune_steps(run, record):
    """A step as it is and with each set of changes, in turn; and with the head in chunks of twice as many rows, which at -b 64 of d12 are
    so few that their weight gradients need no sum in fp32."""
    if run.args.tune is None:
        raise Skip("only with --tune")
    if run.kernels != "triton" or not run.cuda:
        raise Skip(run.no_triton or "the kernels of these steps are Triton's, on a CUDA device")
    s = run.sizes
    rows = 2 * head_chunk_rows(run.options(s.config, s.B, s.T))
    cases = [(what, change, {}) for what, change in STEP_SWEEP] + [(f"--head-chunk {rows}", {}, {"head_chunk": rows})]
    for what, change, forms in while_time(run, record, cases, 15, name=lambda case: case[0]):
        with attempt(record, what):
            table(record, "").append({"changed": what} | changed_step(run, change, forms))
        free_memory()


def changed_step(run, change, forms) -> dict:
    """The times and the losses of a step with these changes, or these options, and of the step as it is."""
    s = run.sizes
    as_it_is, _ = our_step(run, s.config, s.B, s.T)
    with constants(None, change):  # what a model runs is chosen when it is made
        changed, _ = our_step(run, s.config, s.B, s.T, **forms)

    def step():
        with constants(None, change):  # how it is launched, each time, or when it is captured
            return changed()

    from scripts.gpu_heads import forget_room  # here, as above

    try:
        found = measure_steps_in_turn(run, {"as it is": as_it_is, "changed": step})
    finally:
        forget_room()
    (usual_ms, _, usual_loss), (ms, spread, loss) = found["as it is"], found["changed"]
    return {"ms": ms, "spread": spread, "ms as it is": usual_ms, "ratio": ms / usual_ms, "loss": loss, "loss as it is": usual_loss}


def with_option(launch, owner, name, value):
    """door.launch with that option, for the kernel named `owner`, or for all kernels if owner is "door"."""

    def launch_with_it(kernel, *args, **options):
        if owner in ("door", kernel.fn.__name__):
            if name == SOURCE:
                kernel = rewritten(kernel, value)
            else:
                options[name] = value
        launch(kernel, *args, **options)

    return launch_with_it


@contextmanager
def constants(room, wanted: dict):
    """Set {(module of llmc.kernels, constant or several): value or values} for a while; options of launches, and the number of column
    partials in a room, can be set likewise."""
    from llmc.kernels import door

    with ExitStack() as until_end:
        for (module, name), value in wanted.items():
            if name == "column partials":
                partials = room.scratch["column_partials"]
                until_end.callback(room.scratch.__setitem__, "column_partials", partials)
                room.scratch["column_partials"] = torch.zeros(value, partials.shape[1], device=partials.device)
            elif name in LAUNCH_OPTIONS:
                until_end.enter_context(door.launched_by(with_option(door.launch, module, name, value)))
            else:
                owner = import_module(f"llmc.kernels.{module}")
                for one, its in zip(name, value) if isinstance(name, tuple) else [(name, value)]:
                    until_end.callback(setattr, owner, one, getattr(owner, one))
                    setattr(owner, one, its)
        yield


@cache
def rewritten(kernel, changes):
    """The same kernel, but for these (text, new text) of its source. In the kernel itself each would be a parameter that nothing sets."""
    source, other = kernel.src, type(kernel)(kernel.fn)
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{kernel.fn.__name__} has {source.count(old)} times, expected once: {old}")
        source = source.replace(old, new)
    other._unsafe_update_src(source)
    return other
