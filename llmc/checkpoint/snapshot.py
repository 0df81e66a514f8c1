"""A whole checkpoint, written and read back: the model, the training state, and what else a resumed run needs to be the same run."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from llmc.checkpoint.extra_file import Extra, read_crc, write_extra
from llmc.checkpoint.model_file import open_weights, read_model_header, write_model
from llmc.checkpoint.state_file import TrainingState, write_state
from llmc.checkpoint.store import extra_path, model_path, state_path, unmark
from llmc.checkpoint.whole_tensors import shares, whole_tensors
from llmc.checkpoint.writer import PIECE_BYTES
from llmc.errors import RESUME_FROM_ANOTHER, UserError
from llmc.files import Numbers, crc_of, make_folder
from llmc.memory.layout import runs
from llmc.memory.tables import num_parameters


def begin_snapshot(writer, folder, step, model, loader, extra: Extra):
    """Give the writer the checkpoint of `step`. All ranks call this; rank 0 writes the model, and each rank its own state.

    With tensor parallelism the files are those of a whole model: the first part writes what a rank without it would.

    Once this returns the model may train on. Raises UserError where the disk is full or denies the write; earlier checkpoints stay as they
    were.
    """
    sharing = model.sharing
    print(f"Writing checkpoint at step {step}")
    sharing.release_all()
    if is_first(model):
        make_folder(Path(folder))  # it may have been removed or renamed while the run went on
        unmark(folder, step)  # an earlier run's DONE must not stand over files that are being replaced
    sharing.barrier()
    writes = contents(folder, step, model, loader, extra)
    writer.begin(step, ((partial(write_moving, write, sharing), tensors) for write, tensors in writes))


def await_all(writer, sharing):
    """Wait until all ranks have written their files. Raises UserError if this one could not."""
    writer.wait()
    sharing.release_all()
    sharing.wait_for_all(f"the files of checkpoint {writer.step}")


def contents(folder, step, model, loader, extra: Extra):
    """Yields (write, tensors) for what this rank has to write, in order. write(pieces) is to be called with the bytes of `tensors`.

    tensors yields flat tensors on the model's device, each of which the next may overwrite; `write` holds all else, as it is now. All ranks
    must take all of them, one by one as they come, because the ranks gather weights from one another.
    """
    sharing, options, crc32 = model.sharing, model.plan.options, {}
    weights = whole_tensors(model, "parameters") if model.division.size > 1 else sharing.whole_weights()
    weights = (piece for whole in weights for piece in pieces(whole))
    if is_first(model):
        model_file = model_path(folder, step)
        print(f"Writing model to {model_file}", flush=True)

        def write_weights(pieces):
            crc32["model"] = write_model(model_file, options.config, options.precision, pieces)

        yield write_weights, weights
    for _ in weights:  # the other ranks give their shares of each piece
        pass
    state = TrainingState(
        step=step, num_processes=sharing.size, rank=sharing.rank, use_master_weights="master" in options.state_tensors,
        rng_state=model.rng.state, rng_state_last_update=model.rng_state_last_update, loader=loader.state(),
    )  # fmt: skip
    tensors = (piece for name in options.state_tensors for piece in state_pieces(model, name))
    if model.division.rank == 0:
        state_file = state_path(folder, step, sharing.rank)
        print(f"Writing state to {state_file}", flush=True)

        def write_state_and_extra(pieces):
            crc32["state"] = write_state(state_file, state, pieces, num_parameters(options.config) // options.ranks_of("m"))
            write_extra(extra_path(folder, step, sharing.rank), replace(extra, crc32=crc32))

        yield write_state_and_extra, tensors
    for _ in tensors:  # the other parts give theirs
        pass


def write_moving(write, sharing, pieces):
    """Call write(pieces), saying with each piece that it goes on: a slow disk may take long, while the other ranks wait."""

    def moving():
        for piece in pieces:
            sharing.moved()
            yield piece

    write(moving())


def is_first(model) -> bool:
    """Whether this rank is the first of all."""
    return model.sharing.rank == model.division.rank == 0


def load_weights(weights: Numbers, model):
    """Fill the parameters, or this rank's share of them, from open_weights() of a model file of the model's own sizes and precision, which
    is then closed; and start the master from them."""
    with weights:
        fill(model.flat["parameters"], model.layout_of("parameters"), weights.read, model.sharing.moved)
    model.copy_weights_to_master()


def load_snapshot(folder, step, model, saved):
    """Load weights, m, v, master and the generator from the checkpoint of `step`, which `saved` has open, whichever ranks wrote it.

    The state files hold fp32. m and v that this run keeps in fewer bits are rounded to nearest, which is exact where they were as short
    when written. Without a saved master, this run's starts from the weights. A model of another precision than the checkpoint's takes its
    weights from the master, which the checkpoint must then have (source.check_precision). Raises UserError for files that are damaged, or
    not those that were written.
    """
    check_files(folder, step, saved.num_processes, model)
    state, options, path = saved.state_of(0), model.plan.options, state_path(folder, step, 0)
    _, written_in = read_model_header(model_path(folder, step))
    converts, master_weights = written_in != options.precision, "master" in options.state_tensors
    if converts:
        print(f"the {written_in} checkpoint goes on in {options.precision}, from its fp32 master weights")
    if master_weights and not state.use_master_weights and options.precision != "fp32":
        print(f"{path} holds no fp32 master weights: they start from the bf16 weights")
    if state.use_master_weights and not master_weights and not converts:
        print(f"{path} holds fp32 master weights, which a run without them leaves unused")
    model.rng.state, model.rng_state_last_update = state.rng_state, state.rng_state_last_update
    if not converts:
        load_weights(open_weights(model_path(folder, step), written_in), model)
    if options.optimizer_state != "fp32":
        print(f"m and v of {path} are rounded to {options.optimizer_state}, unless they were as short when written")
    for name in ("m", "v"):
        fill(model.flat[name], model.layout, partial(saved.read, name), model.sharing.moved)
    read_master = partial(saved.read, "master")
    if options.precision == "fp32":
        if converts:
            fill(model.flat["parameters"], model.layout_of("parameters"), read_master, model.sharing.moved)
    elif converts or state.use_master_weights and master_weights:
        model.load_master(partial(read_arena, model.layout, read_master))


def check_files(folder, step, num_processes, model):
    """Raise UserError if a file of a checkpoint that so many ranks wrote does not hold what was written, by its CRC-32. The processes of
    the run share the files among them. In a checkpoint of llm.c, which names none, any files will do."""
    sharing, division = model.sharing, model.division
    states = ((state_path(folder, step, rank), "state", rank) for rank in range(num_processes))
    files = [(model_path(folder, step), "model", 0), *states]
    for path, name, rank in files[sharing.rank * division.size + division.rank :: sharing.size * division.size]:
        source = extra_path(folder, step, rank)
        written = read_crc(source, name)
        if written is not None and (found := crc_of(path, sharing.moved)) != written:
            raise UserError(
                f"{path} is damaged or another file: its CRC-32 is {found}, and by what {source.name} says {written} was written; "
                f"put that one back, remove {source.name} if another program has written the checkpoint, or {RESUME_FROM_ANOTHER}"
            )


def state_pieces(model, name):
    """The fp32 bytes of m, v or the master, whatever form this run keeps it in: all of it, or this rank's share."""
    if model.division.size > 1:
        ranks = model.plan.options.ranks_of("m")
        tensors = shares(whole_tensors(model, name), model.layout, ranks, model.sharing.rank % ranks)
    else:
        tensors = model.master_pieces() if name == "master" else [model.flat[name]]
    widened = name != "master" and model.flat[name].dtype != torch.float32
    for tensor in tensors:
        yield from pieces(tensor, model.acts[f"update_{name}"] if widened else None)


def pieces(flat: torch.Tensor, room=None):
    """The bytes of a flat tensor as uint8 tensors, a piece at a time, on the tensor's own device.

    room  fp32 scratch in which a bf16 tensor is widened; each piece is then overwritten by the next
    """
    for part in flat.split(PIECE_BYTES // flat.element_size() if room is None else len(room)):
        part = part if room is None else room[: len(part)].copy_(part)
        yield part.view(torch.uint8)


def fill(flat: torch.Tensor, layout, read, moved=lambda: None):
    """Fill a flat arena of that layout, a piece at a time, with what read(at, n) gives: n elements of a whole file from `at` on.

    moved  called before each piece
    """
    size = PIECE_BYTES // flat.element_size()
    for begin, whole_begin, n in runs(layout):
        for at in range(0, n, size):
            moved()
            values = torch.from_numpy(read(whole_begin + at, min(size, n - at)))
            target = flat[begin + at : begin + at + len(values)]
            (target.view(torch.int16) if values.dtype == torch.int16 else target).copy_(values)


def read_arena(layout, read, at, n):
    """Elements at..at+n of an arena of that layout, (n,) float32; read(at, n) gives elements of a whole file."""
    out, end = np.zeros(n, np.float32), at + n  # zeros: a file has nothing for padding
    for t in layout:
        # only the layers that have some of it: a part can be very many runs
        first_layer, last_layer = ((place - t.start) // t.elements for place in (max(at, t.start), end - 1))
        for l in range(first_layer, min(last_layer + 1, t.layers)):
            for begin, whole_begin, count in t.runs_of(l):
                first, last = max(at, begin), min(end, begin + count)
                if first < last:
                    out[first - at : last - at] = read(whole_begin + first - begin, last - first)
    return out
