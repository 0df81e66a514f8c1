"""The one place that opens a device and asks it: what it can do, how much memory it has and how much is in use, how long work took."""

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from llmc.cards import AMPERE, Device
from llmc.errors import UserError
from llmc.host import available_host_bytes, peak_resident_bytes, resident_bytes, total_host_bytes, within_quota
from llmc.processor import cpu_gains_from_bf16, cpu_name

if TYPE_CHECKING:
    import torch

# --matmul -> torch's name of what runs a GPU's matmuls without a bias
MATMUL_LIBRARY = {"auto": "cublas", "cublas": "cublas", "cublaslt": "cublaslt", "fp8": "cublas"}


@dataclass(frozen=True, slots=True)
class Backend:
    """A device ready for use. kind is cpu or cuda; name as the vendor writes it."""

    device: "torch.device"
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
        """A mark of this moment; on a GPU, of the moment at which it has done all that it was given so far."""
        if self.kind != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, first, second) -> float:
        """Seconds from the first mark to the second, which is waited for."""
        if self.kind != "cuda":
            return second - first
        second.synchronize()
        return first.elapsed_time(second) / 1e3

    def read_later(self, *numbers):
        """Start to copy tensors of one number each, or plain numbers, to the host. Returns a function that waits and gives a list of
        floats. Whatever is launched after this call may overwrite the tensors.
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

    def capability(self) -> tuple[int, int] | None:
        """Compute capability of the card; None for a CPU."""
        if self.kind != "cuda":
            return None
        import torch

        return torch.cuda.get_device_capability(self.device)

    def facts(self) -> Device:
        """What precision, kernels and plan are decided by."""
        return Device(self.kind, self.name, self.capability(), self.processors())

    def has_tf32(self) -> bool:
        """Whether fp32 matmuls can run as TF32: from SM80."""
        return self.kind == "cuda" and self.capability() >= AMPERE

    def memory_bytes(self) -> tuple[int, int]:
        """(used, total) bytes: of the card; on a CPU (this process's resident memory, what the machine or the container has)."""
        if self.kind == "cuda":
            import torch

            free, total = torch.cuda.mem_get_info(self.device)
            return total - free, total
        return resident_bytes(), total_host_bytes()

    def free_bytes(self) -> int:
        """Bytes a larger batch could still take."""
        if self.kind == "cuda":
            used, total = self.memory_bytes()
            return total - used
        return available_host_bytes()

    def baseline_bytes(self) -> int:
        """Bytes in use now, counted as peak_bytes counts them. Call it before the first arena is allocated."""
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
        """The most bytes in use so far: by torch's allocator on a GPU, else this process's peak resident memory."""
        if self.kind == "cuda":
            import torch

            return torch.cuda.max_memory_allocated(self.device)
        return peak_resident_bytes()


def open_backend(device: str, threads: int, tf32: bool, matmul: str = "auto") -> Backend:
    """Choose and prepare the device. Raises UserError where what was asked for is not there.

    matmul  the library for a GPU's matmuls without a bias, a key of MATMUL_LIBRARY; anything else is for a CPU, and ignored here
    """
    # read when torch first opens cuBLAS. What a shell has there does not count: which matmuls run, and so their last bits, depends on it
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it deterministic matmuls are refused
    os.environ["CUBLASLT_WORKSPACE_SIZE"] = "32768"  # KiB; its 1 MiB by default rules out the fastest matmuls with a bias
    import torch

    torch.set_grad_enabled(False)
    if not threads and "OMP_NUM_THREADS" not in os.environ:  # else torch has it from there
        threads = within_quota(torch.get_num_threads())  # torch's own choice is one per physical core that this process may run on
    if threads:
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
    """The one stream of a device: every further stream would have cuBLAS workspaces of its own."""
    import torch

    return torch.cuda.Stream(index)


@contextmanager
def deterministic(device):
    """Ask torch for the deterministic form of the CUDA operators called inside, so that they give the same bits every time.

    Use it only around operators that need it: it makes torch sort and copy for scatters of distinct elements too.
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
    """If active, and if this CPU is faster in bf16, fp32 matmuls inside round their inputs to bf16 and sum in fp32, up to twice as fast.

    That is exact for inputs that were bf16 before they were widened.
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

    Afterwards `values` may be changed at once, unless it is a tensor that was pinned before.
    """
    import torch

    values = torch.as_tensor(values)
    if out.device.type == "cuda" and values.device.type == "cpu":
        values = values.pin_memory()  # from pageable memory the copy would wait for everything launched before it
    out.copy_(values.view(out.shape), non_blocking=True)


def measure_matmul_tflops(backend: Backend, precision: str, others=(), seconds: float = 0.5) -> float:
    """TFLOP/s of a large square matmul here and now: the best of several tries within about `seconds`.

    others  functions of (out, a, b) that are tried beside torch's
    """
    import torch

    n = 8192 if backend.kind == "cuda" else 1024
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    random = torch.Generator(backend.device).manual_seed(0)  # of its own; a GPU takes less power for ones, and so has a higher clock
    a, b = (torch.empty(n, n, dtype=dtype, device=backend.device).normal_(generator=random) for _ in range(2))
    out = torch.empty_like(a)
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
