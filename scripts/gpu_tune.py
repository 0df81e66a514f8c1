"""Sections of gpu_check.py that only --tune runs: other values of constants and launch options of Triton's kernels."""

from contextlib import contextmanager
from importlib import import_module

import torch

from scripts.gpu_common import Skip, attempt, measure, table, while_time
from scripts.gpu_kernels import KERNELS, STAGED, Attention, Room, evaluate, letters

# options of a launch, which are given at door.launch, are treated as constants too: of "door" for every kernel, or of a kernel's name for
# that one
LAUNCH_OPTIONS = {"num_warps", "num_stages", "maxnreg"}
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
    "matmul_dbias": (("columns", "TILE_ROWS", TILE_ROWS), ("columns", "TILE_COLUMNS", TILE_COLUMNS)),
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


# for Triton's attention, sets of changes made together: {(module or kernel, constant): value}, the most promising first. The second of
# two values is for heads of more than 64 channels, which no shape here has. Compiled for sm90, the kernel of keys takes 167 registers, so
# a multiprocessor has room for three of its programs; with 128, at which its main loop reads one spilled number, for four. The other two
# kernels have room for four; with 96 registers, at which they spill nothing, and less shared memory for forward, for five
KEYS, QUERIES, FORWARD = "_attention_backward_keys", "_attention_backward_queries", "_attention_forward"
MORE_KEYS, MORE_QUERIES = {(KEYS, "maxnreg"): 128}, {(QUERIES, "maxnreg"): 96}
MORE_FORWARD = {(FORWARD, "maxnreg"): 96, (FORWARD, "num_stages"): 2}
ATTENTION_SWEEP = (
    MORE_KEYS | MORE_QUERIES | MORE_FORWARD, MORE_KEYS, MORE_QUERIES, MORE_FORWARD,
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


def with_option(launch, owner, name, value):
    """door.launch with that option, for the kernel named `owner`, or for all kernels if owner is "door"."""

    def launch_with_it(kernel, *args, **rest):
        launch(kernel, *args, **(rest | ({name: value} if owner in ("door", kernel.fn.__name__) else {})))

    return launch_with_it


@contextmanager
def constants(room, wanted: dict):
    """Set {(module of llmc.kernels, constant or several): value or values} for a while; options of launches and the number of column
    partials can be set likewise."""
    from llmc.kernels import door

    launch, partials, saved = door.launch, room.scratch["column_partials"], []
    try:
        for (module, name), value in wanted.items():
            if name == "column partials":
                room.scratch["column_partials"] = torch.zeros(value, partials.shape[1], device=partials.device)
            elif name in LAUNCH_OPTIONS:
                door.launch = with_option(door.launch, module, name, value)
            else:
                owner = import_module(f"llmc.kernels.{module}")
                for one, its in zip(name, value) if isinstance(name, tuple) else [(name, value)]:
                    saved.append((owner, one, getattr(owner, one)))
                    setattr(owner, one, its)
        yield
    finally:
        door.launch, room.scratch["column_partials"] = launch, partials
        for owner, name, value in saved:
            setattr(owner, name, value)
