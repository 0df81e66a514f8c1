"""GPUs that can be planned for without having them: memory, bandwidth, and the row of PEAKS that says how fast they multiply.

Memory is what the driver reports as total, in MiB; bandwidth is the datasheet's, in GB/s.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from re import fullmatch

from llmc.errors import UserError
from llmc.mfu import PEAKS
from llmc.units import MIB

RESERVE = {"cpu": 0.05, "cuda": 0.02}  # share of a device's free memory that auto leaves free
CONTEXT_MIB = 768  # a CUDA context with cuBLAS's workspaces: what a process holds before its first tensor. An estimate
UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities of the first cards with bf16 and TF32, and with matmuls in FP8 as used here


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, by what its plans and times depend on. peak: its row in llmc.mfu.PEAKS."""

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
