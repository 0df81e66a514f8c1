"""A CUDA graph without a card: what a function does to CPU tensors, captured once and replayed with the same arguments.

What a step reads from a Python number, or from an array made for that step, stays as it was at the capture; what it reads from
memory changes with the memory. A replay that equals a plain call therefore shows that the step takes all that changes from memory.
"""

from contextlib import contextmanager
from math import nan

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

try:
    from llmc.kernels import door
except ImportError:  # no triton, and so no kernels
    door = None

aten = torch.ops.aten
UNINITIALISED = {aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided}
INDEXED_READS = {aten.index, aten._unsafe_index}
INDEXED_WRITES = {aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put}
HOST_READS = {getattr(torch.Tensor, name): f"Tensor.{name}" for name in ("cpu", "numpy", "tolist", "__array__", "__repr__", "__format__")}


class CaptureError(RuntimeError):
    """Something that a graph cannot do, or cannot be captured with."""


class RecordedGraph:
    """What torch.cuda.CUDAGraph is on a GPU: work captured once, replayed with the very same arguments and addresses.

    Recorded are torch's operations and the kernels of llmc.kernels.door.launch, in order. A number among the arguments keeps the
    value it had, a tensor its place in memory. An operation's new tensors live as long as the graph, and a replay writes them anew
    in their places. Python itself is not repeated: assignments, random seeds drawn, files read.

    A capture on a GPU executes nothing. Here it does, but then `memory` is put back, and the tensors made in the capture are
    filled with NaN (integers with 77) until a replay writes them.

    CaptureError, with the operation's name, meets
      - a value read back to the host: item(), float(t), bool(t), torch.equal, cpu(), numpy(), tolist(), repr(t)
      - shapes that depend on values: nonzero, unique, masked_select, a boolean mask as an index
      - values that come from the host: torch.tensor, from_numpy, as_tensor of anything but a tensor
      - random numbers (a dropout of 0 is none)
      - a capture or a replay inside a capture, a second capture, a replay without a capture that succeeded

    Not seen: t.to("cpu"), which does nothing on a CPU; memory read through a pointer or through a numpy array that shares it;
    libraries called through ctypes; streams and events. A 0-dim tensor among the arguments is read anew at each replay, while
    a GPU's graph keeps the value of one that lies in host memory.
    """

    _capturing = False

    def __init__(self, memory):
        """memory: the tensors whose contents a capture leaves as they were."""
        self.memory = list(memory)
        self.outside = []  # (operation, tensor): what it refers to that is neither in `memory` nor made in the capture, once each
        self._started, self._work = False, None

    def capture(self, function):
        """Record what function() does; its result is returned."""
        if RecordedGraph._capturing or self._started:
            raise CaptureError("a graph is captured once, and not inside a capture")
        recorder = _Recorder(self.memory)
        with torch.no_grad():
            before = [t.clone() for t in self.memory]
        self._started = RecordedGraph._capturing = True
        try:
            with recorder.kernels(), _Calls(recorder), recorder:
                result = function()
            with torch.no_grad():
                for t in recorder.temporaries:
                    t.fill_(nan if t.is_floating_point() else 77)
            self._work, self.outside = recorder.work, recorder.outside
            self._temporaries = recorder.temporaries
            return result
        finally:
            RecordedGraph._capturing = False
            with torch.no_grad():
                for t, values in zip(self.memory, before):
                    t.copy_(values)

    @torch.no_grad()
    def replay(self):
        """Do it all again."""
        if self._work is None or RecordedGraph._capturing:
            raise CaptureError("only a graph whose capture succeeded is replayed, and not inside a capture")
        for function, args, kwargs, results in self._work:
            for new, place in zip(tree_leaves(function(*args, **kwargs)), results):
                if place is not None:
                    place.copy_(new)


class _Recorder(TorchDispatchMode):
    """Sees every operation on its way to the CPU's own code, and what door.launch is called with."""

    def __init__(self, memory):
        super().__init__()
        self.work = []  # (function, args, kwargs, where the tensors it returns belong, None for one that is in place already)
        self.temporaries, self.outside = [], []
        self.known = {_storage(t) for t in memory}
        self.recording, self.setting_item = True, False

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing here is compiled, and importing the compiler takes a second

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.recording:
            return function(*args, **kwargs)
        if function is aten.lift_fresh.default and self.setting_item and args[0].dim() == 0:  # t[i] = 1.0 makes a tensor of the number
            self.known.add(_storage(args[0]))
        elif refusal := _refusal(function, args, kwargs):
            raise CaptureError(f"{function} in a capture: {refusal}")
        frozen = self.freeze(str(function), args, kwargs)
        given = {_storage(t) for t in _tensors(frozen)}
        out = function(*args, **kwargs)
        # a view, or an argument that was written, lies in its place already
        results = [t.detach() if isinstance(t, torch.Tensor) and _storage(t) not in given else None for t in tree_leaves(out)]
        fresh = _tensors(results)
        self.temporaries += fresh
        self.known |= {_storage(t) for t in fresh}
        only_views = bool(_tensors(out)) and not fresh and not function._schema.is_mutable
        if not (only_views or function.overloadpacket in UNINITIALISED):
            self.work.append((function, *frozen, results))
        return out

    def freeze(self, name, args, kwargs):
        """(args, kwargs) that no later change of a list, or of a tensor's shape by t_() or resize_(), reaches."""
        frozen = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        for t in _tensors(frozen):
            if _storage(t) not in self.known:
                self.known.add(_storage(t))
                self.outside.append((name, t))
        return frozen

    @contextmanager
    def kernels(self):
        """Kernels are recorded as launches: what Triton's interpreter does to run one is not."""
        if door is None:
            yield
            return
        launch = door.launch

        def recorded(kernel, grid, *args, **options):
            self.recording = False
            try:
                self.work.append((launch, *self.freeze(str(kernel), (kernel, grid, *args), options), []))
                launch(kernel, grid, *args, **options)
            finally:
                self.recording = True

        with door.launched_by(recorded):
            yield


class _Calls(TorchFunctionMode):
    """Sees the calls from Python, of which some reach no operation."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if self.recorder.recording and function in HOST_READS:
            raise CaptureError(f"{HOST_READS[function]} in a capture: the host reads what is on the device")
        self.recorder.setting_item = function is torch.Tensor.__setitem__
        try:
            return function(*args, **(kwargs or {}))
        finally:
            self.recorder.setting_item = False


def _refusal(function, args, kwargs):
    """Why an operation cannot be captured; None if it can."""
    packet, tags = function.overloadpacket, function.tags
    if function is aten.lift_fresh.default:
        return "its values come from the host"
    if torch.Tag.data_dependent_output in tags:
        return "the host reads what is on the device"
    if packet in INDEXED_READS | INDEXED_WRITES:  # a mask is turned into indices, unless one value is filled in
        masked = any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        filled = packet in INDEXED_WRITES and args[2].numel() == 1
        return "a mask's count of elements is a shape" if masked and not filled else None
    if torch.Tag.dynamic_output_shape in tags:
        return "a shape that depends on values"
    if torch.Tag.nondeterministic_seeded in tags and _argument(function, "dropout_p", args, kwargs) != 0:
        return "random numbers"
    return None


def _argument(function, name, args, kwargs):
    """An argument by its name in the operation's schema, given or by default; None if there is no such argument."""
    for i, argument in enumerate(function._schema.arguments):
        if argument.name == name:
            return kwargs.get(name, args[i] if i < len(args) else argument.default_value)
    return None


def _tensors(tree):
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def _storage(tensor):
    """The memory that a tensor and its views share, as a number."""
    return tensor.untyped_storage()._cdata
