"""What this machine's processor can do, and which way to compute a run takes for it: known without importing torch or touching a device.
So --plan knows it too."""

import ctypes
import os
from functools import cache

from llmc.host import own_processors

CPU_INFO = "/proc/cpuinfo"
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux on x86-64
# who made a core and which it is, as registers of Arm's say it (MIDR_EL1). Source: util-linux, sys-utils/lscpu-arm.c
ARM_IMPLEMENTER = "0x41"
ARM_CORES = {
    "0xd03": "Cortex-A53", "0xd05": "Cortex-A55", "0xd07": "Cortex-A57", "0xd08": "Cortex-A72", "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1", "0xd42": "Cortex-A78AE", "0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2",
    "0xd84": "Neoverse-V3", "0xd85": "Cortex-X925", "0xd87": "Cortex-A725", "0xd8e": "Neoverse-N3",
}  # fmt: skip
CPU_MATMULS = ("native", "numba", "widened")  # --matmul on a CPU
NVIDIA_DRIVERS = "/dev/nvidiactl", "/usr/lib/wsl/lib/libcuda.so.1"  # one of them exists where there is an NVIDIA driver: Linux, WSL 2


def cpu_name() -> str:
    """The processor's name, and how many of its cores this process may use."""
    return f"{_processor_name()}, {own_processors()} cores"


def _processor_name() -> str:
    """As Linux says it on x86; on Arm it only says numbers, of each core: there the names of these, or "CPU" if not all are known."""
    if model := _values("model name"):
        return model[0]
    parts = _values("CPU part") if _values("CPU implementer") == [ARM_IMPLEMENTER] else []
    return " and ".join(f"Arm {ARM_CORES[part]}" for part in parts) if parts and ARM_CORES.keys() >= set(parts) else "CPU"


def _values(name) -> list[str]:
    """What the lines of that name say of the cores, each value once."""
    try:
        with open(CPU_INFO) as f:
            return list(dict.fromkeys(line.partition(":")[2].strip() for line in f if line.startswith(name)))
    except OSError:
        return []


def _cpu_line(name) -> list[str]:
    """The words of the first line of that name about the processor."""
    return _line_of(CPU_INFO, name)


@cache
def _line_of(path, name) -> list[str]:
    try:
        with open(path) as f:
            return next((line for line in f if line.lower().startswith(name)), "").split()
    except OSError:
        return []


def cpu_has_native_bf16() -> bool:
    """Whether the processor multiplies bf16 itself: x86 or Arm. Without that, and without AVX-512, bf16 matmuls of torch 2.13 were
    measured a hundred times as slow as fp32's."""
    return "avx512_bf16" in _cpu_line("flags") or cpu_has_amx() or "bf16" in _cpu_line("features")


def cpu_pairs_bf16() -> bool:
    """Whether AVX-512's instruction that multiplies pairs of bf16 is faster than fp32's of widened ones: Intel's is half as fast, since
    there is AVX-512 for fp16."""
    flags = _cpu_line("flags")
    return "avx512_bf16" in flags and "avx512_fp16" not in flags


def cpu_has_amx() -> bool:
    """Whether the processor multiplies tiles of bf16 for this process."""
    return "amx_bf16" in _cpu_line("flags") and linux_grants_amx()


@cache
def linux_grants_amx() -> bool:
    """Ask for the registers of AMX, which Linux gives to whoever asks: to all threads of this process, and those that it forks."""
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0


def cpu_gains_from_bf16() -> bool:
    """Whether torch's matmuls of bf16 are faster than those of fp32: by AVX-512's for pairs, by tiles or on Arm."""
    return cpu_pairs_bf16() or cpu_has_amx() or "bf16" in _cpu_line("features")


def cpu_favours_numba(precision: str) -> bool:
    """Whether numba's matmuls were measured to be faster than torch's on such a processor: scripts/bench/cpu.md, "Which matmuls run"."""
    vendor, flags = _cpu_line("vendor_id"), _cpu_line("flags")
    if "AuthenticAMD" in vendor:
        return "avx2" in flags
    return "GenuineIntel" in vendor and precision == "bf16" and {"avx512_bf16", "avx512_fp16"} <= set(flags)


def likely_device_kind(device: str) -> str:
    """cpu or cuda, without touching a device or importing torch: what --plan assumes."""
    if device != "auto":
        return device.partition(":")[0]
    return "cuda" if any(map(os.path.exists, NVIDIA_DRIVERS)) else "cpu"


def likely_precision(precision: str, device_kind: str) -> str:
    """fp32 or bf16 for a model made from a descriptor, without touching a device: what a CPU takes, and what a GPU is likely to."""
    if precision != "auto":
        return precision
    return "bf16" if device_kind == "cuda" or cpu_has_native_bf16() else "fp32"


def matmul_kind(matmul: str, device_kind: str, precision: str, kernels: str) -> str:
    """native, numba or widened: whose matmuls a run on a CPU takes, by --matmul or else what its processor has. On a GPU native or fp8."""
    if device_kind != "cpu":
        return "fp8" if matmul == "fp8" else "native"
    if matmul != "auto":
        return matmul
    if kernels == "numba" and cpu_favours_numba(precision):
        return "numba"
    return "native" if precision == "fp32" or cpu_gains_from_bf16() else "widened"


def factor_type(device_kind: str, precision: str) -> str:
    """fp32 or bf16: what numba's kernels multiply on this CPU. For a GPU, which runs none of them, the type of the weights."""
    return precision if device_kind != "cpu" or cpu_pairs_bf16() or cpu_has_amx() else "fp32"
