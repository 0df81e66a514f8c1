"""A whole checkpoint, written and read back: the model, the training state, and what a resumed run needs to be the same run."""

import numpy as np
import torch

from llmc.checkpoint.model_file import map_parameters, write_model
from llmc.checkpoint.state_file import TrainingState, read_extra, read_state, tensor_names, write_extra, write_state
from llmc.checkpoint.store import delete, extra_path, mark_done, model_path, state_path, step_to_delete, unmark
from llmc.errors import UserError
from llmc.files import read_part

PIECE_BYTES = 4 << 20  # what is copied from a device, or from a file, at a time


def save_snapshot(folder, step, model, loader, extra, *, rank, num_processes, master_weights):
    """Write model, state and extra files of `step`, then DONE.

    extra is a plain dict (see write_extra). With master_weights an fp32 model writes its weights as the master: they are.
    Raises UserError where the disk is full or denies; the checkpoints before stay as they were.
    """
    print(f"Writing checkpoint at step {step}")
    if rank == 0:
        unmark(folder, step)  # an earlier run's DONE must not stand over files that are being replaced
    flat, options = model.flat, model.plan.options
    if rank == 0:
        path = model_path(folder, step)
        print(f"Writing model to {path}", flush=True)
        write_model(path, options.config, options.precision, pieces(flat["parameters"]))
    path = state_path(folder, step, rank)
    print(f"Writing state to {path}", flush=True)
    state = TrainingState(
        step=step, num_processes=num_processes, rank=rank, use_master_weights=master_weights,
        rng_state=model.rng.state, rng_state_last_update=model.rng_state_last_update, loader=loader.state(),
    )  # fmt: skip
    tensors = (piece for name in tensor_names(master_weights) for piece in state_pieces(model, name))
    write_extra(extra_path(folder, step, rank), extra)
    write_state(path, state, tensors, len(flat["m"]))
    mark_done(folder, step)


def rotate(folder, step, *, every, keep, major_every, rank):
    """Delete the checkpoint that the one of `step` replaces, or what a crash left of it, if -nk says so."""
    old = step_to_delete(step, every, keep, major_every)
    if old is not None and any(
        path.exists() for path in (model_path(folder, old), state_path(folder, old, rank), extra_path(folder, old, rank))
    ):
        print(f"Deleting checkpoint at step {old}")
        delete(folder, old, rank)


def load_weights(path, model):
    """Fill the parameters from a model file of the model's own sizes and precision, and start the master from them."""
    fill(model.flat["parameters"], map_parameters(path, model.config, model.plan.options.precision))
    model.copy_weights_to_master()


def load_snapshot(folder, step, model, loader, *, rank, num_processes, master_weights) -> dict:
    """Become the run that wrote the checkpoint of `step`: weights, m, v, master, generators, loader. Returns the extra dict.

    Files hold fp32; what this run keeps in fewer bits is rounded to them, to nearest, and exact where they came from as few.
    Without a saved master one starts from the weights. Raises UserError for damaged files.
    """
    path = state_path(folder, step, rank)
    state, tensors = read_state(path, len(model.flat["m"]), num_processes=num_processes, rank=rank)
    if state.step != step:
        raise UserError(
            f"{path} says that it was written at step {state.step}; "
            f"expected {step}, so the file is not the one of this checkpoint: resume from another"
        )
    if master_weights and not state.use_master_weights and model.plan.options.precision != "fp32":
        print(f"{path} holds no fp32 master weights: they start from the bf16 weights")
    if state.use_master_weights and not master_weights:
        print(f"{path} holds fp32 master weights, which a run without them leaves unused")
    model.rng.state, model.rng_state_last_update = state.rng_state, state.rng_state_last_update
    load_weights(model_path(folder, step), model)
    if model.plan.options.optimizer_state != "fp32":
        print(f"m and v of {path} are rounded to {model.plan.options.optimizer_state}, unless they were as short when written")
    for name in ("m", "v"):
        fill(model.flat[name], tensors[name])
    if state.use_master_weights and master_weights and model.plan.options.precision != "fp32":
        model.load_master(tensors["master"])
    loader.restore(state.loader)
    return read_extra(extra_path(folder, step, rank))


def state_pieces(model, name):
    """The fp32 bytes of m, v or the master, whatever form this run keeps them in."""
    if name != "master":
        widened = model.flat[name].dtype != torch.float32
        yield from pieces(model.flat[name], model.acts[f"update_{name}"] if widened else None)
    elif model.plan.options.precision == "fp32":
        yield from pieces(model.flat["parameters"])
    else:
        for part in model.master_pieces():
            yield part.cpu().numpy().view(np.uint8)


def pieces(flat: torch.Tensor, room=None):
    """The bytes of a flat tensor as uint8 numpy arrays, a piece at a time, from whatever device.

    room  fp32 working room through which a bf16 tensor is widened; then each piece is overwritten by the next
    """
    for part in flat.split(PIECE_BYTES // flat.element_size() if room is None else len(room)):
        part = part if room is None else room[: len(part)].copy_(part)
        yield part.view(torch.uint8).cpu().numpy()


def fill(flat: torch.Tensor, data: np.memmap):
    """Copy mapped `data` into a flat tensor a piece at a time: as many bytes as uint8, or as many numbers as float32."""
    target = flat.view(torch.uint8) if data.dtype == np.uint8 else flat
    assert len(target) == len(data), f"{len(data)} elements for {len(target)}"
    size = PIECE_BYTES // data.itemsize
    for at in range(0, len(data), size):
        target[at : at + size].copy_(torch.from_numpy(read_part(data, at, size)))
