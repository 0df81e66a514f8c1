"""Graphs: work that is launched again and again, launched as a whole.

All addresses are the plan's, and what changes from step to step lies in its memory, so a step that is captured once serves for every step.
On a GPU it is a CUDA graph, which the host launches in some ten microseconds instead of some milliseconds; with a small batch, the GPU
would wait for these. On a CPU it is a list of calls: see llmc/kernels_cpu/recording.py.
"""

import gc
from contextlib import suppress
from functools import partial

from llmc.errors import UserError, is_out_of_memory, lines_of


class Graphs:
    """Runs work by name: the first time directly, which sets libraries up; from then on as a graph, captured the second time.

    Graphs live as long as this object. capture(work) returns an object that has a replay(), and launches nothing.
    """

    def __init__(self, capture):
        self._capture, self._seen, self._graphs = capture, set(), {}

    def run(self, name: str, work) -> None:
        """Do work(), which must be the same every time for this name. Raises UserError where it cannot be captured."""
        if name not in self._seen:
            self._seen.add(name)
            work()
            return
        if name not in self._graphs:
            self._graphs[name] = self._captured(name, work)
        self._graphs[name].replay()

    def _captured(self, name, work):
        try:
            return self._capture(work)
        except Exception as error:
            reasons = list(causes(error))
            for reason in filter(is_out_of_memory, reasons):
                raise reason  # not the error that ends the capture, which only says that it is broken
            reason = lines_of(reasons[-1])[0]
            raise UserError(f"the {name} cannot be captured as a graph ({reason}); use --cuda-graph 0") from error


def causes(error):
    """Yield an error, the one during whose handling it was raised, and so on: the end of a broken capture only says that it is broken."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def graphs_on(device_kind: str) -> Graphs:
    """The Graphs of a device, cuda or cpu.

    CUDA graphs share one memory pool for what their library calls allocate: they run one after the other, on one stream, and leave nothing
    there that is read later.
    """
    if device_kind == "cpu":
        from llmc.kernels_cpu.recording import Recording

        return Graphs(Recording)
    import torch

    return Graphs(partial(capture_cuda_graph, pool=torch.cuda.graph_pool_handle()))


def capture_cuda_graph(work, pool):
    """A torch.cuda.CUDAGraph of work(), captured on the current stream, so that libraries use the memory they already have for it.

    No garbage is collected meanwhile: if an earlier graph, or a kernel, were freed in the middle of a capture, that would break it.
    """
    import torch

    graph, collects = torch.cuda.CUDAGraph(), gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            work()
    except BaseException:
        _close_pool(pool)
        raise
    finally:
        if collects:
            gc.enable()
    return graph


def _close_pool(pool):
    """Let go of the pool of a capture that could not be ended: torch before 2.12 would go on allocating there, and not empty its cache."""
    import torch

    with suppress(RuntimeError):  # raised if the capture could be ended: then it is done already
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        torch._C._cuda_releasePool(torch.cuda.current_device(), pool)
