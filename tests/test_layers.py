"""Every layer against float64 and autograd, in fp32 and bf16: the error is at most twice eager torch's own at that type.

Outputs start as NaN and accumulating ones from noise, so what is not written, or overwritten, shows.
"""

from dataclasses import replace
from functools import partial
from math import inf, nan, prod, sqrt
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmc.config import ModelConfig
from llmc.data.order import token_order
from llmc.layers.adamw import GRADIENT_CLIP, TensorState, adamw_update, piece_noise, pieces_of
from llmc.layers.attention import attention_backward, attention_forward
from llmc.layers.attention_library import attention_one_row, pack_gradients
from llmc.layers.encoder import encoder_backward, encoder_forward
from llmc.layers.fused_classifier import fused_classifier_inplace
from llmc.layers.gelu import gelu_backward_inplace, gelu_forward
from llmc.layers.global_norm import global_norm
from llmc.layers.layernorm import layernorm_backward, layernorm_forward, layernorm_normalize, residual_layernorm_forward
from llmc.layers.matmul import matmul_dinput, matmul_dweight, matmul_forward
from llmc.layers.residual import residual_add_inplace
from llmc.layers.rounding import noise_2d, round_to_bf16
from llmc.memory.arena import TORCH_DTYPE
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from oracle import adamw, assert_as_good_as_eager, attention

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1, 1), (3, 7, 11), (2, 33, 768)]  # B, T, C: one element, primes, GPT-2's width

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
shapes = pytest.mark.parametrize("B, T, C", SHAPES)


def noise(*shape, dtype=torch.float32, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def unwritten(*shape, dtype=torch.float32):
    return torch.full(shape, nan, dtype=dtype) if dtype.is_floating_point else torch.full(shape, -77, dtype=dtype)


def bits(tensor):
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same_bits(a, b):
    return torch.equal(bits(a), bits(b))


def autograd(function, leaves, dout, dtype):
    """(output, gradients of its leaves) in `dtype`."""
    with torch.enable_grad():
        leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        out = function(*leaves)
        return out.detach(), torch.autograd.grad(out, leaves, dout.to(dtype))


def judge(names, ours, function, leaves, dout, dtype, before=None, floor=1.0):
    """Gradients `ours` against autograd in float64 and in their own type; `before` holds what accumulated ones started from."""
    _, exact = autograd(function, leaves, dout, torch.float64)
    _, eager = autograd(function, leaves, dout, dtype)
    for name, mine, want, theirs in zip(names, ours, exact, eager):
        start = (before or {}).get(name)
        if start is not None:
            want, theirs = start.double() + want, start + theirs
        assert_as_good_as_eager(mine, theirs, want, what=name, floor=floor)


def row_scratch(width, rows, columns=None):
    """Working room of `rows` rows of `width` at a time, no larger than a layer asks for; column_sums are 2 x columns."""
    return {"rows": unwritten(4, rows, width), "row_stats": unwritten(2, rows), "column_sums": unwritten(2, columns or width)}


# ----------------------------------------------------------------------------
# stochastic rounding


def squirrel_noise(position, seed):
    """SquirrelNoise5 in Python's own integers, from the contract's constants."""

    def wrap(n):
        return n & 0xFFFFFFFF

    n = wrap(wrap(position) * 0xD2A80A3F + seed)
    n ^= n >> 9
    n = wrap(n + 0xA884F197)
    n ^= n >> 11
    n = wrap(n * 0x6C736F4B)
    n ^= n >> 13
    n = wrap(n + 0xB79F3ABB)
    n ^= n >> 15
    n = wrap(n * 0x1B56C4F5)
    return n ^ n >> 17


def noise_of_element(k, layer, seed):
    """The contract's position for element k of a layer's tensor."""
    return squirrel_noise(k % 512 + 198491317 * ((k // 512) * 512 + layer), seed)


def rounded_bits(value_bits, noise_bits):
    """The upper 16 bits of an fp32's after rounding: away from zero when its lower half exceeds the noise's."""
    return ((value_bits >> 16) + ((value_bits & 0xFFFF) > (noise_bits & 0xFFFF))) & 0xFFFF


def rounded(values, seed, *, layers=1, threshold=lambda noise: noise):
    """A flat tensor of `layers` equal slices, rounded element by element in Python: bf16. The lower half of `threshold` counts."""
    n = len(values) // layers
    integers = values.view(torch.int32).tolist()
    out = [rounded_bits(v & 0xFFFFFFFF, threshold(noise_of_element(i % n, i // n, seed))) for i, v in enumerate(integers)]
    return torch.from_numpy(np.array(out, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)


def round_piece(param, master, piece, seed, scratch):
    """A piece of a weight as the update rounds it."""
    noise, work = piece_noise(piece, seed, scratch)
    round_to_bf16(param.view(noise.shape), master.view(noise.shape), noise, work)


def rounding_scratch(room):
    return {"noise": unwritten(room, dtype=torch.int32), "noise_work": unwritten(room, dtype=torch.int32)}


@pytest.mark.parametrize("seed", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2654435769])
def test_noise_is_squirrelnoise5_to_the_bit(seed):
    x = torch.tensor([0, 1, 2, 255, 511, 512, 50303], dtype=torch.int32)
    y = torch.tensor([[0, 1, 47], [512, 513, 75 * 512 + 11], [50257, 1 << 20, (1 << 31) - 1]], dtype=torch.int32)
    out, work = unwritten(3, 3, 7, dtype=torch.int32), unwritten(3, 3, 7, dtype=torch.int32)
    noise_2d(out, work, x, y, seed)
    want = [[[squirrel_noise(i + 198491317 * j, seed) for i in x.tolist()] for j in row] for row in y.tolist()]
    assert (out.numpy().view(np.uint32) == np.array(want, dtype=np.uint32)).all()


def test_noise_known_values():
    """Numbers a C program with the published constants printed, so that both transcriptions here cannot drift together."""
    assert [squirrel_noise(p, s) for p, s in ((0, 0), (1, 0), (0, 1), (198491317, 0xDEADBEEF))] == NOISE


NOISE = [0x16791E00, 0xC895CB1D, 0x23F6C851, 0x80E765EB]


def test_rounding_each_value_at_each_threshold_is_the_definition():
    """Signs, subnormals, infinities, values a bf16 holds exactly and values just above and below them, at several thresholds."""
    uppers = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80, 0xBF80, 0x3F7F, 0x7F7F, 0xFF7F, 0x4049, 0xC2C8]
    lowers = [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF]
    thresholds = [0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF, 0xABCD0000, 0xFFFFFFFF, 0x80007FFF]
    cases = [(u << 16 | w, t) for u in uppers for w in lowers for t in thresholds]
    cases += [(u << 16, t) for u in (0x7F80, 0xFF80) for t in thresholds]  # the infinities
    values, noises = (torch.from_numpy(np.array(c, dtype=np.uint32).view(np.int32)) for c in zip(*cases))
    out = unwritten(len(cases), dtype=torch.bfloat16)
    round_to_bf16(out, values.view(torch.float32), noises.clone(), unwritten(len(cases), dtype=torch.int32))
    assert out.view(torch.int16).numpy().view(np.uint16).tolist() == [rounded_bits(v, t) for v, t in cases]


@pytest.mark.parametrize("threshold", [0, 0x7FFF, 0xFFFF, -1])
def test_rounding_keeps_nan_a_nan_and_what_bf16_holds(threshold):
    keeps = torch.tensor([inf, -inf, 0.0, -0.0, 1.0, -2.5, 2.0**-133, 3.0e38]).bfloat16()
    values = torch.cat([keeps.float(), torch.tensor([nan, -nan])])
    out = unwritten(len(values), dtype=torch.bfloat16)
    round_to_bf16(out, values, torch.full_like(values, threshold, dtype=torch.int32), torch.empty(len(values), dtype=torch.int32))
    assert same_bits(out[:-2], keeps)
    assert out[-2:].isnan().all()


@pytest.mark.parametrize(
    "layers, n, room",
    [
        (1, 1, 512),  # one element
        (5, 40, 512),  # smaller than a block: one layer at a time
        (5, 40, 2048),  # several layers together, the last piece smaller
        (48, 40, 512 * 48),  # all layers at once
        (3, 512, 1024),  # whole blocks, two layers in a piece
        (3, 1025, 2048),  # a block more than whole, one layer at a time
        (2, 3001, 1024),  # larger than a piece: each layer cut, the last cut ragged
        (1, 5 * 512, 1024 + 100),  # a room that is no multiple of a block
    ],
)
def test_weights_are_rounded_at_the_contracts_positions(layers, n, room):
    """Cutting a tensor into pieces changes no bit: element k of layer l has its own place in the noise."""
    master, seed, start = noise(layers * n, seed=layers), 3735928559, 77  # where the tensor begins in its arena is no part of the place
    param, scratch = unwritten(start + layers * n + 5, dtype=torch.bfloat16), rounding_scratch(room)
    arena = torch.cat([unwritten(start), master, unwritten(5)])
    for piece in pieces_of(TensorState(start, layers, n, decay=False, seed=seed), scratch):
        round_piece(param[piece.flat], arena[piece.flat], piece, seed, scratch)
    assert same_bits(param[start:-5], rounded(master, seed, layers=layers))
    assert param[:start].isnan().all() and param[-5:].isnan().all()


@pytest.mark.parametrize("layers, n, room", [(1, 1, 512), (7, 40, 1024), (3, 1025, 2048), (2, 3001, 1024), (12, 768 * 3, 1 << 18)])
def test_pieces_cover_every_element_once_and_fit_their_room(layers, n, room):
    for start in (0, 1009):
        seen = np.zeros(start + layers * n, dtype=int)
        for piece in pieces_of(TensorState(start, layers, n, decay=False, seed=0), rounding_scratch(room)):
            seen[piece.flat] += 1
            assert len(piece.layers) * -(-piece.length // 512) * 512 <= room
            assert start <= piece.flat.start < piece.flat.stop <= start + layers * n
        assert not seen[:start].any() and (seen[start:] == 1).all()


def test_rounding_is_unbiased():
    """Over 65536 places of the noise the share rounded up is the distance to the lower neighbour, within 5 deviations."""
    n = 1 << 16
    for share in (0.1, 0.5, 0.97):
        value = 1 + share * 2.0**-7  # bf16's neighbours are 1 and 1 + 2**-7
        out, scratch = unwritten(n, dtype=torch.bfloat16), rounding_scratch(n)
        for piece in pieces_of(TensorState(0, 1, n, decay=False, seed=12345), scratch):
            round_piece(out, torch.full((n,), value), piece, 12345, scratch)
        up = (out.float() > 1).double().mean().item()
        assert abs(up - share) < 5 * sqrt(share * (1 - share) / n)


# ----------------------------------------------------------------------------
# encoder


def encoder_scratch(B, T, C, dtype, room=None):
    room = room or max(512, C)
    if dtype == torch.float32:
        return {"encoder_sums": unwritten(T, C)}
    rows = {name: unwritten(B, T, C) for name in ("encoder_rows", "encoder_sums")}
    return rows | {"encoder_gathered": unwritten(B, T, C, dtype=dtype)} | rounding_scratch(room)


def tokens_of(kind, B, T, V, seed=0):
    inputs = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))
    return {"any": inputs, "few": inputs % 3, "one": torch.full_like(inputs, V - 1)}[kind]


@dtypes
@shapes
@pytest.mark.parametrize("kind", ["any", "few", "one"])
def test_encoder_forward_is_the_sum_of_two_rows(B, T, C, dtype, kind):
    V = 29
    wte, wpe, inputs = noise(V, C, dtype=dtype, seed=1), noise(T + 5, C, dtype=dtype, seed=2), tokens_of(kind, B, T, V)
    out = unwritten(B, T, C, dtype=dtype)
    encoder_forward(out, inputs, wte, wpe)
    assert same_bits(out, wte[inputs] + wpe[:T])


@dtypes
@shapes
@pytest.mark.parametrize("kind", ["any", "few", "one"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_encoder_backward_adds_rows_of_equal_tokens(B, T, C, dtype, kind, accumulate):
    """dwte always starts from the classifier's gradient; dwpe is written the first time, NaN or not, with zeros beyond T."""
    V, maxT = 29, T + 5
    inputs, dout = tokens_of(kind, B, T, V), noise(B, T, C, dtype=dtype, seed=3)
    dwte_before = noise(V, C, dtype=dtype, seed=4)
    dwpe_before = noise(maxT, C, dtype=dtype, seed=5)
    dwte, dwpe = dwte_before.clone(), dwpe_before.clone() if accumulate else unwritten(maxT, C, dtype=dtype)
    encoder_backward(dwte, dwpe, dout, inputs, token_order(inputs), encoder_scratch(B, T, C, dtype), seed=99, accumulate=accumulate)

    before = {"dwte": dwte_before, "dwpe": dwpe_before if accumulate else torch.zeros_like(dwpe)}
    # a stochastic rounding errs by up to one unit in the last place, four times a mean nearest one: floor 2 of a half
    leaves = [dwte_before, dwpe_before]  # only their shapes matter
    judge(["dwte", "dwpe"], [dwte, dwpe], lambda wte, wpe: F.embedding(inputs, wte) + wpe[:T], leaves, dout, dtype, before, floor=2)
    absent = torch.ones(V, dtype=torch.bool)
    absent[inputs.unique()] = False
    assert same_bits(dwte[absent], dwte_before[absent])
    assert same_bits(dwpe[T:], before["dwpe"][T:])


def in_order(rows):
    """fp32 rows (n, C) added one after the other onto the first."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


@shapes
@pytest.mark.parametrize("kind", ["any", "few", "one"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_encoder_backward_adds_strictly_in_order(B, T, C, kind, accumulate):
    """Rows of one token by position, those of one position by b, one fp32 addition at a time. fp32: to the bit."""
    V, maxT = 29, T + 5
    inputs, dout = tokens_of(kind, B, T, V), noise(B, T, C, seed=3)
    dwte_before, dwpe_before = noise(V, C, seed=4), noise(maxT, C, seed=5)
    dwte, dwpe = dwte_before.clone(), dwpe_before.clone() if accumulate else unwritten(maxT, C)
    encoder_backward(dwte, dwpe, dout, inputs, token_order(inputs), encoder_scratch(B, T, C, torch.float32), seed=99, accumulate=accumulate)
    for token in range(V):
        assert same_bits(dwte[token], in_order([dwte_before[token], *dout[inputs == token]]))  # a mask keeps the order of positions
    for t in range(T):
        want = in_order(dout[:, t])
        assert same_bits(dwpe[t], dwpe_before[t] + want if accumulate else want)


@pytest.mark.parametrize("kind", ["any", "few", "one"])
@pytest.mark.parametrize("room", [1, 3, 100])
def test_encoder_backward_in_bf16_rounds_the_sum_in_order_at_its_place_in_the_noise(kind, room):
    """To the bit: rows summed in order in fp32, onto the gradient, rounded at (column, row), position rows behind those of tokens."""
    B, T, C, V, seed = 3, 13, 11, 29, 3735928559
    inputs, dout = tokens_of(kind, B, T, V), noise(B, T, C, dtype=torch.bfloat16, seed=3)
    dwte_before, dwpe_before = noise(V, C, dtype=torch.bfloat16, seed=4), noise(T, C, dtype=torch.bfloat16, seed=5)
    dwte, dwpe = dwte_before.clone(), dwpe_before.clone()
    scratch = encoder_scratch(B, T, C, torch.bfloat16, room * C)
    encoder_backward(dwte, dwpe, dout, inputs, token_order(inputs), scratch, seed=seed, accumulate=True)

    def rounded_row(values, row):
        integers = values.view(torch.int32).tolist()
        bits = [rounded_bits(v & 0xFFFFFFFF, squirrel_noise(c + 198491317 * row, seed)) for c, v in enumerate(integers)]
        return torch.from_numpy(np.array(bits, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)

    for token in inputs.unique().tolist():
        sums = in_order(dout[inputs == token].float())
        assert same_bits(dwte[token], rounded_row(sums + dwte_before[token].float(), token))
    for t in range(T):
        assert same_bits(dwpe[t], rounded_row(in_order(dout[:, t].float()) + dwpe_before[t].float(), V + t))


def test_encoder_backward_repeats_its_bits():
    B, T, C, V = 3, 64, 768, 5
    inputs, dout = tokens_of("any", B, T, V), noise(B, T, C, seed=3)
    for dtype in DTYPES:
        results = []
        for _ in range(2):
            dwte, dwpe = noise(V, C, dtype=dtype, seed=4), unwritten(T, C, dtype=dtype)
            encoder_backward(
                dwte, dwpe, dout.to(dtype), inputs, token_order(inputs), encoder_scratch(B, T, C, dtype), seed=7, accumulate=False
            )
            results.append((dwte, dwpe))
        assert same_bits(results[0][0], results[1][0]) and same_bits(results[0][1], results[1][1])


def test_encoder_backward_in_bf16_does_not_depend_on_its_working_room():
    """How many rows are rounded at a time is no part of the result."""
    B, T, C, V = 2, 13, 40, 17
    inputs, dout = tokens_of("any", B, T, V), noise(B, T, C, dtype=torch.bfloat16, seed=3)
    results = []
    for room in (C, 3 * C + 1, 4096):
        dwte, dwpe = noise(V, C, dtype=torch.bfloat16, seed=4), unwritten(T, C, dtype=torch.bfloat16)
        encoder_backward(
            dwte, dwpe, dout, inputs, token_order(inputs), encoder_scratch(B, T, C, torch.bfloat16, room), seed=7, accumulate=False
        )
        results.append(torch.cat([dwte, dwpe]))
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


def test_encoder_backward_in_bf16_is_one_unbiased_rounding_of_the_sum():
    """Small rows onto a large gradient, as for a frequent token: every result is a neighbour of the sum, their mean is the sum."""
    B, T, C, V, seeds = 2, 25, 16, 4, 400
    inputs = tokens_of("any", B, T, V)
    dout = noise(B, T, C, seed=3, scale=1e-3).bfloat16()
    dwte_before, dwpe_before = (noise(n, C, seed=4).bfloat16() for n in (V, T))
    exact = [dwte_before.double().index_add(0, inputs.view(-1), dout.double().view(-1, C)), dwpe_before.double() + dout.double().sum(0)]
    totals = [torch.zeros_like(e) for e in exact]
    ulps = [2.0 ** (torch.floor(torch.log2(e.abs())) - 7) for e in exact]
    for seed in range(seeds):
        got = [dwte_before.clone(), dwpe_before.clone()]
        scratch = encoder_scratch(B, T, C, torch.bfloat16)
        encoder_backward(*got, dout, inputs, token_order(inputs), scratch, seed=seed * 2654435761 % 2**32, accumulate=True)
        for total, g, e, ulp in zip(totals, got, exact, ulps):
            assert ((g.double() - e).abs() <= ulp * 1.001).all()  # the fp32 sum may lie an fp32 rounding off
            total += g.double()
    for total, e, ulp in zip(totals, exact, ulps):
        # one rounding deviates by ulp/2 at most; 5.5 deviations of the mean for the worst of some hundred elements
        assert ((total / seeds - e).abs() <= 5.5 * ulp / 2 / sqrt(seeds)).all()
        assert ((total / seeds - e) / ulp).mean().abs() < 5 * 0.5 / sqrt(seeds * e.numel())


def test_encoder_backward_in_bf16_rounds_tokens_and_positions_apart():
    """Token t at position t: both tables get the same sums, and must not get the same noise, or the two errors would add up."""
    T, C = 32, 40
    dout, before = noise(1, T, C, seed=3, scale=0.1).bfloat16(), noise(T, C, seed=4).bfloat16()
    dwte, dwpe = before.clone(), before.clone()
    inputs, scratch = torch.arange(T)[None], encoder_scratch(1, T, C, torch.bfloat16)
    encoder_backward(dwte, dwpe, dout, inputs, token_order(inputs), scratch, seed=7, accumulate=True)
    inexact = before.double() + dout[0].double() != dwte.double()
    same = (dwte == dwpe)[inexact].double().mean().item()
    assert inexact.sum() > 500 and 0.3 < same < 0.85


# ----------------------------------------------------------------------------
# layernorm


def norm_scratch(C, rows):
    return row_scratch(C, rows, 2 * C)


def layernorm(inp, weight, bias, scratch):
    B, T, C = inp.shape
    out, mean, rstd = unwritten(B, T, C, dtype=inp.dtype), unwritten(B, T), unwritten(B, T)
    layernorm_forward(out, mean, rstd, inp, weight, bias, scratch)
    return out, mean, rstd


def layernorm_case(B, T, C, dtype, offset=0.0):
    return noise(B, T, C, dtype=dtype, seed=1) + offset, noise(C, dtype=dtype, seed=2), noise(C, dtype=dtype, seed=3)


@dtypes
@shapes
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_layernorm_forward(B, T, C, dtype, rows):
    """Rows are worked on one, a few or all at a time."""
    inp, weight, bias = layernorm_case(B, T, C, dtype)
    out, mean, rstd = layernorm(inp, weight, bias, norm_scratch(C, rows))
    exact = F.layer_norm(inp.double(), (C,), weight.double(), bias.double())
    assert_as_good_as_eager(out, F.layer_norm(inp, (C,), weight, bias), exact, floor=2)
    x = inp.double()
    torch.testing.assert_close(mean.double(), x.mean(-1), rtol=4 * 2**-24, atol=4 * 2**-24 * x.abs().max().item())
    # rsqrt halves the relative error of the variance, which is log2(C) + 3 roundings at most
    torch.testing.assert_close(rstd.double(), (x.var(-1, correction=0) + 1e-5).rsqrt(), rtol=8 * 2**-24, atol=0)


@dtypes
@pytest.mark.parametrize("C", [11, 768])
def test_layernorm_of_rows_far_from_zero_loses_only_the_means_digits(C, dtype):
    """No E[x^2] - E[x]^2: at a mean of 50 the error stays that of the mean, some roundings of 50, over the deviation.

    Twice eager's error does not hold here: torch's Welford sums lose 3 times less on rows as short as 11.
    """
    inp, weight, bias = layernorm_case(3, 7, C, dtype, 50.0)
    out, _, rstd = layernorm(inp, weight, bias, norm_scratch(C, 4))
    exact = F.layer_norm(inp.double(), (C,), weight.double(), bias.double())
    mean_error = (2 + np.log2(C)) * 2.0**-24 * 50
    stored = (0 if dtype == torch.float32 else 2.0**-9) * exact.abs().max()
    assert (out.double() - exact).abs().max() <= mean_error * rstd.max() * weight.abs().max() + 2 * stored


@dtypes
@shapes
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_normalising_again_from_kept_statistics_gives_the_same_bits(B, T, C, dtype, rows):
    """As recompute does, whatever the size of its working room."""
    inp, weight, bias = layernorm_case(B, T, C, dtype)
    out, mean, rstd = layernorm(inp, weight, bias, norm_scratch(C, 4))
    again, kept = unwritten(B, T, C, dtype=dtype), [inp.clone(), mean.clone(), rstd.clone()]
    layernorm_normalize(again, inp, mean, rstd, weight, bias, norm_scratch(C, rows))
    assert same_bits(again, out)
    assert all(same_bits(a, b) for a, b in zip(kept, (inp, mean, rstd)))


@dtypes
@shapes
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_residual_and_layernorm_in_one_are_the_two_one_after_the_other(B, T, C, dtype, rows):
    """Bit for bit: the sum as it was rounded is what is normalised."""
    added, weight, bias = layernorm_case(B, T, C, dtype)
    residual = noise(B, T, C, dtype=dtype, seed=8)
    stream, kept = added.clone(), residual.clone()
    residual_add_inplace(stream, residual)
    want = layernorm(stream, weight, bias, norm_scratch(C, rows))
    both, ours = added.clone(), (unwritten(B, T, C, dtype=dtype), unwritten(B, T), unwritten(B, T))
    residual_layernorm_forward(both, *ours, residual, weight, bias, norm_scratch(C, rows))
    assert same_bits(both, stream) and same_bits(residual, kept)
    assert all(same_bits(a, b) for a, b in zip(ours, want))


def norm_of_projection(stream_gradient):
    """The stream with a projection's bias added, handed on and normalised: (function of inp, weight, bias, that bias; its dout).

    Its gradients are those of layernorm_backward: the stream's comes back both ways, and the bias gets the sum of its rows.
    """

    def function(inp, weight, bias, proj_bias):
        stream = inp + proj_bias
        return torch.stack([F.layer_norm(stream, weight.shape, weight, bias), stream])

    return function, lambda dout: torch.stack([dout, stream_gradient])


@dtypes
@shapes
@pytest.mark.parametrize("rows", [1, 4, 100])
@pytest.mark.parametrize("accumulate", [False, True])
def test_layernorm_backward(B, T, C, dtype, rows, accumulate):
    """dresidual is always added to; dweight, dbias and dproj_bias are written, whatever they held, when accumulate is False."""
    inp, weight, bias = layernorm_case(B, T, C, dtype)
    dout = noise(B, T, C, dtype=dtype, seed=4)
    _, mean, rstd = layernorm(inp, weight, bias, norm_scratch(C, rows))
    dresidual = noise(B, T, C, dtype=dtype, seed=5)
    summed = ("dweight", "dbias", "dproj_bias")
    before = {name: noise(C, dtype=dtype, seed=6 + i) for i, name in enumerate(summed)} if accumulate else {}
    ours = [dresidual.clone(), *(before[n].clone() if n in before else unwritten(C, dtype=dtype) for n in summed)]
    kept = [t.clone() for t in (dout, inp, weight, mean, rstd)]
    layernorm_backward(*ours, dout, inp, weight, mean, rstd, norm_scratch(C, rows), accumulate=accumulate)
    function, both = norm_of_projection(dresidual)
    leaves = [inp, weight, bias, torch.zeros(C, dtype=dtype)]
    judge(["dresidual", *summed], ours, function, leaves, both(dout), dtype, before, floor=2)
    assert all(same_bits(a, b) for a, b in zip(kept, (dout, inp, weight, mean, rstd)))


@dtypes
@pytest.mark.parametrize("accumulate", [False, True])
def test_layernorm_backward_without_a_projection_below_gives_the_other_gradients_the_same_bits(accumulate, dtype):
    """The first block's ln1 follows the embedding, which has no bias."""
    inp, weight, bias = layernorm_case(3, 7, 40, dtype)
    dout = noise(3, 7, 40, dtype=dtype, seed=4)
    _, mean, rstd = layernorm(inp, weight, bias, norm_scratch(40, 4))
    results = []
    for dproj_bias in (unwritten(40, dtype=dtype), None):
        ours = [noise(3, 7, 40, dtype=dtype, seed=5), noise(40, dtype=dtype, seed=6), noise(40, dtype=dtype, seed=7)]
        layernorm_backward(*ours, dproj_bias, dout, inp, weight, mean, rstd, norm_scratch(40, 4), accumulate=accumulate)
        results.append(ours)
    assert all(same_bits(a, b) for a, b in zip(*results))


@dtypes
def test_the_projection_s_bias_gets_the_sum_of_the_whole_stream_s_gradient(dtype):
    """Of the new dresidual, and not only of what went through the norm: with dout zero it is the sum of what was there."""
    inp, weight, bias = layernorm_case(3, 7, 40, dtype)
    _, mean, rstd = layernorm(inp, weight, bias, norm_scratch(40, 4))
    dresidual, dproj_bias = noise(3, 7, 40, dtype=dtype, seed=5), unwritten(40, dtype=dtype)
    ours = [dresidual.clone(), unwritten(40, dtype=dtype), unwritten(40, dtype=dtype), dproj_bias]
    layernorm_backward(*ours, torch.zeros_like(inp), inp, weight, mean, rstd, norm_scratch(40, 4), accumulate=False)
    assert same_bits(ours[0], dresidual)
    exact = dresidual.double().sum((0, 1))
    assert_as_good_as_eager(dproj_bias, dresidual.sum((0, 1)), exact, what="dproj_bias")


@dtypes
def test_layernorm_rows_do_not_know_how_many_are_worked_on_together(dtype):
    """Recompute, evaluation and sampling must give a row the same bits whatever the size of the scratch."""
    inp, weight, bias = layernorm_case(3, 7, 40, dtype)
    results = [layernorm(inp, weight, bias, norm_scratch(40, rows)) for rows in (1, 2, 5, 21, 64)]
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other))


@dtypes
def test_layernorm_of_a_constant_row_is_its_bias(dtype):
    inp, weight, bias = torch.full((1, 2, 11), 3.0, dtype=dtype), noise(11, dtype=dtype, seed=2), noise(11, dtype=dtype, seed=3)
    out, mean, rstd = layernorm(inp, weight, bias, norm_scratch(11, 1))
    assert same_bits(out, bias.expand(1, 2, 11).contiguous())
    torch.testing.assert_close(rstd, torch.full((1, 2), 1e-5).rsqrt())


# ----------------------------------------------------------------------------
# matmul, residual


MATMULS = [(1, 1, 1, 1), (3, 7, 11, 13), (1, 33, 768, 2304)]  # B, T, C, OC
# elements to widen bf16 factors in, or none: one of each and their sum, pieces with remainders, and all of any matmul here
dtypes_and_rooms = pytest.mark.parametrize(
    "dtype, room", [(torch.float32, 0), *((torch.bfloat16, n) for n in (0, 3, 50, 1_000_000, 4_000_000))], ids=str
)


def room_of(elements, shape):
    """None for 0; and more where a large matmul of such small pieces would not end."""
    return {"widened": unwritten(max(elements, prod(shape) // 100))} if elements else None


@dtypes_and_rooms
@pytest.mark.parametrize("B, T, C, OC", MATMULS)
@pytest.mark.parametrize("biased", [True, False])
def test_matmul_forward(B, T, C, OC, dtype, room, biased):
    inp, weight = noise(B, T, C, dtype=dtype, seed=1), noise(OC, C, dtype=dtype, seed=2)
    bias = noise(OC, dtype=dtype, seed=3) if biased else None
    out = unwritten(B, T, OC, dtype=dtype)
    matmul_forward(out, inp, weight, bias, scratch=room_of(room, (C, OC)))
    exact = F.linear(inp.double(), weight.double(), bias.double() if biased else None)
    assert_as_good_as_eager(out, F.linear(inp, weight, bias), exact)


@dtypes_and_rooms
@pytest.mark.parametrize("B, T, C, OC", MATMULS)
@pytest.mark.parametrize("accumulate", [False, True])
def test_matmul_backward(B, T, C, OC, dtype, room, accumulate):
    """With accumulate False the NaNs in dweight must not be read."""
    inp, weight = noise(B, T, C, dtype=dtype, seed=1), noise(OC, C, dtype=dtype, seed=2)
    dout = noise(B, T, OC, dtype=dtype, seed=4)
    before = {"dweight": noise(OC, C, dtype=dtype, seed=5)} if accumulate else {}
    dinp = unwritten(B, T, C, dtype=dtype)
    dweight = before["dweight"].clone() if accumulate else unwritten(OC, C, dtype=dtype)
    widened = room_of(room, (C, OC))
    matmul_dweight(dweight, dout, inp, accumulate=accumulate, scratch=widened)
    matmul_dinput(dinp, dout, weight, scratch=widened)
    judge(["dinp", "dweight"], [dinp, dweight], F.linear, [inp, weight], dout, dtype, before)


@pytest.mark.parametrize("B, T, C, OC", MATMULS)
@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("accumulate", [False, True])
def test_fp32_weight_gradient_of_bf16_operands(B, T, C, OC, rows, accumulate):
    """Widened a few rows at a time: as good as an fp32 matmul of the same numbers."""
    inp, dout = noise(B, T, C, dtype=torch.bfloat16, seed=1), noise(B, T, OC, dtype=torch.bfloat16, seed=4)
    before = noise(OC, C, seed=5)
    dweight = before.clone() if accumulate else unwritten(OC, C)
    matmul_dweight(dweight, dout, inp, accumulate=accumulate, scratch={"widened": unwritten(rows, OC + C)})
    in_pieces = before.clone() if accumulate else unwritten(OC, C)
    no_whole_row = {"widened": unwritten(max(3, OC + C - 1))}  # of the larger ones
    matmul_dweight(in_pieces, dout, inp, accumulate=accumulate, scratch=no_whole_row)
    exact, eager = (dout.to(t).view(-1, OC).t() @ inp.to(t).view(-1, C) for t in (torch.float64, torch.float32))
    if accumulate:
        exact, eager = before.double() + exact, before + eager
    floor = 1 + sqrt(B * T / min(rows, B * T))  # one sum onto another per piece
    assert_as_good_as_eager(dweight, eager, exact, what="dweight", floor=floor)
    assert_as_good_as_eager(in_pieces, eager, exact, what="dweight", floor=1 + sqrt(B * T))


@dtypes_and_rooms
@pytest.mark.parametrize("B, T, C, OC", MATMULS)
def test_the_gradient_may_be_written_over_the_input_that_the_weight_s_is_done_with(B, T, C, OC, dtype, room):
    """As the head does: lnf becomes its own gradient. Not a bit may differ from two buffers."""
    inp, weight, dout = noise(B, T, C, dtype=dtype, seed=1), noise(OC, C, dtype=dtype, seed=2), noise(B, T, OC, dtype=dtype, seed=4)
    for accumulate in (False, True):
        apart, together = (noise(OC, C, dtype=dtype, seed=5) for _ in range(2))
        dinp, both = unwritten(B, T, C, dtype=dtype), inp.clone()
        for gradient, x, dx in ((apart, inp, dinp), (together, both, both)):
            matmul_dweight(gradient, dout, x, accumulate=accumulate, scratch=room_of(room, (C, OC)))
            matmul_dinput(dx, dout, weight, scratch=room_of(room, (C, OC)))
        assert same_bits(apart, together) and same_bits(dinp, both)


@dtypes
@shapes
def test_residual_adds_in_place(B, T, C, dtype):
    a, b = noise(B, T, C, dtype=dtype, seed=1), noise(B, T, C, dtype=dtype, seed=2)
    out, kept = a.clone(), b.clone()
    residual_add_inplace(out, b)
    assert same_bits(out, a + b) and same_bits(b, kept)


# ----------------------------------------------------------------------------
# gelu


def gelu_formula(x):
    return 0.5 * x * (1 + torch.tanh(sqrt(2 / torch.pi) * (x + 0.044715 * x**3)))


GELU_ROWS = pytest.mark.parametrize("rows", [1, 4, 100])


@dtypes
@shapes
@GELU_ROWS
def test_gelu_is_the_tanh_formula_both_ways(B, T, C, dtype, rows):
    """Also against the formula written out, which torch's own gelu, the yardstick, cannot excuse."""
    inp, dout = noise(B, T, C, dtype=dtype, seed=1, scale=3), noise(B, T, C, dtype=dtype, seed=2)
    out, grad, kept = unwritten(B, T, C, dtype=dtype), dout.clone(), inp.clone()
    gelu_forward(out, inp, row_scratch(C, rows))
    gelu_backward_inplace(grad, unwritten(C, dtype=dtype), inp, row_scratch(C, rows), accumulate=False)
    exact_out, (exact_grad,) = autograd(gelu_formula, [inp], dout, torch.float64)
    eager_out, (eager_grad,) = autograd(lambda x: F.gelu(x, approximate="tanh"), [inp], dout, dtype)
    assert_as_good_as_eager(out, eager_out, exact_out, what="out")
    assert_as_good_as_eager(grad, eager_grad, exact_grad, what="dinp")
    unit = 2.0**-22 if dtype == torch.float32 else 2.0**-8
    assert (out.double() - exact_out).abs().max() <= unit * exact_out.abs().max().clamp(min=1)
    assert same_bits(inp, kept)


@dtypes
@shapes
@GELU_ROWS
@pytest.mark.parametrize("accumulate", [False, True])
def test_gelu_backward_gives_the_bias_below_its_gradient(B, T, C, dtype, rows, accumulate):
    """The sum over rows of the new gradient, in fp32; a NaN that was there is not read when accumulate is False."""
    inp, dout = noise(B, T, C, dtype=dtype, seed=1, scale=3), noise(B, T, C, dtype=dtype, seed=2)
    before = {"dbias": noise(C, dtype=dtype, seed=3)} if accumulate else {}
    grad, dbias = dout.clone(), before["dbias"].clone() if accumulate else unwritten(C, dtype=dtype)
    gelu_backward_inplace(grad, dbias, inp, row_scratch(C, rows), accumulate=accumulate)

    def biased(x, bias):
        # eager's own kernel, but in float64 the formula, as above
        return gelu_formula(x + bias) if x.dtype == torch.float64 else F.gelu(x + bias, approximate="tanh")

    judge(["dinp", "dbias"], [grad, dbias], biased, [inp, torch.zeros(C, dtype=dtype)], dout, dtype, before)


@dtypes
@shapes
@GELU_ROWS
def test_gelu_again_in_the_backward_pass_is_forward_s_to_the_bit_and_changes_nothing_else(B, T, C, dtype, rows):
    """With forward's own pieces, as in a model; where rows fill whole vectors, with any pieces (torch's sigmoid differs in a tail)."""
    inp, dout = noise(B, T, C, dtype=dtype, seed=1, scale=3), noise(B, T, C, dtype=dtype, seed=2)
    want, again = unwritten(B, T, C, dtype=dtype), unwritten(B, T, C, dtype=dtype)
    gelu_forward(want, inp, row_scratch(C, rows if C % 16 else 3))
    alone, together, kept = dout.clone(), dout.clone(), inp.clone()
    biases = [unwritten(C, dtype=dtype) for _ in range(2)]
    gelu_backward_inplace(alone, biases[0], inp, row_scratch(C, rows), accumulate=False)
    gelu_backward_inplace(together, biases[1], inp, row_scratch(C, rows), accumulate=False, out_again=again)
    assert same_bits(again, want)
    assert same_bits(together, alone) and same_bits(*biases) and same_bits(inp, kept)


@dtypes
def test_gelu_far_from_zero_is_the_identity_or_nothing(dtype):
    """Up to what overflows when squared; nothing is -1.3e-28 by definition, as the argument of the sigmoid stops at x = -9."""
    inp = torch.tensor([-inf, -3e38, -1e20, -1e13, -1e4, -50.0, -0.0, 0.0, 50.0, 1e4, 1e13, 1e20, 3e38, inf], dtype=dtype)
    out, grad = torch.full_like(inp, nan), torch.ones_like(inp)
    gelu_forward(out, inp, row_scratch(14, 1))
    gelu_backward_inplace(grad, torch.zeros_like(inp), inp, row_scratch(14, 1), accumulate=False)
    assert (-1.4e-28 < out[:6]).all() and (out[:6] <= 0).all()
    assert out[6:].tolist() == [0.0, 0.0, *inp[8:].tolist()]
    assert grad.tolist() == [0.0] * 6 + [0.5, 0.5] + [1.0] * 6


@dtypes
def test_gelu_may_write_over_its_input(dtype):
    """As the sampler does."""
    inp = noise(3, 7, 11, dtype=dtype)
    out, both = torch.empty_like(inp), inp.clone()
    gelu_forward(out, inp, row_scratch(11, 4))
    gelu_forward(both, both, row_scratch(11, 4))
    assert same_bits(out, both)


# ----------------------------------------------------------------------------
# attention


@pytest.fixture(params=["torch", "numba", "numba, fp32 factors"])
def ours(request):
    """A CPU's attention: forward, backward, and what makes working room for them, of some heads and queries, or of that many workers; a
    multiple of the queries that they take at once; and what the log-sum-exp counts in."""
    common = dict(block=64, lse_unit=1.0)
    if request.param == "torch":
        return SimpleNamespace(forward=attention_forward, backward=attention_backward, room=torch_attention_room, **common)
    pytest.importorskip("numba", reason="no numba here, and so no kernels for a CPU", exc_type=ImportError)
    from llmc.kernels_cpu.attention import attention_backward as backward
    from llmc.kernels_cpu.attention import attention_forward as forward

    room = partial(numba_attention_room, factors="" if request.param == "numba" else "fp32")
    return SimpleNamespace(forward=forward, backward=backward, room=room, **common)


def torch_attention_room(B, T, C, NH, dtype, heads=2, queries=32):
    return {
        "attention_rows": unwritten(7, heads, T, C // NH), "attention_scores": unwritten(2, heads, queries, T),
        "attention_stats": unwritten(2, heads, T), "attention_mask": unwritten(queries, queries), "attention_sums": unwritten(2, 3 * C),
    }  # fmt: skip


def numba_attention_room(B, T, C, NH, dtype, workers=2, queries=None, factors=""):
    config = ModelConfig(max_seq_len=T, vocab_size=2, num_layers=1, num_heads=NH, channels=C, padded_vocab_size=2)
    precision = "fp32" if dtype == torch.float32 else "bf16"
    planned = Plan(PlanOptions(config, B, T, precision, kernels="numba", factors=factors)).tensors.values()
    shapes = {t.name: (t.shape if t.name == "attention_bias" else (workers, *t.shape[1:]), t.dtype) for t in planned}
    return {name: unwritten(*shape, dtype=TORCH_DTYPE[kind]) for name, (shape, kind) in shapes.items() if name.startswith("attention_")}


ATTENTIONS = [(1, 1, 1, 1), (3, 7, 15, 5), (2, 33, 768, 12), (2, 67, 40, 4), (1, 130, 64, 1), (1, 192, 160, 2)]  # B, T, C, NH
# heads and queries at once: one of each, uneven parts, blocks that T is a multiple of, several sequences, and more than there are
ROOMS = [(1, 1), (2, 5), (3, 33), (10, 64), (99, 999)]


@dtypes
@pytest.mark.parametrize("B, T, C, NH", ATTENTIONS)
@pytest.mark.parametrize(
    "ours, heads, queries", [*(("torch", *room) for room in ROOMS), ("numba", 2, None), ("numba, fp32 factors", 2, None)], indirect=["ours"]
)
@pytest.mark.parametrize("accumulate", [False, True])
def test_attention_is_softmax_of_the_past_and_gives_the_bias_below_its_gradient(ours, B, T, C, NH, dtype, heads, queries, accumulate):
    judge_attention(ours, B, T, C, NH, dtype, accumulate, heads, queries)


def judge_attention(ours, B, T, C, NH, dtype, accumulate, *room):
    """Against (T, T) scores, masked, softmaxed and multiplied out in float64. The bias is that of q, k and v packed."""
    qkvr, datty = noise(B, T, 3 * C, dtype=dtype, seed=1, scale=1.5), noise(B, T, C, dtype=dtype, seed=2)
    before = {"dbias": noise(3 * C, dtype=dtype, seed=3)} if accumulate else {}
    atty, dqkvr = unwritten(B, T, C, dtype=dtype), unwritten(B, T, 3 * C, dtype=dtype)
    dbias = before["dbias"].clone() if accumulate else unwritten(3 * C, dtype=dtype)
    kept, scratch, lse = qkvr.clone(), ours.room(B, T, C, NH, dtype, *room), unwritten(B, NH, T)
    ours.forward(atty, lse, qkvr, NH, scratch)
    ours.backward(dqkvr, dbias, datty, qkvr, atty, lse, NH, scratch, accumulate=accumulate)
    exact, eager = attention(qkvr.double(), NH), attention(qkvr, NH)
    assert_as_good_as_eager(atty, eager, exact, what="atty")
    torch.testing.assert_close(lse.double() * ours.lse_unit, log_sum_exp(qkvr.double(), NH), rtol=4e-6, atol=4e-6)
    leaves = [qkvr, torch.zeros(3 * C, dtype=dtype)]
    judge(["dqkvr", "dbias"], [dqkvr, dbias], lambda x, bias: attention(x + bias, NH), leaves, datty, dtype, before)
    assert same_bits(qkvr, kept)


def log_sum_exp(qkvr, NH):
    """(B, NH, T), of the scores of the keys that each query sees."""
    q, k, _ = (x.unflatten(2, (NH, -1)).transpose(1, 2) for x in qkvr.chunk(3, 2))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -inf).logsumexp(3)


@dtypes
def test_attention_is_the_same_bits_whatever_its_room_held_and_leaves_the_matmul_s_precision(ours, dtype):
    B, T, C, NH = 2, 67, 40, 4
    qkvr, datty = noise(B, T, 3 * C, dtype=dtype, seed=1), noise(B, T, C, dtype=dtype, seed=2)
    results, precision = [], torch.backends.mkldnn.matmul.fp32_precision
    for garbage in (nan, 0.0, 1e30):
        scratch = {name: room.fill_(garbage) for name, room in ours.room(B, T, C, NH, dtype, 3, 20).items()}
        outs = [unwritten(B, T, C, dtype=dtype), unwritten(B, T, 3 * C, dtype=dtype), unwritten(3 * C, dtype=dtype)]
        lse = unwritten(B, NH, T)
        ours.forward(outs[0], lse, qkvr, NH, scratch)
        ours.backward(outs[1], outs[2], datty, qkvr, outs[0], lse, NH, scratch, accumulate=False)
        results.append([*outs, lse])
    assert all(same_bits(a, b) for outs in results[1:] for a, b in zip(results[0], outs))
    assert torch.backends.mkldnn.matmul.fp32_precision == precision


@dtypes
@pytest.mark.parametrize("ours", ["numba", "numba, fp32 factors"], indirect=True)
def test_attention_is_the_same_bits_on_any_number_of_threads_and_workers(ours, plain_torch, dtype):
    """Of numba's; torch's takes heads that it has room for together. Two workers, which any machine has, do not share 15 heads evenly."""
    B, T, C, NH = 3, 67, 40, 5
    qkvr, datty = noise(B, T, 3 * C, dtype=dtype, seed=1), noise(B, T, C, dtype=dtype, seed=2)
    results = []
    for threads, workers in ((1, 1), (2, 2), (2, 1), (3, 3), (5, 9)):
        torch.set_num_threads(threads)
        outs = [unwritten(B, T, C, dtype=dtype), unwritten(B, T, 3 * C, dtype=dtype), unwritten(3 * C, dtype=dtype)]
        lse = unwritten(B, NH, T)
        room = ours.room(B, T, C, NH, dtype, workers)
        ours.forward(outs[0], lse, qkvr, NH, room)
        ours.backward(outs[1], outs[2], datty, qkvr, outs[0], lse, NH, room, accumulate=False)
        results.append([*outs, lse])
    assert all(same_bits(a, b) for outs in results[1:] for a, b in zip(results[0], outs))


@dtypes
def test_attention_may_be_written_anywhere(ours, dtype):
    """Also where a head's channels are whole lines of cache that are not at a line's start."""
    B, T, C, NH, results = 2, 67, 128, 2, []
    qkvr, datty = noise(B, T, 3 * C, dtype=dtype, seed=1), noise(B, T, C, dtype=dtype, seed=2)
    for start in (0, 2, 16, 32):
        memory = [torch.full((B * T * width + 2 * start,), nan, dtype=dtype) for width in (C, 3 * C)]
        atty, dqkvr = (x[start : len(x) - start].view(B, T, -1) for x in memory)
        dbias, scratch, lse = unwritten(3 * C, dtype=dtype), ours.room(B, T, C, NH, dtype), unwritten(B, NH, T)
        ours.forward(atty, lse, qkvr, NH, scratch)
        ours.backward(dqkvr, dbias, datty, qkvr, atty, lse, NH, scratch, accumulate=False)
        assert all(x.isnan().sum() == 2 * start for x in memory)
        results.append([atty, dqkvr, dbias])
    assert all(same_bits(a, b) for outs in results[1:] for a, b in zip(results[0], outs))


@dtypes
def test_attention_of_a_later_token_that_is_not_a_number_stays_clear_of_the_earlier_ones(ours, dtype):
    """A NaN may spread to later tokens, and within a block of queries, never back to one before."""
    B, T, C, NH, first = 1, ours.block + 36, 8, 2, ours.block
    qkvr, atty = noise(B, T, 3 * C, dtype=dtype, seed=1), unwritten(B, T, C, dtype=dtype)
    want, scratch, lse = atty.clone(), ours.room(B, T, C, NH, dtype, 2, 16), unwritten(B, NH, T)
    ours.forward(want, lse, qkvr, NH, scratch)
    qkvr[:, first:] = inf
    ours.forward(atty, lse, qkvr, NH, scratch)
    assert same_bits(atty[:, :first].contiguous(), want[:, :first].contiguous()) and atty[:, first:].isnan().all()


@dtypes
@pytest.mark.parametrize("B, T, C, NH", ATTENTIONS)
def test_packed_gradients_are_those_of_the_heads_side_by_side(B, T, C, NH, dtype):
    """Copies: q, k and v of every head at its place, also from fp32 gradients and from strided ones; nothing else is touched."""
    for strided, from_dtype in ((False, dtype), (True, dtype), (False, torch.float32)):
        shape = (B, T, NH, C // NH) if strided else (B, NH, T, C // NH)
        gradients = [noise(*shape, dtype=from_dtype, seed=i) for i in range(3)]
        gradients = [g.transpose(1, 2) for g in gradients] if strided else gradients
        dqkvr, kept = unwritten(B, T, 3 * C, dtype=dtype), [g.clone() for g in gradients]
        pack_gradients(dqkvr, unwritten(3 * C, dtype=dtype), gradients, NH, row_scratch(3 * C, 2), accumulate=False)
        want = torch.cat([g.transpose(1, 2).reshape(B, T, C) for g in gradients], 2).to(dtype)
        assert same_bits(dqkvr, want) and all(torch.equal(a, b) for a, b in zip(kept, gradients))


@dtypes
def test_attention_error_is_a_few_roundings(ours, dtype):
    """The yardstick above is torch's kernel; this bound is not: some roundings of the largest value."""
    B, T, C, NH = 2, 67, 40, 4
    qkvr, datty = noise(B, T, 3 * C, dtype=dtype, seed=1), noise(B, T, C, dtype=dtype, seed=2)
    atty, dqkvr, scratch = unwritten(B, T, C, dtype=dtype), unwritten(B, T, 3 * C, dtype=dtype), ours.room(B, T, C, NH, dtype)
    lse = unwritten(B, NH, T)
    ours.forward(atty, lse, qkvr, NH, scratch)
    ours.backward(dqkvr, unwritten(3 * C, dtype=dtype), datty, qkvr, atty, lse, NH, scratch, accumulate=False)
    exact, (dexact,) = autograd(lambda x: attention(x, NH), [qkvr], datty, torch.float64)
    unit = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}[dtype]
    assert (atty.double() - exact).abs().max() <= 8 * unit * exact.abs().max()
    assert (dqkvr.double() - dexact).abs().max() <= 16 * unit * dexact.abs().max()


@dtypes
def test_attention_does_not_see_the_future(ours, dtype):
    B, T, C, NH = 2, 33, 40, 4
    qkvr = noise(B, T, 3 * C, dtype=dtype, seed=1)
    changed = qkvr.clone()
    changed[:, 20:] = noise(B, T - 20, 3 * C, dtype=dtype, seed=9)
    results = []
    for x in (qkvr, changed):
        atty = unwritten(B, T, C, dtype=dtype)
        ours.forward(atty, unwritten(B, NH, T), x, NH, ours.room(B, T, C, NH, dtype))
        results.append(atty)
    assert same_bits(results[0][:, :20].contiguous(), results[1][:, :20].contiguous())
    assert not torch.equal(results[0][:, 20:], results[1][:, 20:])


@dtypes
@pytest.mark.parametrize("T, C, NH", [(1, 1, 1), (7, 15, 5), (33, 768, 12)])
def test_attention_row_by_row_over_a_cache_is_the_whole(T, C, NH, dtype):
    judge_rows(partial(attention_one_row, kind="cpu"), range(T), T, C, NH, dtype)


def judge_rows(one_row, positions, T, C, NH, dtype):
    """The cache beyond the position is NaN and must not be read; each row's error is judged as the whole's."""
    qkvr = noise(1, T, 3 * C, dtype=dtype, seed=1)
    eager = attention(qkvr, NH)
    exact = attention(qkvr.double(), NH)
    cache, rows = unwritten(2, T + 3, C, dtype=dtype), unwritten(1, T, C, dtype=dtype)
    for position in positions:
        out = unwritten(1, C, dtype=dtype)
        cache[:, :position] = qkvr[0, :position, C:].view(position, 2, C).transpose(0, 1)
        one_row(out, qkvr[:, position].contiguous(), cache, position, NH)
        rows[:, position] = out
        assert cache[:, position + 1 :].isnan().all()
        assert same_bits(cache[:, position].reshape(-1), qkvr[0, position, C:].contiguous())
    # a single query takes another path through the kernel, so one more rounding than eager's, of the largest value
    assert_as_good_as_eager(rows[:, positions], eager[:, positions], exact[:, positions], floor=2)


# ----------------------------------------------------------------------------
# classifier


def classifier_scratch(n, Vp, rows, dtype):
    stats = {"classifier_stats": unwritten(3, n)}
    return stats if dtype == torch.float32 else stats | {"classifier_rows": unwritten(rows, Vp)}


def classifier_case(n, V, Vp, dtype, padding):
    logits = noise(n, Vp, dtype=dtype, seed=1, scale=4)
    logits[:, V:] = padding
    return logits, torch.randint(0, V, (n,), generator=torch.Generator().manual_seed(2))


CLASSIFIERS = [(1, 1, 1), (1, 1, 2), (37, 97, 101), (21, 50257, 50304)]  # rows, V, Vp


@dtypes
@pytest.mark.parametrize("n, V, Vp", CLASSIFIERS)
@pytest.mark.parametrize("padding", [0.0, 1e4, nan], ids=str)
def test_classifier_is_cross_entropy_and_its_gradient(n, V, Vp, dtype, padding):
    """Padded columns have no mass, whatever they hold, and their gradient is zero. Losses add to what is there."""
    dloss, before = 1.0 / 17, noise(n, seed=3)
    logits, targets = classifier_case(n, V, Vp, dtype, padding)
    grad, losses = logits.clone(), before.clone()
    fused_classifier_inplace(grad, losses, targets, classifier_scratch(n, Vp, 4, dtype), V=V, dloss=dloss, rows_at_once=4)
    judge_classifier(grad, losses, before, logits, targets, V, dloss)


def judge_classifier(grad, losses, before, logits, targets, V, dloss):
    """Losses, added to `before`, and dlogits against cross-entropy in float64; nothing in the padding."""
    n = len(logits)

    def cross_entropy(x):
        # eager bf16 users take the loss in fp32; its gradient then returns to bf16 in one rounding, as ours
        return F.cross_entropy(x.float() if x.dtype == torch.bfloat16 else x, targets, reduction="none")

    real = logits[:, :V]
    exact, (dexact,) = autograd(cross_entropy, [real], torch.full((n,), dloss, dtype=torch.float64), torch.float64)
    with torch.enable_grad():
        leaf = real.clone().requires_grad_()
        eager = cross_entropy(leaf)
        (deager,) = torch.autograd.grad(eager, leaf, torch.full((n,), dloss))
    # floor 4: adding to what is there takes two roundings, the sum and the difference
    assert_as_good_as_eager(losses, before + eager.detach(), before.double() + exact, what="losses", floor=4)
    assert_as_good_as_eager(grad[:, :V], deager, dexact, what="dlogits", floor=2)
    assert (grad[:, V:] == 0).all()


@dtypes
@pytest.mark.parametrize("n, V, Vp", CLASSIFIERS[1:])
def test_classifier_rows_do_not_mix_whatever_the_piece(n, V, Vp, dtype):
    """Pieces of 1, 5 and all rows agree but for exp's last bit, which torch computes otherwise in a vector's tail; that is all.

    The loss alone has the bits of the loss beside a gradient: evaluation and training must agree.
    """
    logits, targets = classifier_case(n, V, Vp, dtype, 0.0)
    results = []
    for rows, dloss in ((1, 0.01), (5, 0.01), (n + 9, 0.01), (5, None)):
        grad, losses = logits.clone(), torch.zeros(n)
        scratch = classifier_scratch(n + 2, Vp, min(rows, n), dtype)
        fused_classifier_inplace(grad, losses, targets, scratch, V=V, dloss=dloss, rows_at_once=rows)
        results.append((grad, losses))
    last_bit = 8 * 2.0**-24 if dtype == torch.float32 else 2.0**-8
    for grad, losses in results[1:3]:
        torch.testing.assert_close(grad, results[0][0], rtol=last_bit, atol=8 * 2.0**-24 * 0.01)
        torch.testing.assert_close(losses, results[0][1], rtol=8 * 2.0**-24, atol=0)
    assert same_bits(results[3][1], results[1][1])


@dtypes
def test_classifier_survives_logits_beyond_exp(dtype):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], dtype=dtype)
    losses, targets = torch.zeros(2), torch.tensor([0, 2])
    fused_classifier_inplace(logits, losses, targets, classifier_scratch(2, 3, 2, dtype), V=3, dloss=1.0, rows_at_once=2)
    assert losses[0] == 0 and abs(losses[1].item() - np.log(3)) < 1e-6
    assert logits[0].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(logits[1].float(), torch.tensor([1 / 3, 1 / 3, -2 / 3]), rtol=4e-3, atol=0)


# ----------------------------------------------------------------------------
# global norm


@dtypes
@pytest.mark.parametrize("n, piece", [(1, 1), (1, 64), (1009, 64), (1009, 1009), (1009, 5000), (3 * 4096, 4096), (768 * 768 + 1, 1 << 16)])
def test_global_norm_of_several_pieces(n, piece, dtype):
    """In room for some more partials than there are pieces."""
    grads = noise(n, dtype=dtype, seed=n) + 0.1
    scratch = {"norm_partials": unwritten(-(-n // piece) + 3), "norm_work": unwritten(min(n, piece))}
    kept = grads.clone()
    out = unwritten(1)
    global_norm(out, grads, scratch, piece=piece)
    norm = out.item()
    exact = grads.double().square().sum().sqrt().item()
    # an fp32 dot product in 16 lanes: three deviations of a random walk of that many roundings, halved by the root, and two for itself
    assert abs(norm - exact) <= exact * 2.0**-24 * (2 + 1.5 * sqrt(min(n, piece) / 16))
    assert same_bits(grads, kept)


def test_global_norm_tells_of_nan_and_of_its_piece():
    """A NaN anywhere, also in the last, short piece, reaches the norm."""
    for at in (0, 50, 99):
        grads = torch.ones(100)
        grads[at] = nan
        out = torch.zeros(1)
        global_norm(out, grads, {"norm_partials": unwritten(4)}, piece=32)
        assert out.isnan().all()


# ----------------------------------------------------------------------------
# AdamW


def update_case(sizes, dtype, *, master, seed=0):
    """(flat arenas, TensorStates) of tensors (layers, n, decay), with noise for weights and gradients, and moments of zero."""
    weights = torch.cat([noise(layers * n, seed=seed + i, scale=0.5) for i, (layers, n, _) in enumerate(sizes)])
    gradients = torch.cat([noise(layers * n, dtype=dtype, seed=100 + seed + i) for i, (layers, n, _) in enumerate(sizes)])
    flat = {"parameters": weights.to(dtype), "gradients": gradients, "m": torch.zeros(len(weights)), "v": torch.zeros(len(weights))}
    if master:
        flat["master"] = weights.clone()
    tensors, start = [], 0
    for i, (layers, n, decay) in enumerate(sizes):
        tensors.append(TensorState(start, layers, n, decay, seed=1000 * i + 5))
        start += layers * n
    return flat, tensors


def part(t):
    """Where a tensor lies in the arenas."""
    return slice(t.start, t.start + t.layers * t.elements)


def update_scratch(room, master):
    names = ("update_gradient",) if master else ("update_gradient", "update_parameter")
    return {name: unwritten(room) for name in names} | rounding_scratch(room)


SIZES = [(1, 1, True), (1, 1, False), (3, 37, True), (3, 37, False), (2, 1031, True), (1, 768 * 64, True)]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("divisor", [1.0, 3.7])
def test_adamw_follows_the_formula_over_several_steps(weight_decay, divisor):
    """fp32 against float64, decay where it applies and nowhere else, the gradient clipped or not."""
    flat, tensors = update_case(SIZES, torch.float32, master=False)
    exact, eager = (
        [[flat[k][part(t)].to(dtype) for k in ("parameters", "m", "v")] for t in tensors] for dtype in (torch.float64, torch.float32)
    )
    eager = [[t.clone() for t in copies] for copies in eager]  # to() of its own type is no copy
    for step in range(1, 7):
        for i, t in enumerate(tensors):
            grads = noise(t.layers * t.elements, seed=50 * step + i, scale=10.0 ** (step - 4))
            flat["gradients"][part(t)] = grads
            for copies in (exact[i], eager[i]):
                p, m, v = copies
                adamw(p, grads.to(p.dtype) / divisor, m, v, lr=1e-2, decay=weight_decay if t.decay else 0.0, t=step)
        adamw_update(flat, tensors, {}, lr=1e-2, weight_decay=weight_decay, step=step, grad_norm=divisor * GRADIENT_CLIP)
        for t, want, theirs in zip(tensors, exact, eager):
            for name, w, e in zip(("parameters", "m", "v"), want, theirs):
                assert_as_good_as_eager(flat[name][part(t)], e, w, what=f"{name} after step {step}", floor=2)


@pytest.mark.parametrize("room", [512, 1536, 1 << 16])
@pytest.mark.parametrize("master", [True, False])
def test_adamw_in_bf16_updates_fp32_and_rounds_it_once(room, master):
    """The master moves as an fp32 model's weight would; the bf16 weight is its rounding, bit for bit, at the contract's noise."""
    flat, tensors = update_case(SIZES[:-1], torch.bfloat16, master=master)
    full = {
        "parameters": (flat["master"] if master else flat["parameters"].float()).clone(),
        "m": flat["m"].clone(),
        "v": flat["v"].clone(),
    }
    for step in range(1, 5):
        tensors = [replace(t, seed=step * 77777 + i) for i, t in enumerate(tensors)]
        for i, t in enumerate(tensors):
            flat["gradients"][part(t)] = noise(t.layers * t.elements, seed=50 * step + i).bfloat16()
        if not master:
            full["parameters"] = flat["parameters"].float()
        full["gradients"] = flat["gradients"].float()
        adamw_update(full, tensors, {}, lr=1e-2, weight_decay=0.1, step=step, grad_norm=1.3)
        adamw_update(flat, tensors, update_scratch(room, master), lr=1e-2, weight_decay=0.1, step=step, grad_norm=1.3)
        for mine, want in (("m", "m"), ("v", "v")) + ((("master", "parameters"),) if master else ()):
            # one vector's tail is another's middle, where the compiler may contract differently: two roundings of its value
            torch.testing.assert_close(flat[mine], full[want], rtol=4 * 2.0**-24, atol=1e-12)
        for t in tensors:
            param = flat["parameters"][part(t)]
            if master:
                assert same_bits(param, rounded(flat["master"][part(t)], t.seed, layers=t.layers))
            else:
                p = full["parameters"][part(t)]
                assert ((param.float() - p).abs() <= 2.0**-7 * p.abs()).all()


@dtypes
def test_adamw_clips_by_the_norm_whoever_holds_it(dtype):
    """The divisor is max(1, norm / the limit): a small norm scales nothing; a tensor, on the device until it is read, is as a number."""
    runs = {}
    for norm in (0.0, 0.3, 1.0, 1.5, torch.tensor(1.5), torch.tensor([1.5])[0]):
        flat, tensors = update_case(SIZES, dtype, master=dtype == torch.bfloat16)
        adamw_update(flat, tensors, update_scratch(1024, True), lr=1e-2, weight_decay=0.1, step=1, grad_norm=norm)
        runs.setdefault(float(norm), []).append(flat)
    unclipped, (clipped, *others) = runs[0.0][0], runs[1.5]
    for name in ("parameters", "m", "v"):
        assert all(same_bits(run[name], unclipped[name]) for norm in (0.3, 1.0) for run in runs[norm])
        assert len(others) == 2 and all(same_bits(run[name], clipped[name]) for run in others)
    torch.testing.assert_close(clipped["m"], unclipped["m"] / (1.5 / GRADIENT_CLIP), rtol=4 * 2.0**-24, atol=0)


def test_adamw_leaves_the_rest_of_the_arenas_alone():
    """Elements of no tensor in the list keep every bit, whichever tensors are updated."""
    for dtype in DTYPES:
        flat, tensors = update_case(SIZES, dtype, master=dtype == torch.bfloat16)
        before = {name: t.clone() for name, t in flat.items()}
        adamw_update(flat, tensors[2:4], update_scratch(1024, True), lr=1e-2, weight_decay=0.1, step=1, grad_norm=1.0)
        touched = slice(tensors[2].start, tensors[4].start)
        for name in flat:
            assert same_bits(flat[name][: touched.start], before[name][: touched.start])
            assert same_bits(flat[name][touched.stop :], before[name][touched.stop :])
        assert not same_bits(flat["m"][touched], before["m"][touched])


def test_adamw_without_gradient_and_decay_moves_nothing():
    for dtype in DTYPES:
        flat, tensors = update_case(SIZES, dtype, master=dtype == torch.bfloat16)
        flat["gradients"].zero_()
        if "master" in flat:
            flat["master"].copy_(flat["parameters"])
        before = flat["parameters"].clone()
        adamw_update(flat, tensors, update_scratch(1024, True), lr=1e-2, weight_decay=0.0, step=1, grad_norm=1.0)
        assert same_bits(flat["parameters"], before)


def test_adamw_decays_only_where_it_applies():
    flat, tensors = update_case(SIZES, torch.float32, master=False)
    flat["gradients"].zero_()
    before = flat["parameters"].clone()
    adamw_update(flat, tensors, {}, lr=0.5, weight_decay=0.1, step=1, grad_norm=1.0)
    for t in tensors:
        torch.testing.assert_close(flat["parameters"][part(t)], before[part(t)] * (0.95 if t.decay else 1.0), rtol=2.0**-23, atol=0)
