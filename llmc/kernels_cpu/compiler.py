"""How numba compiles the kernels, once for a processor, and where their code is kept."""

import fcntl
import gc
import hashlib
import os
import secrets
import time
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path

import numba
from numba import njit
from numba.core.caching import IndexDataCacheFile
from numba.core.codegen import JITCodeLibrary, get_host_cpu_features
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import FunctionPass, register_pass
from numba.core.environment import lookup_environment
from numba.core.typed_passes import ParforPreLoweringPass
from numba.parfors.parfor import Parfor

from llmc.kernels_cpu.notice import compiling
from llmc.processor import cpu_has_amx

COMPILED_AFTER_S, LOOK_AGAIN_S = 60, 0.02  # seconds that another process may compile a kernel before it counts as hung; between looks
AMX_FEATURES = {"amx-tile", "amx-bf16"}
if numba.config.CPU_NAME is None and numba.config.CPU_FEATURES is None and "+avx512f" in get_host_cpu_features().split(","):
    numba.config.CPU_FEATURES = get_host_cpu_features() + ",-prefer-256-bit"  # else LLVM uses half of the vector width on Intel
# a division by zero gives infinity, not an exception. No kernel is called from C, and nothing that kernels call is called from Python: the
# wrappers for that are left out
OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}

# A helper is inlined into every kernel that calls it. Compiled on its own, it would exist in several copies, in which its sums (plus)
# could be vectorized differently, and which copy a kernel gets would depend on what was compiled, or loaded from disk, first.
helper = njit(**OPTIONS, no_cpython_wrapper=True, forceinline=True)
# A shared function uses no plus, so every copy gives the same bits: it is compiled once for all kernels that call it.
shared = njit(**OPTIONS, no_cpython_wrapper=True)


# how numba's names begin for the parts of a prange loop: a function of its body, which calls helpers, a wrapper of that, and a wrapper of
# the wrapper. Should it rename one, compiling takes longer
PRANGE_PARTS = ("__numba_parfor_gufunc", "<numba.np.ufunc.wrappers", "parallelgufuncwrapper")


class _Part(JITCodeLibrary):
    """A kernel's code, or code that is linked into it, translated to machine code only when something asks for its address, as happens for
    whole kernels alone. numba by itself translates every part, and optimizes those of a prange loop, each of which holds all that it
    calls, one after the other. Here only helpers are optimized before they are linked, so that every kernel has the same sums of them.

    No kernel or helper may call itself.
    """

    _translated = False

    def _optimize_final_module(self):
        if not self.name.startswith(PRANGE_PARTS):
            super()._optimize_final_module()

    def _finalize_final_module(self):
        self._finalized = True
        if self._object_caching_enabled and self._compiled_object:  # a kernel that was on disk, called by this one
            self._translate()

    def _translate(self):
        super()._finalize_final_module()
        self._translated = True
        for variable in self._final_module.global_variables:  # those of the parts are set here, as they are where code comes from disk
            environment = lookup_environment(variable.name)
            if environment is not None:
                type(self._codegen).set_env(self._codegen, variable.name, environment)

    def get_pointer_to_function(self, name):
        self._ensure_finalized()
        if not self._translated and any(function.name == name for function in self.get_defined_functions()):
            self._translate()
        return super().get_pointer_to_function(name)


@contextmanager
def _parts_of_a_kernel(codegen):
    """Inside, codegen makes all code a _Part."""
    if codegen._library_class is _Part:  # a kernel that another one calls
        yield
        return

    def set_env(name, environment):
        if codegen._engine.is_symbol_defined(name):  # else it was not translated: it has no address, and is set with the whole
            type(codegen).set_env(codegen, name, environment)

    codegen._library_class, codegen.set_env = _Part, set_env
    try:
        yield
    finally:
        del codegen._library_class, codegen.set_env


class _Loop(Parfor):
    """A prange loop whose hash is not its address. numba names the function of its body by that, and two processes of which one is forked
    from the other, or both from a third, have other things at the same address. Of two bodies of one name, whichever was loaded from disk
    first would run as both.
    """

    def __hash__(self):
        return self.number


@register_pass(mutates_CFG=False, analysis_only=False)
class _NameAndCallBodies(FunctionPass):
    """A loop's body has its kernel's options, and would get a wrapper to be called from Python, which nothing does: that is left out. And
    it gets a name that no other has, see _Loop."""

    _name = "name_and_call_bodies"

    def __init__(self):
        super().__init__()  # numba requires that every pass has this

    def run_pass(self, state):
        loops = (node for block in state.func_ir.blocks.values() for node in block.body if isinstance(node, Parfor))
        for loop in loops:
            loop.flags = loop.flags.copy()
            loop.flags.no_cpython_wrapper = True
            object.__setattr__(loop, "__class__", _Loop)  # to its own __setattr__ all that is set is an operand
            loop.number = secrets.randbits(60)
        return False


class KernelCompiler(CompilerBase):
    """numba's compiler in half the time: what it does to parts of a kernel by themselves is left out. Results have the same bits."""

    def define_pipelines(self):
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(_NameAndCallBodies, ParforPreLoweringPass)
        passes.finalize()
        return [passes]

    def compile_extra(self, function):
        compiling(kept=not _nowhere)
        collects = gc.isenabled()
        gc.disable()  # the compiler makes millions of objects, and looking for unused ones takes an eighth of its time
        try:
            with _parts_of_a_kernel(self.state.targetctx.codegen()):
                return super().compile_extra(function)
        finally:
            if collects:
                gc.enable()


_nowhere = set()  # names of kernels for which there is no folder that could keep them


def jit(function):
    """A kernel, compiled at its first call with arguments of each combination of types. Its prange loops run in parallel.

    Compiled code is kept beside the source or in the user's cache folder; where neither can be written to, it is not kept.
    """
    options = OPTIONS | {"parallel": True, "pipeline_class": KernelCompiler}
    try:
        kernel = njit(**options, cache=True)(function)
    except RuntimeError:
        _nowhere.add(function.__name__)
        return njit(**options)(function)
    kept = kernel._cache._cache_file
    name = kept._index_name.removesuffix(".nbi") + "-amx" * cpu_has_amx()  # Linux may refuse it where the processor has it
    kernel._cache._cache_file = KeptKernels(kept._cache_path, name, sources())
    return kernel


class KeptKernels(IndexDataCacheFile):
    """The compiled code of a kernel on disk, safe for several processes at once: an index by argument types, and a file for each.

    numba's own class writes the index before the file, and two processes may choose the same file: a third would load and run code
    that was compiled for other types. So only one process at a time reads or writes here, and the index is written last. A process
    that finds no code keeps the lock until it has saved what it compiled, so the ranks of a run wait for one of them to compile.
    """

    _lock = None  # an open file, locked while this process reads, compiles or writes

    def load(self, key):
        self._take_lock()
        data = _or_nothing(super().load, key)
        if data is not None:
            self._release_lock()
        return data

    def save(self, key, data):
        self._take_lock()
        try:
            overloads = _or_nothing(self._load_index) or {}
            names = (self._data_name(number) for number in count(1))
            name = overloads.get(key) or next(name for name in names if name not in overloads.values())
            self._save_data(name, data)
            self._save_index(overloads | {key: name})
        except OSError:  # a full disk: the kernel is compiled again next time
            pass
        finally:
            self._release_lock()

    def _take_lock(self):
        if self._lock:
            return
        try:
            os.makedirs(self._cache_path, exist_ok=True)
            lock = open(os.path.join(self._cache_path, self._index_name + ".lock"), "w")
        except OSError:  # then no process can save here either
            return
        deadline = time.monotonic() + COMPILED_AFTER_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
                return
            except BlockingIOError:
                time.sleep(LOOK_AGAIN_S)
            except OSError:  # a file system that has no locks
                return

    def _release_lock(self):
        if self._lock:
            self._lock.close()
            self._lock = None


def is_to_be_kept(kernel, types) -> bool:
    """Whether code of a kernel for arguments of these types will be kept on disk once it is compiled, and is not there yet."""
    kept = getattr(kernel._cache, "_cache_file", None)
    if not isinstance(kept, KeptKernels) or types in kernel.overloads:
        return False
    return kernel._cache._index_key(types, kernel.targetctx.codegen()) not in (_or_nothing(kept._load_index) or {})


def _or_nothing(read, *args):
    """read(*args), or None if a file is damaged, as after a loss of power: pickle may then raise any exception."""
    try:
        return read(*args)
    except Exception:
        return None


@cache
def sources():
    """A hash of what kernels are compiled from: their own files, and those whose constants they use."""
    folder = Path(__file__).resolve().parent
    constants = [folder.parent / "memory" / "tuning.py", folder.parent / "units.py"]
    files = sorted([*folder.glob("*.py"), *(folder.parent / "layers").glob("*.py"), *constants])
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).digest()


def processor_features() -> frozenset:
    """LLVM's names of the features numba compiles for: this processor's unless NUMBA_CPU_NAME or NUMBA_CPU_FEATURES says otherwise."""
    features = numba.config.CPU_FEATURES
    features = get_host_cpu_features() if features is None else features
    known = frozenset(feature[1:] for feature in features.split(",") if feature.startswith("+"))
    return known if cpu_has_amx() else known - AMX_FEATURES
