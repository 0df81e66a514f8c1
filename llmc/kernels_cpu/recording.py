"""A step as a list of calls: the CPU's counterpart of a CUDA graph.

Between two kernels Python prepares the arguments of the next one. As each kernel evicts Python's own code and data from the caches, that
takes 50 to 100 us, 25 ms in a whole step of d12, while all cores wait. Repeating a recorded call takes 15 to 25 us.
"""

from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmc.kernels_cpu import door


class Recording:
    """What work() does to existing memory, through kernels and torch operations, to be repeated with exactly the same arguments.

    Recording these changes nothing. A number among the arguments keeps its value, and a tensor its place in memory.
    Python itself is not repeated, nor what work() does through numpy; a copy from a tensor that it makes of numbers repeats the numbers of
    the recording. All kernels must have run before with arguments of such types. Raises RuntimeError where torch would make a new tensor,
    or return a number.
    """

    def __init__(self, work):
        with door.recorded() as self._calls, _Operations(self._calls):
            work()

    def replay(self):
        door.use_threads()
        for function, args in self._calls:
            function(*args)


class _Operations(TorchDispatchMode):
    """Adds to the calls each torch operation that writes into one of its arguments; views are made at once."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # private to torch: without it the mode would import torch's compiler, which takes a second

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not function._schema.is_mutable:
            return _views(function, function(*args, **kwargs), args)
        written = [i for i, argument in enumerate(function._schema.arguments) if argument.is_write]
        if len(written) != 1 or len(function._schema.returns) != 1:
            raise RuntimeError(f"{function} writes to more than one tensor")
        self.calls.append((partial(function, *args, **kwargs), ()))
        name = function._schema.arguments[written[0]].name
        return kwargs[name] if name in kwargs else args[written[0]]


def _views(function, result, args):
    """The result of an operation that writes nothing. It must be one view of an argument, or several."""
    known = {_memory(t) for t in args if isinstance(t, torch.Tensor)}
    for t in result if isinstance(result, (list, tuple)) else [result]:
        if not isinstance(t, torch.Tensor):
            raise RuntimeError(f"{function} asks for a number")
        if _memory(t) not in known:
            raise RuntimeError(f"{function} makes a new tensor")
    return result


def _memory(tensor):
    """The address of the memory that a tensor and its views share."""
    return tensor.untyped_storage().data_ptr()
