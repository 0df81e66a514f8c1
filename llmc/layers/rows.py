"""Working through rows a few at a time, in fp32 scratch that fits in cache; and sums over all rows."""

import torch


def rows_of(tensor):
    """(..., C) as (rows, C)."""
    return tensor.view(-1, tensor.shape[-1])


def row_pieces(x, scratch):
    """Yield (slice of rows, four fp32 views of scratch with as many rows) for one piece of x (n, C) after the other.

    scratch  view rows (4, ...) fp32, each at least one row of x
    """
    n, width = x.shape
    buffers = scratch["rows"].view(4, -1)
    size = buffers.shape[1] // width
    for at in range(0, n, size):
        count = min(size, n - at)
        yield slice(at, at + count), *(b[: count * width].view(count, width) for b in buffers)


def widened(x, room):
    """The tensor itself if it is fp32, else an fp32 copy of it in `room`."""
    return x if x.dtype == torch.float32 else room.copy_(x)


def add_widened(total, x, room):
    """total (fp32) += x of another type. On a CPU torch would widen all of x first; here fp32 `room` takes a piece at a time."""
    if total.is_cuda:  # there torch widens x in registers
        total.add_(x)
        return
    room, total, x = room.view(-1), total.view(-1), x.view(-1)
    for at in range(0, len(x), len(room)):
        piece = x[at : at + len(room)]
        total[at : at + len(piece)].add_(room[: len(piece)].copy_(piece))


def finish_column_sums(out, total, accumulate):
    """out (C,) = total, added to what it held if `accumulate`: one rounding to its type. total is destroyed."""
    if accumulate:
        total.add_(out)
    out.copy_(total)
