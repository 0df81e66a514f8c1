"""A step as a list of calls: what a CUDA graph of it is on a GPU.

Between two kernels Python finds the next one's arguments. Each kernel drives Python's own code and data out of the caches, so that takes
50 to 100 us, a hundredth of a second in all, while every core waits. A call that was recorded takes 15 to 25.
"""

from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from llmc.kernels_cpu import door


class Recording:
    """What work() does to the memory there is, by kernels and by torch's operations, to be done again with the very same arguments.

    Making it changes nothing. A number among the arguments keeps its value, a tensor its place; Python itself is not repeated. All kernels
    must have run before with arguments of such types. Raises RuntimeError where torch would make a new tensor, or tell a number.
    """

    def __init__(self, work):
        with door.recorded() as self._calls, _Operations(self._calls):
            work()

    def replay(self):
        door.use_threads()
        for function, args in self._calls:
            function(*args)


class _Operations(TorchDispatchMode):
    """Adds torch's operations that write into their arguments to the calls; views are made at once."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing here is compiled, and importing the compiler takes a second

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function._schema.is_mutable:
            self.calls.append((partial(function, *args, **kwargs), ()))
            return _written(function, args, kwargs)
        result = function(*args, **kwargs)
        if not isinstance(result, torch.Tensor) or _memory(result) not in map(_memory, filter(torch.is_tensor, args)):
            raise RuntimeError(f"{function} writes to no memory of the plan")
        return result


def _memory(tensor):
    """What a tensor and its views share."""
    return tensor.untyped_storage().data_ptr()


def _written(function, args, kwargs):
    """The one argument that an operation writes and returns."""
    for i, argument in enumerate(function._schema.arguments):
        if argument.is_write:
            return kwargs[argument.name] if argument.name in kwargs else args[i]
