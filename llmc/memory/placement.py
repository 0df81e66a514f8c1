"""Where tensors lie in an arena in which those whose lifetimes do not overlap may share bytes."""

from bisect import insort

from llmc.memory.tuning import ALIGNMENT
from llmc.units import round_up


def place(tensors, stages) -> tuple[dict[str, int], int]:
    """Name -> offset in bytes of every tensor, and the bytes of an arena that holds them: largest first, each in the lowest gap that no
    tensor alive at the same time takes."""
    at = {stage: i for i, stage in enumerate(stages)}

    def lifetime(tensor) -> int:
        """A bit for every stage in which it is alive."""
        bits = 0
        for first, last in tensor.spans:
            bits |= (2 << at[last]) - (1 << at[first])
        return bits

    offsets, ranges = {}, []  # (offset, end, lifetime), by offset
    for tensor, nbytes in sorted(((t, t.nbytes) for t in tensors), key=lambda each: (-each[1], each[0].name)):
        alive, offset = lifetime(tensor), 0
        for start, end, others in ranges:
            if alive & others:
                if offset + nbytes <= start:
                    break
                offset = max(offset, end)
        insort(ranges, (offset, round_up(offset + nbytes, ALIGNMENT), alive))
        offsets[tensor.name] = offset
    return offsets, max(end for _, end, _ in ranges)


def bytes_covered(ranges) -> int:
    """Bytes that at least one of the (start, end) ranges covers."""
    total, reach = 0, 0
    for start, end in sorted(ranges):
        total += max(0, end - max(start, reach))
        reach = max(reach, end)
    return total
