"""Small arithmetic that many share."""

MIB = 1024 * 1024


def whole(n: int, unit: int) -> int:
    """n, or the next multiple of a unit."""
    return -(-n // unit) * unit


def even_part(n: int, most: int) -> int:
    """The largest of parts of n that are as few and as even as can be, each of at most so much."""
    return -(-n // -(-n // most))
