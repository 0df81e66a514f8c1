"""GPUs: how fast they multiply; and of those that can be planned for without having them, memory and bandwidth.

Peaks are dense (no 2:4 sparsity) tensor-core rates with fp32 accumulation, the kind a training matmul runs at:

    TFLOP/s = tensor cores x boost clock in MHz x FLOP per core and clock / 1e6,        TF32 is half of bf16

Cores, clocks and rates are from NVIDIA's architecture white papers (Volta, Turing, GA102, Ada, RTX Blackwell) and product pages; server
cards have their datasheet's own figure, halved where it counts sparsity. Memory is what the driver reports as total, in MiB; bandwidth is
the datasheet's, in GB/s.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from re import fullmatch

from llmc.errors import UserError
from llmc.units import MIB

RESERVE = {"cpu": 0.05, "cuda": 0.02}  # share of a device's free memory that auto leaves free
CONTEXT_MIB = 768  # a CUDA context with cuBLAS's workspaces: what a process holds before its first tensor. An estimate
UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities of the first cards with bf16 and TF32, and with matmuls in FP8 as used here


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, by what its plans and times depend on. peak: its row in PEAKS."""

    peak: str
    memory_mib: int
    bandwidth_gb_s: float
    processors: int  # streaming multiprocessors
    capability: tuple[int, int]  # compute capability

    @property
    def budget_bytes(self) -> int:
        """Bytes that are left for a plan."""
        return (self.memory_mib - CONTEXT_MIB) * MIB


@dataclass(frozen=True, slots=True)
class Device:
    """What there is to know before anything runs: of a run's device, or of the one that a plan is for.

    kind                    cpu | cuda
    name                    its vendor's, or that of --memory-budget; empty for a GPU that nobody named
    capability, processors  a card's compute capability and streaming multiprocessors; None of a CPU, and where nobody knows
    """

    kind: str
    name: str = ""
    capability: tuple[int, int] | None = None
    processors: int | None = None


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

CARDS = {
    "v100-16": Card("V100", 16384, 900, 80, (7, 0)), "v100-32": Card("V100", 32768, 900, 80, (7, 0)),
    "t4": Card("T4", 15360, 320, 40, (7, 5)), "a100-40": Card("A100", 40960, 1555, 108, (8, 0)),
    "a100-80": Card("A100", 81920, 2039, 108, (8, 0)), "a30": Card("A30", 24576, 933, 56, (8, 0)),
    "a10": Card("A10", 23028, 600, 72, (8, 6)), "a10g": Card("A10G", 23028, 600, 80, (8, 6)), "a40": Card("A40", 46068, 696, 84, (8, 6)),
    "a6000": Card("RTX A6000", 49140, 768, 84, (8, 6)), "l4": Card("L4", 23034, 300, 58, (8, 9)),
    "l40": Card("L40", 46068, 864, 142, (8, 9)), "l40s": Card("L40S", 46068, 864, 142, (8, 9)),
    "6000-ada": Card("RTX 6000 Ada", 49140, 960, 142, (8, 9)), "h100-80": Card("H100", 81559, 3352, 132, (9, 0)),
    "h100-pcie": Card("H100 PCIe", 81559, 2039, 114, (9, 0)), "h100-nvl": Card("H100 NVL", 95830, 3938, 132, (9, 0)),
    "h200": Card("H200", 143771, 4800, 132, (9, 0)), "gh200-96": Card("GH200", 97871, 4000, 132, (9, 0)),
    "h20": Card("H20", 97871, 4000, 78, (9, 0)), "b200": Card("B200", 183359, 8000, 148, (10, 0)),
    "3060-12": Card("RTX 3060", 12288, 360, 28, (8, 6)), "3080-10": Card("RTX 3080", 10240, 760, 68, (8, 6)),
    "3090": Card("RTX 3090", 24576, 936, 82, (8, 6)), "4070": Card("RTX 4070", 12282, 504, 46, (8, 9)),
    "4080": Card("RTX 4080", 16376, 717, 76, (8, 9)), "4090": Card("RTX 4090", 24564, 1008, 128, (8, 9)),
    "5080": Card("RTX 5080", 16303, 960, 84, (12, 0)), "5090": Card("RTX 5090", 32607, 1792, 170, (12, 0)),
}  # fmt: skip
ALIASES = {"v100": "v100-16", "a100": "a100-80", "h100": "h100-80", "gh200": "gh200-96", "3060": "3060-12", "3080": "3080-10"}
assert all(card.peak in PEAKS for card in CARDS.values())


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory that a plan must fit in.

    card     None where the budget was given as a size, or is what this machine has free
    reserve  share that auto leaves free, for what a process holds beside its plan; 0 where --memory-budget gave the budget
    """

    bytes: int
    name: str
    card: Card | None = None
    reserve: float = 0.0

    @property
    def origin(self) -> str:
        """Where it comes from, for a sentence that has told how much it is."""
        if self.card:
            return f"{self.name}, less {CONTEXT_MIB} MiB that CUDA takes"
        return self.name if self.reserve else f"--memory-budget {self.name}"

    @property
    def auto_bytes(self) -> int:
        return int(self.bytes * (1 - self.reserve))

    @property
    def auto_name(self) -> str:
        return self.name + (f", less {self.reserve:.0%}" if self.reserve else "")


def parse_budget(text: str) -> Budget:
    """The Budget of a size, as in 24GiB, "500 MiB" or 80GB, or of a card, as in h100-80, less what CUDA takes; otherwise a UserError."""
    word = text.strip().lower()
    size = fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kmgt]i?b)", word)
    n_bytes = int(Fraction(size[1]) * UNITS[size[2]]) if size else 0
    if n_bytes:
        return Budget(n_bytes, text.strip())
    name = word.removeprefix("rtx").strip(" _-").replace(" ", "-")
    name = ALIASES.get(name, name)
    if name in CARDS and word[0] != "-":
        return Budget(CARDS[name].budget_bytes, name, CARDS[name])
    number = fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)", word)
    is_size = number and float(number[1]) > 0 and not fullmatch("[0-9]{4}", word)  # which is how cards are called
    unit = is_size and (number[2].upper() or ("G" if float(number[1]) < 1000 else "M"))
    near = [f"{number[1]}{unit}iB"] if is_size else get_close_matches(name, [*CARDS, *ALIASES], 3, 0.5)
    meant = [f"did you mean {' or '.join(near)}?"] if near else []
    known = [] if is_size else [f"known cards: {', '.join(CARDS)}"]
    said = " ".join(meant + known)
    raise UserError(f"--memory-budget {text}: expected a size such as 24GiB or 500MiB, or a card such as h100-80; {said}")
