"""What the ranks of a model that is split by tensor parallelism hold, as the file of a whole model has it.

Every rank goes through all of it, tensor after tensor in file order, and each piece is the same on all of them. Shares that follow each
other in the file are sent one by one; of a tensor whose columns, or blocks, are split, a layer is put together in working room.
"""

import torch

from llmc.layers.adamw import RoundingPiece, read_master
from llmc.memory.layout import flat_layout
from llmc.memory.tuning import ROUNDING_BLOCK


def whole_tensors(model, name):
    """Yields flat tensors: a whole model's parameters, m, v or master, in file order; the master in fp32, the others in their own type.

    Each is overwritten by the next. All ranks must take all of them. Scratch: whole_tensor and part_tensor, as the plan has them.
    """
    o, sharing = model.plan.options, model.sharing
    flat = model.flat if name == "parameters" else sharing.updated()
    ranks = o.ranks_of("m" if name == "master" else name)
    dtype = torch.float32 if name == "master" else flat[name].dtype
    part_room, whole_room = (model.acts[room].view(-1).view(dtype) for room in ("part_tensor", "whole_tensor"))
    # of noise there are whole blocks, and the first element may be the last of one
    at_once = min(len(part_room), len(model.acts["noise"]) - ROUNDING_BLOCK + 1) if o.rounds else len(part_room)

    def read(t, l, at, n):
        """Elements at..at+n of what this rank has of a layer."""
        if name != "master":
            return flat[name][t.layer(l)][at : at + n]
        if "master_bits" not in flat:
            return flat["master" if "master" in flat else "parameters"][t.layer(l)][at : at + n]
        piece = RoundingPiece(t.start, l, 1, at, n, t.elements, t.noise_first)
        return read_master(flat, piece, seeds[t.name], model.acts)

    seeds = {t.name: state.seed for t, state in zip(model.layout, model.last_tensor_states())}
    layout = flat_layout(model.config, ranks, sharing.rank % ranks, o.tensor_parallel, model.parts.rank)
    for t in layout:
        in_order = t.parameter.split is None or t.parameter.split == 0 and t.parameter.blocks == 1
        for l in range(t.layers):
            pieces = [(at, min(at_once, t.elements - at)) for at in range(0, t.elements, at_once)]
            if in_order:
                for part in range(1 if t.parameter.split is None else t.parts):
                    for rank in range(ranks):
                        for at, n in pieces:
                            room = part_room[:n]
                            source = rank * t.parts + part
                            if sharing.whole.rank == source:
                                room.copy_(read(t, l, at, n))
                            sharing.whole.send_from(source, room).wait()
                            yield room
                continue
            part, whole = part_room[: t.whole_elements], whole_room[: t.whole_elements * t.parts]
            for at, n in pieces:
                part[t.first + at : t.first + at + n].copy_(read(t, l, at, n))
            if ranks > 1:
                sharing.group.gather_shares([part]).wait()
            model.parts.group.gather_shares([whole], [part]).wait()
            if t.parameter.split == 0:
                in_file = t.file_elements // t.parameter.blocks
                for blocks in whole.view(t.parts, t.parameter.blocks, -1).unbind(1):
                    yield from (b[: t.real_of(len(b), in_file, p)] for p, b in enumerate(blocks) if t.real_of(len(b), in_file, p))
                continue
            in_file = t.file_shape[1]
            for rows in whole.view(t.parts, *t.shape).transpose(0, 1).split(max(1, len(part_room) // in_file)):
                room = part_room[: len(rows) * in_file]
                for p, columns in enumerate(rows.unbind(1)):
                    n = t.real_of(t.shape[1], in_file, p)
                    room.view(-1, in_file)[:, p * t.shape[1] :][:, :n].copy_(columns[:, :n])
                yield room


def shares(tensors, layout, ranks, rank):
    """Of pieces of a whole, those of one of `ranks` that have a share of each layer; `layout` says how long layers are."""
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
