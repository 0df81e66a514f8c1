"""What Triton's and numba's kernels read from the plan's memory: it is copied there before they are launched, so that a launch can be
captured and used again."""

from math import sqrt

import numpy as np
import torch

from llmc.backend import copy_in
from llmc.layers.adamw import BETA1, BETA2
from llmc.memory.tuning import UPDATE_COLUMNS


def stage_encoder_backward(order, seed, scratch):
    """Copy the TokenOrder of a batch, and the seed of its rounding, into scratch, where kernels read them.

    There are as many groups as positions, and those beyond the last token are empty, so what is launched does not depend on the batch.
    With tensor parallelism the order covers only some of the positions.
    Scratch: token_order (n,) and token_groups (2, n + 1) int32, for n = B*T positions, and token_seed (1,) int32.
    """
    n, ordered, m = scratch["token_order"].numel(), len(order.positions), len(order.tokens)
    groups = np.full((2, n + 1), ordered, np.int32)
    groups[0, : m + 1], groups[1, :m] = order.starts, order.tokens
    copy_in(scratch["token_order"], np.pad(order.positions, (0, n - ordered)))
    copy_in(scratch["token_groups"], groups)
    copy_in(scratch["token_seed"], np.array([seed], np.uint32).view(np.int32))


def chunk_layout(tensors, chunk: int):
    """(layout (tensors, 5) int64, total number of chunks), for kernels that update `chunk` elements of a layer at a time.

    A row of the layout has a tensor's first chunk, its first element in the arena, the elements and the chunks of one layer, and the
    index in the whole layer of the first element here.
    """
    layout, first_chunk = np.empty((len(tensors), UPDATE_COLUMNS), np.int64), 0
    for i, t in enumerate(tensors):
        chunks = -(-t.elements // chunk)
        layout[i] = first_chunk, t.start, t.elements, chunks, t.noise_first
        first_chunk += t.layers * chunks
    return layout, first_chunk


def stage_chunks(tensors, chunk: int, scratch, *, lr, weight_decay, step, grad_norm):
    """Copy what changes from step to step into scratch, where kernels read it; returns chunk_layout(tensors, chunk).

    Scratch: update_layout (tensors, 5) int64, that layout; update_numbers (3 * tensors + 2,) int32: the seeds, the last seeds, and as the
    bits of fp32 numbers each tensor's factor for weight decay, -lr over m's bias correction, and the root of v's; grad_norm (1,) fp32,
    which may be the tensor passed as grad_norm.
    """
    layout, chunks = chunk_layout(tensors, chunk)
    floats = [1 - lr * weight_decay * t.decay for t in tensors]
    floats += [-(lr / (1 - BETA1**step)), sqrt(1 - BETA2**step)]
    seeds = np.array([t.seed for t in tensors] + [t.last_seed for t in tensors], np.uint32)
    with np.errstate(over="ignore"):  # beyond fp32 it becomes infinite, and the training loop reports the loss that results
        numbers = np.array(floats, np.float32)
    copy_in(scratch["update_layout"], layout)
    copy_in(scratch["update_numbers"], np.concatenate([seeds.view(np.int32), numbers.view(np.int32)]))
    if not isinstance(grad_norm, torch.Tensor) or grad_norm.data_ptr() != scratch["grad_norm"].data_ptr():
        scratch["grad_norm"].fill_(float(grad_norm))
    return layout, chunks
