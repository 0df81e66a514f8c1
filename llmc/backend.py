"""The one place that knows devices: which one a run uses, in which precision, with how much memory."""

import ctypes
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from llmc.errors import UserError

# --matmul -> torch's name of what runs a GPU's matmuls without a bias
MATMUL_LIBRARY = {"auto": "cublas", "cublas": "cublas", "cublaslt": "cublaslt", "fp8": "cublas"}
CPU_INFO = "/proc/cpuinfo"
ZEN_2_MODELS = 0x30  # and later, of family 23
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux on x86-64
CPU_MATMULS = ("native", "numba", "widened")  # --matmul on a CPU


@dataclass(frozen=True, slots=True)
class Backend:
    """A device ready for use. kind is cpu or cuda; name as the vendor writes it."""

    device: "torch.device"  # noqa: F821
    kind: str
    name: str

    @property
    def asynchronous(self) -> bool:
        """Whether the device works beside the host, which then need not wait for a step to launch the next."""
        return self.kind == "cuda"

    def synchronize(self):
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def mark(self):
        """This moment: on a GPU that at which it has done all it was given so far."""
        if self.kind != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first, second) -> float:
        """From one mark to another, which is waited for."""
        if self.kind != "cuda":
            return second - first
        second.synchronize()
        return first.elapsed_time(second) / 1e3

    def read_later(self, *numbers):
        """Start to fetch tensors of one number each, or plain numbers; a function that waits for them and returns a list of floats.

        What is launched next may overwrite them.
        """
        if self.kind != "cuda":
            values = [float(number) for number in numbers]
            return lambda: values
        import torch

        host = torch.empty(len(numbers), pin_memory=True)  # its memory is used again once nobody waits for it
        for out, number in zip(host.unbind(), numbers):
            out.copy_(torch.as_tensor(number).view(()), non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def wait():
            done.synchronize()
            return host.tolist()

        return wait

    def capability(self) -> tuple[int, int]:
        """Compute capability of the card; (0, 0) for a CPU."""
        if self.kind != "cuda":
            return 0, 0
        import torch

        return torch.cuda.get_device_capability(self.device)

    def has_tf32(self) -> bool:
        """Whether fp32 matmuls can run as TF32: from SM80."""
        return self.capability() >= (8, 0)

    def memory_bytes(self) -> tuple[int, int]:
        """(used, total) bytes: of the card, or of the machine with what this process has resident as used."""
        if self.kind == "cuda":
            import torch

            free, total = torch.cuda.mem_get_info(self.device)
            return total - free, total
        return resident_bytes(), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def free_bytes(self) -> int:
        """Bytes a larger batch could still take."""
        if self.kind == "cuda":
            used, total = self.memory_bytes()
            return total - used
        return available_host_bytes()

    def baseline_bytes(self) -> int:
        """What is in use now, as peak_bytes counts it: to be asked before the first arena is allocated."""
        if self.kind == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats(self.device)  # measuring matmuls took some
            return torch.cuda.memory_allocated(self.device)
        return resident_bytes()

    def processors(self) -> int | None:
        """Streaming multiprocessors of the card; None for a CPU."""
        if self.kind != "cuda":
            return None
        import torch

        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def peak_bytes(self) -> int:
        """The most there ever was: of the allocator, or of this process's resident memory."""
        if self.kind == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self.device)
        return peak_resident_bytes()


def _cpu_line(*names) -> list[str]:
    """The words of the first line of that name about the processor, which --plan knows without importing torch."""
    return _line_of(CPU_INFO, names)


@cache
def _line_of(path, names) -> list[str]:
    try:
        with open(path) as f:
            return next((line for line in f if line.lower().startswith(names)), "").split()
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
    """Whether torch's matmuls of bf16 are faster than those of fp32: by that instruction, by tiles or on Arm."""
    return cpu_pairs_bf16() or cpu_has_amx() or "bf16" in _cpu_line("features")


def cpu_is_zen_1() -> bool:
    """AMD's first Zen, or its shrink: models of family 23 before Zen 2's."""
    vendor, family, model = (_cpu_line(name)[-1:] for name in ("vendor_id", "cpu family", "model\t"))
    return (vendor, family) == (["AuthenticAMD"], ["23"]) and int(model[0]) < ZEN_2_MODELS


def cpu_favours_numba(precision: str) -> bool:
    """Whether numba's matmuls were measured to be faster than torch's. On AMD with AVX-512 and bf16: those of a d12 step by a fifth in
    fp32, which are MKL's, and a twentieth in bf16, oneDNN's. On AMD's first Zen: steps of d12 of 256 and 1024 tokens by a twentieth in
    fp32, a fifth and a twentieth in bf16. On its third, and taken to be so on its second: steps of d6 and d12 of 256 to 4096 tokens by a
    sixth to nothing in bf16; in fp32 slower by up to a twelfth. On Intel with AVX-512 for bf16 and fp16 by a third in bf16, with AMX and
    without; in fp32 slower by a twentieth."""
    vendor, flags = _cpu_line("vendor_id"), _cpu_line("flags")
    if "AuthenticAMD" in vendor:
        return "avx512_bf16" in flags or cpu_is_zen_1() or (precision == "bf16" and "avx2" in flags)
    return "GenuineIntel" in vendor and precision == "bf16" and {"avx512_bf16", "avx512_fp16"} <= set(flags)


def likely_device_kind(device: str) -> str:
    """cpu or cuda, without touching a device or importing torch: what --plan assumes."""
    if device != "auto":
        return device.partition(":")[0]
    return "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"


def likely_precision(precision: str, kind: str) -> str:
    """fp32 or bf16 for a model made from a descriptor, without touching a device: what --plan assumes."""
    if precision != "auto":
        return precision
    return "bf16" if kind == "cuda" or cpu_has_native_bf16() else "fp32"


def likely_matmul(matmul: str, kind: str, precision: str, kernels: str) -> str:
    """native, numba or widened: whose matmuls a run on a CPU takes, by --matmul or else what its processor has. On a GPU native or fp8."""
    if kind != "cpu":
        return "fp8" if matmul == "fp8" else "native"
    if matmul != "auto":
        return matmul
    if kernels == "numba" and cpu_favours_numba(precision):
        return "numba"
    return "native" if precision == "fp32" or cpu_gains_from_bf16() else "widened"


def likely_factors(kind: str, precision: str) -> str:
    """fp32 or bf16: what numba's kernels multiply on this CPU. On a GPU, where there are none, as the weights."""
    return precision if kind != "cpu" or cpu_pairs_bf16() or cpu_has_amx() else "fp32"


def open_backend(device: str, threads: int, tf32: bool, matmul: str = "auto") -> Backend:
    """Choose and prepare the device. Raises UserError where what was asked for is not there.

    matmul  the library for a GPU's matmuls without a bias, a key of MATMUL_LIBRARY; anything else is for a CPU, and ignored here
    """
    # read when torch first opens cuBLAS; without it deterministic matmuls are refused
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "32768")  # KiB; its 1 MiB by default rules out the fastest matmuls with a bias
    import torch

    torch.set_grad_enabled(False)
    if threads:  # else torch's choice: one per physical core that this process may use
        torch.set_num_threads(threads)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return Backend(torch.device("cpu"), "cpu", cpu_name())
    if not torch.cuda.is_available():
        raise UserError(
            f"--device {device}: torch {torch.__version__} finds no CUDA device here; "
            "use --device cpu, or install a CUDA build of torch and a driver"
        )
    index = int(device.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise UserError(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0; choose one of them")
    torch.cuda.set_device(index)
    torch.cuda.set_stream(_stream(index))  # for everything: graphs cannot be captured on the default one
    torch.backends.cuda.preferred_blas_library(MATMUL_LIBRARY.get(matmul))  # whatever the environment says
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # split-K partial sums of weight gradients stay fp32
    torch.utils.deterministic.fill_uninitialized_memory = False  # every arena is zeroed by us, once
    return Backend(torch.device("cuda", index), "cuda", torch.cuda.get_device_name(index))


@cache
def _stream(index: int):
    """The one stream of a device: each would have workspaces of cuBLAS of its own."""
    import torch

    return torch.cuda.Stream(index)


@contextmanager
def deterministic(device):
    """Ask torch for its deterministic form of the CUDA operators called inside; what follows is the same bits every time.

    Only around those that need it: under the global switch scatters of distinct elements would be sorted and copied too.
    """
    import torch

    if device.type != "cuda":
        yield
        return
    torch._C._set_deterministic_algorithms(True)  # the public function imports and sets torch.compile's part too, which takes seconds
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)


@contextmanager
def bf16_products(active: bool):
    """If active, fp32 matmuls on a CPU whose bf16 is faster round their factors to that and add up in fp32, at up to twice fp32's speed.

    Exact for factors that were bf16 before they were widened.
    """
    import torch

    if not active or not cpu_gains_from_bf16():
        yield
        return
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def copy_in(out, values):
    """Copy an array, or tensor, of the host into a tensor, without waiting for the device.

    `values` may change at once afterwards, unless it is a tensor that is pinned already.
    """
    import torch

    values = torch.as_tensor(values)
    if out.device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()  # from other memory the copy would wait for everything launched before it
    out.copy_(values.view(out.shape), non_blocking=True)


def choose_precision(precision: str, backend: Backend) -> str:
    """fp32 or bf16 for a model made from a descriptor: bf16 wherever the hardware has it."""
    if backend.kind == "cpu":
        return likely_precision(precision, "cpu")
    native = backend.capability() >= (8, 0)
    if precision == "bf16" and not native:
        raise UserError(f"--precision bf16: {backend.name} has no bf16 arithmetic (SM80 or later has); use --precision fp32")
    return precision if precision != "auto" else ("bf16" if native else "fp32")


def measure_matmul_tflops(backend: Backend, precision: str, others=(), seconds: float = 0.5) -> float:
    """TFLOP/s of a large square matmul here and now: the best of several tries within about `seconds`.

    others  functions of (out, a, b) that are tried beside torch's
    """
    import torch

    n = 8192 if backend.kind == "cuda" else 1024
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    a, b, out = (torch.ones(n, n, dtype=dtype, device=backend.device) for _ in range(3))
    ways = (lambda out, a, b: torch.mm(a, b, out=out), *others)
    for multiply in ways:
        multiply(out, a, b)  # the first call sets a library up
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        for multiply in ways:
            backend.synchronize()
            start = time.perf_counter()
            multiply(out, a, b)
            backend.synchronize()
            best = min(best, time.perf_counter() - start)
    if backend.kind == "cuda":
        del a, b, out
        torch.cuda.empty_cache()  # or what is free would be counted without them
    return 2 * n**3 / best / 1e12


def cpu_name() -> str:
    """The processor's name and the number of cores that this process may use."""
    try:
        with open(CPU_INFO) as f:
            names = [line.partition(":")[2].strip() for line in f if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0] if names else 'CPU'}, {len(os.sched_getaffinity(0))} cores"


def resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_resident_bytes() -> int:
    """The highest resident memory of this process so far (Linux)."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM:"))


def available_host_bytes(mount: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")) -> int:
    """Memory the machine could still hand out without swapping, or the container or job that this process belongs to, if one has a limit
    (Linux). What caches files is free."""
    with open("/proc/meminfo") as f:
        fields = dict(line.split(":", 1) for line in f)
    left = [int(fields["MemAvailable"].split()[0]) * 1024]
    for folder, limit_name, used_name, prefix in _control_groups(mount, groups):
        with suppress(OSError, ValueError, KeyError):  # no such file, as outside of what a container sees, or "max"
            limit, used = (int((folder / name).read_text()) for name in (limit_name, used_name))
            kinds = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            left.append(limit - used + int(kinds[prefix + "active_file"]) + int(kinds[prefix + "inactive_file"]))
    return max(0, min(left))


def _control_groups(mount: Path, groups: Path):
    """This process's own and all above it, any of which may limit memory: folder, names of the files with limit and use, and what a name
    in its memory.stat begins with where it counts the groups below too. Source: Linux, cgroup-v2.rst and cgroup-v1/memory.rst."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root, names = mount, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            yield root.joinpath(*parts[:depth]), *names
