"""Triton's kernels against the torch functions of the same names: on a card where there is one, else interpreted on the CPU.

What is elementwise or integer equals the torch function to the bit; sums are off float64 by at most twice what eager torch is.
Outputs start as NaN and accumulating ones from noise, so what is not written, or overwritten, shows.
"""

import inspect
import json
import platform
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from case_a import CONFIG, restore, save_snapshot, write_case_a
from interpreter import little_to_interpret, quick_interpreter  # noqa: F401  (a fixture)
from oracle import assert_as_good_as_eager
from test_layers import (
    DTYPES, bits, classifier_case, dtypes, encoder_scratch, judge, judge_classifier, layernorm_case, noise,
    norm_of_projection, norm_scratch, rounding_scratch, row_scratch, same_bits, tokens_of, unwritten, update_case,
)  # fmt: skip
from whole_steps import plan_without_sharing, raw

from llmc.backend import open_backend
from llmc.checkpoint.extra_file import Extra
from llmc.checkpoint.saved_state import SavedState
from llmc.checkpoint.model_file import open_weights
from llmc.checkpoint.snapshot import load_snapshot, load_weights
from llmc.config import ModelConfig
from llmc.data.loader import TokenLoader
from llmc.data.order import token_order
from llmc.data.shards import write_shard
from llmc.distributed.tensor_parallel import Divided
from llmc.gpt2 import GPT2
from llmc.layers.adamw import BETA1, BETA2, EPSILON, piece_noise, pieces_of
from llmc.layers.functions import in_halves, torch_operations
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.staging import stage_chunks

if TRITON := find_spec("triton") is not None:  # test_kernels_cpu.py runs many of these tests, triton or not
    from llmc.kernels.functions import triton_operations

REPO = Path(__file__).resolve().parent.parent
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16 = DTYPES
TORCH = SimpleNamespace(**torch_operations())

pytestmark = [
    pytest.mark.skipif(not TRITON, reason="no triton here, and so no kernels: python -m pip install triton"),
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter is numpy, which tells of every infinity
]

SHAPES = [(1, 1, 1), (3, 7, 11), (2, 9, 768), (6, 100, 11)]  # one element, primes, GPT-2's width, more rows than a tile for two partials
shapes = pytest.mark.parametrize("B, T, C", SHAPES)
# types of activations and weights, and of gradients
FORMS = [(FP32, FP32), (BF16, BF16), (BF16, FP32)]
forms = pytest.mark.parametrize("dtype, grad_dtype", FORMS, ids=["fp32", "bf16", "bf16-fp32"])
accumulates = pytest.mark.parametrize("accumulate", [False, True], ids=["write", "add"])
# how many partial sums there are, and whether their sum is added: the one does not know of the other
sums = pytest.mark.parametrize("P, accumulate", [(2, True), (8, False)], ids=["2-add", "8-write"])


def made_whole(functions: dict) -> dict:
    """The functions by name, and those that are in halves whole too, as torch's are."""

    def encoder_backward(dwte, dwpe, dout, inputs, order, scratch, *, seed, accumulate):
        staged = functions["stage_encoder_backward"](order, seed, scratch)
        functions["launch_encoder_backward"](dwte, dwpe, dout, inputs, staged, scratch, accumulate=accumulate)

    def adamw_update(flat, tensors, scratch, **numbers):
        functions["launch_adamw_update"](flat, functions["stage_adamw_update"](tensors, scratch, **numbers), scratch)

    return functions | {f.__name__: f for f in (encoder_backward, adamw_update)}


def names_and_arguments(functions: dict) -> dict:
    return {name: list(inspect.signature(function).parameters.values()) for name, function in functions.items()}


def torch_operations_in_halves() -> dict:
    """torch's operations as a model runs them: without what it runs in halves."""
    whole = torch_operations()
    halves = in_halves(whole)
    return {name: f for name, f in (whole | halves).items() if f"launch_{name}" not in halves}


class OnDevice:
    """The kernels by name, for tensors of the CPU: where there is a card, arguments go there, and what it left comes back."""

    def __getattr__(self, name):
        return partial(self._run, made_whole(triton_operations())[name])

    def _run(self, launcher, *args, **kwargs):
        there = {}

        def put(x):
            if isinstance(x, torch.Tensor):
                return there.setdefault(id(x), (x, x.to(DEVICE)))[1]  # on the CPU itself; a tensor given twice stays one
            if isinstance(x, dict):
                return {k: put(v) for k, v in x.items()}
            return [put(v) for v in x] if isinstance(x, (list, tuple)) else x

        launcher(*map(put, args), **{k: put(v) for k, v in kwargs.items()})
        for here, copy in there.values():
            if copy is not here:
                here.copy_(copy)


@pytest.fixture
def kernels():
    return OnDevice()


@pytest.fixture
def own():
    """The name a plan has for these kernels."""
    return "triton"


@pytest.fixture(autouse=True)
def prepared_device():
    """One thread, and on a card what the program does before its first call."""
    threads = torch.get_num_threads()
    open_backend(DEVICE, 1, False)
    yield
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)


def partials(P, columns):
    return {"column_partials": unwritten(P, columns)}


def started(C, dtype, accumulate):
    """(what counts of it, what a sum over rows (C,) starts from): noise if it is added to, NaN that does not count if written."""
    before = noise(C, dtype=dtype, seed=3) if accumulate else torch.zeros(C, dtype=dtype)
    return before, before.clone() if accumulate else unwritten(C, dtype=dtype)


def same_numbers(a, b):
    """The same bits, but a NaN is a NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(bits(a)[~a.isnan()], bits(b)[~b.isnan()])


# ----------------------------------------------------------------------------
# the two sets of functions


def test_kernels_have_the_names_and_arguments_of_the_torch_functions():
    assert names_and_arguments(triton_operations()) == names_and_arguments(torch_operations_in_halves())


def test_triton_has_one_door():
    imports = re.compile(r"^\s*(import|from)\s+triton\b", re.M)
    files = [*(REPO / "llmc").rglob("*.py"), REPO / "train_gpt2.py"]
    assert [str(f.relative_to(REPO)) for f in files if imports.search(f.read_text())] == ["llmc/kernels/door.py"]


TRAIN_WITHOUT_TRITON = """
import sys

if sys.argv[1] == "blocked":
    sys.modules["triton"] = None  # as if it was not installed, for torch too
import numpy as np
from llmc.config import ModelConfig
from llmc.gpt2 import GPT2
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan

model = GPT2(Plan(PlanOptions(ModelConfig(9, 45, 2, 2, 16, 48), 2, 9, kernels="torch", optimizer_state="bf16")))
model.init_random()
losses, tokens = [], np.arange(18).reshape(2, 9)
for step in range(1, 4):
    model.forward(tokens)
    model.backward(tokens)
    model.update(1e-2, 0.1, step, model.grad_norm())
    losses.append(model.mean_loss())
model.next_logits(3, 0)
assert losses[2] < losses[1] < losses[0], losses
assert not any(module and name.partition(".")[0] == "triton" for name, module in sys.modules.items())
"""


@pytest.mark.parametrize("how", ["allowed", "blocked"])
def test_the_torch_operations_train_without_triton(how):
    """Neither importing the model nor training it imports triton, and where that cannot be imported it works all the same."""
    done = subprocess.run([sys.executable, "-c", TRAIN_WITHOUT_TRITON, how], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def results(kernels, name, dtype, garbage):
    """What an operation wrote; its outputs and scratch held `garbage` before."""
    B, T, C, V, P = 3, 7 if name == "encoder_backward" else 45, 24, 29, 4

    def blank(*shape, dtype=dtype):
        return torch.full(shape, garbage if dtype.is_floating_point else -77 if garbage != garbage else 5, dtype=dtype)

    inputs, dout, x = tokens_of("any", B, T, V), noise(B, T, C, dtype=dtype, seed=1), noise(B, T, C, dtype=dtype, seed=2)
    weight, bias = noise(C, dtype=dtype, seed=3), noise(C, dtype=dtype, seed=4)
    mean, rstd = noise(B, T, seed=5), noise(B, T, seed=6).abs()
    scratch = {"column_partials": blank(P, 4 * C, dtype=FP32), "norm_partials": blank(8, dtype=FP32)}
    scratch |= {"token_order": blank(B * T, dtype=torch.int32), "token_groups": blank(2, B * T + 1, dtype=torch.int32)}
    scratch["token_seed"] = blank(1, dtype=torch.int32)
    if name == "encoder_forward":
        outs = [blank(B, T, C)]
        kernels.encoder_forward(*outs, inputs, noise(V, C, dtype=dtype), noise(T, C, dtype=dtype))
    elif name == "encoder_backward":
        outs = [noise(V, C, dtype=dtype), blank(T + 2, C)]
        kernels.encoder_backward(*outs, dout, inputs, token_order(inputs), scratch, seed=7, accumulate=False)
    elif name == "layernorm_forward":
        outs = [blank(B, T, C), blank(B, T, dtype=FP32), blank(B, T, dtype=FP32)]
        kernels.layernorm_forward(*outs, x, weight, bias, scratch)
    elif name == "residual_layernorm_forward":
        outs = [dout, blank(B, T, C), blank(B, T, dtype=FP32), blank(B, T, dtype=FP32)]
        kernels.residual_layernorm_forward(*outs, x, weight, bias, scratch)
    elif name == "layernorm_normalize":
        outs = [blank(B, T, C)]
        kernels.layernorm_normalize(*outs, x, mean, rstd, weight, bias, scratch)
    elif name == "layernorm_backward":
        outs = [noise(B, T, C, dtype=dtype), blank(C), blank(C), blank(C)]
        kernels.layernorm_backward(*outs, dout, x, weight, mean, rstd, scratch, accumulate=False)
    elif name == "gelu_forward":
        outs = [blank(B, T, C)]
        kernels.gelu_forward(*outs, x, scratch)
    elif name == "gelu_backward_inplace":
        outs = [dout, blank(C), blank(B, T, C)]
        kernels.gelu_backward_inplace(*outs[:2], x, scratch, accumulate=False, out_again=outs[2])
    elif name == "pack_gradients":
        outs = [blank(B, T, 3 * C), blank(3 * C)]
        kernels.pack_gradients(*outs, [noise(B, 2, T, C // 2, dtype=dtype, seed=i) for i in range(3)], 2, scratch, accumulate=False)
    elif name == "matmul_dbias":
        outs = [blank(C)]
        kernels.matmul_dbias(*outs, dout, scratch, accumulate=False)
    elif name == "fused_classifier_inplace":
        outs = [classifier_case(B * T, V, V + 3, dtype, garbage)[0], noise(B * T)]
        kernels.fused_classifier_inplace(*outs, inputs.view(-1), scratch, V=V, dloss=0.1, rows_at_once=4)
    elif name == "global_norm":
        outs = [blank(1, dtype=FP32)]
        kernels.global_norm(*outs, x.view(-1), scratch, piece=100)
    else:
        assert name == "adamw_update"
        flat, tensors = update_case([(1, 5, True), (2, 1031, True)], dtype, master=dtype == BF16)
        scratch = {k: v.fill_(-77 if garbage != garbage else 5) for k, v in update_scratch(tensors).items()}
        kernels.adamw_update(flat, tensors, scratch, lr=1e-2, weight_decay=0.1, step=3, grad_norm=1.7)
        outs = list(flat.values())
    return outs


@dtypes
@pytest.mark.parametrize("name", list(torch_operations()))
def test_what_buffers_held_before_does_not_matter_and_a_second_run_repeats_every_bit(kernels, name, dtype):
    first = results(kernels, name, dtype, nan)
    assert not any(out.isnan().any() for out in first)
    for garbage in (nan, -3e30):
        assert all(same_bits(a, b) for a, b in zip(first, results(kernels, name, dtype, garbage)))


# ----------------------------------------------------------------------------
# encoder


ENCODERS = [(1, 1, 1), (3, 7, 11), (2, 9, 768), (11, 4, 5), (1, 3, 1031)]  # also more rows than are fetched together, and wider


def order_scratch(n):
    """Room for the order of n tokens, and a seed, on the device."""
    shapes = {"token_order": (n,), "token_groups": (2, n + 1), "token_seed": (1,)}
    return {name: unwritten(*shape, dtype=torch.int32) for name, shape in shapes.items()}


@dtypes
@pytest.mark.parametrize("B, T, C", [*ENCODERS, (2, 150, 11)])
@pytest.mark.parametrize("kind", ["any", "one"])
def test_encoder_forward_has_torch_s_bits(kernels, B, T, C, dtype, kind):
    V = 29
    wte, wpe, inputs = noise(V, C, dtype=dtype, seed=1), noise(T + 5, C, dtype=dtype, seed=2), tokens_of(kind, B, T, V)
    out, want = unwritten(B, T, C, dtype=dtype), unwritten(B, T, C, dtype=dtype)
    kernels.encoder_forward(out, inputs, wte, wpe)
    TORCH.encoder_forward(want, inputs, wte, wpe)
    assert same_bits(out, want)


@forms
@pytest.mark.parametrize("B, T, C", ENCODERS)
@pytest.mark.parametrize("kind", ["any", "few", "one"])
@accumulates
def test_encoder_backward_has_torch_s_bits(kernels, B, T, C, dtype, grad_dtype, kind, accumulate):
    """dwte is always added to, a position's row is written the first time, rows beyond T are then zero. Seeds above 2**31 too."""
    V, maxT, seed = 29, T + 5, 0xDEADBEEF if accumulate else 99
    inputs, dout = tokens_of(kind, B, T, V), noise(B, T, C, dtype=dtype, seed=3)
    dwte = noise(V, C, dtype=grad_dtype, seed=4)
    dwpe = noise(maxT, C, dtype=grad_dtype, seed=5) if accumulate else unwritten(maxT, C, dtype=grad_dtype)
    want, kept = (dwte.clone(), dwpe.clone()), dout.clone()
    scratch = order_scratch(B * T)
    kernels.encoder_backward(dwte, dwpe, dout, inputs, token_order(inputs), scratch, seed=seed, accumulate=accumulate)
    torch_scratch = encoder_scratch(B, T, C, grad_dtype) | {"encoder_rows": unwritten(B, T, C)}
    TORCH.encoder_backward(*want, dout, inputs, token_order(inputs), torch_scratch, seed=seed, accumulate=accumulate)
    assert same_bits(dwte, want[0]) and same_bits(dwpe, want[1]) and same_bits(dout, kept)


@forms
@pytest.mark.parametrize("B, T, C", ENCODERS[1:3])
def test_encoder_backward_of_a_part_of_the_vocabulary_has_torch_s_bits(kernels, B, T, C, dtype, grad_dtype):
    """The order is then of some positions only, by a token's number in the part. Torch is given a row more, for all other tokens.

    fp32 gradients are rows of the whole's; bf16 ones have the noise of their place in the part.
    """
    V, seed = 32, 77
    inputs, dout = tokens_of("any", B, T, V), noise(B, T, C, dtype=dtype, seed=3)
    dwte, order = noise(V, C, dtype=grad_dtype, seed=4), token_order(inputs)
    whole = dwte.clone()
    kernels.encoder_backward(
        whole, unwritten(T, C, dtype=grad_dtype), dout, inputs, order, order_scratch(B * T), seed=seed, accumulate=False
    )
    parts = 4
    width = V // parts
    for part in range(parts):
        divided = Divided(SimpleNamespace(rank=part, size=parts))
        divided.vocabulary, divided.first_token = width, part * width
        rows = dwte[part * width : (part + 1) * width]
        ours, want = [rows.clone(), unwritten(T, C, dtype=grad_dtype)], [torch.cat([rows, rows[:1]]), unwritten(T, C, dtype=grad_dtype)]
        kernels.encoder_backward(*ours, dout, inputs, divided.own_order(order), order_scratch(B * T), seed=seed, accumulate=False)
        here = inputs - part * width
        here[(here < 0) | (here >= width)] = width
        scratch = encoder_scratch(B, T, C, grad_dtype) | {"encoder_rows": unwritten(B, T, C)}
        TORCH.encoder_backward(*want, dout, here, token_order(here), scratch, seed=seed, accumulate=False)
        assert same_bits(ours[0], want[0][:width])
        if grad_dtype == FP32:
            assert same_bits(ours[0], whole[part * width : (part + 1) * width]) and same_bits(ours[1], want[1])


@pytest.mark.parametrize("seed", [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_encoder_backward_takes_every_seed(kernels, seed):
    """As a signed number of 32 bits; the extremes."""
    B, T, C, V = 1, 5, 40, 7
    inputs, dout = tokens_of("any", B, T, V), noise(B, T, C, dtype=BF16, seed=3)
    ours, want = ([noise(V, C, dtype=BF16, seed=4), noise(T, C, dtype=BF16, seed=5)] for _ in range(2))
    scratch = order_scratch(B * T)
    kernels.encoder_backward(*ours, dout, inputs, token_order(inputs), scratch, seed=seed, accumulate=True)
    TORCH.encoder_backward(*want, dout, inputs, token_order(inputs), encoder_scratch(B, T, C, BF16), seed=seed, accumulate=True)
    assert all(same_bits(a, b) for a, b in zip(ours, want))


# ----------------------------------------------------------------------------
# layernorm


def statistics_of(x, C):
    """Mean and rstd (B, T) as the torch function takes them."""
    mean, rstd = unwritten(*x.shape[:2]), unwritten(*x.shape[:2])
    TORCH.layernorm_forward(
        unwritten(*x.shape, dtype=x.dtype), mean, rstd, x, noise(C).to(x.dtype), noise(C).to(x.dtype), norm_scratch(C, 4)
    )
    return mean, rstd


@dtypes
@shapes
def test_normalising_from_given_statistics_has_torch_s_bits(kernels, B, T, C, dtype):
    inp, weight, bias = layernorm_case(B, T, C, dtype)
    mean, rstd = statistics_of(inp, C)
    out, want = unwritten(B, T, C, dtype=dtype), unwritten(B, T, C, dtype=dtype)
    kernels.layernorm_normalize(out, inp, mean, rstd, weight, bias, {})
    TORCH.layernorm_normalize(want, inp, mean, rstd, weight, bias, norm_scratch(C, 4))
    assert same_bits(out, want)


@dtypes
@shapes
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_layernorm_forward(kernels, B, T, C, dtype, offset):
    """Statistics within some roundings of float64's, the output torch's and our own normalisation by them to the bit.

    At a mean of 50 no error but that mean's, of some roundings of 50: no E[x^2] - E[x]^2.
    """
    inp, weight, bias = layernorm_case(B, T, C, dtype, offset)
    kept = inp.clone()
    out, again, want = (unwritten(B, T, C, dtype=dtype) for _ in range(3))
    mean, rstd = unwritten(B, T), unwritten(B, T)
    kernels.layernorm_forward(out, mean, rstd, inp, weight, bias, {})
    x = inp.double()
    mean_error = 4 * 2.0**-24 * x.abs().max().item()
    torch.testing.assert_close(mean.double(), x.mean(-1), rtol=4 * 2.0**-24, atol=mean_error)
    exact_rstd = (x.var(-1, correction=0) + 1e-5).rsqrt()
    # each x is off the mean by that much more, which moves the variance by its square
    torch.testing.assert_close(rstd.double(), exact_rstd, rtol=8 * 2.0**-24 + (mean_error * exact_rstd.max().item()) ** 2, atol=0)
    TORCH.layernorm_normalize(want, inp, mean, rstd, weight, bias, norm_scratch(C, 4))
    kernels.layernorm_normalize(again, inp, mean, rstd, weight, bias, {})
    assert same_bits(out, want) and same_bits(again, want) and same_bits(inp, kept)
    if not offset:
        exact = F.layer_norm(x, (C,), weight.double(), bias.double())
        assert_as_good_as_eager(out, F.layer_norm(inp, (C,), weight, bias), exact, floor=2)


@dtypes
@shapes
def test_residual_and_layernorm_in_one_are_the_two_one_after_the_other(kernels, B, T, C, dtype):
    """The sum has torch's bits, and as it was rounded it is what is normalised."""
    added, weight, bias = layernorm_case(B, T, C, dtype)
    residual = noise(B, T, C, dtype=dtype, seed=8)
    kept, stream = residual.clone(), added + residual
    want, ours = ([unwritten(B, T, C, dtype=dtype), unwritten(B, T), unwritten(B, T)] for _ in range(2))
    kernels.layernorm_forward(*want, stream, weight, bias, {})
    kernels.residual_layernorm_forward(added, *ours, residual, weight, bias, {})
    assert same_bits(added, stream) and same_bits(residual, kept)
    assert all(same_bits(a, b) for a, b in zip(ours, want))


@dtypes
def test_layernorm_of_a_constant_row_is_its_bias(kernels, dtype):
    inp, weight, bias = torch.full((1, 2, 11), 3.0, dtype=dtype), noise(11, dtype=dtype, seed=2), noise(11, dtype=dtype, seed=3)
    out, mean, rstd = unwritten(1, 2, 11, dtype=dtype), unwritten(1, 2), unwritten(1, 2)
    kernels.layernorm_forward(out, mean, rstd, inp, weight, bias, {})
    assert same_bits(out, bias.expand(1, 2, 11).contiguous())
    torch.testing.assert_close(rstd, torch.full((1, 2), 1e-5).rsqrt())


@dtypes
@shapes
@sums
def test_layernorm_backward(kernels, B, T, C, dtype, P, accumulate):
    """dresidual is always added to; what is summed over rows is written, whatever it held, when accumulate is False."""
    inp, weight, bias = layernorm_case(B, T, C, dtype)
    dout, dresidual = noise(B, T, C, dtype=dtype, seed=4), noise(B, T, C, dtype=dtype, seed=5)
    mean, rstd = statistics_of(inp, C)
    summed = ("dweight", "dbias", "dproj_bias")
    before = {name: noise(C, dtype=dtype, seed=6 + i) for i, name in enumerate(summed)} if accumulate else {}
    ours = [dresidual.clone(), *(before[n].clone() if n in before else unwritten(C, dtype=dtype) for n in summed)]
    kept = [t.clone() for t in (dout, inp, weight, mean, rstd)]
    kernels.layernorm_backward(*ours, dout, inp, weight, mean, rstd, partials(P, 4 * C), accumulate=accumulate)
    function, both = norm_of_projection(dresidual)
    judge(["dresidual", *summed], ours, function, [inp, weight, bias, torch.zeros(C, dtype=dtype)], both(dout), dtype, before, floor=2)
    assert all(same_bits(a, b) for a, b in zip(kept, (dout, inp, weight, mean, rstd)))


@shapes
@accumulates
def test_layernorm_backward_into_fp32_gradients_has_the_bits_of_an_fp32_model_s(kernels, B, T, C, accumulate):
    """Of the same numbers, widened; what goes on down the stream is that, rounded.

    On a card a thread loads more numbers at a time of bf16, and fp32 has more warps, so sums over a row and over rows have other orders
    there: a number of the stream may be rounded to its neighbour, up to 2^-7 away, and sums over rows, small ones too, are off by
    roundings of partial sums as large as the largest of them.
    """
    inp, weight, _ = layernorm_case(B, T, C, BF16)
    dout, dresidual = noise(B, T, C, dtype=BF16, seed=4), noise(B, T, C, dtype=BF16, seed=5)
    mean, rstd = statistics_of(inp, C)
    runs = []
    for dtype in (BF16, FP32):
        sums = [noise(C, seed=6 + i) if accumulate else unwritten(C) for i in range(3)]
        stream, *read = (t.to(dtype, copy=True) for t in (dresidual, dout, inp, weight))
        kernels.layernorm_backward(stream, *sums, *read, mean, rstd, partials(2, 4 * C), accumulate=accumulate)
        runs.append([stream.bfloat16(), *sums])
    if DEVICE == "cpu":
        assert all(same_bits(a, b) for a, b in zip(*runs))
    (stream, *sums), (wide_stream, *wide_sums) = runs
    torch.testing.assert_close(stream, wide_stream, rtol=2**-7, atol=1e-6)
    for ours, wide in zip(sums, wide_sums):
        torch.testing.assert_close(ours, wide, rtol=0, atol=2**-22 * wide.abs().max().item())


@dtypes
@accumulates
def test_layernorm_backward_without_a_projection_below_gives_the_other_gradients_the_same_bits(kernels, accumulate, dtype):
    """The first block's ln1 follows the embedding, which has no bias."""
    inp, weight, _ = layernorm_case(3, 7, 40, dtype)
    mean, rstd = statistics_of(inp, 40)
    results = []
    for dproj_bias in (unwritten(40, dtype=dtype), None):
        ours = [noise(3, 7, 40, dtype=dtype, seed=5), noise(40, dtype=dtype, seed=6), noise(40, dtype=dtype, seed=7)]
        dout = noise(3, 7, 40, dtype=dtype, seed=4)
        kernels.layernorm_backward(*ours, dproj_bias, dout, inp, weight, mean, rstd, partials(4, 160), accumulate=accumulate)
        results.append(ours)
    assert all(same_bits(a, b) for a, b in zip(*results))


# ----------------------------------------------------------------------------
# gelu


def torch_gelu(inp, dout=None):
    """GELU(inp), and its gradient times dout, by the torch functions, on rows of 64.

    A row that does not fill whole vectors ends in torch's scalar sigmoid, whose exp is the C library's and not SLEEF's.
    """
    n = inp.numel()
    x, d = (torch.zeros(-(-n // 64) * 64, dtype=inp.dtype) for _ in range(2))
    x[:n] = inp.flatten()
    out = unwritten(len(x) // 64, 64, dtype=inp.dtype)
    TORCH.gelu_forward(out, x.view(-1, 64), row_scratch(64, 16))
    if dout is None:
        return out.flatten()[:n].view(inp.shape)
    d[:n] = dout.flatten()
    TORCH.gelu_backward_inplace(d.view(-1, 64), unwritten(64, dtype=inp.dtype), x.view(-1, 64), row_scratch(64, 16), accumulate=False)
    return out.flatten()[:n].view(inp.shape), d[:n].view(inp.shape)


def same_gelu(a, b, own):
    """Whether two GELUs, or gradients by them, are the same numbers: to the bit, but Triton's in bf16, whose exp and reciprocal are the
    card's own. So an fp32 is some units of 2^-24 off, and one bf16 in thousands rounds to its neighbour; no other kind of number does."""
    if own != "triton" or a.dtype == FP32:
        return same_numbers(a, b)
    a, b = a.flatten(), b.flatten()
    differ = a.view(torch.int16) != b.view(torch.int16)
    differ &= ~(a.isnan() & b.isnan())
    one_off = (a[differ].view(torch.int16).int() - b[differ].view(torch.int16).int()).abs() == 1
    return differ.sum() <= 1 + len(a) / 1000 and bool(one_off.all())


@dtypes
@shapes
@sums
def test_gelu_both_ways_has_torch_s_bits_and_sums_the_bias_below_its_gradient(kernels, own, B, T, C, dtype, P, accumulate):
    """Triton's in bf16 within what same_gelu allows.

    Holds on an x86 CPU, where torch's exp is SLEEF's of 1.0 ulp; another CPU's torch may have another exp, and the bits may differ.
    """
    inp, dout = noise(B, T, C, dtype=dtype, seed=1, scale=3), noise(B, T, C, dtype=dtype, seed=2)
    out, again = unwritten(B, T, C, dtype=dtype), unwritten(B, T, C, dtype=dtype)
    kept, alone, together = inp.clone(), dout.clone(), dout.clone()
    (before, *biases) = *started(C, dtype, accumulate), started(C, dtype, accumulate)[1]
    kernels.gelu_forward(out, inp, {})
    kernels.gelu_backward_inplace(alone, biases[0], inp, partials(P, 4 * C), accumulate=accumulate)
    kernels.gelu_backward_inplace(together, biases[1], inp, partials(P, 4 * C), accumulate=accumulate, out_again=again)
    want, dwant = torch_gelu(inp, dout)
    assert same_gelu(out, want, own) and same_bits(again, out) and same_bits(inp, kept)
    assert same_gelu(alone, dwant, own) and same_bits(together, alone) and same_bits(*biases)

    # the sum's own error: how far the gradient itself is off is the formula's matter, and test_layers.py's
    _, wide = torch_gelu(inp.float(), dout.float())
    exact, eager = before.double() + wide.double().sum((0, 1)), before + wide.to(dtype).sum((0, 1))
    assert_as_good_as_eager(biases[0], eager, exact, what="dbias", floor=2)


@shapes
@accumulates
def test_gelu_backward_into_fp32_gradients_has_the_bits_of_an_fp32_model_s(kernels, own, B, T, C, accumulate):
    """Triton's in bf16 within what same_gelu allows."""
    inp, dout = noise(B, T, C, dtype=BF16, seed=1, scale=3), noise(B, T, C, dtype=BF16, seed=2)
    runs = []
    for dtype in (BF16, FP32):
        grad, dbias = dout.to(dtype, copy=True), noise(C, seed=3) if accumulate else unwritten(C)
        kernels.gelu_backward_inplace(grad, dbias, inp.to(dtype), partials(2, 4 * C), accumulate=accumulate)
        runs.append((grad.bfloat16(), dbias))
    (grad, dbias), (wide_grad, wide_dbias) = runs
    assert same_gelu(grad, wide_grad, own)
    assert same_bits(dbias, wide_dbias) or own == "triton" and torch.allclose(dbias, wide_dbias, rtol=1e-6, atol=1e-6 * B * T)


def numbers_of_every_exponent():
    """fp32 (512, 128): 128 numbers of every sign and exponent, zeros, infinities, subnormals and NaNs among them."""
    mantissa = torch.randint(0, 1 << 23, (512, 128), generator=torch.Generator().manual_seed(0))
    mantissa[:, 0] = 0
    pattern = torch.arange(512)[:, None] << 23 | mantissa
    return pattern.to(torch.int32).view(FP32)  # wraps where the sign is set


@pytest.mark.parametrize("inp", [
    torch.arange(1 << 16).to(torch.int16).view(BF16).view(512, 128), numbers_of_every_exponent(),
], ids=["every-bf16", "fp32"])  # fmt: skip
def test_gelu_of_all_kinds_of_numbers_has_torch_s_bits(kernels, own, inp):
    """A NaN stays one. As above."""
    out, again, dout = unwritten(512, 128, dtype=inp.dtype), unwritten(512, 128, dtype=inp.dtype), noise(512, 128, dtype=inp.dtype)
    grad, (want, dwant) = dout.clone(), torch_gelu(inp, dout)
    kernels.gelu_forward(out, inp, {})
    kernels.gelu_backward_inplace(grad, unwritten(128, dtype=inp.dtype), inp, partials(4, 128), accumulate=False, out_again=again)
    assert inp.isnan().any() and out[inp.isnan()].isnan().all() and grad[inp.isnan()].isnan().all()
    assert same_gelu(out, want, own) and same_numbers(again, out) and same_gelu(grad, dwant, own)


@dtypes
def test_gelu_may_write_over_its_input(kernels, dtype):
    """As the sampler does."""
    inp = noise(3, 7, 11, dtype=dtype)
    out, both = unwritten(3, 7, 11, dtype=dtype), inp.clone()
    kernels.gelu_forward(out, inp, {})
    kernels.gelu_forward(both, both, {})
    assert same_bits(out, both)


# ----------------------------------------------------------------------------
# attention's gradients, packed


PACKS = [(1, 1, 1, 1), (3, 7, 15, 5), (2, 9, 768, 12), (6, 100, 12, 2)]  # B, T, C, NH


@forms
@pytest.mark.parametrize("B, T, C, NH", PACKS)
@sums
def test_packed_gradients_have_torch_s_bits_and_their_sum_is_the_bias_s(kernels, B, T, C, NH, dtype, grad_dtype, P, accumulate):
    """From gradients laid out as a kernel likes, (B, NH, T, HS) or (B, T, NH, HS), also all three side by side."""
    by_heads = [noise(B, NH, T, C // NH, dtype=dtype, seed=i) for i in range(3)]
    by_rows = [noise(B, T, NH, C // NH, dtype=dtype, seed=i).transpose(1, 2) for i in range(3)]
    one = torch.stack([g.transpose(1, 2) for g in by_rows], 2)
    for gradients in (by_heads, by_rows, [g.transpose(1, 2) for g in one.unbind(2)]):
        before, dbias = started(3 * C, grad_dtype, accumulate)
        kept = [g.clone() for g in gradients]
        dqkvr, want = unwritten(B, T, 3 * C, dtype=dtype), unwritten(B, T, 3 * C, dtype=dtype)
        kernels.pack_gradients(dqkvr, dbias, gradients, NH, partials(P, 4 * C), accumulate=accumulate)
        TORCH.pack_gradients(want, unwritten(3 * C), gradients, NH, row_scratch(3 * C, 2), accumulate=False)
        assert same_bits(dqkvr, want) and all(torch.equal(a, b) for a, b in zip(kept, gradients))
        exact, eager = before.double() + dqkvr.double().sum((0, 1)), before + dqkvr.to(grad_dtype).sum((0, 1))
        assert_as_good_as_eager(dbias, eager, exact, what="dbias", floor=2)


@pytest.mark.parametrize("B, T, C, NH", PACKS)
def test_gradients_in_fp32_are_packed_into_bf16_rounded_to_nearest(kernels, B, T, C, NH):
    """A CPU's attention widens short sequences and returns fp32. The bias is the sum of what was packed."""
    gradients = [noise(B, NH, T, C // NH, seed=i) for i in range(3)]
    dqkvr, want = unwritten(B, T, 3 * C, dtype=BF16), unwritten(B, T, 3 * C, dtype=BF16)
    dbias, from_packed = unwritten(3 * C), unwritten(3 * C)
    kernels.pack_gradients(dqkvr, dbias, gradients, NH, partials(4, 4 * C), accumulate=False)
    TORCH.pack_gradients(want, unwritten(3 * C), gradients, NH, row_scratch(3 * C, 2), accumulate=False)
    assert same_bits(dqkvr, want)
    kernels.pack_gradients(want, from_packed, [g.bfloat16() for g in gradients], NH, partials(4, 4 * C), accumulate=False)
    assert same_bits(dbias, from_packed)


@forms
@shapes
@sums
def test_a_bias_of_its_own_is_the_sum_over_rows(kernels, B, T, C, dtype, grad_dtype, P, accumulate):
    dout = noise(B, T, C, dtype=dtype, seed=1)
    before, dbias = started(C, grad_dtype, accumulate)
    kept = dout.clone()
    kernels.matmul_dbias(dbias, dout, partials(P, 4 * C), accumulate=accumulate)
    exact, eager = before.double() + dout.double().sum((0, 1)), before + dout.to(grad_dtype).sum((0, 1))
    assert_as_good_as_eager(dbias, eager, exact, what="dbias", floor=2)
    assert same_bits(dout, kept)


# ----------------------------------------------------------------------------
# classifier


CLASSIFIERS = [(1, 1, 1), (1, 1, 2), (37, 97, 101), (3, 50257, 50304)]  # rows, V, Vp


@dtypes
@pytest.mark.parametrize("n, V, Vp", CLASSIFIERS)
@pytest.mark.parametrize("padding", [0.0, 1e4, nan], ids=str)
def test_classifier_is_cross_entropy_and_its_gradient(kernels, n, V, Vp, dtype, padding):
    """Padded columns have no mass, whatever they hold, and their gradient is zero. Losses add to what is there.

    The loss alone, as in evaluation, is the same to the bit, and its logits stay as they are.
    """
    dloss, before = 1.0 / 17, noise(n, seed=3)
    logits, targets = classifier_case(n, V, Vp, dtype, padding)
    grad, losses, untouched, alone = logits.clone(), before.clone(), logits.clone(), before.clone()
    kernels.fused_classifier_inplace(grad, losses, targets, {}, V=V, dloss=dloss, rows_at_once=4)
    kernels.fused_classifier_inplace(untouched, alone, targets, {}, V=V, dloss=None, rows_at_once=4)
    assert same_bits(alone, losses) and same_bits(untouched, logits)
    judge_classifier(grad, losses, before, logits, targets, V, dloss)


@dtypes
def test_classifier_survives_logits_beyond_exp(kernels, dtype):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], dtype=dtype)
    losses, targets = torch.zeros(2), torch.tensor([0, 2])
    kernels.fused_classifier_inplace(logits, losses, targets, {}, V=3, dloss=1.0, rows_at_once=2)
    assert losses[0] == 0 and abs(losses[1].item() - np.log(3)) < 1e-6
    assert logits[0].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(logits[1].float(), torch.tensor([1 / 3, 1 / 3, -2 / 3]), rtol=4e-3, atol=0)


@pytest.mark.parametrize("at", [0, 8192, 20000])
def test_classifier_finds_the_largest_logit_in_any_block(kernels, at):
    """The running maximum moves on, and what was summed before it scales to nothing."""
    logits = noise(1, 20001, seed=1)
    logits[0, at] = 500.0
    losses = torch.zeros(2)
    for i, target in enumerate((at, 7)):
        kernels.fused_classifier_inplace(logits.clone(), losses[i : i + 1], torch.tensor([target]), {}, V=20001, dloss=None, rows_at_once=1)
    assert losses[0] == 0 and losses[1] == 500.0 - logits[0, 7]


# ----------------------------------------------------------------------------
# global norm


@dtypes
@pytest.mark.parametrize("P", [2, 8])
@pytest.mark.parametrize("n", [1, 5, 1009, 3 * 4096, 100_003])
def test_global_norm(kernels, n, P, dtype):
    """Within fp32 roundings: of one element's sum of a tile's, at most log2 of 2048 and n / P / 2048 of them, and the last ones."""
    grads = noise(n, dtype=dtype, seed=n) + 0.1
    kept, out = grads.clone(), unwritten(1)
    kernels.global_norm(out, grads, {"norm_partials": unwritten(P)}, piece=64)
    exact = grads.double().square().sum().sqrt().item()
    assert abs(out.item() - exact) <= exact * 2.0**-24 * (2 + (11 + n / P / 2048) / 2)
    assert same_bits(grads, kept)


def test_global_norm_tells_of_nan_wherever_it_is(kernels):
    for at in (0, 50, 99):
        grads, out = torch.ones(100), torch.zeros(1)
        grads[at] = nan
        kernels.global_norm(out, grads, {"norm_partials": unwritten(8)}, piece=32)
        assert out.isnan().all()


# ----------------------------------------------------------------------------
# AdamW


# layers, elements of each, decay: one element, less than a row of the noise, a little more than a program's, several programs
SIZES = [(1, 1, True), (3, 37, False), (2, 1031, True), (1, 2048, False), (1, 9001, True)]
ROOM = 1 << 14
UPDATES = [(FP32, ""), (BF16, "master"), (BF16, "master_bits"), (BF16, "")]
updates = pytest.mark.parametrize("dtype, master", UPDATES, ids=["fp32", "master", "bits16", "none"])


@pytest.fixture
def small_chunks(monkeypatch):
    """Programs of two turns each, where every turn takes time."""
    if DEVICE == "cpu":
        monkeypatch.setattr("llmc.kernels.adamw.CHUNK", 4096)
        monkeypatch.setattr("llmc.kernels.adamw.ELEMENTS", 2048)


def update_scratch(tensors):
    """The kernel's working room for as many tensors, with nothing of use in it."""
    n = len(tensors)
    return {
        "update_layout": unwritten(n, 5, dtype=torch.int64),
        "update_numbers": unwritten(3 * n + 2, dtype=torch.int32),
        "grad_norm": unwritten(1),
    }


def torch_update_scratch(rounds):
    names = ("update_gradient", "update_parameter", "update_m", "update_v")
    rounding = rounding_scratch(ROOM) | {"noise_moments": unwritten(ROOM, dtype=torch.int32)}
    return {name: unwritten(ROOM) for name in names} | (rounding if rounds else {})


def arenas(dtype, master, moments, sizes=SIZES):
    """(flat, tensors) as a model has them after a step or two: weights and their master belong to seeds 1000 * i + 5."""
    flat, tensors = update_case(sizes, dtype, master=master == "master")
    n = len(flat["m"])
    flat["m"], flat["v"] = noise(n, seed=300, scale=0.1).to(moments), noise(n, seed=301, scale=0.1).square().to(moments)
    if master == "master_bits":
        flat["master_bits"] = torch.randint(-(1 << 15), 1 << 15, (n,), generator=torch.Generator().manual_seed(9)).to(torch.int16)
    return flat, [replace(t, last_seed=t.seed) for t in tensors]


def torch_update(flat, tensors, **kwargs):
    """adamw_update by torch, in place, on copies whose layers are padded to whole vectors.

    In a vector's tail torch's fused kernel is scalar code, which rounds otherwise. Where an element has its place in the noise
    depends on its place in the layer alone.
    """
    places, roomy, start = [], [], 0
    for t in tensors:
        width = -(-t.elements // 64) * 64
        places.append((start + torch.arange(t.layers)[:, None] * width + torch.arange(t.elements)).flatten())
        roomy.append(replace(t, start=start, elements=width))
        start += t.layers * width
    at = torch.cat(places)
    padded = {name: torch.zeros(start, dtype=arena.dtype).index_copy_(0, at, arena) for name, arena in flat.items()}
    rounds = BF16 in (flat["parameters"].dtype, flat["m"].dtype)
    TORCH.adamw_update(padded, roomy, torch_update_scratch(rounds), **kwargs)
    for name, arena in flat.items():
        arena.copy_(padded[name][at])


@pytest.fixture
def torch_s_adamw():
    """Skip where torch's CPU kernel for AdamW has other fused multiply-adds than on x86, where ours have its bits: which product and sum
    become one is its compiler's choice. On Arm torch 2.13 fuses the other product of v, or none where vectors have 256 bits."""
    g, v = noise(512, seed=1).cpu(), noise(512, seed=2).cpu().abs()
    shares = g * np.float32(1 - BETA2), v * np.float32(BETA2)
    fused = (shares[0].double() * g.double() + shares[1].double()).float()
    torch._fused_adamw_(
        [torch.zeros(512)], [g], [torch.zeros(512)], [v], [], [torch.tensor(1.0)], lr=0.0, beta1=BETA1, beta2=BETA2, eps=EPSILON,
        weight_decay=0.0, amsgrad=False, maximize=False,
    )  # fmt: skip
    if not same_bits(v, fused):
        assert platform.machine() != "x86_64", "torch's AdamW has other bits on x86 than those that the kernels were written to have"
        pytest.skip("torch's AdamW was compiled to other fused multiply-adds for this processor")


@updates
@pytest.mark.parametrize("moments", DTYPES, ids=["m-fp32", "m-bf16"])
@pytest.mark.parametrize("gradients", DTYPES, ids=["g-fp32", "g-bf16"])
def test_adamw_has_torch_s_bits_in_every_form_step_after_step(kernels, torch_s_adamw, small_chunks, dtype, master, moments, gradients):
    """Clipped and not, decayed and not; seeds of all 32 bits. Gradients stay as they are, which torch's need not."""
    flat, tensors = arenas(dtype, master, moments)
    want = {name: arena.clone() for name, arena in flat.items()}
    scratch = update_scratch(tensors)
    for step, (norm, weight_decay) in enumerate(((0.3, 0.1), (3.7, 0.1), (1.5, 0.0)), 1):
        tensors = [replace(t, seed=(step * 2654435769 + i * 77777) % 2**32, last_seed=t.seed) for i, t in enumerate(tensors)]
        grads = noise(len(flat["m"]), seed=step, scale=10.0 ** (step - 3)).to(gradients)
        flat["gradients"], want["gradients"] = grads.clone(), grads.clone()
        kwargs = dict(lr=1e-2, weight_decay=weight_decay, step=step, grad_norm=norm)
        kernels.adamw_update(flat, tensors, scratch, **kwargs)
        torch_update(want, tensors, **kwargs)
        assert same_bits(flat["gradients"], grads)
        for name in flat:
            assert name == "gradients" or same_bits(flat[name], want[name]), f"{name} after step {step}"


@pytest.mark.parametrize("norm", [0.0, 1.0, 1.0 + 2.0**-23, 1e-30, 3e38, inf, -inf, nan])
def test_adamw_clips_as_torch_does_whatever_the_norm(kernels, torch_s_adamw, small_chunks, norm):
    """An infinite one makes the gradient nothing; one that is no number leaves it as it is, and the outlier detector will tell."""
    flat, tensors = arenas(FP32, "", FP32)
    flat["gradients"] *= 1e10
    want = {name: arena.clone() for name, arena in flat.items()}
    kernels.adamw_update(flat, tensors, update_scratch(tensors), lr=1e-2, weight_decay=0.1, step=3, grad_norm=norm)
    torch_update(want, tensors, lr=1e-2, weight_decay=0.1, step=3, grad_norm=norm)
    assert all(same_bits(flat[name], want[name]) for name in ("parameters", "m", "v"))


@pytest.mark.parametrize("master", ["master", "master_bits"])
def test_adamw_rounds_ties_as_torch_does(kernels, small_chunks, master):
    """Lower halves just below, at and just above the noise that decides: at a rate of 0 the weights stay what they are."""
    flat, tensors = arenas(BF16, master, FP32)
    scratch = torch_update_scratch(True)
    noises = torch.cat([piece_noise(piece, t.seed, scratch)[0].flatten().clone() for t in tensors for piece in pieces_of(t, scratch)])
    low = (noises + torch.arange(len(noises), dtype=torch.int32) % 3 - 1) & 0xFFFF
    values = (flat["parameters"].float().view(torch.int32) | low).view(FP32)
    up = (low > noises & 0xFFFF).to(torch.int32)
    rounded = ((values.view(torch.int32) >> 16) + up).to(torch.int16).view(BF16)
    if master == "master":
        flat["master"].copy_(values)
    else:  # as an update with these seeds has left them
        flat["parameters"].copy_(rounded)
        flat["master_bits"].copy_(low.to(torch.int16))
    kernels.adamw_update(flat, tensors, update_scratch(tensors), lr=0.0, weight_decay=0.1, step=1, grad_norm=0.5)
    assert same_bits(flat["parameters"], rounded) and 0.2 < up.float().mean() < 0.5
    left = flat["master"].view(torch.int32) & 0xFFFF if master == "master" else flat["master_bits"].to(torch.int32) & 0xFFFF
    assert torch.equal(left, low)


@updates
def test_adamw_leaves_the_rest_of_the_arenas_alone(kernels, small_chunks, dtype, master):
    """Elements of no tensor in the list keep every bit, and those of one in it get the bits they get in the whole list."""
    flat, tensors = arenas(dtype, master, FP32)
    before, whole = ({name: arena.clone() for name, arena in flat.items()} for _ in range(2))
    kwargs = dict(lr=1e-2, weight_decay=0.1, step=2, grad_norm=1.7)
    kernels.adamw_update(whole, tensors, update_scratch(tensors), **kwargs)
    kernels.adamw_update(flat, tensors[1:3], update_scratch(tensors[1:3]), **kwargs)
    touched = slice(tensors[1].start, tensors[3].start)
    for name in flat:
        assert same_bits(flat[name][touched], whole[name][touched])
        assert same_bits(flat[name][: touched.start], before[name][: touched.start])
        assert same_bits(flat[name][touched.stop :], before[name][touched.stop :])


def update_in_shares(update, dtype, master, moments):
    """Bits of an update of whole tensors, and those of its shares, each in arenas of its own, put together: two lists.

    update(flat, tensors, numbers). Layers are cut into three; shares end in the middle of what has one row of the noise.
    """
    sizes, numbers = [(3, 3 * 448, True), (1, 3 * 64, False), (2, 3 * 4160, True)], dict(lr=1e-2, weight_decay=0.1, step=2, grad_norm=1.7)
    flat, tensors = arenas(dtype, master, moments, sizes)
    flat["gradients"] = noise(len(flat["m"]), seed=8).to(dtype)
    tensors = [replace(t, seed=2654435769 * (i + 1) % 2**32) for i, t in enumerate(tensors)]

    def of_share(t, share):
        """Places of a share's elements, layer after layer."""
        n = t.elements // 3
        return (t.start + torch.arange(t.layers)[:, None] * t.elements + share * n + torch.arange(n)).flatten()

    together = {name: torch.empty_like(arena) for name, arena in flat.items()}
    for share in range(3):
        places = [of_share(t, share) for t in tensors]
        starts = np.cumsum([0, *map(len, places)]).tolist()
        mine = [
            replace(t, start=start, elements=t.elements // 3, noise_first=share * (t.elements // 3)) for t, start in zip(tensors, starts)
        ]
        held = {name: arena[torch.cat(places)] for name, arena in flat.items()}
        update(held, mine, numbers)
        for name, arena in held.items():
            together[name][torch.cat(places)] = arena
    update(flat, tensors, numbers)
    names = [name for name in flat if name != "gradients"]
    return [flat[name] for name in names], [together[name] for name in names]


@updates
@pytest.mark.parametrize("moments", DTYPES, ids=["m-fp32", "m-bf16"])
def test_adamw_of_shares_has_the_bits_of_the_whole_tensors(kernels, small_chunks, dtype, master, moments):
    """As ZeRO and tensor parallelism have it: where an element is in its layer decides about its noise, not where it is in an arena."""

    def update(flat, tensors, numbers):
        kernels.adamw_update(flat, tensors, update_scratch(tensors), **numbers)

    assert all(same_bits(*pair) for pair in zip(*update_in_shares(update, dtype, master, moments)))


def test_adamw_takes_the_norm_where_it_lies_or_as_a_number(kernels, small_chunks):
    """The loop hands over the one that global_norm left in the arena."""
    runs = []
    for kind in ("number", "tensor", "in place"):
        flat, tensors = arenas(FP32, "", FP32)
        scratch = update_scratch(tensors)
        norm = {"number": 3.7, "tensor": torch.tensor(3.7), "in place": scratch["grad_norm"]}[kind]
        if kind == "in place":
            norm.fill_(3.7)
        kernels.adamw_update(flat, tensors, scratch, lr=1e-2, weight_decay=0.1, step=1, grad_norm=norm)
        runs.append(flat)
    assert all(same_bits(runs[0][name], run[name]) for run in runs[1:] for name in run)


def test_a_learning_rate_beyond_fp32_is_infinite_and_no_warning(recwarn):
    _, tensors = arenas(FP32, "", FP32)
    scratch = update_scratch(tensors)
    stage_chunks(tensors, 256, scratch, lr=1e39, weight_decay=0.1, step=1, grad_norm=1.0)
    assert scratch["update_numbers"].view(torch.float32)[-2] == -inf and not recwarn


@pytest.mark.parametrize("pattern", [0x7FC00000, -0x400000, 0x7FFFFFFF, -1], ids=hex)
def test_a_weight_that_is_nan_stays_one(kernels, small_chunks, pattern):
    """Also as a card writes it, 0x7FFFFFFF, to which rounding must not add a carry: -0 would hide that a run has diverged."""
    flat, tensors = arenas(BF16, "master", FP32)
    flat["master"].view(torch.int32).fill_(pattern)
    kernels.adamw_update(flat, tensors, update_scratch(tensors), lr=0.0, weight_decay=0.0, step=1, grad_norm=1.0)
    assert flat["master"].isnan().all() and flat["parameters"].isnan().all()


# ----------------------------------------------------------------------------
# the whole model

B, T = 2, 9
TINY = ModelConfig(max_seq_len=11, vocab_size=45, num_layers=3, num_heads=2, channels=16, padded_vocab_size=48)
precisions = pytest.mark.parametrize("precision", ["fp32", "bf16"])


@pytest.fixture
def little_work(monkeypatch):
    little_to_interpret(monkeypatch)


def build(kernels, precision, config=TINY, own_bytes=False, B=B, T=T, **options) -> GPT2:
    """A model with noise in all its weights; with `own_bytes` no activation shares memory."""
    sample_length = config.max_seq_len
    options = PlanOptions(config, B, T, precision, kernels=kernels, device=DEVICE, **{"sample_length": sample_length} | options)
    model = GPT2(plan_without_sharing(options) if own_bytes else Plan(options), DEVICE)
    for i, (name, p) in enumerate(model.params.items()):
        p.copy_(noise(*p.shape, seed=i, scale=0.1) + (1.0 if name in ("ln1w", "ln2w", "lnfw") else 0.0))
    model.params["wte"][config.vocab_size :] = 0
    model.copy_weights_to_master()
    return model


def batch(step):
    tokens = np.random.default_rng(step).integers(0, TINY.vocab_size, (B, T + 1))
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def accumulate_gradients(model, step, micro_steps=2):
    for micro_step in range(micro_steps):
        inputs, targets = batch(10 * step + micro_step)
        model.forward(inputs)
        model.backward(targets, micro_steps, micro_step)


def poison(model):
    """NaN in every activation and all scratch, -1 in indices: before a step nothing in there may be of use."""
    torch.empty(0, dtype=torch.uint8, device=DEVICE).set_(model.acts["losses"].untyped_storage()).fill_(0xFF)


def one_step(model):
    """Loss, norm, gradients of two micro-steps and all arenas after an update, as bits; before it, every activation is NaN."""
    poison(model)
    accumulate_gradients(model, 0)
    norm = model.grad_norm()
    assert all(g.isfinite().all() for g in model.grads.values()) and norm > 1
    seen = [model.mean_loss(2), norm.item(), *(raw(g) for g in model.grads.values())]
    model.update(1e-2, 0.1, 1, norm)
    return seen + [raw(arena) for arena in model.flat.values()]


def interpreted(own):
    """Whether those kernels run in Triton's interpreter."""
    return own == "triton" and DEVICE == "cpu"


@precisions
def test_every_recompute_level_gives_the_same_bits(own, little_work, precision):
    """Of losses, gradients, weights and moments; and the same where no two activations share a byte. Interpreted, which takes a minute,
    fp32 has two levels: what is launched at one does not depend on the type."""
    baseline = one_step(build(own, precision, recompute=0))
    for level in (2, 6) if interpreted(own) and precision == "fp32" else list(NOT_KEPT)[1:]:
        model = build(own, precision, recompute=level)
        assert one_step(model) == baseline, f"-r {level}"
    assert any(model.plan.segments.again)  # blocks do run again
    assert one_step(build(own, precision, recompute=level, own_bytes=True)) == baseline


def test_fp32_gradients_of_bf16_weights_have_the_same_bits_at_the_lowest_and_the_highest_level(own, little_work):
    runs = [one_step(build(own, "bf16", grad_dtype="fp32", recompute=level)) for level in (0, 6)]
    assert runs[0] == runs[1]


def distance(a, b):
    """How far a is from b, relative to b's norm."""
    a, b = a.double().flatten(), b.double().flatten()
    return ((a - b).norm() / b.norm()).item()


# measured: 4e-7 and 7e-3. In fp32 the two take sums in another order; in bf16 the last bit of a sum may round an activation to its
# neighbour, 2**-8 off, and what follows with it
NOISE = {"fp32": 2e-6, "bf16": 2.0**-6}


@precisions
def test_gradients_are_those_of_the_torch_operations_but_for_noise(own, little_work, precision):
    """Each of the sixteen, in norm."""
    models = [build(kernels, precision) for kernels in (own, "torch")]
    for model in models:
        accumulate_gradients(model, 0)
    for name, ours in models[0].grads.items():
        assert distance(ours, models[1].grads[name]) <= NOISE[precision], name
    assert abs(models[0].mean_loss(2) / models[1].mean_loss(2) - 1) <= NOISE[precision]


@precisions
def test_losses_of_three_steps_are_those_of_the_torch_operations_but_for_noise(own, little_work, precision):
    """Of one batch, which is learnt meanwhile. Measured: 0 in fp32 and 8e-4 in bf16."""
    losses = []
    for kernels in (own, "torch"):
        model = build(kernels, precision, replace(TINY, num_layers=1))
        for step in range(3):
            accumulate_gradients(model, 0, 1)
            losses.append(model.mean_loss())
            model.update(1e-2, 0.1, step + 1, model.grad_norm())
    ours, theirs = np.array(losses).reshape(2, 3)
    assert theirs[2] < theirs[0] - 0.3
    assert (abs(ours / theirs - 1) <= NOISE[precision]).all()


OPTIMIZERS = [
    dict(precision="fp32"), dict(precision="fp32", optimizer_state="bf16"),
    dict(precision="bf16", master="fp32"), dict(precision="bf16", master="fp32", optimizer_state="bf16", grad_dtype="fp32"),
    dict(precision="bf16", master="bits16"), dict(precision="bf16", master="bits16", optimizer_state="bf16", grad_dtype="fp32"),
    dict(precision="bf16", master="none"), dict(precision="bf16", master="none", optimizer_state="bf16", grad_dtype="fp32"),
]  # fmt: skip


@pytest.mark.parametrize("form", OPTIMIZERS, ids=lambda form: "-".join(form.values()))
def test_a_checkpoint_of_a_model_with_kernels_gives_back_every_bit_and_changes_none(own, little_work, tmp_path, form):
    """It reads and writes master and moments in the working room of the plan, which is not that of the torch operations."""
    write_shard(str(tmp_path / "tokens.bin"), np.random.default_rng(0).integers(0, TINY.vocab_size, 200))
    config = replace(TINY, num_layers=1)

    def start():
        return build(own, config=config, **form), TokenLoader(str(tmp_path / "tokens.bin"), B, T, shuffle=True)

    def train(model, loader, step):  # with gradients out of the air: what an update makes of them is what a checkpoint holds
        loader.next_batch()
        generator = torch.Generator(DEVICE).manual_seed(step)
        model.flat["gradients"].normal_(0, 0.1, generator=generator)
        model.update(1e-2, 0.1, step, model.grad_norm())

    def state(model):
        return {name: arena.view(torch.uint8).cpu().numpy().tobytes() for name, arena in model.flat.items() if name != "gradients"}

    model, loader = start()
    train(model, loader, 1)
    before = state(model)
    save_snapshot(tmp_path, 1, model, loader, Extra({}, {}))
    assert state(model) == before
    other, other_loader = start()
    saved = SavedState(tmp_path, 1, config)
    load_snapshot(tmp_path, 1, other, saved)
    restore(other_loader, saved.state_of(0).loader)
    assert state(other) == before
    train(model, loader, 2)
    train(other, other_loader, 2)
    assert state(model) == state(other) != before


@pytest.mark.parametrize("form", OPTIMIZERS, ids=lambda form: "-".join(form.values()))
def test_updates_of_a_model_have_the_bits_of_the_torch_operations(own, torch_s_adamw, little_work, form):
    """Two updates of every form of weights and moments, from the same gradients; a checkpoint then reads the same master, and makes
    the same weights from it again.

    The torch operations work on copies of the arenas on the CPU, where all tensors are whole vectors, as in any real model.
    """
    config = replace(TINY, num_layers=1)
    model = build(own, config=config, **form)
    theirs = GPT2(Plan(PlanOptions(config, B, T, kernels="torch", **form)))
    theirs.rng.state, theirs.rng_state_last_update = model.rng.state, model.rng_state_last_update
    for name, arena in model.flat.items():
        theirs.flat[name].copy_(arena)
    for step in (1, 2):
        for m in (model, theirs):
            m.flat["gradients"].copy_(noise(m.flat["gradients"].numel(), seed=step))
        norm = model.grad_norm()
        assert norm > 1
        model.update(1e-2, 0.1, step, norm)
        theirs.update(1e-2, 0.1, step, norm.item())
        for name in set(model.flat) - {"gradients"}:
            assert raw(model.flat[name]) == raw(theirs.flat[name]), f"{name} after update {step}"
    assert model.rng.state == theirs.rng.state
    assert raw(torch.cat([p.cpu().clone() for p in model.master_pieces()])) == raw(torch.cat([p.clone() for p in theirs.master_pieces()]))
    if form["precision"] == "bf16":
        weights, master = raw(model.flat["parameters"]), torch.cat([p.cpu().clone() for p in model.master_pieces()]).numpy()
        model.flat["parameters"].fill_(nan)
        model.load_master(lambda at, n: master[at : at + n])
        assert raw(model.flat["parameters"]) == weights


@precisions
def test_sampling_and_evaluation_are_those_of_the_torch_operations_but_for_noise(own, little_work, precision):
    models = [build(kernels, precision) for kernels in (own, "torch")]
    rows = []
    for model in models:
        poison(model)
        rows.append(np.stack([model.next_logits(token, position) for position, token in enumerate((3, 44, 0, 7))]))
        poison(model)
        rows.append(np.array(model.loss_of(*batch(3))))
    for ours, theirs in zip(rows[:2], rows[2:]):
        assert abs(ours - theirs).max() <= NOISE[precision] * abs(theirs).max()


def test_golden_losses_of_llmc(own, little_work, tmp_path, monkeypatch):
    """The first five steps of case A in fp32, interpreted three, to 2e-4; its norms to 1e-3."""
    if interpreted(own):  # fewer, larger pieces are faster then
        little_to_interpret(monkeypatch, 1 << 14)
    case = write_case_a(tmp_path)
    golden = [json.loads(line) for line in (REPO / "tests/golden/train_A.jsonl").read_text().splitlines()]
    model = GPT2(Plan(PlanOptions(CONFIG, 4, 32, "fp32", kernels=own, recompute=2, device=DEVICE)), DEVICE)
    load_weights(open_weights(case / "model.bin", "fp32"), model)
    loader = TokenLoader(f"{case}/train_*.bin", 4, 32, shuffle=True)
    for row in [row for row in golden if "loss" in row][: 3 if interpreted(own) else 5]:
        for micro_step in range(2):
            inputs, targets = loader.next_batch()
            model.forward(inputs)
            model.backward(targets, 2, micro_step, loader.token_order())
        norm = model.grad_norm()
        assert abs(model.mean_loss(2) - row["loss"]) <= 2e-4 and abs(norm.item() - row["norm"]) <= 1e-3, f"step {row['step']}"
        model.update(row["lr"], 0.1, row["step"], norm)


# ----------------------------------------------------------------------------
# what only compiled kernels do


def fused_multiply_add(a, b, c):
    """fp32 a * b + c, rounded once, in numpy: the product is exact in fp64, the sum as two of them."""
    product, c = a.astype(np.float64) * b.astype(np.float64), np.asarray(c, np.float64)
    high = product + c
    part = high - product
    low = (product - (high - part)) + (c - part)  # what the fp64 sum lost (Knuth 1969)
    rounded = high.astype(np.float32)
    # halfway between two fp32 numbers, what was lost decides
    other = np.nextafter(rounded, np.where(high > rounded, np.float32(np.inf), np.float32(-np.inf)))
    tie = (rounded != high) & (np.abs(high - rounded) == np.abs(other - high.astype(np.float64)))
    return np.where(tie & (low != 0) & ((low > 0) == (other > rounded)), other, rounded)


@pytest.mark.parametrize("exponent", [0, 61])
@pytest.mark.parametrize("off", [-1, 0, 1], ids="{:+} ulp".format)
def test_the_reciprocal_without_a_branch_is_the_correctly_rounded_one(exponent, off):
    """For every significand and any approximation that is good to an ulp. The interpreter divides instead, so here it is written out."""
    significand = np.arange(1 << 23, dtype=np.uint32)
    x = (significand + np.uint32((127 + exponent) << 23)).view(np.float32)
    exact = np.float32(1) / x
    r = (exact.view(np.int32) + np.int32(off)).view(np.float32)
    for _ in range(2):
        r = fused_multiply_add(fused_multiply_add(-x, r, 1.0), r, r)
    assert np.flatnonzero(r != exact).tolist() in ([], [0x7FFFFF])
    r = np.where(significand == 0x7FFFFF, (0x7F000000 - x.view(np.int32)).view(np.float32), r)
    assert (r.view(np.int32) == exact.view(np.int32)).all()
