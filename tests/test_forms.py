"""The forms a run can keep its numbers in: masters in 16 bits, bf16 moments, fp32 gradients, any head chunk, any depth, residuals away.

What is meant to be exact is compared bit for bit; what is rounded is judged by float64 and by eager torch's own error.
"""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from allocations import largest_allocation
from case_a import NoLoader, read_state, save_snapshot, write_case_a
from oracle import assert_as_good_as_eager, loss_and_gradients
from test_gpt2 import DEEP, DTYPE, SMALL, activation_arena, batch, build, precisions, raw, state, train_step
from test_gpt2 import one_thread  # noqa: F401  (autouse here too)
from test_layers import rounded
from test_loop import ran
from test_resume import assert_same_end, bf16_model_bytes, files_of

import train_gpt2
from llmc import gpt2
from llmc.cards import Budget
from llmc.checkpoint.extra_file import Extra
from llmc.checkpoint.saved_state import SavedState
from llmc.checkpoint.snapshot import load_snapshot
from llmc.checkpoint.store import state_path
from llmc.config import ModelConfig, config_from_descriptor
from llmc.errors import UserError
from llmc.gpt2 import GPT2
from llmc.layers.rounding import join_bits, low_bits, round_to_bf16
from llmc.memory.arena import allocate
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.scratch_sizes import head_sums
from llmc.memory.tables import PARAMETERS, num_parameters
from llmc.memory.tuning import HEAD_GROUP
from llmc.rand import XorShift


def master_of(model) -> torch.Tensor:
    """The fp32 master, flat, from whatever form it is kept in."""
    return torch.cat([piece.clone() for piece in model.master_pieces()])


# ----------------------------------------------------------------------------
# the master in the 16 bits that bf16 lacks


def test_upper_half_and_lower_half_give_every_number_back():
    """All 65536 lower halves, ties among them, under numbers, subnormals, infinities and NaNs of both signs, at any threshold."""
    lower = torch.arange(1 << 16, dtype=torch.int32)
    for upper in (0x0000, 0x0001, 0x007F, 0x3F80, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xBF80, 0xC2C8, 0xFF7F, 0xFF80, 0xFFFF):
        bits = lower + (upper - (upper >> 15 << 16) << 16)
        for threshold in (0, 1, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF, 0x1234ABCD):
            noise = torch.full_like(bits, threshold)
            hi, lo, out = (
                torch.empty(1 << 16, dtype=torch.bfloat16),
                torch.empty(1 << 16, dtype=torch.int16),
                torch.full((1 << 16,), torch.nan),
            )
            values = bits.view(torch.float32)
            round_to_bf16(hi, values, noise.clone(), torch.empty_like(bits))
            low_bits(lo, values)
            join_bits(out, hi, lo, noise.clone(), torch.empty_like(bits))
            assert torch.equal(out.view(torch.int32), bits), hex(upper)


@pytest.mark.parametrize("optimizer_state", ["fp32", "bf16"])
def test_weight_and_bits_are_exactly_the_fp32_master_for_50_steps(optimizer_state):
    """Two models side by side, one with an fp32 master: the same weights, moments, gradients and masters, all bits, after every step.

    Updates are skipped now and then, as -sl does, so that the last rounding's seeds are older than the last step.
    """
    fp32, bits16 = (build(DEEP, "bf16", master=m, optimizer_state=optimizer_state, recompute=5) for m in ("fp32", "bits16"))
    assert "master" in fp32.flat and "master_bits" in bits16.flat and "master" not in bits16.flat
    ties = carries = 0
    for step in range(50):
        for model in (fp32, bits16):
            inputs, targets = batch(step, DEEP)
            model.forward(inputs)
            model.backward(targets)
            if step % 7 != 3:
                model.update(1e-2, 0.1, step + 1, model.grad_norm())
        for name in ("parameters", "gradients", "m", "v"):
            assert raw(fp32.flat[name]) == raw(bits16.flat[name]), f"{name} after step {step}"
        master = fp32.flat["master"]
        assert raw(master) == raw(master_of(bits16)), f"master after step {step}"
        low = master.view(torch.int32) & 0xFFFF
        ties += (low == 0x8000).sum().item()
        carries += (fp32.flat["parameters"].view(torch.int16) != (master.view(torch.int32) >> 16)).sum().item()
    assert ties > 0  # the case that a rounding to nearest could not tell
    assert 0.3 < carries / (50 * len(master)) < 0.7  # and noise decides about half of all


def test_16_bits_cost_two_bytes_a_parameter_and_bf16_moments_four():
    """llm.c's form is 16 bytes per parameter with the gradient; an exact master in 16 bits makes it 14, bf16 moments as well 10."""
    n = num_parameters(SMALL)

    def bytes_per_parameter(**options):
        arenas = Plan(PlanOptions(SMALL, 2, 17, precision="bf16", sample_length=9, **options)).arenas
        return sum(n_bytes for name, n_bytes in arenas.items() if name != "activations") / n

    assert [bytes_per_parameter(), bytes_per_parameter(master="bits16")] == [16, 14]
    assert bytes_per_parameter(master="bits16", optimizer_state="bf16") == 10
    assert bytes_per_parameter(grad_dtype="fp32") == 18


# ----------------------------------------------------------------------------
# m and v in bf16


# which 16 of the noise's bits decide: the weight has the lower half
THRESHOLD = {"m": lambda noise: noise >> 16, "v": lambda noise: noise ^ noise >> 16}


@pytest.mark.parametrize("precision, master", [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bits16"), ("bf16", "none")])
def test_bf16_moments_are_one_stochastic_rounding_of_what_fp32_arithmetic_gives(precision, master):
    """From the same bf16 moments: an update with fp32 ones, whose m and v are then rounded by the contract's definition."""
    ours, full = (build(SMALL, precision, master=master, optimizer_state=s) for s in ("bf16", "fp32"))
    for step in range(3):
        for name in ("m", "v"):
            full.flat[name].copy_(ours.flat[name])
        full.rng.state = ours.rng.state
        seeds = XorShift(ours.rng.state)
        seeds.u32()  # the embedding's
        results = [train_step(model, step) for model in (ours, full)]
        assert results[0] == results[1]
        assert raw(ours.flat["parameters"]) == raw(full.flat["parameters"])  # moments enter the update before they are rounded
        start = 0
        for p in PARAMETERS:
            part, seed = slice(start, start := start + ours.params[p.name].numel()), seeds.u32()
            layers = SMALL.num_layers if p.per_layer else 1
            for name in ("m", "v"):
                want = rounded(full.flat[name][part], seed, layers=layers, threshold=THRESHOLD[name])
                assert raw(ours.flat[name][part]) == raw(want), f"{name} of {p.name} at step {step}"
    assert ours.flat["m"].dtype == ours.flat["v"].dtype == torch.bfloat16


@pytest.mark.parametrize("precision, master", [("fp32", "fp32"), ("bf16", "bits16"), ("bf16", "none")])
def test_training_with_bf16_moments_learns_as_well(precision, master):
    """Forty steps on four batches: the last four losses within 10% of those with fp32 moments."""
    ends = []
    for moments in ("fp32", "bf16"):
        model = build(SMALL, precision, master=master, optimizer_state=moments)
        losses = [train_step(model, step % 4, lr=3e-3)[0] for step in range(40)]
        ends.append(np.mean(losses[-4:]))
        assert ends[-1] < losses[0] - 1
    assert abs(ends[1] / ends[0] - 1) < 0.1


# ----------------------------------------------------------------------------
# gradients in fp32


def gradients_of(model, tokens, targets, micro_steps):
    rows = len(tokens) // micro_steps
    for i in range(micro_steps):
        part = slice(i * rows, (i + 1) * rows)
        model.forward(tokens[part])
        model.backward(targets[part], micro_steps, i)
    return {name: g.clone() for name, g in model.grads.items()}


def test_64_micro_steps_of_one_sequence_are_one_of_64():
    """bf16 weights and activations. fp32 gradients: equal but for the rounding of 64 additions, a random walk of 8 half units of the
    largest gradient of a tensor (measured: up to 4.7). bf16 gradients are ten thousand times further apart."""
    T, count = 17, 64
    tokens, targets = batch(3, SMALL, count, T)
    apart = {}
    for dtype in ("fp32", "bf16"):
        one, many = (build(SMALL, "bf16", B=b, grad_dtype=dtype) for b in (count, 1))
        whole, parts = gradients_of(one, tokens, targets, 1), gradients_of(many, tokens, targets, count)
        assert whole["wte"].dtype == DTYPE[dtype]
        apart[dtype] = {k: (g.double() - parts[k].double()).abs().max() / g.double().abs().max() for k, g in whole.items()}
    for name in apart["fp32"]:
        assert apart["fp32"][name] <= count**0.5 * 2.0**-24, name
        assert apart["bf16"][name] > 1e4 * 2.0**-24, name


def test_fp32_gradients_of_a_bf16_model_are_as_good_as_eager_torch_s():
    """Against float64; eager torch accumulates eight micro-steps of its bf16 gradients in fp32."""
    model, micro_steps = build(SMALL, "bf16", grad_dtype="fp32"), 8
    parts = [batch(i) for i in range(micro_steps)]
    for i, (inputs, targets) in enumerate(parts):
        model.forward(inputs)
        model.backward(targets, micro_steps, i)
    eager = {name: torch.zeros(p.shape) for name, p in model.params.items()}
    for x, y in parts:
        for name, g in loss_and_gradients(model.params, torch.from_numpy(x), torch.from_numpy(y), SMALL, torch.bfloat16)[1].items():
            eager[name] += g.float() / micro_steps
    x, y = (torch.from_numpy(np.concatenate(t)) for t in zip(*parts))
    _, exact = loss_and_gradients(model.params, x, y, SMALL, torch.float64)
    for name, ours in model.grads.items():
        assert ours.dtype == torch.float32
        assert_as_good_as_eager(ours, eager[name], exact[name], what=name, largest=False)


def test_fp32_gradients_keep_the_forward_pass_and_the_generator_as_they_are():
    """The losses of the first step and the seeds drawn are those of a run with bf16 gradients."""
    first, second = (build(SMALL, "bf16", grad_dtype=g) for g in ("bf16", "fp32"))
    losses = [train_step(model, 0, 3)[0] for model in (first, second)]
    assert losses[0] == losses[1] and first.rng.state == second.rng.state


# ----------------------------------------------------------------------------
# the head, chunk by chunk

HEAD = ModelConfig(max_seq_len=61, vocab_size=301, num_layers=1, num_heads=1, channels=48, padded_vocab_size=320)
HEAD_ROWS = 4 * 61


def head_problem(dtype):
    """lnf (rows, C) and wte (Vp, C) of the size they have in a trained model, and targets."""
    generator = torch.Generator().manual_seed(3)
    lnf = torch.randn(HEAD_ROWS, HEAD.channels, generator=generator).to(dtype)
    wte = (torch.randn(HEAD.padded_vocab_size, HEAD.channels, generator=generator) * 0.4).to(dtype)
    wte[HEAD.vocab_size :] = 0
    return lnf, wte, torch.randint(0, HEAD.vocab_size, (HEAD_ROWS,), generator=generator)


def head_by_autograd(lnf, wte, targets, dtype):
    """(losses, gradient of lnf, gradient of wte) at a type."""
    with torch.enable_grad():
        x, w = lnf.to(dtype).clone().requires_grad_(), wte.to(dtype).clone().requires_grad_()
        logits = x @ w[: HEAD.vocab_size].T
        losses = F.cross_entropy(logits.float() if dtype == torch.bfloat16 else logits, targets, reduction="none")
        losses.mean().backward()
    return losses.detach(), x.grad, w.grad


@precisions
@pytest.mark.parametrize("micro_step", [0, 1])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 61, 100, HEAD_ROWS // 2, HEAD_ROWS - 1, HEAD_ROWS, 10**6])
def test_losses_and_gradients_of_the_head_are_right_at_every_chunk_size(precision, chunk, micro_step):
    """Per token and per weight within twice eager torch's own error to float64, the odd last chunk included; also on top of a gradient."""
    dtype = DTYPE[precision]
    lnf, wte, targets = head_problem(dtype)
    model = GPT2(Plan(PlanOptions(HEAD, 4, 61, precision=precision, head_chunk=chunk, sample_length=5)))
    model.params["wte"].copy_(wte)
    activation_arena(model).fill_(0xFF)  # NaN: nothing may be read before it is written
    model.acts["lnf"].view(-1, HEAD.channels).copy_(lnf)
    model.acts["losses"].zero_()
    before = (torch.randn(wte.shape, generator=torch.Generator().manual_seed(9)) * 1e-4).to(dtype) * micro_step
    model.grads["wte"].copy_(before if micro_step else torch.full(wte.shape, torch.nan))
    model.accumulate = micro_step > 0
    model.acts["targets"].copy_(targets.view(4, 61))
    model._head_backward(1.0 / HEAD_ROWS)
    eager, exact = (head_by_autograd(lnf, wte, targets, t) for t in (dtype, torch.float64))
    assert_as_good_as_eager(model.acts["losses"].flatten(), eager[0].float(), exact[0], floor=4, what="losses")
    assert_as_good_as_eager(model.acts["lnf"].view(lnf.shape), eager[1], exact[1], what="lnf's gradient")
    assert_as_good_as_eager(model.grads["wte"], eager[2] + before, exact[2] + before.double(), what="wte's gradient")


@precisions
def test_chunks_of_the_head_change_no_loss(precision):
    """A row's loss does not depend on the rows beside it: evaluation is the same bits at every chunk size."""
    losses = []
    for chunk in (0, 1, 5, 33):
        model = build(SMALL, precision, head_chunk=chunk)
        losses.append(model.token_losses(*batch(0)).clone())
    assert all(torch.allclose(other, losses[0], rtol=0, atol=1e-6) for other in losses[1:])


def test_the_head_sums_in_fp32_only_where_bf16_would_lose_bits():
    """A few chunks are added up in bf16, which costs no memory; more, or fewer rows in each, need the fp32 sum; fp32 gradients never do."""

    def sums(**options):
        plan = Plan(PlanOptions(SMALL, 4, 20, sample_length=5, **options))
        assert ("dwte_sum" in plan.tensors) == head_sums(plan.options)
        return head_sums(plan.options)

    assert not sums(head_chunk=80 // HEAD_GROUP) and sums(head_chunk=80 // HEAD_GROUP - 1)
    assert not sums(head_chunk=1, precision="fp32") and not sums(head_chunk=1, grad_dtype="fp32")


# ----------------------------------------------------------------------------
# memory beside the arenas


@pytest.mark.parametrize("kernels", ["torch", "numba"])
@pytest.mark.parametrize("level, chunk", [(0, 0), (5, 16)], ids=["-r 0, whole head", "-r 5, chunks"])
@pytest.mark.parametrize("forms", [
    {"precision": "fp32"}, {"precision": "bf16"}, {"precision": "bf16", "grad_dtype": "fp32"},
    {"precision": "bf16", "master": "bits16", "optimizer_state": "bf16"}, {"precision": "bf16", "matmul": "widened"},
])  # fmt: skip
def test_a_step_allocates_no_rows_of_channels_beside_the_arenas(kernels, level, chunk, forms):
    """Positions and masks of 8 bytes a token may be; the operator that allocates more is named. torch widens, for one, all of what is
    added to another type."""
    if kernels == "numba":
        pytest.importorskip("numba")
    config, B, T = ModelConfig(64, 500, 2, 2, 128, 512), 4, 64
    model = GPT2(Plan(PlanOptions(config, B, T, recompute=level, kernels=kernels, head_chunk=chunk, **forms)))
    model.init_random()
    inputs, targets = np.random.default_rng(0).integers(0, config.vocab_size, (2, B, T))

    def step():
        for micro_step in range(2):
            model.train(inputs, targets, grad_accum_steps=2, micro_step=micro_step)
        model.update(1e-3, 0.1, 1, model.grad_norm())
        model.token_losses(inputs, targets)

    n_bytes, name = largest_allocation(step)
    assert n_bytes <= 8 * B * T, name


# ----------------------------------------------------------------------------
# depth, and residuals elsewhere


@precisions
@pytest.mark.parametrize("L", [1, 2, 5, 7, 12])
def test_every_level_gives_the_same_bits_at_any_depth(L, precision):
    """Two steps of two micro-steps: losses, norms, gradients, weights and moments. Level 6 has 1, 2, 3, 4 and 4 segments."""
    config, runs = replace(DEEP, num_layers=L), []
    for level in NOT_KEPT:
        model = build(config, precision, recompute=level)
        runs.append(([train_step(model, step, 2) for step in range(2)], state(model)))
        assert runs[-1] == runs[0], f"-r {level}"
    assert len(model.plan.segments.spans) == {1: 1, 2: 2, 5: 3, 7: 4, 12: 4}[L]


@precisions
@pytest.mark.parametrize("L", [1, 2, 3, 4, 5, 9])
def test_residuals_in_host_memory_change_no_bit(L, precision):
    """Slots that are reused: each block must find its own input again. NaN wherever nothing was written, at the start of every step."""
    config, runs = replace(DEEP, num_layers=L), []
    for level, offload in product((0, 2, 5), (False, True)):
        model = build(config, precision, recompute=level, offload_residual=offload)
        steps = []
        for step in range(2):
            activation_arena(model).fill_(0xFF)
            steps.append(train_step(model, step, 2))
            steps.append(model.loss_of(*batch(77, config)))
        runs.append((steps, state(model)))
    assert all(run == runs[0] for run in runs[1:])


def test_with_residuals_in_host_memory_activations_do_not_grow_with_depth():
    """At level 5 nothing else is kept per layer; what leaves the device is planned as host memory."""

    def plan(L, **options):
        return Plan(PlanOptions(replace(DEEP, num_layers=L), 64, 23, recompute=5, offload_residual=True, sample_length=1, **options))

    shallow, deep = plan(6), plan(40)
    assert shallow.arenas["activations"] == deep.arenas["activations"]
    per_layer = 64 * 23 * DEEP.channels * 2
    assert (shallow.host_bytes, deep.host_bytes) == (3 * per_layer, 37 * per_layer)


def test_a_model_with_an_offloaded_optimizer_has_that_alone_in_host_memory(monkeypatch):
    mapped = []

    def on_host(n_bytes, device):
        mapped.append(allocate(n_bytes, device))
        return mapped[-1]

    monkeypatch.setattr(gpt2, "allocate_mapped", on_host)
    for master, arenas in (("fp32", {"m", "v", "master"}), ("bits16", {"m", "v", "master_bits"}), ("none", {"m", "v"})):
        mapped.clear()
        model = build(SMALL, "bf16", master=master, offload_optimizer=True)
        addresses = {arena.data_ptr() for arena in mapped}
        assert {name for name, flat in model.flat.items() if flat.data_ptr() in addresses} == arenas and len(mapped) == len(arenas)
        here = build(SMALL, "bf16", master=master)
        assert [train_step(model, step, 2) for step in range(2)] == [train_step(here, step, 2) for step in range(2)]
        assert state(model) == state(here)


def test_host_memory_that_is_not_there_is_refused_before_anything_is_allocated():
    """The plan of the device fits; what goes to the host would not."""
    options = PlanOptions(config_from_descriptor("d48"), 1000, 1024, recompute=5, offload_residual=True, device="cuda")
    run = SimpleNamespace(plan=Plan(options), budget=Budget(1 << 60, "a lot"), host_bytes=1 << 34)
    with pytest.raises(UserError, match="--offload-residual needs .* MiB of host memory.*smaller -b"):
        train_gpt2.check_fits(run)


# ----------------------------------------------------------------------------
# checkpoints: llm.c's fp32 form, from and into every form

FORMS = [
    dict(master="fp32"), dict(master="bits16"), dict(master="none"), dict(master="fp32", optimizer_state="bf16"),
    dict(master="bits16", optimizer_state="bf16"), dict(master="bits16", grad_dtype="fp32"),
]  # fmt: skip


def save(model, folder, step):
    save_snapshot(folder, step, model, NoLoader(), Extra({}, {}))


def load(model, folder, step):
    load_snapshot(folder, step, model, SavedState(folder, step, model.config))


@pytest.mark.parametrize("source, target", [(a, b) for a in range(len(FORMS)) for b in range(len(FORMS))])
def test_a_checkpoint_of_every_form_loads_into_every_other(source, target, tmp_path, capsys):
    """The file holds fp32 m, v and master; each form takes what it can, rounds to nearest where it keeps less, says so and trains on."""
    wrote, read = build(SMALL, "bf16", **FORMS[source]), build(SMALL, "bf16", **FORMS[target])
    for step in range(3):
        train_step(wrote, step)
    save(wrote, tmp_path, 3)
    has_master = FORMS[source]["master"] != "none"
    _, tensors = read_state(state_path(tmp_path, 3, 0), num_parameters(SMALL))
    assert set(tensors) == {"m", "v"} | ({"master"} if has_master else set())
    capsys.readouterr()
    load(read, tmp_path, 3)
    said, takes_master = capsys.readouterr().out, FORMS[target]["master"] != "none"
    assert ("m and v of" in said, "master weights: they start" in said, "master weights, which" in said) == (
        "optimizer_state" in FORMS[target], takes_master and not has_master, has_master and not takes_master
    )  # fmt: skip
    assert raw(read.flat["parameters"]) == raw(wrote.flat["parameters"])
    for name in ("m", "v"):
        assert np.array_equal(tensors[name], wrote.flat[name].float().numpy())
        assert raw(read.flat[name]) == raw(wrote.flat[name].to(read.flat[name].dtype))
    want = master_of(wrote) if has_master else wrote.flat["parameters"].float()
    if has_master:
        assert np.array_equal(tensors["master"], want.numpy())
    if takes_master:
        assert raw(master_of(read)) == raw(want)
    if FORMS[source] == FORMS[target]:
        ahead = [train_step(model, 3) for model in (wrote, read)]
        assert ahead[0] == ahead[1] and state(wrote) == state(read)
    else:
        assert np.isfinite(train_step(read, 3)[0])


def test_an_fp32_model_s_moments_go_through_every_form(tmp_path):
    wrote, read = build(SMALL, "fp32", optimizer_state="bf16"), build(SMALL, "fp32", optimizer_state="fp32")
    for step in range(3):
        train_step(wrote, step)
    save(wrote, tmp_path, 3)
    load(read, tmp_path, 3)
    assert raw(read.flat["parameters"]) == raw(wrote.flat["parameters"])
    assert all(raw(read.flat[name]) == raw(wrote.flat[name].float()) for name in ("m", "v"))


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    folder = write_case_a(tmp_path_factory.mktemp("case_a"))
    (folder / "bf16.bin").write_bytes(bf16_model_bytes((folder / "model.bin").read_bytes()))
    return folder


def command(case, folder, *more):
    return ["-i", case / "train_*.bin", "-j", case / "val.bin", "-e", case / "bf16.bin", "-b 4 -t 32 -d 256 -x 8 -l 3e-3 -v 0 -s 0 -n 4",
            "-o", folder, *more]  # fmt: skip


def test_a_run_with_the_master_in_16_bits_writes_the_files_of_one_with_an_fp32_master(case, tmp_path):
    ran(*command(case, tmp_path / "fp32"))
    ran(*command(case, tmp_path / "bits16", "--master bits16"))
    for step in (4, 8):
        assert files_of(tmp_path / "fp32", step) == files_of(tmp_path / "bits16", step)


@pytest.mark.parametrize(
    "form", ["--master bits16", "--master bits16 --optimizer-state bf16 --grad-dtype fp32", "--master none --optimizer-state bf16"]
)
def test_a_resumed_run_of_any_form_is_the_run_that_never_stopped(case, tmp_path, form):
    ran(*command(case, tmp_path / "straight", form, "-k constant"))
    ran(*command(case, tmp_path / "broken", form, "-k constant", "-x 4"))
    ran(*command(case, tmp_path / "broken", form, "-k constant", "-y 1"))
    assert_same_end(tmp_path / "broken", tmp_path / "straight", 8)
