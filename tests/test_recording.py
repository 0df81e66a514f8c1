"""A CPU's graphs: lists of the calls that a step makes, and the same bits as steps that run as they come."""

import gc
import os
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

pytest.importorskip("numba", reason="no numba here, and recordings are of its kernels: python -m pip install numba", exc_type=ImportError)

from test_loop import case, inputs, losses, ran  # noqa: F401  (a fixture)
from case_a import CONFIG
from conftest import REPO
from whole_steps import batch, build, put_back, raw, trained

from llmc.checkpoint.model_file import write_model
from llmc.errors import UserError
from llmc.graphs import Graphs, graphs_on
from llmc.kernels_cpu import door, gelu
from llmc.kernels_cpu.gelu import gelu_forward
from llmc.kernels_cpu.global_norm import global_norm
from llmc.kernels_cpu.recording import Recording
from llmc.memory.tables import num_parameters


@pytest.fixture(autouse=True)
def no_grad():
    """As the program runs."""
    with torch.no_grad():
        yield


# ----------------------------------------------------------------------------
# a recording


def test_what_is_recorded_happens_at_a_replay_with_what_memory_holds_then():
    """In order, kernels and torch's operations: (2x)^2 summed up, and its root, after x was changed."""
    x, y, norm, partials = torch.tensor([1.0, 2.0]), torch.zeros(2), torch.zeros(1), torch.zeros(4)

    def work():
        y.copy_(x)
        y[:2].mul_(2.0)
        global_norm(norm, y, {"norm_partials": partials}, piece=2)
        torch.sum(y, 0, keepdim=True, out=x[1:]).add_(1.0)
        low, high = y.split(1)
        high.sub_(low).add_(low)

    work()
    assert norm.item() == pytest.approx(np.sqrt(4 + 16)) and x[1] == 7
    recording = Recording(work)
    assert norm.item() == pytest.approx(np.sqrt(4 + 16)) and x[1] == 7, "a recording changes nothing"
    for _ in range(2):
        x[0], x[1] = 3, 1.5
        recording.replay()
        assert norm.item() == pytest.approx(np.sqrt(36 + 9)) and x[1] == 10


@pytest.mark.parametrize("work, what", [
    (lambda t: t + 1, "aten.add.Tensor makes a new tensor"), (lambda t: t[0].item(), "_local_scalar_dense.default asks for a number"),
    (lambda t: t.sum(), "aten.sum.default makes a new tensor"), (lambda t: t.clone(), "aten.clone.default makes a new tensor"),
    (lambda t: torch.zeros(3), "aten.zeros.default makes a new tensor"), (lambda t: t.max(0), "aten.max.dim makes a new tensor"),
    (lambda t: torch.max(t, 0, out=(t, t.long())), "aten._to_copy.default makes a new tensor"),
    (lambda t: torch._foreach_add_([t, t], 1.0), "aten._foreach_add_.Scalar writes to more than one tensor"),
    (lambda t: gelu_forward(t.view(1, 1, 3), t.view(1, 1, 3), {}), "the kernel _gelu_forward has not run with such arguments before"),
])  # fmt: skip
def test_what_writes_nowhere_in_the_plan_cannot_be_recorded(monkeypatch, work, what):
    """Replays would not do it again; as an error of Graphs it is a sentence with a way out."""
    monkeypatch.setattr(gelu._gelu_forward, "overloads", {})
    t = torch.ones(3)
    with pytest.raises(RuntimeError, match=what):
        Recording(lambda: work(t))
    graphs = Graphs(Recording)
    graphs.run("norm", lambda: None)
    with pytest.raises(UserError, match=f"^the norm cannot be captured as a graph .*{what}.*; use --cuda-graph 0$"):
        graphs.run("norm", lambda: work(t))


def test_after_a_recording_that_failed_kernels_run_again():
    norm, partials = torch.zeros(1), torch.zeros(4)
    with pytest.raises(ZeroDivisionError):
        Recording(lambda: 1 / 0)
    global_norm(norm, torch.full((4,), 2.0), {"norm_partials": partials}, piece=4)
    assert norm.item() == 4


def test_a_replay_uses_as_many_threads_as_torch():
    y, norm, partials, threads = torch.ones(64), torch.zeros(1), torch.zeros(4), torch.get_num_threads()

    def work():
        global_norm(norm, y, {"norm_partials": partials}, piece=64)

    work()
    recording = Recording(work)
    try:
        torch.set_num_threads(1)
        recording.replay()
        assert door.numba.get_num_threads() == 1 and norm.item() == 8
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("how", ["torch.set_num_threads(1)", "os.environ['OMP_NUM_THREADS'] = '1'", "torch.set_num_threads(3)"])
def test_that_numba_starts_its_threads_changes_nobody_s_number_of_them(how):
    """It tells OpenMP how many, and torch asks OpenMP. Once numba has started it does not, so this is a process of its own."""
    code = f"""
import os
{how if "environ" in how else ""}
import torch
{"" if "environ" in how else how}
before = torch.get_num_threads()
import numba
from llmc.kernels_cpu.global_norm import global_norm
y, norm, partials = torch.ones(64), torch.zeros(1), torch.zeros(4)
for _ in range(2):
    global_norm(norm, y, {{"norm_partials": partials}}, piece=64)
    assert norm.item() in (4, 8) and torch.get_num_threads() == before
    assert numba.get_num_threads() == min(before, numba.config.NUMBA_NUM_THREADS)
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------
# steps


@pytest.mark.parametrize("options", [
    {"precision": "fp32", "recompute": 0}, {"precision": "fp32", "matmul": "numba", "recompute": 3},
    {"precision": "bf16", "matmul": "numba", "recompute": 6, "head_chunk": 1},
    {"precision": "bf16", "matmul": "numba", "master": "bits16", "optimizer_state": "bf16"},
    {"precision": "bf16", "matmul": "numba", "grad_dtype": "fp32", "recompute": 2},
], ids=lambda o: "-".join(map(str, o.values())))  # fmt: skip
def test_recorded_steps_and_eager_ones_give_the_same_bits(options):
    """Losses, norms, gradients, weights, moments and evaluations, with a learning rate, tokens and seeds that change at every step."""
    eager, ours = trained(build("numba", **options), steps=4), trained(build("numba", graphs_on("cpu"), **options), steps=4)
    assert list(ours) == list(eager) and [name for name in ours if ours[name] != eager[name]] == []


def test_a_step_calls_no_operation_of_the_model_once_it_is_recorded():
    """Or it would be no faster."""
    model, called = build("numba", graphs_on("cpu")), []
    trained(model, steps=2)
    for name, operation in vars(model.ops).items():
        if not name.startswith("stage_"):
            setattr(
                model.ops, name, lambda *args, operation=operation, name=name, **kwargs: called.append(name) or operation(*args, **kwargs)
            )
    trained(model, steps=1)
    assert called == []


@pytest.mark.parametrize("options", [
    {"precision": "fp32"}, {"precision": "bf16", "matmul": "numba", "head_chunk": 1, "master": "bits16", "optimizer_state": "bf16"},
], ids=lambda o: o["precision"])  # fmt: skip
def test_all_that_is_recorded_lies_in_the_plan(monkeypatch, options):
    """Whatever else a call referred to would stay as it was: only GELU's tables may."""
    recordings = []
    monkeypatch.setattr("llmc.kernels_cpu.recording.Recording", lambda work: recordings.append(Recording(work)) or recordings[-1])
    model = build("numba", graphs_on("cpu"), **options)
    trained(model, steps=2)
    arenas = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (*model.flat.values(), *model.acts.values())]
    tables = {table.ctypes.data for table in gelu._tables()}
    assert len(recordings) == 5
    for function, args in (call for recording in recordings for call in recording._calls):
        for x in tree_leaves((args, getattr(function, "args", ()), getattr(function, "keywords", {}))):
            if isinstance(x, torch.Tensor):
                start, n_bytes = x.data_ptr(), x.nbytes
            elif isinstance(x, np.ndarray):
                start, n_bytes = x.ctypes.data, x.nbytes
            else:
                continue
            assert start in tables or any(first <= start and start + n_bytes <= end for first, end in arenas), (function, x)


@pytest.mark.parametrize("norm_of, samples", [(lambda step, norm: float(norm) * (step + 1), 0), (lambda step, norm: norm, 2)],
                         ids=["a norm that is a number", "samples in between"])  # fmt: skip
def test_recorded_steps_take_the_norm_they_are_given_and_bear_samples_in_between_as_eager_ones_do(norm_of, samples):
    left = {}
    for graphs in (None, graphs_on("cpu")):
        model, logits = build("numba", graphs), []
        for step in range(4):
            model.train(*batch(step))
            model.update(1e-2, 0.1, step + 1, norm_of(step, model.grad_norm()))
            logits += [model.next_logits(token, position) for position, token in enumerate((3, 5)[:samples])]
        left[graphs is None] = raw(model.flat["parameters"]), np.array(logits).tobytes()
    assert left[True] == left[False]


def test_the_memory_of_a_model_goes_with_it_and_its_recordings():
    model = build("numba", graphs_on("cpu"))
    trained(model, steps=2)
    memory = [weakref.ref(t) for t in model.acts.values()]
    gc.disable()
    try:
        del model
        assert [t for t in memory if t() is not None] == []
    finally:
        gc.enable()


def test_weights_that_were_loaded_are_those_that_recorded_steps_use():
    """A recording knows addresses, not values: after a resume in place it goes on from there."""
    model, fresh = build("numba", graphs_on("cpu")), build("numba")
    trained(model)
    put_back(model, fresh)
    assert trained(model, 1) == trained(fresh, 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_program_trains_to_the_same_bits_with_graphs_and_without(case, tmp_path, monkeypatch, precision):  # noqa: F811
    """Micro-steps, evaluations, samples, checkpoints and a resume in between; graphs are the default."""
    weights = torch.randn(num_parameters(CONFIG), generator=torch.Generator().manual_seed(1)) * 0.02
    write_model(tmp_path / "bf16.bin", CONFIG, "bf16", [weights.bfloat16().view(torch.uint8).numpy()])
    common = [*inputs(case)[:4], "-e", tmp_path / "bf16.bin" if precision == "bf16" else case / "model.bin"]
    common += ["-b 2 -t 16 -d 64 -l 1e-3 -v 2 -m 1 -s 3 -g 8 -n 3 --kernels numba --matmul numba --precision", precision]
    printed, files, replays, replay = {}, {}, [], Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda recording: replays.append(1) or replay(recording))
    for graph in ("0", "auto"):
        folder = tmp_path / graph
        assert not replays
        out = ran(*common, "-o", folder, "-x 3 --cuda-graph", graph) + ran(*common, "-o", folder, "-x 5 -y 1 --cuda-graph", graph)
        assert out.count(f", graphs: {'off' if graph == '0' else 'on'}\n") == 2
        printed[graph] = losses(out)
        files[graph] = {path.name: path.read_bytes() for path in folder.glob("*_0000000*")}
    assert len(replays) >= 2 * (1 + 1)  # each run's second step and those after it: micro-steps and updates at the least
    assert len(printed["0"]) == 5 and printed["auto"] == printed["0"]
    assert len(files["0"]) >= 4 and files["auto"] == files["0"]
