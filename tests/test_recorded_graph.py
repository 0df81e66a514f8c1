"""tests/recorded_graph.py: a replay does the captured work again, on what memory holds by then, and nothing else."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from recorded_graph import CaptureError, RecordedGraph

try:
    from llmc.kernels import door
    from llmc.kernels.door import jit, tl
except ImportError:
    door = None

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("plain_torch")


def counting(*shape, start=0):
    """start, start + 1, ... in fp32."""
    return torch.arange(start, start + int(np.prod(shape)), dtype=torch.float32).view(shape)


def captured(function, *memory):
    graph = RecordedGraph(memory)
    graph.capture(function)
    assert graph.outside == []
    return graph


# ----------------------------------------------------------------------------
# what changes from replay to replay


def test_a_number_is_frozen_and_what_is_in_memory_is_not():
    x, out, rate_in_memory = counting(3), torch.zeros(2, 3), torch.tensor([2.0])
    step = {"rate": 10.0}

    def work():
        torch.mul(x, step["rate"], out=out[0])
        torch.mul(x, rate_in_memory, out=out[1])

    graph = captured(work, x, out, rate_in_memory)
    step["rate"] = 1000.0
    rate_in_memory.fill_(3.0)
    x.add_(1.0)
    graph.replay()
    assert out.tolist() == [[10.0, 20.0, 30.0], [3.0, 6.0, 9.0]]


def test_lists_of_arguments_are_frozen():
    a, b, out = counting(2), counting(2, start=5), torch.zeros(4)
    both = [a, b]
    graph = captured(lambda: torch.cat(both, out=out), a, b, out)
    both.reverse()
    a.neg_()
    graph.replay()
    assert out.tolist() == [0.0, -1.0, 5.0, 6.0]


def test_python_runs_only_at_the_capture():
    x, calls = torch.zeros(1), []

    def work():
        calls.append(len(calls))
        x.add_(1.0)

    graph = captured(work, x)
    graph.replay()
    graph.replay()
    assert x.item() == 2.0 and calls == [0]


# ----------------------------------------------------------------------------
# a capture executes nothing


def test_a_capture_leaves_memory_as_it_was():
    a, b = counting(4), torch.tensor([float("nan"), 1.0])
    before = a.clone(), b.clone().view(torch.int32)
    graph = captured(lambda: (a.mul_(3.0), b.zero_()), a, b)
    assert torch.equal(a, before[0]) and torch.equal(b.view(torch.int32), before[1])
    graph.replay()
    assert torch.equal(a, before[0] * 3.0) and b.tolist() == [0.0, 0.0]


def test_a_result_holds_nothing_before_the_first_replay():
    x, graph = counting(3), RecordedGraph([])
    doubled, largest = graph.capture(lambda: (x * 2.0, x.argmax()))
    assert doubled.isnan().all() and largest.item() == 77
    graph.replay()
    assert doubled.tolist() == [0.0, 2.0, 4.0] and largest.item() == 2


def test_what_lies_outside_is_listed():
    inside, x = torch.zeros(3), counting(3)
    graph = RecordedGraph([inside])
    graph.capture(lambda: inside.copy_(x[1:].sum() + x[0]))
    ((operation, tensor),) = graph.outside
    assert "aten.slice" in operation and tensor.data_ptr() == x.data_ptr()


# ----------------------------------------------------------------------------
# where results go


def test_a_temporary_keeps_its_address():
    x, out = counting(2, 2), torch.zeros(2, 2)
    kept = []

    def work():
        square = x * x
        kept.append(square.data_ptr())
        torch.add(square, 1.0, out=out)
        return square

    graph = RecordedGraph([x, out])
    square = graph.capture(work)
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert (out == value * value + 1.0).all() and (square == value * value).all()
        assert [square.data_ptr()] == kept


def test_a_temporary_lives_as_long_as_the_graph():
    x, out = counting(1000), torch.zeros(1000)
    graph = captured(lambda: torch.add(x * 2.0, 1.0, out=out), x, out)
    others = [torch.full((1000,), 7.0) for _ in range(20)]
    graph.replay()
    assert torch.equal(out, x * 2.0 + 1.0) and all((o == 7.0).all() for o in others)


def test_in_place_and_out():
    x, y = torch.ones(3), torch.zeros(3)
    graph = captured(lambda: torch.add(x.mul_(2.0).add_(1.0), x, out=y), x, y)
    graph.replay()
    assert x.tolist() == [3.0] * 3 and y.tolist() == [6.0] * 3
    graph.replay()
    assert x.tolist() == [7.0] * 3 and y.tolist() == [14.0] * 3


def test_accumulation_adds_once_a_replay():
    a, b, total = torch.ones(2, 3), torch.ones(3, 2), torch.zeros(2, 2)
    graph = captured(lambda: torch.addmm(total, a, b, beta=1, out=total), a, b, total)
    assert (total == 0.0).all()
    for replays in (1, 2, 3):
        graph.replay()
        assert (total == 3.0 * replays).all()


def test_an_out_that_the_operation_resizes():
    x, out = counting(4), torch.zeros(4)

    def work():
        room = torch.empty(0)
        torch.mul(x, 2.0, out=room)
        out.copy_(room)

    graph = captured(work, x, out)
    x.add_(1.0)
    graph.replay()
    assert torch.equal(out, x * 2.0)


def test_views_made_inside_the_capture():
    x = torch.zeros(2, 6)

    def work():
        left, right = x.split(3, dim=1)
        left.view(-1, 3)[1].add_(1.0)
        right.t()[0].unsqueeze(0).mul_(2.0).sub_(1.0)
        for row in x.unbind():
            row[-1:].expand(1).add_(5.0)

    graph = captured(work, x)
    for _ in range(2):
        graph.replay()
    replayed = x.clone()
    x.zero_()
    for _ in range(2):
        work()
    assert torch.equal(replayed, x)


def test_views_of_temporaries():
    x, out = counting(2, 3), torch.zeros(3, 2)

    def work():
        turned = x.t().contiguous()  # a copy
        flat = x.t().reshape(6)  # a copy, and a view that its operation does not declare
        out.copy_(turned.view(6).add_(flat).view(3, 2))

    graph = captured(work, x, out)
    for _ in range(2):
        x.mul_(3.0)
        graph.replay()
        assert torch.equal(out, 2.0 * x.t())


def test_shapes_changed_in_place():
    x, out = counting(2, 3), torch.zeros(2, 2)

    def work():
        room = torch.empty(2, 3)
        room.copy_(x).mul_(2.0)
        room.t_()  # and a copy of x no longer fits
        torch.mm(x, room, out=out)

    graph = captured(work, x, out)
    for _ in range(2):
        x.add_(1.0)
        graph.replay()
        assert torch.equal(out, 2.0 * x @ x.t())


def test_several_results():
    x, values, where = counting(2, 3), torch.zeros(2), torch.zeros(2, dtype=torch.int64)

    def work():
        largest, index = torch.max(x, dim=1)
        values.copy_(largest)
        where.copy_(index)
        for part in torch._foreach_mul([values, values[1:]], 2.0):
            values[: len(part)].copy_(part)

    graph = captured(work, x, values, where)
    x.copy_(torch.tensor([[9.0, 1.0, 2.0], [3.0, 8.0, 4.0]]))
    graph.replay()
    assert where.tolist() == [0, 1] and values.tolist() == [16.0, 16.0]


def test_attention():
    B, NH, T, HS = 2, 2, 5, 4
    q, k, v, dout = (torch.randn(B, NH, T, HS, generator=torch.Generator().manual_seed(s)) for s in range(4))
    out, gradients = torch.zeros(B, NH, T, HS), torch.zeros(3, B, NH, T, HS)

    def work():
        y, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True)
        out.copy_(y)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        for room, gradient in zip(gradients, backward(dout, q, k, v, y, lse, 0.0, True)):
            room.copy_(gradient)

    graph = captured(work, q, k, v, dout, out, gradients)
    for _ in range(2):
        q.mul_(1.5)
        dout.add_(1.0)
        graph.replay()
        replayed = out.clone(), gradients.clone()
        work()
        assert torch.equal(out, replayed[0]) and torch.equal(gradients, replayed[1])


def test_composite_attention_has_no_dropout():
    q, out = torch.randn(1, 1, 3, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(1, 1, 3, 4)
    graph = captured(lambda: out.copy_(F.scaled_dot_product_attention(q, q, q, is_causal=True)), q, out)
    q.neg_()
    graph.replay()
    assert torch.equal(out, F.scaled_dot_product_attention(q, q, q, is_causal=True))
    with pytest.raises(CaptureError, match="random"):
        captured(lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), q)


# ----------------------------------------------------------------------------
# factories


@pytest.mark.parametrize(
    "make", [lambda: torch.zeros(3), lambda: torch.ones(3), lambda: torch.full((3,), 5.0), lambda: torch.arange(3.0)],
    ids=["zeros", "ones", "full", "arange"],
)  # fmt: skip
def test_what_a_factory_wrote_is_written_again(make):
    x, out = counting(3), torch.zeros(3)

    def work():
        total = make()
        total.add_(x)
        out.copy_(total)

    graph = captured(work, x, out)
    for _ in range(2):
        graph.replay()
        assert torch.equal(out, make() + x)


@pytest.mark.parametrize("make", [torch.empty_like, lambda x: x.new_empty(3), lambda x: torch.empty_strided((3,), (1,))])
def test_uninitialised_memory(make):
    x, out = counting(3), torch.zeros(3)

    def work():
        room = make(x)
        torch.add(x, 1.0, out=room)
        out.copy_(room)

    graph = captured(work, x, out)
    x.add_(1.0)
    graph.replay()
    assert torch.equal(out, x + 1.0)


def test_adding_to_uninitialised_memory_shows():
    x, out = counting(3), torch.zeros(3)
    graph = captured(lambda: out.copy_(torch.empty(3).add_(x)), x, out)
    graph.replay()
    assert out.isnan().all()


def test_numbers_written_by_index():
    x = torch.ones(4)
    index, mask = torch.tensor([1, 2]), torch.tensor([False, False, False, True])

    def work():
        x[0] = 4.0
        x[index] = x[index] + 1.0
        x[mask] = 6.0  # a masked fill

    graph = captured(work, x, index, mask)
    index.copy_(torch.tensor([2, 3]))
    mask.copy_(torch.tensor([False, True, False, False]))
    graph.replay()
    assert x.tolist() == [4.0, 6.0, 2.0, 2.0]


# ----------------------------------------------------------------------------
# what is refused


X = torch.ones(3)
REFUSED = {
    "item": (lambda: X[0].item(), "_local_scalar_dense"),
    "float": (lambda: float(X.sum()), "_local_scalar_dense"),
    "bool": (lambda: bool(X[0] > 0), "_local_scalar_dense"),
    "equal": (lambda: torch.equal(X, X), "aten.equal"),
    "cpu": (lambda: X.cpu(), "cpu"),
    "numpy": (lambda: X.numpy(), "numpy"),
    "asarray": (lambda: np.asarray(X), "__array__"),
    "tolist": (lambda: X.tolist(), "tolist"),
    "repr": (lambda: repr(X), "__repr__"),
    "format": (lambda: f"{X}", "__format__"),
    "list_as_index": (lambda: X[[0, 1]].add(1.0), "lift_fresh"),
    "nonzero": (lambda: torch.nonzero(X), "nonzero"),
    "unique": (lambda: torch.unique(X), "unique"),
    "masked_select": (lambda: torch.masked_select(X, X > 0), "masked_select"),
    "mask": (lambda: X[X > 0], "aten.index"),
    "put_by_mask": (lambda: X.index_put_([X > 0], torch.ones(3)), "index_put"),
    "where": (lambda: torch.where(X > 0), "nonzero"),
    "tensor": (lambda: torch.tensor(3.0), "lift_fresh"),
    "from_numpy": (lambda: torch.from_numpy(np.ones(2)), "lift_fresh"),
    "as_tensor": (lambda: torch.as_tensor(np.ones(2)), "lift_fresh"),
    "rand": (lambda: torch.rand(3), "rand"),
    "normal": (lambda: torch.empty(3).normal_(), "normal_"),
    "dropout": (lambda: F.dropout(X), "bernoulli_"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    memory, (work, operation) = counting(3), REFUSED[name]

    def function():
        memory.add_(1.0)
        work()

    graph = RecordedGraph([memory])
    with pytest.raises(CaptureError, match=operation):
        graph.capture(function)
    assert memory.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(CaptureError, match="succeeded"):
        graph.replay()
    work()  # outside of a capture nothing is refused


def test_an_error_of_the_function_itself():
    memory = counting(3)

    def function():
        memory.zero_()
        raise KeyError("here")

    graph = RecordedGraph([memory])
    with pytest.raises(KeyError, match="here"):
        graph.capture(function)
    assert memory.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(CaptureError):
        graph.replay()
    with pytest.raises(CaptureError):
        graph.capture(lambda: None)
    captured(lambda: memory.add_(1.0), memory)  # another can be captured


def test_captures_do_not_nest():
    x = torch.zeros(1)
    graph = captured(lambda: x.add_(1.0), x)
    for inner in (graph.replay, lambda: RecordedGraph([]).capture(lambda: None)):
        with pytest.raises(CaptureError, match="inside a capture"):
            RecordedGraph([x]).capture(inner)
    graph.replay()
    assert x.item() == 1.0


def test_nothing_to_replay_before_a_capture():
    with pytest.raises(CaptureError):
        RecordedGraph([]).replay()


# ----------------------------------------------------------------------------
# kernels

needs_triton = pytest.mark.skipif(
    door is None or torch.cuda.is_available(), reason="kernels run on CPU tensors in Triton's interpreter only"
)

if door is not None:

    @jit
    def _add_scaled(out, inp, scale, scale_in_memory, N: tl.constexpr):
        i = tl.arange(0, N)
        tl.store(out + i, tl.load(inp + i) * scale + tl.load(scale_in_memory))


@pytest.mark.kernels
@needs_triton
def test_a_launch_and_its_numbers():
    x, out, offset = counting(4), torch.zeros(4), torch.ones(1)
    launch, scale = door.launch, [2.0]
    graph = captured(lambda: door.launch(_add_scaled, (1,), out, x + 1.0, scale[0], offset, N=4, num_warps=1), x, out, offset)
    assert door.launch is launch and (out == 0.0).all()
    assert [work[0] for work in graph._work] == [aten.add.Tensor, launch]  # and nothing that the interpreter did
    scale[0] = 100.0
    for _ in range(2):
        x.add_(1.0)
        offset.add_(1.0)
        graph.replay()
        assert torch.equal(out, (x + 1.0) * 2.0 + offset)


@pytest.mark.kernels
@needs_triton
def test_an_error_gives_launch_back():
    launch = door.launch
    with pytest.raises(KeyError):
        RecordedGraph([]).capture(lambda: {}["none"])
    assert door.launch is launch


@pytest.mark.kernels
@needs_triton
def test_a_step_of_kernels_and_operations():
    from llmc.kernels.gelu import gelu_forward
    from llmc.kernels.global_norm import global_norm

    x, weight, hidden, active, norm = counting(2, 3) / 7, counting(3, 4) / 11, torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(1)
    scratch = {"norm_partials": torch.zeros(2)}

    def work():
        torch.mm(x, weight, out=hidden)
        gelu_forward(active, hidden, {})
        global_norm(norm, active.view(-1), scratch, piece=1024)
        x.mul_(norm)

    graph = captured(work, x, weight, hidden, active, norm, scratch["norm_partials"])
    assert (norm == 0.0).all()
    before = x.clone()
    for _ in range(2):
        graph.replay()
    replayed = x.clone()
    x.copy_(before)
    for _ in range(2):
        work()
    assert torch.equal(replayed, x)
