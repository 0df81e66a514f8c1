"""AdamW over the arenas, with stochastic rounding of bf16 weights. Source: llm.c llmc/adamw.cuh; Loshchilov and Hutter 2019.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    p = p - lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p)

torch's fused CPU and CUDA kernels do this in one pass, in fp32. Where anything is kept in bf16, the update works in
pieces that stay in cache: bf16 values are widened to fp32, and the updated ones are rounded back stochastically. The fp32
master of a bf16 weight takes one of three forms: a tensor of its own; the 16 bits that the weight lacks, which together
with the noise that rounded the weight restore it exactly; or none, and then the widened weight takes its place.
"""

from dataclasses import dataclass

import torch

from llmc.layers.rounding import join_bits, low_bits, noise_2d, round_to_bf16
from llmc.memory.tuning import ROUNDING_BLOCK
from llmc.units import round_up

BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8
GRADIENT_CLIP = 1.0  # a gradient of larger norm is scaled down to this norm


@dataclass(frozen=True, slots=True)
class TensorState:
    """One parameter tensor, all layers, as the update sees it: its place in an arena, as in FlatTensor, and its seeds for rounding."""

    start: int  # where it begins in the arena
    layers: int
    elements: int  # of a layer, in this arena
    decay: bool
    seed: int  # uint32, this step's
    last_seed: int = 0  # that of the step that rounded the present weights
    noise_first: int = 0  # index in the whole layer of the first element here, where layers are sharded


def adamw_update(flat, tensors, scratch, *, lr, weight_decay, step, grad_norm):
    """One update of every tensor in `tensors`.

    flat     name -> arena (n,): parameters, gradients, m and v, fp32 or bf16; and for bf16 parameters master (fp32), or
             master_bits (int16), the lower halves that they lack, or neither
    tensors  list of TensorState, in file order
    scratch  fp32 views update_gradient, update_parameter, update_m, update_v and int32 noise, noise_work, noise_moments, those
             of them that the plan has
    lr, weight_decay floats; step counts from 1; grad_norm is the gradient's norm, a tensor or a number. Clipping divides fp32
    gradients in place and so destroys them.
    """
    device, grad_divisor = flat["parameters"].device, max(1.0, float(grad_norm) / GRADIENT_CLIP)
    divisor = torch.tensor(grad_divisor, dtype=torch.float32, device=device) if grad_divisor != 1.0 else None
    step = torch.tensor(float(step), device=device)
    for t in tensors:
        for piece in pieces_of(t, scratch):
            param = read_master(flat, piece, t.last_seed, scratch)
            grad, m, v = (
                _widened(flat[arena][piece.flat], scratch, name) for arena, name in (("gradients", "gradient"), ("m", "m"), ("v", "v"))
            )
            torch._fused_adamw_(
                [param], [grad], [m], [v], [], [step], lr=lr, beta1=BETA1, beta2=BETA2, eps=EPSILON,
                weight_decay=weight_decay if t.decay else 0.0, amsgrad=False, maximize=False, grad_scale=divisor,
            )  # fmt: skip
            noise, work = piece_noise(piece, t.seed, scratch) if "noise" in scratch else (None, None)
            if flat["m"].dtype != torch.float32:
                round_moments(flat["m"][piece.flat], flat["v"][piece.flat], m, v, noise, work, scratch["noise_moments"])
            write_master(flat, piece, param, noise, work)


def _widened(tensor, scratch, name):
    """The tensor itself if it is fp32, else an fp32 copy of it in scratch."""
    return tensor if tensor.dtype == torch.float32 else scratch[f"update_{name}"][: len(tensor)].copy_(tensor)


def read_master(flat, piece, last_seed, scratch):
    """The fp32 weights of a piece, flat: a view of where they are kept, or made in scratch update_parameter."""
    param = flat["parameters"][piece.flat]
    if "master_bits" not in flat:
        return flat["master"][piece.flat] if "master" in flat else _widened(param, scratch, "parameter")
    values = scratch["update_parameter"][: len(param)]
    noise, work = piece_noise(piece, last_seed, scratch)
    shape = noise.shape
    join_bits(values.view(shape), param.view(shape), flat["master_bits"][piece.flat].view(shape), noise, work)
    return values


def write_master(flat, piece, values, noise, work):
    """Store the fp32 `values` of a piece, and make its bf16 weights by rounding them with the piece's noise, which is destroyed.

    `values` is what read_master returned, updated: fp32 weights, or an fp32 master, have already changed in place.
    """
    if "master_bits" in flat:
        low_bits(flat["master_bits"][piece.flat], values)
    if flat["parameters"].dtype != torch.float32:
        round_to_bf16(flat["parameters"][piece.flat].view(noise.shape), values.view(noise.shape), noise, work)


def round_moments(m_out, v_out, m, v, noise, work, room):
    """m_out, v_out (bf16) = stochastic roundings of m and v (fp32), all flat; room is int32 scratch of at least as many elements.

    The rounding of a weight uses the lower half of its noise, that of m the upper half, and that of v the xor of the two: any
    two of the three are independent, at the price of one hash.
    """
    threshold = room[: noise.numel()].view(noise.shape)
    torch.bitwise_right_shift(noise, 16, out=threshold)
    round_to_bf16(m_out.view(noise.shape), m.view(noise.shape), threshold, work)
    torch.bitwise_right_shift(noise, 16, out=threshold).bitwise_xor_(noise)
    round_to_bf16(v_out.view(noise.shape), v.view(noise.shape), threshold, work)


@dataclass(frozen=True, slots=True)
class RoundingPiece:
    """Consecutive elements that are rounded together: all of several layers, or some of one layer."""

    layers: range
    noise_first: int  # index in the whole layer of the first of them
    length: int  # of each layer
    flat: slice  # where they lie in the arena


def piece_of(t, layers: range, start: int, end: int) -> RoundingPiece:
    """Elements start..end of those layers of a TensorState or a FlatTensor."""
    length, begin = end - start, t.start + layers.start * t.elements + start
    return RoundingPiece(layers, t.noise_first + start, length, slice(begin, begin + len(layers) * length))


def pieces_of(t, scratch):
    """Yields the pieces of one tensor, whose noise, padded to whole blocks on both sides, fits the scratch for noise; where nothing is
    rounded, the whole tensor."""
    n, before = t.elements, t.noise_first % ROUNDING_BLOCK
    padded = round_up(before + n, ROUNDING_BLOCK)
    room = scratch["noise"].numel() if "noise" in scratch else t.layers * padded
    if padded <= room:
        together = room // padded
        for layer in range(0, t.layers, together):
            yield piece_of(t, range(layer, min(layer + together, t.layers)), 0, n)
    else:
        length = room // ROUNDING_BLOCK * ROUNDING_BLOCK
        cuts = [0, *range(length - before, n, length), n]  # at block boundaries
        for layer in range(t.layers):
            for start, end in zip(cuts, cuts[1:]):
                yield piece_of(t, range(layer, layer + 1), start, end)


def piece_noise(piece, seed, scratch):
    """Rounding noise of a piece, (layers, length) int32, and scratch of the same shape.

    Element k of layer l takes the noise at x = k mod 512, y = (k div 512) * 512 + l.
    """
    first_block, before = divmod(piece.noise_first, ROUNDING_BLOCK)
    layers, blocks = len(piece.layers), -(-(before + piece.length) // ROUNDING_BLOCK)
    shape = (layers, blocks, ROUNDING_BLOCK)
    noise, work = (scratch[k][: layers * blocks * ROUNDING_BLOCK] for k in ("noise", "noise_work"))
    device = noise.device
    x = torch.arange(ROUNDING_BLOCK, dtype=torch.int32, device=device)
    block = torch.arange(first_block, first_block + blocks, dtype=torch.int32, device=device) * ROUNDING_BLOCK
    layer = torch.arange(piece.layers.start, piece.layers.stop, dtype=torch.int32, device=device)
    noise_2d(noise.view(shape), work.view(shape), x, layer[:, None] + block, seed)
    # each layer's noise was made in whole blocks: cut off what precedes the piece's first element and what follows its last
    noise = noise.view(layers, -1)[:, before : before + piece.length]
    work = work[: layers * piece.length].view(layers, piece.length)
    return noise, work
