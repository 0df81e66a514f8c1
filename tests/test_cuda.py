"""On a CUDA device: llm.c's golden losses, the same bits at every -r and in every run, resume, memory as planned.

Without one, only what can be known from shapes: that the CUDA attention operators accept the views the arenas give them.
"""

import gc
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt2
from case_a import write_case_a
from llmc.backend import open_backend
from llmc.config import ModelConfig, config_from_descriptor
from llmc.gpt2 import GPT2
from llmc.graphs import graphs_on
from llmc.layers.attention_library import attention_one_row, library_forward, library_gradients, pack_gradients
from llmc.layers.matmul import matmul_dinput, matmul_dweight
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.refusals import FP8_CAPABILITY

GOLDEN = Path(__file__).parent / "golden"
SMALL = ModelConfig(max_seq_len=64, vocab_size=96, num_layers=3, num_heads=4, channels=64, padded_vocab_size=128)
FLAGS = "-b 4 -t 32 -d 256 -l 3e-3 -u 3 -q 0.1 -c 0.1 -x 40 -v 0 -s 0 -f 0 --device cuda".split()

gpu = pytest.mark.gpu


@pytest.fixture(autouse=True)
def prepared_device():
    """What the program does before its first CUDA call, also where a test builds a model itself."""
    if torch.cuda.is_available():
        open_backend("cuda", 0, False)
    yield
    torch.set_grad_enabled(True)


precisions = pytest.mark.parametrize("precision", ["fp32", "bf16"])
HAS_FP8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY


def skip_without_fp8(forms):
    if forms.get("matmul") == "fp8" and not HAS_FP8:
        pytest.skip("this card does not multiply FP8")


@pytest.mark.parametrize("precision, kind", [("fp32", ""), ("bf16", ""), ("bf16", "flash"), ("bf16", "cudnn"), ("bf16", "efficient")])
def test_cuda_attention_accepts_the_arenas_views(precision, kind):
    """Shapes only, on the meta device: T = 33 shows the padding of fp32's row statistics. Every kind of kernel, and the default."""
    plan = Plan(PlanOptions(SMALL, 2, 33, precision=precision, device="cuda", attention=kind, kernels="torch"))
    kind = plan.options.attention
    assert kind != "cpu"
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    C, NH = SMALL.channels, SMALL.num_heads

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    qkvr, dqkvr, atty = empty(2, 33, 3 * C), empty(2, 33, 3 * C), empty(2, 33, C)
    lse = empty(*plan.tensors["lse"].shape[1:], dtype=torch.float32)
    library_forward(atty, lse, qkvr, NH, kind)
    gradients = library_gradients(atty, qkvr, atty, lse, NH, kind)
    assert [g.shape for g in gradients] == [(2, NH, 33, C // NH)] * 3
    scratch = {name: empty(*plan.tensors[name].shape, dtype=torch.float32) for name in ("rows", "column_sums")}
    pack_gradients(dqkvr, empty(3 * C), gradients, NH, scratch, accumulate=False)
    attention_one_row(empty(1, C), empty(1, 3 * C), empty(2, 16, C), 5, NH, kind)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 has this call for CUDA only, nothing for the meta device")
def test_cuda_matmuls_take_fp32_gradients_of_bf16_operands():
    """The call that a CPU has no kernel for, on the meta device, first micro-step and later ones."""
    dweight = torch.empty((12, 8), device="meta")
    dout, inp, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((3, 5, 12), (3, 5, 8), (12, 8)))
    for accumulate in (False, True):
        matmul_dweight(dweight, dout, inp, accumulate=accumulate)
        matmul_dinput(torch.empty_like(inp), dout, weight)


@gpu
@pytest.mark.parametrize("level, kernels", [*((level, "auto") for level in NOT_KEPT), (0, "torch"), (5, "torch")])
def test_golden_losses_in_fp32(level, kernels, tmp_path, capsys):
    case = write_case_a(tmp_path / "case")
    files = ["-e", case / "model.bin", "-i", case / "train_*.bin", "-j", case / "val.bin", "-o", tmp_path / "out", "-r", level]
    files += ["--kernels", kernels]
    assert train_gpt2.main([*map(str, files), *FLAGS]) == 0
    golden = [row["loss"] for row in map(json.loads, (GOLDEN / "train_A.jsonl").read_text().splitlines()) if "loss" in row]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    losses = [float(line.split("loss ")[1].split()[0]) for line in lines]
    np.testing.assert_allclose(losses, golden, rtol=0, atol=2e-4)


def gradients(config, precision, level, B, T, accumulation=1, **forms):
    """Losses, gradients and weights of two steps, as bytes."""
    model = GPT2(Plan(PlanOptions(config, B, T, precision=precision, recompute=level, device="cuda", **forms)), "cuda")
    model.init_random()
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, accumulation, 2, B, T))
    out = []
    for step, batches in enumerate(tokens):
        for micro_step, (inputs, targets) in enumerate(batches):
            model.forward(inputs)
            model.backward(targets, accumulation, micro_step)
        out.append((model.mean_loss(accumulation), model.flat["gradients"].view(torch.uint8).cpu().numpy().tobytes()))
        model.update(1e-3, 0.1, step + 1, model.grad_norm())
    return out, model.flat["parameters"].view(torch.uint8).cpu().numpy().tobytes()


def steps_and_evaluations(graphs, precision, accumulation=3, steps=4, **forms):
    """What every step and the evaluation after it leave, as bytes: with graphs the first runs as it comes, the second is captured."""
    plan = Plan(PlanOptions(SMALL, 4, 64, precision=precision, device="cuda", **forms))
    model, tokens = (
        GPT2(plan, "cuda", graphs=graphs),
        np.random.default_rng(0).integers(0, SMALL.vocab_size, (steps, accumulation, 2, 4, 64)),
    )
    model.init_random()
    out = []
    for step, batches in enumerate(tokens):
        for micro_step, (inputs, targets) in enumerate(batches):
            model.train(inputs, targets, accumulation, micro_step)
        norm = model.grad_norm()
        out += [model.acts["loss_sum"].item(), norm.item()]
        model.update(1e-3 / (step + 1), 0.1, step + 1, norm)
        out.append(model.token_losses(*batches[0]).cpu().numpy().tobytes())
    return out, [arena.view(torch.uint8).cpu().numpy().tobytes() for arena in model.flat.values()]


@gpu
@precisions
@pytest.mark.parametrize("forms", [
    *({"recompute": level} for level in NOT_KEPT), {"head_chunk": 50}, {"attention": "efficient"}, {"attention": "triton"},
    {"gelu_fusion": 2}, {"gelu_fusion": 3, "recompute": 5}, {"optimizer_state": "bf16", "grad_dtype": "fp32"},
    {"matmul": "fp8"}, {"matmul": "fp8", "grad_dtype": "fp32"},
], ids=lambda forms: "-".join(map(str, forms.values())))  # fmt: skip
def test_graphs_and_eager_give_the_same_bits(precision, forms):
    if precision == "fp32" and {"triton", "fp8"} & set(forms.values()):
        pytest.skip("--attention triton and --matmul fp8 have no fp32 form")
    skip_without_fp8(forms)
    eager = steps_and_evaluations(None, precision, **forms)
    for _ in range(2):
        assert steps_and_evaluations(graphs_on("cuda"), precision, **forms) == eager


@gpu
def test_a_run_with_graphs_writes_what_one_without_writes(tmp_path):
    """The whole program, stopped and resumed with the other kind of step in between."""
    case = write_case_a(tmp_path / "case")
    common = ["-e", "d6", "-i", f"{case}/train_*.bin", "-j", f"{case}/val.bin", "-y", "1",
              *"--precision bf16 -n 4 -b 4 -t 32 -d 384 -v 4 -m 2 -s 5 -g 8 --device cuda -k constant".split()]  # fmt: skip
    for folder, steps, graph in (("eager", "8", "0"), ("graph", "8", "1"), ("both", "4", "1"), ("both", "8", "0"), ("auto", "8", "auto")):
        assert train_gpt2.main([*common, "-o", str(tmp_path / folder), "-x", steps, "--cuda-graph", graph]) == 0
    for name in ("main.log", "model_00000008.bin", "state_00000008_00000.bin", "extra_00000008_00000.json"):
        want = (tmp_path / "eager" / name).read_bytes()
        assert all((tmp_path / folder / name).read_bytes() == want for folder in ("graph", "both", "auto")), name


def training_losses(device, steps=40, rounding=0, **forms):
    """Losses of a small bf16 model that learns a batch by heart; `rounding` chooses the seeds of its stochastic rounding."""
    model = GPT2(Plan(PlanOptions(SMALL, 8, 64, device=device, **forms)), device)
    model.rng.state += rounding
    model.init_random()
    inputs, targets = np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 8, 64))
    losses = []
    for step in range(steps):
        model.forward(inputs)
        model.backward(targets)
        model.update(1e-3, 0.1, step + 1, model.grad_norm())
        losses.append(model.mean_loss())
    return np.array(losses)


@pytest.fixture(scope="module")
def on_the_cpu():
    """(losses, how far runs that only round by other seeds lie apart): bf16's own noise, on a CPU."""
    torch.set_grad_enabled(False)
    runs = np.array([training_losses("cpu", rounding=i) for i in range(5)])
    return runs[0], (runs.max(0) - runs.min(0)).max()


@gpu
@pytest.mark.parametrize("forms", [
    {}, {"kernels": "torch"}, {"recompute": 5}, {"attention": "cudnn"}, {"attention": "efficient"}, {"attention": "triton"},
    {"gelu_fusion": 1}, {"gelu_fusion": 2}, {"gelu_fusion": 3}, {"gelu_fusion": 2, "recompute": 5}, {"gelu_fusion": 1, "recompute": 6},
    {"optimizer_state": "bf16", "master": "bits16"},
])  # fmt: skip
def test_a_bf16_run_stays_within_bf16_noise_of_the_cpu_s(forms, on_the_cpu):
    """Rounding by other seeds alone moves a loss by `noise`; another order of sums on top of that may at most double it."""
    losses, noise = on_the_cpu
    assert losses[-1] < losses[0] - 0.5  # it learns
    assert abs(training_losses("cuda", **forms) - losses).max() <= 2 * noise


@gpu
@precisions
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_recompute_level_and_every_run_gives_the_same_bits(precision, accumulation):
    longer = replace(SMALL, max_seq_len=512)  # 8192 positions: each of the 256 programs of a sum has many rows
    cases = [(SMALL, 4, 64, {"kernels": "triton"}), (longer, 16, 512, {"kernels": "triton"}), (SMALL, 4, 64, {"kernels": "torch"}),
             (longer, 16, 512, {"gelu_fusion": 3})]  # fmt: skip
    if precision == "bf16":
        cases += [(longer, 16, 512, {"attention": "triton"}), (longer, 3, 200, {"attention": "triton"})]
        cases += [(longer, 16, 512, {"matmul": "fp8"})] if HAS_FP8 else []
    for config, B, T, forms in cases:
        baseline = gradients(config, precision, 0, B, T, accumulation, **forms)
        for level in (0, *NOT_KEPT):
            assert gradients(config, precision, level, B, T, accumulation, **forms) == baseline


@gpu
@precisions
@pytest.mark.parametrize("L", [1, 2, 4, 9])
@pytest.mark.parametrize("level", [0, 5])
def test_residuals_in_host_memory_change_no_bit(precision, level, L):
    """Copies run on a stream of their own: a block that did not wait for its input, or wrote over one on its way out, would show."""
    config = replace(SMALL, num_layers=L)
    baseline = gradients(config, precision, level, 8, 64, 3)
    for _ in range(3):
        assert gradients(config, precision, level, 8, 64, 3, offload_residual=True) == baseline


@gpu
@precisions
@pytest.mark.parametrize("forms", [{}, {"kernels": "torch"}, {"optimizer_state": "bf16"}, {"master": "bits16"}])
def test_an_optimizer_in_host_memory_changes_no_bit(precision, forms):
    """Its updates, and what a checkpoint reads of it at once, without waiting for the GPU by itself."""
    if precision == "fp32" and "master" in forms:
        pytest.skip("fp32 weights are their own master")
    runs = []
    for offloaded in (False, True):
        for graphs in (None, graphs_on("cuda")) if forms.get("kernels") != "torch" else (None,):
            options = PlanOptions(SMALL, 8, 64, precision=precision, device="cuda", offload_optimizer=offloaded, **forms)
            model = GPT2(Plan(options), "cuda", graphs=graphs)
            model.init_random()
            tokens = np.random.default_rng(0).integers(0, SMALL.vocab_size, (2, 8, 64))
            for step in range(5):
                model.train(*tokens)
                model.update(1e-3, 0.1, step + 1, model.grad_norm())
            states = {name: flat.cpu().view(torch.uint8).numpy().tobytes() for name, flat in model.flat.items()}
            runs.append(states | {"whole master": torch.cat([piece.cpu() for piece in model.master_pieces()]).numpy().tobytes()})
    assert all(run == runs[0] for run in runs[1:])


@gpu
@pytest.mark.parametrize("forms", [{}, {"optimizer_state": "bf16"}, {"grad_dtype": "fp32"}, {"grad_dtype": "fp32", "head_chunk": 7}])
def test_the_master_in_16_bits_gives_the_bits_of_an_fp32_master(forms):
    runs = [gradients(SMALL, "bf16", 2, 4, 64, 2, master=master, **forms) for master in ("fp32", "bits16")]
    assert runs[0] == runs[1]


@gpu
@pytest.mark.parametrize("forms", [
    {"master": "bits16", "optimizer_state": "bf16"}, {"master": "none"}, {"grad_dtype": "fp32"}, {"offload_residual": True},
    {"precision": "fp32"}, {"attention": "efficient"}, {"attention": "triton"}, {"matmul": "fp8"}, {"offload_optimizer": True},
])  # fmt: skip
def test_allocated_memory_is_the_plan_in_every_form(forms):
    skip_without_fp8(forms)
    peak, plan = peak_and_plan(PlanOptions(config_from_descriptor("d12"), 8, 1024, recompute=5, device="cuda", **forms))
    arenas = sum(n_bytes for arena, n_bytes in plan.arenas.items() if not plan.on_host(arena))
    assert arenas <= peak <= plan.total_bytes * 1.01 + CUBLAS_BYTES


@gpu
@pytest.mark.parametrize("precision, forms", [("fp32", []), ("bf16", []), ("bf16", ["--master", "bits16", "--optimizer-state", "bf16"]),
                                              ("bf16", ["--matmul", "fp8"]), ("bf16", ["--offload-optimizer"]),
                                              ("bf16", ["--offload-optimizer", "--async-checkpoint", "1"])])  # fmt: skip
def test_resuming_gives_the_bytes_of_never_having_stopped(precision, forms, tmp_path):
    skip_without_fp8({"matmul": forms[-1]} if forms else {})
    case = write_case_a(tmp_path / "case")
    common = ["-e", "d6", "-i", f"{case}/train_*.bin", "-j", f"{case}/val.bin", "--precision", precision, "-n", "3",
              "-b", "4", "-t", "32", "-v", "0", "-s", "0", "--device", "cuda", *forms]  # fmt: skip
    for folder, steps in (("straight", "6"), ("resumed", "3"), ("resumed", "6")):
        assert train_gpt2.main([*common, "-o", str(tmp_path / folder), "-x", steps, "-k", "constant", "-y", "1"]) == 0
    for name in ("model_00000006.bin", "state_00000006_00000.bin", "extra_00000006_00000.json"):
        assert (tmp_path / "straight" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes(), name


CUBLAS_BYTES = 64 << 20  # its own workspaces


def peak_and_plan(options, graphs=None):
    """The allocator's peak over three steps, and the plan."""
    plan = Plan(options)
    gc.collect()  # an earlier model refers to itself
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = GPT2(plan, "cuda", graphs=graphs)
    model.init_random()
    tokens = np.random.default_rng(0).integers(0, 50257, (2, options.B, options.T))
    for step in range(3):
        model.train(*tokens)
        model.update(1e-4, 0.1, step + 1, model.grad_norm())
    return torch.cuda.max_memory_allocated() - before, plan


@gpu
@pytest.mark.parametrize("level", NOT_KEPT)
def test_allocated_memory_is_the_plan(level):
    """Within 1%, and cuBLAS's own workspaces."""
    peak, plan = peak_and_plan(PlanOptions(config_from_descriptor("d12"), 8, 1024, recompute=level, device="cuda"))
    assert sum(plan.arenas.values()) <= peak <= plan.total_bytes * 1.01 + CUBLAS_BYTES


@gpu
@pytest.mark.parametrize("level", [0, 2, 5])
def test_allocated_memory_is_the_plan_with_graphs_too(level):
    """Their pool holds what library calls return, which the plan has; the first step, which runs as it comes, gave its own back."""
    peak, plan = peak_and_plan(PlanOptions(config_from_descriptor("d12"), 8, 1024, recompute=level, device="cuda"), graphs_on("cuda"))
    assert sum(plan.arenas.values()) <= peak <= plan.total_bytes * 1.01 + CUBLAS_BYTES
