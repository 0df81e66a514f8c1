"""Model FLOPs utilization: the share of a GPU's peak FLOP/s that a step reaches. Source: llm.c llmc/mfu.h and gpt2_estimate_mfu.

Peaks are dense (no 2:4 sparsity) tensor-core rates with fp32 accumulation, the kind a training matmul runs at:

    TFLOP/s = tensor cores x boost clock in MHz x FLOP per core and clock / 1e6,        TF32 is half of bf16

Cores, clocks and rates are from NVIDIA's architecture white papers (Volta, Turing, GA102, Ada, RTX Blackwell) and product pages; server
cards have their datasheet's own figure, halved where it counts sparsity.
"""

from re import findall

# bf16 FLOP per tensor core and clock, accumulating in fp32
HALF_RATE = 128  # GeForce 30, 40 and 50: accumulating in fp32 is slowed to half
FULL_RATE = 256  # the same chips as workstation and server cards


def _tensor(cores: int, mhz: int, rate: int) -> tuple[float, float]:
    bf16 = cores * mhz * rate / 1e6
    return bf16, bf16 / 2


def _cuda(cores: int, mhz: int) -> tuple[None, float]:
    """Volta and Turing: no bf16 and no TF32, so fp32 is what the CUDA cores do, a multiply and an add per clock."""
    return None, 2 * cores * mhz / 1e6


# name -> TFLOP/s (bf16, fp32); fp32 is TF32 where the card has it. None: the card does not have it, or no figure is published
PEAKS = {
    # Volta, Turing
    "V100": _cuda(5120, 1530), "V100-PCIE": _cuda(5120, 1370), "V100S-PCIE": _cuda(5120, 1597), "TITAN V": _cuda(5120, 1455),
    "Quadro GV100": _cuda(5120, 1447), "T4": _cuda(2560, 1590), "T4G": _cuda(2560, 1590), "TITAN RTX": _cuda(4608, 1770),
    "Quadro RTX 8000": _cuda(4608, 1770), "Quadro RTX 6000": _cuda(4608, 1770), "Quadro RTX 5000": _cuda(3072, 1815),
    "Quadro RTX 4000": _cuda(2304, 1545),
    "RTX 2080 Ti": _cuda(4352, 1545), "RTX 2080 SUPER": _cuda(3072, 1815), "RTX 2080": _cuda(2944, 1710),
    "RTX 2070 SUPER": _cuda(2560, 1770), "RTX 2070": _cuda(2304, 1620), "RTX 2060 SUPER": _cuda(2176, 1650), "RTX 2060": _cuda(1920, 1680),
    # Ampere, Ada: data centre
    "A100": (312.0, 156.0), "A800": (312.0, 156.0), "A30": (165.0, 82.0),
    "A2": (18.0, 9.0), "A10": (125.0, 62.5), "A10G": (70.0, 35.0), "A16": (17.9, 9.0), "A40": (149.7, 74.8),  # A16: each of its four GPUs
    "L4": (121.0, 60.5), "L20": (119.5, 59.8), "L40": (181.0, 90.5), "L40S": (362.1, 183.0),
    # Hopper: an H100 whose name does not say which is the SXM module
    "H100": (989.4, 494.7), "H100 PCIe": (756.0, 378.0), "H100 80GB HBM2e": (756.0, 378.0), "H100 NVL": (835.5, 417.8),
    "H200": (989.4, 494.7), "H200 NVL": (835.5, 417.8), "GH200": (989.4, 494.7), "H800": (989.4, 494.7), "H800 PCIe": (756.0, 378.0),
    "H20": (148.0, 74.0),
    # Blackwell: data centre, each GPU of two dies
    "B100": (1750.0, 875.0), "B200": (2250.0, 1125.0), "GB200": (2500.0, 1250.0), "B300": (2250.0, 1125.0), "GB300": (2500.0, 1250.0),
    # GeForce
    "RTX 3090 Ti": _tensor(336, 1860, HALF_RATE), "RTX 3090": _tensor(328, 1695, HALF_RATE), "RTX 3080 Ti": _tensor(320, 1665, HALF_RATE),
    "RTX 3080": _tensor(272, 1710, HALF_RATE), "RTX 3070 Ti": _tensor(192, 1770, HALF_RATE), "RTX 3070": _tensor(184, 1725, HALF_RATE),
    "RTX 3060 Ti": _tensor(152, 1665, HALF_RATE), "RTX 3060": _tensor(112, 1777, HALF_RATE), "RTX 3050": _tensor(80, 1777, HALF_RATE),
    "RTX 3050 6GB": _tensor(72, 1470, HALF_RATE),
    "RTX 4090": _tensor(512, 2520, HALF_RATE), "RTX 4090 D": _tensor(456, 2520, HALF_RATE), "RTX 4080 SUPER": _tensor(320, 2550, HALF_RATE),
    "RTX 4080": _tensor(304, 2505, HALF_RATE), "RTX 4070 Ti SUPER": _tensor(264, 2610, HALF_RATE),
    "RTX 4070 Ti": _tensor(240, 2610, HALF_RATE), "RTX 4070 SUPER": _tensor(224, 2475, HALF_RATE),
    "RTX 4070": _tensor(184, 2475, HALF_RATE),
    "RTX 4060 Ti": _tensor(136, 2535, HALF_RATE), "RTX 4060": _tensor(96, 2460, HALF_RATE),
    "RTX 5090": _tensor(680, 2407, HALF_RATE), "RTX 5090 D": (None, None), "RTX 5080": _tensor(336, 2617, HALF_RATE),
    "RTX 5070 Ti": _tensor(280, 2452, HALF_RATE), "RTX 5070": _tensor(192, 2512, HALF_RATE), "RTX 5060 Ti": _tensor(144, 2572, HALF_RATE),
    "RTX 5060": _tensor(120, 2497, HALF_RATE), "RTX 5050": _tensor(80, 2572, HALF_RATE),
    # workstation cards that llm.c lists, the ADA ones under names that no driver reports (the real ones follow below). llm.c takes the
    # GeForce rate for them, half of their datasheets' figures, and so prints twice the utilization
    "RTX A2000": _tensor(104, 1200, FULL_RATE), "RTX A4000": _tensor(192, 1560, FULL_RATE), "RTX A4500": _tensor(224, 1650, FULL_RATE),
    "RTX A5000": _tensor(256, 1695, FULL_RATE), "RTX A5500": _tensor(320, 1770, FULL_RATE), "RTX A6000": _tensor(336, 1800, FULL_RATE),
    "RTX A2000 ADA": _tensor(88, 2130, FULL_RATE), "RTX A4000 ADA": _tensor(192, 2175, FULL_RATE),
    "RTX A4500 ADA": _tensor(224, 2580, FULL_RATE),
    "RTX A5000 ADA": _tensor(400, 2550, FULL_RATE), "RTX A5880 ADA": _tensor(440, 2460, FULL_RATE),
    "RTX A6000 ADA": _tensor(568, 2505, FULL_RATE),
    # workstation cards that it does not list
    "RTX A400": _tensor(24, 1762, FULL_RATE), "RTX A1000": _tensor(72, 1462, FULL_RATE),
    "RTX 2000 Ada": _tensor(88, 2130, FULL_RATE), "RTX 4000 Ada": _tensor(192, 2175, FULL_RATE),
    "RTX 4000 SFF Ada": _tensor(192, 1560, FULL_RATE),
    "RTX 4500 Ada": _tensor(240, 2580, FULL_RATE), "RTX 5000 Ada": _tensor(400, 2550, FULL_RATE),
    "RTX 5880 Ada": _tensor(440, 2460, FULL_RATE),
    "RTX 6000 Ada": _tensor(568, 2505, FULL_RATE),
    "RTX PRO 6000 Blackwell": _tensor(752, 2617, FULL_RATE), "RTX PRO 6000 Blackwell Max-Q": _tensor(752, 2280, FULL_RATE),
    "RTX PRO 6000 Blackwell Server": _tensor(752, 2493, FULL_RATE),  # this clock, the SFF's and the 2000's follow from their fp32 figures
    "RTX PRO 5000 Blackwell": _tensor(440, 2617, FULL_RATE), "RTX PRO 4500 Blackwell": _tensor(328, 2617, FULL_RATE),
    "RTX PRO 4000 Blackwell": _tensor(280, 2617, FULL_RATE), "RTX PRO 4000 Blackwell SFF": _tensor(280, 1339, FULL_RATE),
    "RTX PRO 2000 Blackwell": _tensor(136, 1953, FULL_RATE),
}  # fmt: skip

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
    if any(_occurs(_words(name), words) for name in OTHER_HARDWARE):
        return None
    found = [name for name in PEAKS if _occurs(_words(name), words)]
    bf16, fp32 = PEAKS[max(found, key=len)] if found else (None, None)
    if precision == "bf16":
        return bf16
    return fp32 if tf32 or bf16 is None else None


def flops_per_token(num_parameters: int, L: int, C: int, T: int) -> int:
    """FLOPs of forward and backward for one token: 6 per parameter, and attention. Source: arXiv 2001.08361, section 2.1.

    Counts every parameter, as llm.c does, though layernorms, biases and positions are in no matmul.
    """
    return 6 * num_parameters + 6 * L * C * T


def model_flops_utilization(flops_per_token: int, tokens: int, dt_s: float, peak_tflops: float | None) -> float | None:
    """The share of the peak, 0 to 1, that one device reaches with `tokens` in dt_s seconds; None if the peak is unknown."""
    return flops_per_token * tokens / dt_s / (peak_tflops * 1e12) if peak_tflops else None


def _words(name: str) -> list[str]:
    return findall(r"[a-z0-9]+", name.lower())


def _occurs(part: list[str], whole: list[str]) -> bool:
    return any(whole[i : i + len(part)] == part for i in range(len(whole) - len(part) + 1))
