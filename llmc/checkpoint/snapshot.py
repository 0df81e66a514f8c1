"""A whole checkpoint, written and read back: the model, the training state, and what a resumed run needs to be the same run."""

import numpy as np
import torch

from llmc.checkpoint.model_file import map_parameters, write_model
from llmc.checkpoint.state_file import TrainingState, read_extra, read_state, tensor_names, write_extra, write_state
from llmc.checkpoint.store import delete, extra_path, mark_done, model_path, state_path, step_to_delete, unmark
from llmc.errors import UserError

PIECE_BYTES = 32 << 20  # what is copied from a device, or from a file, at a time


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
    tensors = (piece for name in tensor_names(master_weights) for piece in pieces(flat.get(name, flat["parameters"])))
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

    Raises UserError for damaged files, and for master weights that are wanted but were not saved.
    """
    path = state_path(folder, step, rank)
    state, tensors = read_state(path, len(model.flat["m"]), num_processes=num_processes, rank=rank)
    if state.step != step:
        raise UserError(
            f"{path} says that it was written at step {state.step}; "
            f"expected {step}, so the file is not the one of this checkpoint: resume from another"
        )
    if master_weights and not state.use_master_weights:
        raise UserError(f"{path} holds no fp32 master weights, but -w 1 asks for them; resume with -w 0, as the run that wrote it")
    if state.use_master_weights and not master_weights:
        print(f"{path} holds fp32 master weights, which -w 0 leaves unused")
    load_weights(model_path(folder, step), model)
    for name in ("m", "v", *(["master"] if "master" in model.flat else [])):
        fill(model.flat[name], tensors[name].view(np.uint8))
    model.rng.state, model.rng_state_last_update = state.rng_state, state.rng_state_last_update
    loader.restore(state.loader)
    return read_extra(extra_path(folder, step, rank))


def pieces(flat: torch.Tensor):
    """The bytes of a flat tensor as uint8 numpy arrays, a piece at a time, from whatever device."""
    for part in flat.view(torch.uint8).split(PIECE_BYTES):
        yield part.cpu().numpy()


def fill(flat: torch.Tensor, data: np.ndarray):
    """Copy uint8 `data` into a flat tensor of as many bytes, a piece at a time."""
    target = flat.view(torch.uint8)
    assert len(target) == len(data), f"{len(data)} bytes for a tensor of {len(target)}"
    for at in range(0, len(data), PIECE_BYTES):
        target[at : at + PIECE_BYTES].copy_(torch.from_numpy(np.array(data[at : at + PIECE_BYTES])))
