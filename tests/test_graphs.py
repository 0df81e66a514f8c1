"""Steps as graphs: captured once, replayed with the very same arguments, and the same bits as steps that run as they come.

On a CPU a recorder stands in for CUDA's graphs, see recorded_graph.py; tests/test_cuda.py has those on a card.
"""

import contextlib
import gc
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="no triton here, and graphs are of its kernels: python -m pip install triton")

from interpreter import little_to_interpret, quick_interpreter  # noqa: F401  (a fixture)
from recorded_graph import RecordedGraph
from whole_steps import build, put_back, trained

from llmc.errors import UserError
from llmc.graphs import Graphs, capture_cuda_graph

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a card tests/test_cuda.py has real graphs")


@pytest.fixture
def no_grad(monkeypatch):
    """As the program runs, with kernels that the interpreter can afford."""
    little_to_interpret(monkeypatch)
    with torch.no_grad():
        yield


class Recorded:
    """Graphs that are recorded instead of captured: what they refer to is the model's arenas, and nothing else."""

    def __init__(self):
        self.captured, self.model = 0, None
        self.graphs = Graphs(self.capture)

    def capture(self, work):
        self.captured += 1
        graph = RecordedGraph([*self.model.flat.values(), *self.model.acts.values()])
        graph.capture(work)
        assert graph.outside == []
        return graph


@pytest.mark.parametrize("options", [
    {"precision": "fp32", "recompute": 0}, {"precision": "bf16", "recompute": 6, "head_chunk": 3},
    {"precision": "bf16", "master": "bits16", "optimizer_state": "bf16"},
], ids=lambda o: "-".join(map(str, o.values())))  # fmt: skip
def test_graphs_and_eager_give_the_same_bits_step_after_step(no_grad, options):
    """Losses, norms, gradients, weights, moments and evaluations, with a learning rate and seeds that change at every step."""
    eager, recorded = trained(build("triton", **options)), Recorded()
    recorded.model = model = build("triton", recorded.graphs, **options)
    ours = trained(model)
    assert list(ours) == list(eager) and [name for name in ours if ours[name] != eager[name]] == []
    # micro-step 0, the later ones, norm, update, evaluation
    assert recorded.captured == 5


def test_weights_that_were_loaded_are_those_that_graphs_use(no_grad):
    """A graph knows addresses, not values: after a resume in place it goes on from there."""
    recorded = Recorded()
    recorded.model = model = build("triton", recorded.graphs)
    trained(model)
    fresh = build("triton")
    put_back(model, fresh)
    assert trained(model, 1) == trained(fresh, 1)


def test_work_runs_once_as_it_comes_and_is_captured_once():
    did = []
    graphs = Graphs(lambda work: did.append("capture") or SimpleNamespace(replay=lambda: did.append("replay")))
    for _ in range(3):
        graphs.run("step", lambda: did.append("run"))
    graphs.run("other", lambda: did.append("run other"))
    assert did == ["run", "capture", "replay", "replay", "run other"]


def test_what_cannot_be_captured_is_a_sentence_with_a_way_out_but_running_out_of_memory_is_itself():
    def refuse(text):
        def capture(work):
            raise RuntimeError(text)

        graphs = Graphs(capture)
        graphs.run("update", lambda: None)
        graphs.run("update", lambda: None)

    with pytest.raises(UserError, match=r"^the update cannot be captured as a graph \(operation not permitted\); use --cuda-graph 0$"):
        refuse("operation not permitted\nmore of it")
    with pytest.raises(RuntimeError, match="out of memory"):
        refuse("CUDA out of memory")


def test_the_reason_is_what_went_wrong_first():
    """The end of a capture that is broken raises too, and says no more than that."""

    def capture(work):
        try:
            raise ValueError("a number was asked for")
        except ValueError:
            raise RuntimeError("operation failed due to a previous error during capture")

    graphs = Graphs(capture)
    graphs.run("norm", lambda: None)
    with pytest.raises(UserError, match=r"\(a number was asked for\)"):
        graphs.run("norm", lambda: None)


def test_memory_that_ran_out_in_a_capture_is_what_comes_out_of_it_though_its_end_raises_too():
    def capture(work):
        try:
            raise RuntimeError("CUDA out of memory")
        except RuntimeError:
            raise RuntimeError("operation failed due to a previous error during capture")

    graphs = Graphs(capture)
    graphs.run("micro-step", lambda: None)
    with pytest.raises(RuntimeError, match="^CUDA out of memory$"):
        graphs.run("micro-step", lambda: None)


def test_a_capture_that_breaks_leaves_its_pool_closed(monkeypatch):
    """torch's own calls of CUDA are stood in for: the first is refused where the capture could be ended, and nothing is left to do."""
    calls = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    for name in ("current_stream", "current_device"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)

    def call(name, refuses=False):
        def called(device, pool):
            calls.append((name, pool))
            if refuses:
                raise RuntimeError("not recording")

        return called

    for refuses, expected in ((False, [("end", 7), ("release", 7)]), (True, [("end", 7)])):
        calls.clear()
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", call("end", refuses), raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", call("release"), raising=False)
        with pytest.raises(ZeroDivisionError):
            capture_cuda_graph(lambda: 1 / 0, 7)
        assert calls == expected and gc.isenabled()
    calls.clear()
    capture_cuda_graph(lambda: None, 7)
    assert not calls


@pytest.mark.parametrize("collects", [True, False])
def test_no_garbage_is_collected_in_a_capture_and_after_it_as_before(monkeypatch, collects):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: 0)
    seen = []
    try:
        if not collects:
            gc.disable()
        capture_cuda_graph(lambda: seen.append(gc.isenabled()), 7)
        assert seen == [False] and gc.isenabled() == collects
    finally:
        gc.enable()
