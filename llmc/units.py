"""Small arithmetic that many modules share."""

MIB = 1024 * 1024


def round_up(n: int, unit: int) -> int:
    """n rounded up to a multiple of unit."""
    return -(-n // unit) * unit


def even_part(n: int, most: int) -> int:
    """The size of the largest part when n is cut into parts of at most `most`, as few and as even as possible."""
    return -(-n // -(-n // most))


def ceil_mib(n_bytes: int) -> int:
    """MiB of which a message says that they are needed: at least as many as are."""
    return -(-n_bytes // MIB)
