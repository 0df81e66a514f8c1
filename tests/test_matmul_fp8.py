"""FP8: operands to the bit, by torch's operations and by Triton's kernels; products of what they say; steps of a model at every level.

On a CPU products are torch's own, exact but slow, so all is small there.
"""

import inspect
import re
from dataclasses import replace
from math import inf, nan

import numpy as np
import pytest
import torch

from interpreter import little_to_interpret, quick_interpreter  # noqa: F401  (a fixture)
from test_kernels import BF16, DEVICE, FP32, TRITON, build, distance, poison, prepared_device  # noqa: F401
from test_layers import noise, unwritten
from test_plan import D48, ODD
from whole_steps import raw

from llmc.cards import Device
from llmc.config import ModelConfig
from llmc.errors import UserError
from llmc.flags import parse
from llmc.layers import matmul
from llmc.layers.matmul_fp8 import E4M3, LARGEST
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.report import describe, options_json
from llmc.operations import MATMULS, fp8_matmuls, fp8_operand_of, matmul_operations
from llmc.plan_command import plan_text
from llmc.refusals import FP8_CAPABILITY, check_fp8, check_sizes
from llmc.request import plan_options

SETS = ["torch", *(["triton"] if TRITON else [])]
kernels = pytest.mark.parametrize("kernels", [pytest.param(name, marks=[pytest.mark.kernels] * (name == "triton")) for name in SETS])
has_fp8 = DEVICE == "cpu" or torch.cuda.get_device_capability() >= FP8_CAPABILITY
pytestmark = [
    pytest.mark.skipif(not has_fp8, reason="this card does not multiply FP8"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter is numpy, which tells of every infinity
]


def made(kernels, x, rows=True, columns=True):
    """(scale, rows, columns) that an operand of x becomes, on the CPU; as bytes where they were asked for, else None."""
    R, C = x.shape
    scale, scratch = unwritten(1).to(DEVICE), {"fp8_partials": unwritten(4).to(DEVICE)}
    places = {"rows": (R, C) if rows else None, "columns": (C, R) if columns else None}
    out = {name: shape and torch.full(shape, 0xAA, dtype=torch.uint8, device=DEVICE).view(E4M3) for name, shape in places.items()}
    fp8_operand_of(kernels)(scale, x.to(DEVICE), scratch, **out)
    return scale.cpu(), *(None if t is None else t.view(torch.uint8).cpu() for t in out.values())


# all finite numbers that are not negative, in order: their codes are 0, 1, 2, ...
NUMBERS = torch.arange(127, dtype=torch.uint8).view(E4M3).double()


# ----------------------------------------------------------------------------
# operands


@kernels
@pytest.mark.parametrize("R, C", [(1, 1), (3, 7), (130, 140), (2, 768)])
@pytest.mark.parametrize("size", [1.0, 1e-9, 1e30])
def test_an_operand_is_its_tensor_scaled_to_the_nearest_numbers(kernels, R, C, size):
    """Of two equally near the even one; and transposed it is the same bytes."""
    x = (noise(R, C) * noise(R, C, seed=1).mul(3).exp() * size).bfloat16()
    scale, rows, columns = made(kernels, x)
    assert scale.item() == (x.float().abs().max() / torch.tensor(LARGEST)).item()
    wanted = x.float() * (torch.tensor(LARGEST) / x.float().abs().max())
    distances = (wanted.double().abs()[..., None] - NUMBERS).abs()
    nearest = distances == distances.min(-1, keepdim=True).values
    odd = torch.arange(len(NUMBERS)) % 2
    code = (nearest * (2 - odd)).argmax(-1)  # the even one counts double
    assert torch.equal(rows & 0x7F, code.to(torch.uint8)) and torch.equal(rows >> 7, x.signbit().to(torch.uint8))
    assert torch.equal(columns, rows.t())


@pytest.mark.kernels
@pytest.mark.skipif(not TRITON, reason="no triton here, and so no kernels: python -m pip install triton")
@pytest.mark.parametrize("top", [inf, 448.0, 3.0, 2.0**-90, 2.0**-110, 0.0], ids=str)
def test_of_every_bf16_number_the_kernel_has_the_bytes_of_torch_s_operations(top):
    """Of those up to `top`, which is among them, or of all and infinity; where all are tiny, or zero, the scale stays a number."""
    x = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    x = torch.cat([x[x <= top], torch.tensor([top]).bfloat16()])
    x = torch.stack([x, -x])
    ours, torchs = made("triton", x), made("torch", x)
    assert ours[0].item() == torchs[0].item() > 0
    for a, b in zip(ours[1:], torchs[1:]):
        mine, theirs = (t.view(E4M3).float().isnan() for t in (a, b))
        assert torch.equal(mine, theirs) and torch.equal(a[~mine], b[~mine])  # a NaN is a NaN, of whatever sign


@kernels
def test_what_is_not_a_number_stays_so_and_nothing_else_becomes_it(kernels):
    x = noise(5, 33, dtype=BF16)
    x[3, 20] = nan
    scale, rows, columns = made(kernels, x)
    assert rows.view(E4M3)[3, 20].isnan() and columns.view(E4M3)[20, 3].isnan()
    x[3, 20] = 0
    others, wanted = (t.view(E4M3).float() for t in (rows, made(kernels, x)[1]))
    others[3, 20] = 0
    assert torch.equal(others, wanted) and scale.isfinite()


@kernels
@pytest.mark.parametrize("rows, columns", [(True, False), (False, True)])
def test_a_layout_that_is_not_asked_for_changes_nothing(kernels, rows, columns):
    x = noise(20, 300, dtype=BF16)
    both, one = made(kernels, x), made(kernels, x, rows, columns)
    assert torch.equal(both[0], one[0]) and all(b is None or torch.equal(a, b) for a, b in zip(both[1:], one[1:]))


# ----------------------------------------------------------------------------
# matmuls

R, C, OC = 32, 48, 64


def room():
    widest, weight = max(C, OC), C * OC
    flat = {"fp8_inp": R * widest, "fp8_weight": weight, "fp8_dout": 2 * R * widest}
    acts = {name: torch.full((n,), 0xFF, dtype=torch.uint8, device=DEVICE) for name, n in flat.items()}
    acts["fp8_dout"] = acts["fp8_dout"].view(2, -1)
    fp32 = {"fp8_partials": 4, "fp8_sum": weight} | dict.fromkeys(("fp8_inp_scale", "fp8_weight_scale", "fp8_dout_scale"), 1)
    return acts | {name: unwritten(n).to(DEVICE) for name, n in fp32.items()}


def seen(x):
    """What a matmul sees of a tensor, in fp64: its operand, times the scale."""
    scale, rows, _ = made("torch", x)
    return rows.view(E4M3).double() * scale.double()


def judge(out, exact, operands, dtype):
    """Off the exact product by the rounding of the result and of sums in fp32; and off that of the tensors themselves by FP8's."""
    left, right = operands
    largest = (left.abs()[:, :, None] * right.abs()[None]).amax(1)  # Hopper cuts each term off 13 bits below the largest of those it adds
    sums = left.shape[1] * largest * 2.0**-13
    assert ((out.double().cpu() - exact).abs() <= exact.abs() * 2.0 ** (-8 if dtype == BF16 else -20) + sums).all()


@kernels
def test_matmuls_multiply_what_their_operands_say(kernels):
    ops, inp, weight = fp8_matmuls(kernels), noise(2, R // 2, C, dtype=BF16), noise(OC, C, dtype=BF16, seed=1)
    bias, dout = noise(OC, dtype=BF16, seed=2), noise(2, R // 2, OC, dtype=BF16, seed=3) * 1e-6
    x, w, dy = seen(inp.view(R, C)), seen(weight), seen(dout.view(R, OC))
    inp, weight, bias, dout = (t.to(DEVICE) for t in (inp, weight, bias, dout))
    acts = room()
    out, plain, dinp = (unwritten(2, R // 2, n, dtype=BF16).to(DEVICE) for n in (OC, OC, C))
    ops["matmul_forward"](out, inp, weight, bias, acts)
    judge(out.view(R, OC), x @ w.t() + bias.double().cpu(), (x, w.t()), BF16)
    ops["matmul_forward"](plain, inp, weight, None, acts)
    judge(plain.view(R, OC), x @ w.t(), (x, w.t()), BF16)
    ops["matmul_dout"](dout, acts)
    for name in ("fp8_inp", "fp8_weight"):  # between the two halves of fcproj's backward other tensors may lie there
        acts[name].fill_(0xFF)
    ops["matmul_dinput"](dinp, dout, weight, acts)
    judge(dinp.view(R, C), dy @ w, (dy, w), BF16)
    for dtype in (BF16, FP32):
        dweight = unwritten(OC, C, dtype=dtype).to(DEVICE)
        ops["matmul_dweight"](dweight, dout, inp, accumulate=False, scratch=acts)
        judge(dweight, dy.t() @ x, (dy.t(), x), dtype)
        before = noise(OC, C, dtype=dtype, seed=4).mul_(1e-5).to(DEVICE)
        total = before.clone()
        ops["matmul_dweight"](total, dout, inp, accumulate=True, scratch=acts)
        judge(total, before.double().cpu() + dy.t() @ x, (dy.t(), x), dtype)
    relative = distance(out, inp.view(R, C).double() @ weight.double().t() + bias.double())
    assert 0.005 < relative < 0.05  # it is FP8, and no more than that


@pytest.mark.kernels
def test_sums_of_a_weight_s_gradient_are_rounded_to_bf16_once():
    """Over many rows a library may split them. Already of two parts that were rounded first, a fifth of the sums would be others."""
    rows, C, OC = 8192, 32, 48
    inp, dout = (noise(rows, n, dtype=BF16, seed=n).to(DEVICE) for n in (C, OC))
    ops = fp8_matmuls("triton" if DEVICE == "cuda" else "torch")
    shapes = {"fp8_inp": (rows, C), "fp8_dout": (2, rows, OC)}
    acts = {name: torch.empty(shape, dtype=torch.uint8, device=DEVICE) for name, shape in shapes.items()}
    acts |= {name: unwritten(n).to(DEVICE) for name, n in {"fp8_partials": 64, "fp8_inp_scale": 1, "fp8_dout_scale": 1}.items()}
    ops["matmul_dout"](dout, acts)
    narrow, wide = (unwritten(OC, C, dtype=dtype).to(DEVICE) for dtype in (BF16, FP32))
    for dweight in (narrow, wide):
        ops["matmul_dweight"](dweight, dout, inp, accumulate=False, scratch=acts)
    halves = torch.stack([dy.float().t() @ x.float() for dy, x in zip(dout.chunk(2), inp.chunk(2))])
    assert off(halves.bfloat16().float().sum(0), halves.sum(0)) > 0.2
    assert off(narrow, wide) < 0.1  # for fp32 the library may add up in another order, which is off in few


def off(ours, sums):
    """The share of elements that are not the sums, rounded to bf16."""
    return (ours.bfloat16() != sums.bfloat16()).float().mean().item()


def test_without_a_room_they_are_bf16_s():
    """As the classifier has them."""
    ops, inp, weight, dout = fp8_matmuls("torch"), noise(R, C, dtype=BF16), noise(OC, C, dtype=BF16), noise(R, OC, dtype=BF16)
    for name, shape, args, more in (
        ("matmul_forward", (R, OC), (inp, weight), {}), ("matmul_dinput", (R, C), (dout, weight), {}),
        ("matmul_dweight", (OC, C), (dout, inp), {"accumulate": False}),
    ):  # fmt: skip
        ours, theirs = (torch.zeros(shape, dtype=BF16) for _ in range(2))
        ops[name](ours, *args, **more)
        getattr(matmul, name)(theirs, *args, **more)
        assert torch.equal(ours, theirs), name


# ----------------------------------------------------------------------------
# a model

B, T = 2, 16
SIZED = ModelConfig(max_seq_len=16, vocab_size=45, num_layers=3, num_heads=2, channels=32, padded_vocab_size=48)


def build_sized(kernels="", config=SIZED, **forms):
    """A model of sizes that FP8 takes; on a CPU by torch's operations, as interpreted one takes minutes."""
    return build(kernels or ("triton" if DEVICE == "cuda" else "torch"), "bf16", config, B=B, T=T, **forms)


def gradients_of(model, micro_steps=2):
    """Losses and gradients of some micro-steps; before them every activation is NaN."""
    poison(model)
    batches = np.random.default_rng(0).integers(0, SIZED.vocab_size, (micro_steps, 2, B, T))
    for micro_step, (inputs, targets) in enumerate(batches):
        model.train(inputs, targets, micro_steps, micro_step)
    return model.mean_loss(micro_steps), {name: g.clone() for name, g in model.grads.items()}


def one_step(model):
    """All that it leaves, as bits."""
    loss, gradients = gradients_of(model)
    norm = model.grad_norm()
    assert norm.isfinite()
    model.update(1e-2, 0.1, 1, norm)
    return [loss, norm.item(), *map(raw, gradients.values()), *map(raw, model.flat.values())]


@pytest.mark.kernels
def test_every_recompute_level_gives_the_same_bits():
    """Of losses, gradients of two micro-steps, weights and moments; and the same where no two activations share a byte."""
    baseline = one_step(build_sized(matmul="fp8", recompute=0))
    for level in list(NOT_KEPT)[1:]:
        assert one_step(build_sized(matmul="fp8", recompute=level)) == baseline, f"-r {level}"
    assert one_step(build_sized(matmul="fp8", recompute=6, own_bytes=True)) == baseline


@kernels
def test_gradients_are_bf16_s_but_for_what_eight_bits_cost(kernels, monkeypatch):
    """Of all sixteen tensors. Measured: 0.018 to 0.12, and the loss 0.002."""
    little_to_interpret(monkeypatch)
    shallow = replace(SIZED, num_layers=1)
    (loss, ours), (wanted_loss, wanted) = (gradients_of(build_sized(kernels, shallow, matmul=m), 1) for m in ("fp8", "native"))
    distances = {name: distance(g, wanted[name]) for name, g in ours.items()}
    assert max(distances.values()) < 0.15 and abs(loss / wanted_loss - 1) < 5e-3, distances
    assert min(distances.values()) > 1e-3  # it was FP8 that ran


# ----------------------------------------------------------------------------
# what it goes with


def asked(words, config=D48, precision="bf16", kind="cuda"):
    s = parse(f"--kernels {'triton' if kind == 'cuda' else 'numba'} {words}".split())
    return plan_options(s, config, precision, kind)


def test_it_is_taken_where_it_can_be_and_the_plan_says_so():
    o = asked("--matmul fp8 -t 1024")
    check_fp8(o, Device("cuda", "an H100", (9, 0)))
    check_fp8(o, Device("cuda"))
    check_sizes(o)
    check_fp8(asked("--matmul fp8 -b 2 -t 1000"), Device("cuda", "a B200", (10, 0)))
    check_sizes(asked("--matmul fp8 -b 2 -t 1000"))
    assert o.matmul == "fp8" and "matmuls of layers in FP8" in describe(o) and options_json(o)["matmul"] == "fp8"
    assert asked("").matmul == asked("--matmul cublaslt").matmul == "native"
    check_fp8(asked("", ODD), Device("cuda", "an A100", (8, 0)))  # which nobody asked for
    check_sizes(asked("", ODD))


@pytest.mark.parametrize("words, forms, sentence", [
    ("", {}, "--matmul fp8 is for Hopper and later, SM90, and this run is on an A100; leave it out"),
    ("", {"precision": "fp32"}, "--matmul fp8 is for a bf16 model, and this one is fp32; leave it out, or use a bf16 model"),
    ("--kernels torch", {}, "--matmul fp8 goes with --kernels triton, and this run has --kernels torch; leave one of them out"),
    ("-ge 2", {}, "--matmul fp8 -ge 2: GELU joins matmuls of bf16, and these are FP8; leave one of them out"),
    ("-b 1 -t 1000", {}, "--matmul fp8 takes sizes that 16 divides, and B*T is 1000; leave it out"),
    ("-b 3 -t 24", {}, "--matmul fp8 takes sizes that 16 divides, and B*T is 72; leave it out"),
    ("-t 32", {"config": ODD}, "--matmul fp8 takes sizes that 16 divides, and C is 35; leave it out"),
])  # fmt: skip
def test_what_it_does_not_go_with_is_said(words, forms, sentence):
    o = asked(f"--matmul fp8 -t 1024 {words}", **forms)
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        check_fp8(o, Device("cuda", "an A100", (8, 0) if "A100" in sentence else (9, 0)))
        check_sizes(o)


def test_sizes_are_those_of_the_batch_that_auto_chose():
    """One sequence of 8 tokens is too short to multiply in FP8, as many as fit are not."""
    table = plan_text(parse("--plan -e d48 -b auto -t 8 --matmul fp8 -d 16384 --memory-budget h200".split()))
    assert "-b auto takes -b 2048" in table and "matmuls of layers in FP8" in table
    for budget in range(20, 26):  # at some of them an odd number fits
        table = plan_text(parse(f"--plan -e d12 -b auto -t 8 --matmul fp8 --device cuda --memory-budget {budget}GiB".split()))
        taken, fits = map(int, re.match(r"-b auto takes -b (\d+): (\d+) sequences", table).groups())
        assert taken == fits - fits % 2 and (" and is a multiple of 2 (" in table) == (taken < fits)
    with pytest.raises(UserError, match="B\\*T is 8;"):
        plan_text(parse("--plan -e d48 -b 1 -t 8 --matmul fp8 --memory-budget h200".split()))


def test_on_a_cpu_it_is_refused():
    with pytest.raises(UserError, match="^--matmul fp8 is a GPU's, and this run is on a CPU; leave it out$"):
        asked("--matmul fp8", kind="cpu")


def test_a_plan_for_a_card_without_it_is_refused():
    with pytest.raises(UserError, match="^--matmul fp8 is for Hopper and later, SM90, and this run is on l40s; leave it out$"):
        plan_text(parse("--plan -e d48 --matmul fp8 --memory-budget l40s".split()))
    table = plan_text(parse("--plan -e d48 -b 32 -t 1024 --matmul fp8 --memory-budget h200".split()))
    assert "matmuls of layers in FP8" in table


@pytest.mark.parametrize("kernels", SETS)
def test_operands_are_converted_by_whoever_runs_the_rest(kernels):
    """The bytes are the same, so only time would tell."""
    for name in (*MATMULS, "matmul_dout"):
        assert matmul_operations("fp8", kernels)[name].keywords["fp8_operand"] is fp8_operand_of(kernels)
    assert len(set(map(fp8_operand_of, SETS))) == len(SETS)


def test_its_matmuls_have_the_names_and_arguments_of_torch_s():
    """And one more, before a pair of them in backward."""
    ours, torchs = fp8_matmuls("torch"), matmul_operations("native", "torch")
    for name in MATMULS:
        parameters = list(inspect.signature(ours[name]).parameters)
        assert parameters == [*inspect.signature(torchs[name]).parameters, "fp8_operand"]
    assert set(ours) == {*MATMULS, "matmul_dout"}
    both = matmul_operations("fp8", "torch")
    assert both["matmul_one_row"] is torchs["matmul_one_row"] and set(both) == {*ours, "matmul_one_row"}
