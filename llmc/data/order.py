"""Which positions of a batch hold the same token, found on the host while the device is busy.

The embedding's gradient adds the rows of one token in order of position. Sorted ahead of time, every token is one run of
positions, so a device needs neither atomics nor a sort of its own.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TokenOrder:
    """Positions of a batch (n of them), grouped by token; all int32.

    positions          (n,)      grouped by token, ascending within one
    tokens             (m,)      the tokens there are, ascending
    starts             (m + 1,)  where each token's group starts in positions, and the end
    token_of_position  (n,)      for every position the place of its token in tokens
    """

    positions: np.ndarray
    tokens: np.ndarray
    starts: np.ndarray
    token_of_position: np.ndarray


def token_order(inputs) -> TokenOrder:
    """The order of inputs (B, T), token ids of any integer type below 2**31."""
    flat = np.asarray(inputs).ravel()
    # a stable sort of 16-bit numbers is a radix sort: 0.25 ms for 65536 positions, where 64 bits take 2.1
    flat = flat.astype(np.uint16 if flat.max(initial=0) < 1 << 16 else np.int32)
    positions = np.argsort(flat, kind="stable")
    tokens_sorted = flat[positions]
    first = np.flatnonzero(np.concatenate(([True], tokens_sorted[1:] != tokens_sorted[:-1])))
    starts = np.append(first, len(flat))
    token_of_position = np.empty(len(flat), np.int32)
    token_of_position[positions] = np.repeat(np.arange(len(first), dtype=np.int32), np.diff(starts))
    return TokenOrder(positions.astype(np.int32), tokens_sorted[first].astype(np.int32), starts.astype(np.int32), token_of_position)
