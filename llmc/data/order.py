"""Which positions of a batch hold the same token, found on the host while the device is busy.

The embedding's gradient adds the rows of one token in order of position. Once the positions are sorted by token, those of each token
are contiguous, so the device needs neither atomics nor a sort of its own.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Positions of a batch (n of them), grouped by token; all int32.

    positions  (n,)      grouped by token, ascending within each group
    tokens     (m,)      the distinct tokens, ascending
    starts     (m + 1,)  where each token's group starts in positions; the last is n
    """

    positions: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray


def token_order(inputs) -> TokenOrder:
    """The TokenOrder of inputs (B, T): token ids below 2**31, of any integer type."""
    flat = np.asarray(inputs).ravel()
    # numpy's stable sort of 16-bit numbers is a radix sort: 0.25 ms for 65536 positions, against 2.1 ms for 64-bit ones
    flat = flat.astype(np.uint16 if flat.max() < 1 << 16 else np.int32)
    positions = np.argsort(flat, kind="stable")
    tokens_sorted = flat[positions]
    first = np.flatnonzero(np.concatenate(([True], tokens_sorted[1:] != tokens_sorted[:-1])))
    starts = np.append(first, len(flat))
    return TokenOrder(positions.astype(np.int32), tokens_sorted[first].astype(np.int32), starts.astype(np.int32))
