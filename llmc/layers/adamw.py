"""AdamW over the arenas, with stochastic rounding of bf16 weights. Source: llm.c llmc/adamw.cuh; Loshchilov and Hutter 2019.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    p = p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p)

torch's fused CPU and CUDA kernels do this in one pass, in fp32. Where anything is kept in bf16, the update works in
pieces that stay in cache: what is bf16 is widened, and what was updated becomes its stochastic rounding. The fp32 master
of a bf16 weight may be a tensor of its own; or the 16 bits that the weight lacks, which together with the noise that
rounded it give it back exactly; or missing, and then the widened weight takes its place.
"""

import torch

from llmc.layers.rounding import join_bits, low_bits, noise_2d, round_to_bf16
from llmc.memory.plan import ROUNDING_BLOCK

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


def adamw_update(tensors, scratch, *, lr, weight_decay, step, grad_divisor):
    """One update of every tensor in `tensors`.

    tensors  list of TensorState; all of one model, in file order, with their seeds
    scratch  fp32 views update_gradient, update_parameter, update_m, update_v and int32 noise, noise_work, noise_moments, as the
             plan has them
    lr, weight_decay floats; step counts from 1; grad_divisor >= 1 clips the gradient. Gradients in fp32 are divided in
    place and so destroyed.
    """
    device = tensors[0].param.device
    divisor = torch.tensor(grad_divisor, dtype=torch.float32, device=device) if grad_divisor != 1.0 else None
    step = torch.tensor(float(step), device=device)
    for t in tensors:
        for piece in pieces_of(t, scratch):
            param = read_master(t, piece, scratch)
            grad, m, v = (_widened(x[piece.flat], scratch, k) for x, k in ((t.grad, "gradient"), (t.m, "m"), (t.v, "v")))
            torch._fused_adamw_(
                [param], [grad], [m], [v], [], [step], lr=lr, beta1=BETA1, beta2=BETA2, eps=EPSILON,
                weight_decay=weight_decay if t.decay else 0.0, amsgrad=False, maximize=False, grad_scale=divisor,
            )  # fmt: skip
            noise, work = piece_noise(piece, t.seed, scratch) if "noise" in scratch else (None, None)
            if t.m.dtype != torch.float32:
                round_moments(t.m[piece.flat], t.v[piece.flat], m, v, noise, work, scratch["noise_moments"])
            write_master(t, piece, param, noise, work)


def _widened(tensor, scratch, name):
    """An fp32 tensor itself, or its copy in fp32."""
    return tensor if tensor.dtype == torch.float32 else scratch[f"update_{name}"][: len(tensor)].copy_(tensor)


class TensorState:
    """One parameter tensor, all layers, as the update sees it: flat views, this step's rounding seed and the last step's.

    param, grad  fp32 or bf16     m, v  fp32 or bf16     master  fp32 or None     bits  int16 or None, what a bf16 param lacks
    """

    __slots__ = ("param", "grad", "m", "v", "master", "bits", "layers", "decay", "seed", "last_seed")

    def __init__(self, param, grad, m, v, master, bits=None, *, layers, decay, seed, last_seed=0):
        self.param, self.grad, self.m, self.v, self.master, self.bits = param, grad, m, v, master, bits
        self.layers, self.decay, self.seed, self.last_seed = layers, decay, seed, last_seed


def read_master(t, piece, scratch):
    """The fp32 weights of a piece, flat: where they are kept, or made in scratch update_parameter."""
    param = t.param[piece.flat]
    if t.bits is None:
        return t.master[piece.flat] if t.master is not None else _widened(param, scratch, "parameter")
    values = scratch["update_parameter"][: len(param)]
    noise, work = piece_noise(piece, t.last_seed, scratch)
    shape = noise.shape
    join_bits(values.view(shape), param.view(shape), t.bits[piece.flat].view(shape), noise, work)
    return values


def write_master(t, piece, values, noise, work):
    """Keep the fp32 `values` of a piece, and make its bf16 weights from them, rounded with the piece's noise, which is destroyed.

    `values` is what read_master gave, updated: fp32 weights or a master of their own have changed in place.
    """
    if t.bits is not None:
        low_bits(t.bits[piece.flat], values)
    if t.param.dtype != torch.float32:
        round_to_bf16(t.param[piece.flat].view(noise.shape), values.view(noise.shape), noise, work)


def round_moments(m_out, v_out, m, v, noise, work, room):
    """m_out, v_out (bf16) = stochastic roundings of m and v (fp32), all flat; room is int32, at least as many.

    A weight's rounding looks at the lower half of its noise. m's looks at the upper half, v's at both halves xor-ed: each
    pair of the three is independent, for one hash.
    """
    threshold = room[: noise.numel()].view(noise.shape)
    torch.bitwise_right_shift(noise, 16, out=threshold)
    round_to_bf16(m_out.view(noise.shape), m.view(noise.shape), threshold, work)
    torch.bitwise_right_shift(noise, 16, out=threshold).bitwise_xor_(noise)
    round_to_bf16(v_out.view(noise.shape), v.view(noise.shape), threshold, work)


def pieces_of(t, scratch):
    """Pieces of one tensor: as large as the noise's room, or the whole where nothing is rounded."""
    n = t.param.numel()
    if "noise" not in scratch:
        return [RoundingPiece(0, t.layers, 0, n // t.layers, n // t.layers)]
    return rounding_pieces(t.layers, n, scratch["noise"].numel())


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


def piece_noise(piece, seed, scratch):
    """Rounding noise of a piece, (layers, length) int32, and as much working room.

    Element k of layer l: x = k mod 512, y = (k div 512) * 512 + l.
    """
    blocks = -(-piece.length // ROUNDING_BLOCK)
    shape = (piece.layers, blocks, ROUNDING_BLOCK)
    noise, work = (scratch[k][: piece.layers * blocks * ROUNDING_BLOCK] for k in ("noise", "noise_work"))
    device = noise.device
    x = torch.arange(ROUNDING_BLOCK, dtype=torch.int32, device=device)
    first_block = piece.start // ROUNDING_BLOCK
    block = torch.arange(first_block, first_block + blocks, dtype=torch.int32, device=device) * ROUNDING_BLOCK
    layer = torch.arange(piece.first_layer, piece.first_layer + piece.layers, dtype=torch.int32, device=device)
    noise_2d(noise.view(shape), work.view(shape), x, layer[:, None] + block, seed)
    # the noise of a layer is padded to whole blocks; its tail has no element
    noise = noise.view(piece.layers, -1)[:, : piece.length]
    work = work[: piece.layers * piece.length].view(piece.layers, piece.length)
    return noise, work
