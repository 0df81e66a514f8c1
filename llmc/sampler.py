"""From logits to a token. Source: llm.c llmc/sampler.h."""

import numpy as np


def sample_softmax(logits: np.ndarray, coin: float, temperature: float = 1.0) -> int:
    """The token drawn from softmax(logits / temperature) by a coin in [0, 1); at temperature 0 the likeliest. llm.c's temperature is 1.

    logits  (V,)  fp32  read; padding rows already cut off
    Walks the cumulative exp(logits) until it exceeds coin * sum, as llm.c does: the sum in double, the product rounded to float32, and the
    walk in float32, because the token drawn depends on these roundings. Returns the last token if rounding leaves the coin beyond all of
    them, and for nan.
    """
    if temperature == 0:
        return int(logits.argmax())
    with np.errstate(over="ignore", invalid="ignore"):
        if temperature != 1:
            logits = (logits - logits.max()) / np.float32(temperature)
        weights = np.exp(logits, dtype=np.float32)
        norm = np.cumsum(weights, dtype=np.float64)[-1]  # adds one after the other, np.sum in pairs
        if norm == 0 or norm == np.inf:
            # exp of logits beyond +-88 leaves float32: llm.c would always return the last token; a shift changes no probability
            weights = np.exp(logits - logits.max(), dtype=np.float32)
            norm = np.cumsum(weights, dtype=np.float64)[-1]
        threshold = np.float32(np.float64(coin) * norm)
        cdf = np.cumsum(weights, dtype=np.float32)
    return min(int(np.searchsorted(cdf, threshold, side="right")), len(logits) - 1)
