"""Model FLOPs utilization: the share of a GPU's peak FLOP/s that a step reaches. Source: llm.c llmc/mfu.h and gpt2_estimate_mfu."""

from re import findall

from llmc.cards import PEAKS

# the same names on weaker hardware: laptop chips, and slices of a GPU
OTHER_HARDWARE = ("Laptop", "Mobile", "with Max-Q", "MIG")


def promised_tflops(device_name: str, precision: str, tf32: bool = True) -> float | None:
    """Peak TFLOP/s of the card the driver calls `device_name`, or None if it is not in the table or cannot do it.

    precision is "bf16", or "fp32", which means TF32 where the card has it; without `tf32` only the fp32 of cards that lack TF32 is known.
    The row with the longest name that occurs in `device_name`, word for word, wins: "NVIDIA H100 80GB HBM3" finds H100,
    "NVIDIA A100-SXM4-40GB" does not find A10.
    """
    assert precision in ("bf16", "fp32"), precision
    words = _words(device_name)
    if any(_words(name) in words for name in OTHER_HARDWARE):
        return None
    found = [name for name in PEAKS if _words(name) in words]
    bf16, fp32 = PEAKS[max(found, key=len)] if found else (None, None)
    if precision == "bf16":
        return bf16
    return fp32 if tf32 or bf16 is None else None


def flops_per_token(num_parameters: int, L: int, C: int, T: int) -> int:
    """FLOPs of forward and backward for one token: 6 per parameter, and attention. Source: arXiv 2001.08361, section 2.1.

    Counts every parameter, as llm.c does, though layernorms, biases and positions are in no matmul.
    """
    return 6 * num_parameters + 6 * L * C * T


def model_flops_utilization(flops_per_token: int, tokens: int, dt_s: float, peak_tflops: float) -> float:
    """The share of the peak, 0 to 1, that one device reaches with `tokens` in dt_s seconds."""
    return flops_per_token * tokens / dt_s / (peak_tflops * 1e12)


def _words(name: str) -> str:
    """A name's letters and digits in lower case, with a blank before and after each word: so words are found in others as a text is."""
    return f" {' '.join(findall(r'[a-z0-9]+', name.lower()))} "
