"""AdamW over the arenas, with stochastic rounding of bf16 weights. Source: llm.c llmc/adamw.cuh; Loshchilov and Hutter 2019.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    p = p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p)

torch's fused CPU and CUDA kernels do this in one pass. A bf16 model works in pieces that stay in cache: the gradient is
widened, the fp32 master (or a widened weight) is updated, and the weight becomes its stochastic rounding.
"""

import torch

from llmc.layers.rounding import noise_2d, round_to_bf16
from llmc.memory.plan import ROUNDING_BLOCK

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


def adamw_update(tensors, scratch, *, lr, weight_decay, step, grad_divisor):
    """One update of every tensor in `tensors`.

    tensors  list of TensorState; all of one model, in file order, with their seeds
    scratch  views update_gradient, noise, noise_work and, without a master, update_parameter (bf16 models only)
    lr, weight_decay floats; step counts from 1; grad_divisor >= 1 clips the gradient. In fp32 the gradients are
    divided in place and so destroyed.
    """
    device = tensors[0].param.device
    divisor = torch.tensor(grad_divisor, dtype=torch.float32, device=device) if grad_divisor != 1.0 else None
    step = torch.tensor(float(step), device=device)

    def fused(param, grad, m, v, decay):
        torch._fused_adamw_(
            [param], [grad], [m], [v], [], [step], lr=lr, beta1=BETA1, beta2=BETA2, eps=EPSILON,
            weight_decay=weight_decay if decay else 0.0, amsgrad=False, maximize=False, grad_scale=divisor,
        )  # fmt: skip

    for t in tensors:
        if t.param.dtype == torch.float32:
            fused(t.param, t.grad, t.m, t.v, t.decay)
            continue
        for piece in rounding_pieces(t.layers, t.param.numel(), scratch["noise"].numel()):
            part = piece.flat
            param = t.param[part]
            grad = scratch["update_gradient"][: len(param)].copy_(t.grad[part])
            master = scratch["update_parameter"][: len(param)].copy_(param) if t.master is None else t.master[part]
            fused(master, grad, t.m[part], t.v[part], t.decay)
            round_piece(param, master, piece, t.seed, scratch)


class TensorState:
    """One parameter tensor, all layers, as the update sees it: flat views, and this step's rounding seed."""

    __slots__ = ("param", "grad", "m", "v", "master", "layers", "decay", "seed")

    def __init__(self, param, grad, m, v, master, *, layers, decay, seed):
        self.param, self.grad, self.m, self.v, self.master = param, grad, m, v, master
        self.layers, self.decay, self.seed = layers, decay, seed


class RoundingPiece:
    """Consecutive elements that are rounded together: whole layers first..last, or elements from `start` of one layer."""

    __slots__ = ("first_layer", "layers", "start", "length", "flat")

    def __init__(self, first_layer, layers, start, length, layer_elements):
        self.first_layer, self.layers, self.start, self.length = first_layer, layers, start, length
        begin = first_layer * layer_elements + start
        self.flat = slice(begin, begin + layers * length)


def rounding_pieces(layers, n_elements, room):
    """Cut a tensor of `layers` equal slices into pieces whose noise, padded to whole blocks, fits `room` elements."""
    n = n_elements // layers
    padded = -(-n // ROUNDING_BLOCK) * ROUNDING_BLOCK
    if padded <= room:
        together = room // padded
        for first in range(0, layers, together):
            yield RoundingPiece(first, min(together, layers - first), 0, n, n)
    else:
        length = room // ROUNDING_BLOCK * ROUNDING_BLOCK
        for layer in range(layers):
            for start in range(0, n, length):
                yield RoundingPiece(layer, 1, start, min(length, n - start), n)


def round_piece(param, master, piece, seed, scratch):
    """param (bf16) = stochastic rounding of master (fp32), both flat, at the contract's noise positions.

    Element k of layer l: x = k mod 512, y = (k div 512) * 512 + l.
    """
    blocks = -(-piece.length // ROUNDING_BLOCK)
    shape = (piece.layers, blocks, ROUNDING_BLOCK)
    noise, work = (scratch[k][: piece.layers * blocks * ROUNDING_BLOCK] for k in ("noise", "noise_work"))
    x = torch.arange(ROUNDING_BLOCK, dtype=torch.int32, device=param.device)
    first_block = piece.start // ROUNDING_BLOCK
    block = torch.arange(first_block, first_block + blocks, dtype=torch.int32, device=param.device) * ROUNDING_BLOCK
    layer = torch.arange(piece.first_layer, piece.first_layer + piece.layers, dtype=torch.int32, device=param.device)
    noise_2d(noise.view(shape), work.view(shape), x, layer[:, None] + block, seed)
    by_layer = (piece.layers, piece.length)
    # the noise of a layer is padded to whole blocks; its tail has no element
    noise = noise.view(piece.layers, -1)[:, : piece.length]
    work = work[: param.numel()].view(by_layer)
    round_to_bf16(param.view(by_layer), master.view(by_layer), noise, work)
