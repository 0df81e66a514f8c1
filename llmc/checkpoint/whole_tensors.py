"""The tensors of a model that is split by tensor parallelism, as the file of a whole model has them.

Every rank goes through all of them, tensor after tensor in file order, and gets the same pieces. Shares that follow one another in the
file are sent one by one. Where a tensor's columns, or blocks, are split, each of its layers is put together in scratch memory.
"""

import torch

from llmc.layers.adamw import piece_of, read_master
from llmc.memory.layout import flat_layout
from llmc.memory.tuning import ROUNDING_BLOCK


def whole_tensors(model, name):
    """Yields flat tensors: a whole model's parameters, m, v or master, in file order; the master in fp32, the others in their own type.

    Each is overwritten by the next. All ranks must take all of them. Scratch: whole_tensor and part_tensor, sized by the plan.
    """
    pieces = Pieces(model, name)
    for t in pieces.layout:
        p = t.parameter
        of_layer = pieces.one_by_one if p.split is None or p.split == 0 and p.blocks == 1 else pieces.put_together
        for l in range(t.layers):
            yield from of_layer(t, l)


class Pieces:
    """Produces what whole_tensors yields, for each layer l of each FlatTensor t."""

    def __init__(self, model, name):
        o, self.model, self.name, self.sharing = model.plan.options, model, name, model.sharing
        self.flat = model.flat if name == "parameters" else self.sharing.updated()
        self.ranks = o.ranks_of("m" if name == "master" else name)
        dtype = torch.float32 if name == "master" else self.flat[name].dtype
        self.part_room, self.whole_room = (model.acts[room].view(-1).view(dtype) for room in ("part_tensor", "whole_tensor"))
        self.at_once = len(self.part_room)
        if o.rounds:  # noise comes in whole blocks, and a piece may begin at the last element of one
            self.at_once = min(self.at_once, len(model.acts["noise"]) - ROUNDING_BLOCK + 1)
        self.seeds = {t.name: state.seed for t, state in zip(model.layout, model.last_tensor_states())}
        self.layout = flat_layout(model.config, self.ranks, self.sharing.rank % self.ranks, o.tensor_parallel, model.division.rank)

    def one_by_one(self, t, l):
        """Shares that follow one another in the file, each sent by the rank that has it."""
        for part in range(1 if t.parameter.split is None else t.parts):
            for rank in range(self.ranks):
                source = rank * t.parts + part
                for at, n in self._places(t):
                    room = self.part_room[:n]
                    if self.sharing.everyone.rank == source:
                        room.copy_(self._read(t, l, at, n))
                    self.sharing.everyone.send_from(source, room).wait()
                    yield room

    def put_together(self, t, l):
        """A layer whose columns, or blocks, are split: gathered whole, then yielded in file order."""
        part, whole = self.part_room[: t.whole_elements], self.whole_room[: t.whole_elements * t.parts]
        for at, n in self._places(t):
            part[t.first + at : t.first + at + n].copy_(self._read(t, l, at, n))
        if self.ranks > 1:
            self.sharing.group.gather_shares([part]).wait()
        self.model.division.group.gather_shares([whole], [part]).wait()
        return self._blocks(t, whole) if t.parameter.split == 0 else self._columns(t, whole)

    def _blocks(self, t, whole):
        in_file = t.file_elements // t.parameter.blocks
        for blocks in whole.view(t.parts, t.parameter.blocks, -1).unbind(1):
            yield from (b[: t.real_of(len(b), in_file, p)] for p, b in enumerate(blocks) if t.real_of(len(b), in_file, p))

    def _columns(self, t, whole):
        in_file = t.file_shape[1]
        for rows in whole.view(t.parts, *t.shape).transpose(0, 1).split(len(self.part_room) // in_file):
            room = self.part_room[: len(rows) * in_file]
            for p, columns in enumerate(rows.unbind(1)):
                n = t.real_of(t.shape[1], in_file, p)
                room.view(-1, in_file)[:, p * t.shape[1] :][:, :n].copy_(columns[:, :n])
            yield room

    def _places(self, t):
        """(begin, elements) of each piece of a layer's share that is read at once."""
        return [(at, min(self.at_once, t.elements - at)) for at in range(0, t.elements, self.at_once)]

    def _read(self, t, l, at, n):
        """Elements at..at+n of this rank's share of layer l."""
        if self.name != "master":
            return self.flat[self.name][t.layer(l)][at : at + n]
        return read_master(self.flat, piece_of(t, range(l, l + 1), at, at + n), self.seeds[t.name], self.model.scratch)


def shares(tensors, layout, ranks, rank):
    """From the pieces of a whole, yields those of `rank`, one of `ranks` with equal shares of each layer; `layout` gives layer lengths."""
    lengths = [t.file_elements for t in layout for _ in range(t.layers)]
    tensors, left, piece = iter(tensors), 0, None
    for length in lengths:
        first, end, at = length // ranks * rank, length // ranks * (rank + 1), 0
        while at < length:
            if not left:
                piece = next(tensors)
                left = len(piece)
            n = min(left, length - at)
            begin = len(piece) - left
            low, high = max(first, at), min(end, at + n)
            if low < high:
                yield piece[begin + low - at : begin + high - at]
            at, left = at + n, left - n
    for _ in tensors:
        raise AssertionError("there is more than the layers hold")
