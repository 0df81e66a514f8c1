"""numba's kernels against the torch functions of the same names: the tests of Triton's kernels, run once more, and what only these have."""

import copy
import ctypes
import errno
import gc
import inspect
import itertools
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
import weakref
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="no numba here, and so no kernels for a CPU: python -m pip install numba", exc_type=ImportError)

from numba import njit
from numba.core.codegen import JITCodeLibrary
from numba.core.errors import NumbaError
from numba.core.registry import cpu_target

import llmc.kernels_cpu
import test_kernels
from case_a import write_case_a
from llmc.gpt2 import GPT2
from llmc.kernels_cpu import attention, compiler, door, matmul, packing, tiles, why_no_cpu_kernels
from llmc.kernels_cpu.compiler import KeptKernels
from llmc.kernels_cpu.functions import numba_attention, numba_operations
from llmc.layers.functions import cpu_attention, torch_operations
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.tuning import MATMUL_ROWS, NUMBA_TILE_ROWS, TILE_DEPTH
from llmc.operations import matmul_operations, other_matmuls
from llmc.rehearsal import TINY, _compile, compile_kernels, rehearse
from oracle import assert_as_good_as_eager
from test_kernels import (  # noqa: F401
    CONFIG, made_whole, names_and_arguments, precisions, results, torch_operations_in_halves,
    test_a_checkpoint_of_a_model_with_kernels_gives_back_every_bit_and_changes_none,
    test_a_weight_that_is_nan_stays_one, test_adamw_clips_as_torch_does_whatever_the_norm,
    test_adamw_has_torch_s_bits_in_every_form_step_after_step, test_adamw_of_shares_has_the_bits_of_the_whole_tensors,
    test_adamw_leaves_the_rest_of_the_arenas_alone,
    test_adamw_rounds_ties_as_torch_does, test_adamw_takes_the_norm_where_it_lies_or_as_a_number,
    test_classifier_finds_the_largest_logit_in_any_block, test_classifier_is_cross_entropy_and_its_gradient,
    test_classifier_survives_logits_beyond_exp, test_encoder_backward_has_torch_s_bits, test_encoder_backward_takes_every_seed,
    test_encoder_backward_of_a_part_of_the_vocabulary_has_torch_s_bits,
    test_encoder_forward_has_torch_s_bits, test_every_recompute_level_gives_the_same_bits,
    test_fp32_gradients_of_bf16_weights_have_the_same_bits_at_the_lowest_and_the_highest_level,
    test_gelu_backward_into_fp32_gradients_has_the_bits_of_an_fp32_model_s,
    test_gelu_both_ways_has_torch_s_bits_and_sums_the_bias_below_its_gradient, test_gelu_may_write_over_its_input,
    test_gelu_of_all_kinds_of_numbers_has_torch_s_bits, test_global_norm, test_global_norm_tells_of_nan_wherever_it_is,
    test_golden_losses_of_llmc, test_gradients_are_those_of_the_torch_operations_but_for_noise,
    test_layernorm_backward, test_layernorm_backward_into_fp32_gradients_has_the_bits_of_an_fp32_model_s,
    test_layernorm_backward_without_a_projection_below_gives_the_other_gradients_the_same_bits, test_layernorm_forward,
    test_layernorm_of_a_constant_row_is_its_bias, test_losses_of_three_steps_are_those_of_the_torch_operations_but_for_noise,
    test_normalising_from_given_statistics_has_torch_s_bits,
    test_residual_and_layernorm_in_one_are_the_two_one_after_the_other,
    test_sampling_and_evaluation_are_those_of_the_torch_operations_but_for_noise,
    test_updates_of_a_model_have_the_bits_of_the_torch_operations, torch_s_adamw,
)  # fmt: skip
from test_layers import dtypes, judge_rows, same_bits
from test_loop import inputs, ran
from test_resume import bf16_model_bytes

REPO = Path(__file__).resolve().parent.parent


def said_by(program: str, *words, **environment) -> str:
    """What a program, given as text, prints in a process of its own, where it ends well. It finds what is in tests/ too."""
    environment = os.environ | {"PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}"} | environment
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def kernels():
    return SimpleNamespace(**made_whole(numba_operations()))


@pytest.fixture
def own():
    return "numba"


@pytest.fixture
def small_chunks():
    """What the interpreter of Triton's kernels takes in smaller pieces, to be done with them, is done soon enough here."""


little_work = small_chunks


@pytest.fixture(autouse=True)
def as_in_the_program(monkeypatch, plain_torch):
    """On the CPU, card or not."""
    monkeypatch.setattr(test_kernels, "DEVICE", "cpu")


def test_kernels_have_the_names_and_arguments_of_the_torch_functions():
    """Of all but those that a CPU's attention, which sums its bias itself, does not call. torch's for one row also takes a kind."""
    torchs = {
        name: [argument for argument in arguments if argument.name != "kind"]
        for name, arguments in names_and_arguments(torch_operations_in_halves() | cpu_attention()).items()
        if name not in ("pack_gradients", "matmul_dbias")
    }
    assert names_and_arguments(numba_operations() | numba_attention()) == torchs


def test_only_the_door_and_the_compiler_know_numba():
    imports = re.compile(r"^\s*(import|from)\s+(numba|llvmlite)\b", re.M)
    files = [*(REPO / "llmc").rglob("*.py"), REPO / "train_gpt2.py"]
    knowing = {str(f.relative_to(REPO)) for f in files if imports.search(f.read_text())}
    assert knowing == {"llmc/kernels_cpu/door.py", "llmc/kernels_cpu/compiler.py"}


@dtypes
@pytest.mark.parametrize("name", [name for name in torch_operations() if name in made_whole(numba_operations())])
def test_neither_what_buffers_held_nor_the_number_of_threads_matters_to_a_bit(kernels, name, dtype):
    first = results(kernels, name, dtype, nan)
    assert not any(out.isnan().any() for out in first)
    for threads, garbage in ((1, -3e30), (2, nan), (5, -3e30)):
        torch.set_num_threads(threads)
        assert all(same_bits(a, b) for a, b in zip(first, results(kernels, name, dtype, garbage))), threads


@dtypes
def test_a_row_of_logits_with_a_nan_has_no_loss_and_other_rows_know_nothing_of_it(kernels, dtype):
    """Of either sign; and the same of an infinity, or of nothing but minus infinity. Minus infinity alone has no mass."""
    V, logits = 40, torch.zeros(6, 44, dtype=dtype)
    logits[1, 3], logits[2, 17], logits[3, 39], logits[4, :V], logits[5, 1:V] = nan, -nan, inf, -inf, -inf
    losses, targets = torch.zeros(6), torch.zeros(6, dtype=torch.int64)
    kernels.fused_classifier_inplace(logits, losses, targets, {}, V=V, dloss=1.0, rows_at_once=1)
    assert losses[1:5].isnan().all() and logits[1:5, :V].isnan().all()
    assert abs(losses[0] - np.log(V)) < 1e-6 and losses[5] == 0
    assert not logits[0].isnan().any() and not logits[5].any()


def computed(function, x):
    """function of each of the numbers, as a kernel has it."""

    @door.njit
    def compute(out, x):
        for i in range(len(x)):
            door.store(out, i, function(door.load(x, i)))

    x = np.asarray(x, np.float32)
    out = np.full_like(x, nan)
    compute(out, x)
    return out


@pytest.mark.parametrize(
    "function, exactly, least, ulps", [(door.exp_below_zero, np.exp, 86.9, 1), (door.exp2_below_zero, np.exp2, 125, 2)], ids=["exp", "exp2"]
)
def test_powers_are_off_by_an_ulp_or_two_at_most_and_nothing_where_they_would_soon_be_subnormal(function, exactly, least, ulps):
    x = np.concatenate([-np.geomspace(1e-30, least, 200_000), -np.linspace(0, least, 200_000)]).astype(np.float32)
    out, exact = computed(function, x), exactly(x.astype(np.float64))
    assert (abs(out - exact) <= ulps * np.spacing(exact.astype(np.float32))).all()
    beyond = computed(function, [-least - 0.2, -1.2 * least, -1e4, -3e38, -inf, nan])
    assert beyond[:5].tolist() == [0.0] * 5 and np.isnan(beyond[5])


def test_whole_powers_of_two_are_exact_and_none_is_above_one():
    whole = np.arange(-125, 1)
    assert (computed(door.exp2_below_zero, whole) == 2.0**whole).all()
    above = [1e-6, 0.3, 500, 3e38, inf, 0]  # a sum that was rounded may be above what was summed
    assert computed(door.exp2_below_zero, above).tolist() == [1.0] * 6


@pytest.mark.parametrize("view", [door.array, door.factors])
@dtypes
def test_what_a_kernel_sees_of_a_tensor_is_made_once_and_is_its_memory(view, dtype):
    """Also of copies, which have the attributes of the original, and where a tensor is given other memory. It dies with the tensor."""
    x = torch.zeros(4, 6, dtype=dtype)
    assert view(x) is view(x) and view(x).ctypes.data == x.data_ptr() and view(x).nbytes == x.nbytes
    assert view(x.view(-1)) is not view(x)
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert len(pickle.dumps(other)) < 2000 and all(kept.array is None for kept in vars(other).values())
        assert view(other).ctypes.data == other.data_ptr() != x.data_ptr()
    seen, memory = weakref.ref(other), weakref.ref(view(other))
    del other
    assert seen() is None and memory() is None
    x.set_(torch.ones(9, 2, dtype=dtype))
    assert view(x).ctypes.data == x.data_ptr() and view(x).nbytes == x.nbytes


def test_a_thread_s_own_numbers_begin_at_a_line_of_cache():
    @door.njit
    def places(n):
        arrays = [door.aligned(n + i) for i in range(40)]  # all at once, or each would lie where the one before did
        return [x.ctypes.data % door.LINE for x in arrays], [len(x) - n for x in arrays]

    for n in (1, 16, 770):
        assert places(n) == ([0] * 40, list(range(40)))


def test_only_whole_lines_are_streamed_and_only_what_amx_multiplied(monkeypatch):
    out, pairs, numbers = torch.zeros(4, 192, dtype=BF16), torch.zeros(2, dtype=BF16), torch.zeros(2)
    assert out.data_ptr() % door.LINE == 0
    for there in (False, True):
        monkeypatch.setattr(tiles, "MULTIPLIES_TILES", there)
        assert packing.streams_lines(out, 64, pairs) == packing.streams_lines(out.view(-1)[32:], 192, pairs) == int(there)
        assert not packing.streams_lines(out, 80, pairs) and not packing.streams_lines(out.view(-1)[2:], 64, pairs)
        assert not packing.streams_lines(out, 64, numbers)


@pytest.mark.parametrize("kind", [np.float32, np.uint16])
def test_a_row_that_is_streamed_past_the_caches_has_the_bits_of_one_that_is_not(kind):
    @door.njit
    def write(out, x, streams):
        packing.write_row(out, 32, x, 5, 64, np.float32(0.3), streams)

    x = np.random.default_rng(0).standard_normal(80).astype(np.float32)
    x[7], x[9], x[11] = nan, -inf, 1e-40
    want = torch.from_numpy(np.where(np.isnan(x), door.F1, x)[5:69] * np.float32(0.3)).to(torch.float32 if kind is np.float32 else BF16)
    memory = [np.full(128 + door.LINE, 7, kind) for _ in range(2)]
    for streams, room in enumerate(memory):
        out = room[-room.ctypes.data % door.LINE // room.itemsize :][:128]
        write(out, x, streams)
        memory[streams] = out.copy()
    assert memory[0].tobytes() == memory[1].tobytes() and (memory[0][:32] == 7).all() and (memory[0][96:] == 7).all()
    written, want = memory[0][32:96], door.array(want).view(kind)
    assert (np.delete(written, 2) == np.delete(want, 2)).all() and written[2] != want[2]  # bf16 has NaNs that are not torch's


RUN = """
import torch
from llmc.kernels_cpu import why_no_cpu_kernels
from llmc.kernels_cpu.global_norm import _global_norm as kernel
from llmc.kernels_cpu.notice import told_when_compiling

with told_when_compiling(print):
    why_not = why_no_cpu_kernels()
print(why_not or (sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values())))
"""


def test_compiled_kernels_are_kept_until_any_of_their_sources_changes_or_not_at_all_where_nothing_can_be_written(tmp_path):
    """Also what a kernel imports, of which numba knows nothing."""
    shutil.copytree(REPO / "llmc", tmp_path / "llmc", ignore=shutil.ignore_patterns("__pycache__"))
    package, nowhere = tmp_path / "llmc" / "kernels_cpu", str(tmp_path / "file")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")}
    environment |= {"HOME": nowhere, "XDG_CACHE_HOME": nowhere, "PYTHONDONTWRITEBYTECODE": "1"}

    def said():
        done = subprocess.run([sys.executable, "-c", RUN], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    compiled = ["compiling kernels for this processor, which may take a minute", "(0, 1)"]
    assert said() == compiled
    assert said() == ["(1, 0)"]
    with open(package / "door.py", "a") as file:
        file.write("# changed\n")
    assert said() == compiled
    shutil.rmtree(package / "__pycache__")
    (package / "__pycache__").touch()
    (tmp_path / "file").touch()
    assert said() == [
        f"{compiled[0]}, in every run: neither their folder nor the home folder can be written to; name a folder in NUMBA_CACHE_DIR",
        "(0, 1)",
    ]
    environment["NUMBA_CACHE_DIR"] = nowhere
    unusable = f"NUMBA_CACHE_DIR={nowhere} cannot be written to"
    assert said() == [f"{compiled[0]}, in every run: {unusable}; name a folder in NUMBA_CACHE_DIR", "(0, 1)"]


def test_that_kernels_are_compiled_is_told_once_and_to_whoever_listens():
    said = []
    llmc.kernels_cpu.notice.compiling()
    with llmc.kernels_cpu.notice.told_when_compiling(said.append):
        assert not said
        for _ in range(2):
            llmc.kernels_cpu.notice.compiling()
    llmc.kernels_cpu.notice.compiling()
    assert len(said) == 1


@precisions
def test_a_rehearsal_without_kernels_names_those_of_one_with_them(precision, monkeypatch):
    """In the same order, with the same types: so all can be compiled beforehand."""
    launched, launch = [], door.launch

    def counted(kernel, *args):
        launched.append((kernel, door.types_of(args)))
        launch(kernel, *args)

    options = PlanOptions(TINY, 1, 4, precision, kernels="numba", recompute=2, sample_length=1)
    with door.noted() as noted:
        rehearse(options)
    monkeypatch.setattr(door, "launch", counted)
    rehearse(options)
    assert noted == launched and len(set(noted)) > 10


@pytest.mark.parametrize("flags", ["-r 0", "-r 6 --optimizer-state bf16 --grad-dtype fp32", "-x 0"])
@precisions
def test_a_run_calls_nothing_that_was_not_rehearsed(precision, flags, tmp_path, monkeypatch):
    """With steps of several micro-steps, evaluations and samples: none of them waits for a compiler."""
    launched, launch = [], door.launch

    def counted(kernel, *args):
        launched.append((kernel, door.types_of(args)))
        launch(kernel, *args)

    def rehearsed(run):
        _compile.cache_clear()
        launched.clear()
        compile_kernels(run.plan.options)
        known.update(launched)
        launched.clear()

    known, case = set(), write_case_a(tmp_path)
    if precision == "bf16":
        (case / "model.bin").write_bytes(bf16_model_bytes((case / "model.bin").read_bytes()))
    monkeypatch.setattr(door, "launch", counted)
    argv = [*inputs(case), "-b 4 -t 32 -d 256 -x 2 -v 1 -m 1 -s 1 -g 4 --kernels numba"]
    ran(*argv, flags, faked={"compile_kernels": rehearsed})
    assert launched and not set(launched) - known


KEEP = """
import sys
from llmc.kernels_cpu.compiler import KeptKernels

folder, me = sys.argv[1], int(sys.argv[2])
kept = KeptKernels(folder, "kernel", b"sources")
for turn in range(50):
    kept.save((me, turn), (me, turn))
    for other in range(4):
        assert kept.load((other, turn)) in ((other, turn), None), "code of other types"
"""


def test_processes_that_keep_kernels_at_once_never_find_another_s_and_lose_none(tmp_path):
    """numba's own way fails both."""
    processes = [subprocess.Popen([sys.executable, "-c", KEEP, tmp_path, str(me)], cwd=REPO) for me in range(4)]
    assert [process.wait() for process in processes] == [0] * 4
    kept = KeptKernels(tmp_path, "kernel", b"sources")
    assert all(kept.load((me, turn)) == (me, turn) for me in range(4) for turn in range(50))
    assert KeptKernels(tmp_path, "kernel", b"other sources").load((0, 0)) is None


@pytest.mark.parametrize("name", ["kernel", "kernel.1"])
@pytest.mark.parametrize("damage", [b"", b"cut", None])
def test_kept_kernels_that_are_damaged_are_compiled_and_kept_again(tmp_path, name, damage):
    """An index or code: empty, or cut, as a loss of power leaves them."""
    kept = KeptKernels(tmp_path, "kernel", b"sources")
    for number in range(3):
        kept.save(("key", number), list(range(1000)))
    (path,) = tmp_path.glob(f"{name}.nb[ic]")
    path.write_bytes(path.read_bytes()[:-5] if damage is None else damage)
    for number in range(3):
        if kept.load(("key", number)) is None:
            kept.save(("key", number), list(range(1000)))
        assert kept.load(("key", number)) == list(range(1000))


def test_where_a_disk_is_full_kernels_are_not_kept(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = KeptKernels(tmp_path, "kernel", b"sources")
    monkeypatch.setattr(KeptKernels, "_save_data", full)
    kept.save("key", "code")
    assert kept.load("key") is None


BOTH = """
import hashlib, sys, torch
from llmc.kernels_cpu import compiler

if sys.argv[1:]:
    from numba.core.compiler import Compiler
    compiler.KernelCompiler = Compiler
from llmc.kernels_cpu.layernorm import _layernorm_forward, layernorm_forward, residual_layernorm_forward

assert _layernorm_forward._compiler.pipeline_class is compiler.KernelCompiler

torch.manual_seed(0)
x, residual, weight, bias = torch.randn(64, 768), torch.randn(64, 768), torch.randn(768), torch.randn(768)
results = []
for forward, inputs in ((layernorm_forward, ()), (residual_layernorm_forward, (x.clone(),)))[: 1 if sys.argv[1:] else 2]:
    out, mean, rstd = torch.empty(64, 768), torch.empty(64), torch.empty(64)
    forward(*inputs, out, mean, rstd, residual if inputs else x + residual, weight, bias, {})
    results.append(b"".join(t.numpy().tobytes() for t in (out, mean, rstd)))
print(results[0] == results[-1], hashlib.sha256(results[0]).hexdigest())
"""


def test_kernels_give_the_same_bits_whether_just_compiled_or_kept_or_compiled_as_numba_would(tmp_path):
    """A function that several kernels call must be a part of each: else it is the first that was loaded, from whichever. And what is left
    out of numba's way of compiling must not change a bit."""

    def run(cache, *words):
        return said_by(BOTH, *words, NUMBA_CACHE_DIR=str(tmp_path / cache)).split()

    compiled, kept, numba_s = run("ours"), run("ours"), run("another", "as numba would")
    assert compiled == kept == numba_s and compiled[0] == "True"


def test_of_a_kernel_only_the_whole_is_translated_to_machine_code(monkeypatch):
    """Neither its helpers nor what becomes of a loop, which in numba's own way are translated too; and only helpers are optimized alone."""
    done = {"_optimize_final_module": [], "_finalize_specific": []}  # numba's names of the two
    for method, names in done.items():

        def noted(self, names=names, function=getattr(JITCodeLibrary, method)):
            names.append(self.name.split(".")[-1])
            function(self)

        monkeypatch.setattr(JITCodeLibrary, method, noted)

    @door.helper
    def twice(x):
        return x + x

    def double(x):
        for i in door.prange(len(x)):
            x[i] = twice(x[i])

    x = np.arange(5, dtype=np.float32)
    njit(**compiler.OPTIONS, parallel=True, pipeline_class=compiler.KernelCompiler)(double)(x)
    optimized, translated = done.values()
    for names in optimized, translated:
        names[:] = [name for name in names if name != "nrt"]  # numba's runtime, once in a process
    assert optimized == ["twice", "double"] and translated == ["double"] and x.tolist() == [0, 2, 4, 6, 8]
    njit(**compiler.OPTIONS, parallel=True)(double)(x)
    assert len(translated) >= 1 + 4 and x.tolist() == [0, 4, 8, 12, 16]


NESTED = """
import sys
import numpy as np
from llmc.kernels_cpu.door import jit, prange, shared

@shared
def check(x, i):
    if x <= 0:
        raise ValueError("not positive", i)

@jit
def inner(x):
    for i in prange(len(x)):
        x[i] += 1

@jit
def outer(x):
    inner(x)
    for i in prange(len(x)):
        x[i] *= 2
    for i in range(len(x)):
        check(x[i], i)

x = np.arange(3.0)
(inner if sys.argv[1] == "inner" else outer)(x)
print(x.tolist())
if sys.argv[1] == "outer":
    try:
        outer(np.arange(5.0) - 3)
    except ValueError as error:
        print(error.args)
"""


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_a_kernel_may_call_another_and_say_what_is_wrong_whichever_was_compiled_first(tmp_path, first):
    """What was is read from disk."""
    (tmp_path / "nested.py").write_text(NESTED)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPO)}
    said = {"inner": "[1.0, 2.0, 3.0]\n", "outer": "[2.0, 4.0, 6.0]\n('not positive', 0)\n"}
    for which in (first, "outer"):
        command = [sys.executable, "nested.py", which]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (0, said[which]), (which, done.stderr)


def test_code_that_is_part_of_a_kernel_can_be_part_of_other_code_too_and_numba_s_way_is_back_after_an_error():
    @door.shared
    def thrice(x):
        return x + x + x

    @door.njit
    def fails(x):
        return x.no_such_name

    @door.njit
    def alone(x):
        return thrice(x)

    def kernel(x, function):
        for i in door.prange(len(x)):
            x[i] = function(x[i])

    compiled, collects = njit(**compiler.OPTIONS, parallel=True, pipeline_class=compiler.KernelCompiler)(kernel), gc.isenabled()
    x = np.arange(3, dtype=np.float32)
    with pytest.raises(NumbaError, match="no_such_name"):
        compiled(x, fails)
    assert gc.isenabled() == collects and not {"_library_class", "set_env"} & set(vars(cpu_target.target_context.codegen()))
    compiled(x, thrice)
    assert x.tolist() == [0, 3, 6] and alone(x).tolist() == [0, 9, 18] and alone(np.float32(2)) == 6


def test_the_reason_why_there_are_no_kernels_is_one_line(monkeypatch):
    """numba missing, or not to be imported, as with a numpy newer than it knows."""
    assert why_no_cpu_kernels() == ""

    def refuse(*args):
        raise ImportError("Numba needs NumPy 2.4 or less.\nGot NumPy 9.9.")

    monkeypatch.setattr(door, "launch", refuse)
    assert why_no_cpu_kernels() == "numba's kernels do not run here: Got NumPy 9.9."
    monkeypatch.setattr(llmc.kernels_cpu, "find_spec", lambda name: None)
    assert why_no_cpu_kernels() == "numba is not installed (pip install numba)"


PRODUCT = """
import sys
from itertools import product as product_of
import numpy as np
import torch
from llmc.kernels_cpu import door, matmul
from llmc.kernels_cpu.packing import pack_left, pack_right
from llmc.kernels_cpu.tiles import (
    LANES, LARGE, MULTIPLIES_PAIRS, MULTIPLIES_TILES, Ahead, block_tile_of, close_tiles, multiply, open_tiles, whole_depth,
)
from llmc.memory.tuning import NUMBA_TILE_ROWS


@door.njit
def product(c, a, b, a_steps, b_steps, left, right, sizes, adds, upper):
    rows, columns, depth = sizes
    shapes, all_depth = np.empty(64, np.uint8), whole_depth(left, depth)
    pack_left(left, 0, all_depth, rows, all_depth, a, 0, *a_steps, rows, depth)
    pack_right(right, columns, 0, columns, all_depth, b, 0, *b_steps, columns, depth)
    open_tiles(left, shapes)
    ahead = Ahead(b, 0, depth, columns, 1, 0, columns)
    multiply(c, 0, columns, left, 0, all_depth, right, columns, rows, columns, all_depth, adds, upper, ahead)
    close_tiles(left, shapes)


def numbers(x, kind):
    flat = np.ascontiguousarray(x).ravel()
    return flat if kind == np.float32 else (flat.view(np.uint32) >> 16).astype(np.uint16)


NAN, chance = 0x7FC07FC0, np.random.default_rng(0)
for kind in (np.float32, np.uint32):
    tile = block_tile_of(kind == np.uint32)
    rows, columns, depth = 3 * tile.rows, 2 * max(tile.columns, LANES), 83
    a, b, before = (chance.integers(-99, 100, shape).astype(np.float32) for shape in ((rows, depth), (depth, columns), (rows, columns)))
    all_depth = -(-depth // (tile.depth * (1 + (kind == np.uint32)))) * tile.depth  # factors
    room = [np.full(96 * n, NAN, np.uint32).view(kind) for n in (rows, columns)]
    for a_turned in (False, True):
        for b_turned in (False, True):
            given = numbers(a.T if a_turned else a, kind), numbers(b.T if b_turned else b, kind)
            steps = (1, rows) if a_turned else (depth, 1), (depth, 1) if b_turned else (1, columns)
            upper = numbers(np.triu(a).T if a_turned else np.triu(a), kind), given[1]
            for adds, (triangle, matrices) in product_of((0, 1), ((0, given), (1, upper))):
                c = before.copy() if adds else np.full_like(before, np.nan)
                product(c.ravel(), *matrices, *steps, *room, (rows, columns, depth), adds, triangle)
                assert (c == (np.triu(a) if triangle else a) @ b + adds * before).all(), (kind, a_turned, b_turned, adds, triangle)
                assert all((x[n * all_depth :].view(np.uint32) == NAN).all() for x, n in zip(room, (rows, columns))), "beyond its place"
inp, weight = (torch.from_numpy(chance.integers(-9, 10, shape)).float() for shape in ((9, 70), (131, 70)))
sums = torch.full((2 * matmul.PANEL, matmul.PANEL), torch.nan)
kinds = (torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)
for dtype, factors in kinds if str(LARGE) != sys.argv[1] else ():  # elsewhere other tests are of the same code
    out = torch.full((9, 131), torch.nan, dtype=dtype)
    panels = torch.full((2, matmul.DEPTH, matmul.PANEL + NUMBA_TILE_ROWS, 4 // factors.itemsize), torch.nan, dtype=factors)
    room = {"matmul_panels": panels, "matmul_sums": sums, "matmul_packed": panels[0].clone()}
    matmul.matmul_forward(out, inp.to(dtype), weight.to(dtype), scratch=room)
    assert torch.equal(out, (inp @ weight.t()).to(dtype)), (dtype, factors)
print(LANES, MULTIPLIES_PAIRS, MULTIPLIES_TILES)
"""
AVX512 = "avx", "avx2", "fma", "avx512f"
PROCESSORS = {  # what numba is told to compile for, a processor and its features -> lanes, whether pairs have an instruction, and tiles
    "this one": (None, ("16 True True", "16 True False", "16 False False", "8 False False", "4 False False")),
    "AMX": (("skylake-avx512", *AVX512, "avx512bw", "avx512bf16", "amx-tile", "amx-bf16"), ("16 True True", "16 False True")),
    "AVX-512 and bf16": (("skylake-avx512", *AVX512, "avx512bw", "avx512bf16"), ("16 True False", "16 False False")),
    "AVX-512": (("skylake-avx512", *AVX512), ("16 False False",)),
    "AVX2": (("haswell", "avx", "avx2", "fma"), ("8 False False",)),
    "SSE2": (("generic",), ("4 False False",)),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_tiles_multiply_matrices_on_processors_of_all_widths(name):
    """To the bit: whole numbers that bf16 has, and sums that fp32 has. Without an instruction for pairs of bf16, widened ones do."""
    processor, expected = PROCESSORS[name]
    told = {}
    if processor:
        cpu, *features = processor
        if platform.machine() != "x86_64" or not set(features) <= door.processor_features():
            pytest.skip(f"this is no processor with {name}")
        if name == "AVX2" and "avx512f" not in door.processor_features():
            pytest.skip("this one is such a processor")
        told = {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in features)}
    assert said_by(PRODUCT, str(tiles.LARGE), **told).strip() in expected


# ----------------------------------------------------------------------------
# matmuls

# B*T, C, OC: one of each, primes, parts of tiles in rows and columns, several depths with a rest, more rows than are summed up at once
MATMULS = [
    (1, 1, 1), (21, 11, 13), (7, 3, 300), (5, 1100, 65), (67, 769, 130), (1100, 64, 70), (1100, 800, 70), (70, 70, 1100), (33, 768, 2304),
    (300, 2080, 160), (1600, 300, 700),
]  # fmt: skip
matmuls = pytest.mark.parametrize("rows, C, OC", MATMULS)
FP32, BF16 = torch.float32, torch.bfloat16
kinds = pytest.mark.parametrize(  # of numbers, of factors, and of gradients
    "dtype, factors, grad_dtype",
    [(FP32, FP32, FP32), (BF16, BF16, BF16), (BF16, BF16, FP32), (BF16, FP32, BF16), (BF16, FP32, FP32)],
    ids=["fp32", "bf16", "bf16-fp32", "widened", "widened-fp32"],
)


def matmul_room(factors, workers=3, sums=1024, packed=1 << 20, filled=nan):
    each = 4 // factors.itemsize
    return {
        "matmul_panels": torch.full((workers, matmul.DEPTH, matmul.PANEL + NUMBA_TILE_ROWS, each), filled, dtype=factors),
        "matmul_sums": torch.full((workers * sums, matmul.PANEL), filled),
        "matmul_packed": torch.full((packed, each), filled, dtype=factors),
    }


def products(rows, C, OC, dtype, grad_dtype, numbers, accumulate, room):
    """(inp, weight, bias, dout, before), and what the three matmuls make of them; `before` is the gradient added to, or NaN."""
    given = [numbers(*shape).to(dtype) for shape in ((rows, C), (OC, C), (OC,), (rows, OC))]
    before = numbers(OC, C).to(grad_dtype)
    inp, weight, bias, dout = given
    out, unbiased, dinp = (torch.full(shape, nan, dtype=dtype) for shape in ((rows, OC), (rows, OC), (rows, C)))
    dweight = before.clone() if accumulate else torch.full_like(before, nan)
    matmul.matmul_forward(out, inp, weight, bias, scratch=room)
    matmul.matmul_forward(unbiased, inp, weight, scratch=room)
    matmul.matmul_dinput(dinp, dout, weight, scratch=room)
    matmul.matmul_dweight(dweight, dout, inp, accumulate=accumulate, scratch=room)
    return (*given, before if accumulate else torch.zeros_like(before)), (out, unbiased, dinp, dweight)


def expected(given, dtype, grad_dtype, at=torch.float64):
    inp, weight, bias, dout, before = (t.to(at) for t in given)
    exact = bias + inp @ weight.t(), inp @ weight.t(), dout @ weight, before + dout.t() @ inp
    return [t.to(kind) for t, kind in zip(exact, (dtype, dtype, dtype, grad_dtype))]


@matmuls
@kinds
@pytest.mark.parametrize("accumulate", [False, True])
def test_matmuls_of_whole_numbers_are_exact(rows, C, OC, dtype, factors, grad_dtype, accumulate):
    """Every sum is one that fp32 has; bf16 rounds it once."""
    chance = np.random.default_rng(rows)
    found = products(
        rows, C, OC, dtype, grad_dtype, lambda *shape: torch.from_numpy(chance.integers(-9, 10, shape)), accumulate, matmul_room(factors)
    )
    assert all(same_bits(mine, want) for mine, want in zip(found[1], expected(found[0], dtype, grad_dtype)))


@matmuls
@kinds
def test_matmuls_are_as_exact_as_torch_s(rows, C, OC, dtype, factors, grad_dtype):
    """In norm, and of fp32 factors and by AMX in the largest error. Else the two products of a pair are added one after the other, with an
    instruction for pairs too, so a sum in registers has twice the terms: in norm it is then off by 1.6 times what torch's is (on AMD's
    fifth Zen, of 1100 rows into fp32), and one number of 56000 by 2 to 3 times. One that lacked a product would show in the norm.
    """
    largest = factors == FP32 or tiles.MULTIPLIES_TILES
    chance = torch.Generator().manual_seed(1)
    given, found = products(rows, C, OC, dtype, grad_dtype, lambda *s: torch.randn(s, generator=chance), True, matmul_room(factors))
    eager = expected(given, dtype, grad_dtype, torch.float32)
    for mine, theirs, exact in zip(found, eager, expected(given, torch.float64, torch.float64)):
        assert_as_good_as_eager(mine, theirs, exact, largest=largest)


@matmuls
@kinds
def test_neither_threads_nor_the_room_matter_to_a_bit_of_a_product(rows, C, OC, dtype, factors, grad_dtype):
    """Fewer workers than threads, as little room as can be, much, and what it held."""
    runs = []
    smallest = matmul.BLOCK * -(-rows // TILE_DEPTH) * TILE_DEPTH
    little = (1, {"sums": 64, "filled": 3e38}), (5, {"workers": 2, "packed": smallest}), (3, {"sums": 128})
    for threads, room in ((2, {}), *little, (1, {"workers": 30})):
        chance = torch.Generator().manual_seed(1)
        torch.set_num_threads(threads)
        numbers, room = lambda *s: torch.randn(s, generator=chance), matmul_room(factors, **room)
        runs.append(products(rows, C, OC, dtype, grad_dtype, numbers, True, room)[1])
    for other in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(runs[0], other))


@pytest.mark.parametrize("dtype, factors", [(FP32, FP32), (BF16, BF16), (BF16, FP32)], ids=["fp32", "bf16", "widened"])
def test_a_nan_stays_in_its_row_of_a_product(dtype, factors):
    """And one of the weight in its column: what a panel or a pair is filled up with is multiplied with neither."""
    room, inp, weight = matmul_room(factors), torch.ones(9, 13, dtype=dtype), torch.ones(70, 13, dtype=dtype)
    inp[3, ::12], weight[64, ::12] = nan, nan  # first and last, as a row before or behind would be read from
    out = torch.zeros(9, 70, dtype=dtype)
    matmul.matmul_forward(out, inp, weight, scratch=room)
    spoilt = torch.zeros(9, 70, dtype=torch.bool)
    spoilt[3], spoilt[:, 64] = True, True
    assert torch.equal(out.isnan(), spoilt) and (out[~spoilt] == 13).all()


one_rows = pytest.mark.parametrize("C, OC", [(1, 1), (13, 70), (768, 131)])


def products_of_one_row(C, OC, dtype, numbers):
    """(inp, weight, bias), and the product with the bias and without."""
    given = [numbers(*shape).to(dtype) for shape in ((1, C), (OC, C), (OC,))]
    found = [torch.full((1, OC), nan, dtype=dtype) for _ in range(2)]
    matmul.matmul_one_row(found[0], *given)
    matmul.matmul_one_row(found[1], *given[:2])
    return given, found


@one_rows
@dtypes
def test_one_row_of_whole_numbers_is_exact(C, OC, dtype):
    chance = np.random.default_rng(C)
    (inp, weight, bias), found = products_of_one_row(C, OC, dtype, lambda *shape: torch.from_numpy(chance.integers(-9, 10, shape)))
    exact = inp.double() @ weight.double().t()
    assert torch.equal(found[0], (exact + bias).to(dtype)) and torch.equal(found[1], exact.to(dtype))


@one_rows
@dtypes
def test_one_row_is_as_exact_as_torch_s_and_has_the_same_bits_on_any_number_of_threads(C, OC, dtype):
    runs = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        chance = torch.Generator().manual_seed(1)
        given, found = products_of_one_row(C, OC, dtype, lambda *shape: torch.randn(shape, generator=chance))
        runs.append(found)
    inp, weight, bias = given
    exact = bias.double() + inp.double() @ weight.double().t()
    assert_as_good_as_eager(runs[0][0], torch.addmm(bias, inp, weight.t()), exact)
    for other in runs[1:]:
        assert all(same_bits(a, b) for a, b in zip(runs[0], other))


@dtypes
@pytest.mark.parametrize("T, C, NH", [(1, 1, 1), (7, 15, 5), (33, 768, 12)])
def test_attention_row_by_row_over_a_cache_is_the_whole(T, C, NH, dtype):
    judge_rows(attention.attention_one_row, range(T), T, C, NH, dtype)


@dtypes
def test_one_row_s_scores_may_overflow_an_exponential_and_any_number_of_threads_gives_its_bits(dtype):
    """Key 2 has by far the highest score, so that its value is the result; or the lowest, so that the other values, all of them 1, are."""
    C, NH, position, rows = 30, 5, 4, []
    value = torch.arange(C).remainder(7).to(dtype)
    qkvr = torch.tensor([100.0, 0, 1]).repeat_interleave(C).to(dtype).view(1, -1)
    for threads, key in ((1, 100), (3, 100), (1, -100), (3, -100)):
        torch.set_num_threads(threads)
        cache, out = torch.zeros(2, position + 1, C, dtype=dtype), torch.full((1, C), nan, dtype=dtype)
        cache[1] = 1
        cache[0, 2], cache[1, 2] = key, value
        attention.attention_one_row(out, qkvr, cache, position, NH)
        rows.append(out)
    assert same_bits(rows[0], value.view(1, -1)) and same_bits(rows[0], rows[1])
    assert torch.equal(rows[2], torch.ones(1, C, dtype=dtype)) and same_bits(rows[2], rows[3])


def test_a_product_may_begin_anywhere():
    """Also where its rows are whole lines of cache that are not at a line's start."""
    inp, weight = (torch.arange(n * 64).view(n, 64).remainder(m).bfloat16() for n, m in ((40, 5), (96, 7)))
    for start in (0, 2, 32):
        memory = torch.full((40 * 96 + 2 * start,), nan, dtype=BF16)
        out = memory[start : start + 40 * 96].view(40, 96)
        matmul.matmul_forward(out, inp, weight, scratch=matmul_room(BF16))
        assert torch.equal(out, inp @ weight.t()) and memory.isnan().sum() == 2 * start


AT_THE_END_OF_MEMORY = """
import ctypes
import mmap

import torch

from llmc.units import round_up
from test_kernels_cpu import BF16, FP32, MATMULS, attention, matmul, matmul_room
from test_layers import ATTENTIONS, numba_attention_room


def at_the_end(x):  # a copy, behind which begins a page that can be neither read nor written
    memory = mmap.mmap(-1, round_up(x.nbytes, mmap.PAGESIZE) + mmap.PAGESIZE)
    behind = len(memory) - mmap.PAGESIZE
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + behind), mmap.PAGESIZE, 0) == 0
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=behind - x.nbytes).view(x.shape).copy_(x)


def ones(*shape, dtype):
    return at_the_end(torch.ones(shape, dtype=dtype))


for dtype, factors in ((FP32, FP32), (BF16, BF16), (BF16, FP32)):
    for rows, C, OC in MATMULS[:6]:
        room = {name: at_the_end(x) for name, x in matmul_room(factors, workers=1).items()}
        inp, weight, bias, dout = (ones(*shape, dtype=dtype) for shape in ((rows, C), (OC, C), (OC,), (rows, OC)))
        out, dinp, dweight = (ones(*x.shape, dtype=dtype) for x in (dout, inp, weight))
        matmul.matmul_forward(out, inp, weight, bias, scratch=room)
        matmul.matmul_dinput(dinp, dout, weight, scratch=room)
        matmul.matmul_dweight(dweight, dout, inp, accumulate=True, scratch=room)
        assert (out == C + 1).all() and (dinp == OC).all() and (dweight == rows + 1).all()
    for B, T, C, NH in ATTENTIONS:
        planned = numba_attention_room(B, T, C, NH, dtype, workers=1, factors="" if factors == dtype else "fp32")
        room = {name: at_the_end(x) for name, x in planned.items()}
        qkvr, dqkvr = (ones(B, T, 3 * C, dtype=dtype) for _ in range(2))
        atty, datty = (ones(B, T, C, dtype=dtype) for _ in range(2))
        lse, dbias = ones(B, NH, T, dtype=FP32), ones(3 * C, dtype=dtype)
        attention.attention_forward(atty, lse, qkvr, NH, room)
        attention.attention_backward(dqkvr, dbias, datty, qkvr, atty, lse, NH, room, accumulate=False)
        assert (abs(atty - 1) < 1e-2).all()
"""


def test_matmuls_and_attention_neither_read_nor_write_behind_a_tensor():
    """What lies there would not show in a result, but where nothing does, the process would end."""
    said_by(AT_THE_END_OF_MEMORY)


UNWRITTEN = """
from types import SimpleNamespace

import numpy as np
import torch

from llmc.kernels_cpu import door

aligned = door.aligned


@door.shared
def full_of_nan(n):
    room = aligned(n)
    for i in range(n):
        room[i] = np.nan
    return room


door.aligned = full_of_nan
from llmc.kernels_cpu.attention import attention_backward, attention_forward
from test_layers import judge_attention, numba_attention_room

ours = SimpleNamespace(forward=attention_forward, backward=attention_backward, room=numba_attention_room, lse_unit=1.0)
judge_attention(ours, 2, 67, 40, 4, torch.float32, False)
"""


def test_what_a_thread_s_own_numbers_are_at_first_does_not_matter_to_attention(tmp_path):
    """Those of the queries that the last block lacks are of nobody, and are multiplied by zeros: they must be numbers."""
    said_by(UNWRITTEN, NUMBA_CACHE_DIR=str(tmp_path))


LARGE, OF_AVX2 = tiles.Tile(8, 48, 1), tiles.Tile(4, 24, 1)  # of Intel's processors with AVX-512, and of AVX2's; this one may be neither


@pytest.mark.parametrize("tile", [tiles.SMALL, LARGE, OF_AVX2, tiles.AMX], ids=["small", "large", "avx2", "amx"])
@pytest.mark.parametrize("rooms", [1, 2, 6, 64])
def test_pieces_of_a_matmul_fit_the_room_of_any_number_of_workers(rooms, tile):
    """All that is kept at once: a part of the left factor, a panel of the right one, and sums. Parts are as few as that allows."""
    panels, block = rooms * matmul.DEPTH * (matmul.PANEL + NUMBA_TILE_ROWS), matmul.BLOCK
    least, sums = (rooms * rows * matmul.PANEL for rows in (block, MATMUL_ROWS))  # as a small model's plan has, and others
    for K, M, N, workers, where, numbers in itertools.product(
        (1, 32, 33, 768, 4096, 50304), (1, 769, 50304), (1, 31, 768, 3072, 50304), range(1, rooms + 1), range(3),
        (least, sums),
    ):  # fmt: skip
        all_k, packed = -(-K // tile.depth) * tile.depth, max(1 << 20, block * -(-K // TILE_DEPTH) * TILE_DEPTH)
        s = matmul._sizes(M, N, all_k, where, tile, workers, packed, panels // workers, numbers // workers)
        assert all(size > 0 for size in s) and s.part_rows % block == s.rows % block == s.columns % tile.columns == 0
        assert s.depth % tile.depth == s.near % tile.depth == 0 and (s.columns + tile.rows) * s.depth <= panels // workers
        assert tile.rows * s.columns <= numbers // workers
        assert (s.part_depth == all_k or s.part_depth % s.depth == 0) and s.near <= s.depth and s.rows <= s.part_rows
        whole_panels, pieces = -(-N // s.columns), -(-min(M, s.part_rows) // s.rows)
        blocks, room = -(-M // block), numbers // workers // s.columns // block
        parts = -(-M // s.part_rows)
        if where == matmul.BY_PARTS:
            assert s.part_rows * s.part_depth <= packed
        else:
            assert s.part_rows >= M and s.part_depth == all_k
        if s.part_depth < all_k:  # the sums of all tasks of a worker; those of one part less would not fit, or not what is packed
            tasks = -(-whole_panels * pieces // workers)
            assert s.depth == s.part_depth and tasks * s.rows * s.columns <= numbers // workers
            larger = parts == 1 or -(-blocks // ((parts - 1) * pieces)) * block
            assert parts == 1 or tasks * larger * s.columns > numbers // workers or larger * pieces * s.depth > packed
        else:
            assert where != matmul.BY_PARTS or parts <= -(-blocks // (packed // all_k // block))
            assert s.rows >= min(block * min(room, matmul.MOST_ROWS // block), s.part_rows) // (2 * workers)
            assert s.depth >= all_k or (s.rows * s.columns <= numbers // workers and s.rows <= matmul.MOST_ROWS)
        if tile is tiles.AMX:
            assert (s.depth - tile.depth) * -(-all_k // s.depth) < all_k and (s.near - tile.depth) * -(-s.depth // s.near) < s.depth
            assert s.near <= (matmul.AMX_NEAR if s.depth == all_k else matmul.AMX_NEAR_IN_PARTS)
            assert s.columns <= matmul.MOST_COLUMNS and s.depth <= matmul.AMX_DEPTH
    if tile is LARGE:
        s = matmul._sizes(3072, 3072, 768, matmul.IN_PLACE, tile, 1, 1 << 20, panels, sums)
        assert s.depth == s.near == matmul.DEPTH and s.columns == (96 if rooms == 1 else 240 if rooms == 2 else 384)
    if tile is OF_AVX2:
        s = matmul._sizes(3072, 3072, 768, matmul.IN_PLACE, tile, 1, 1 << 20, panels, sums)
        assert s.depth == s.near == matmul.DEPTH and s.columns == (120 if rooms == 1 else 192 if rooms == 2 else 384)
    if tile is tiles.AMX:
        s = matmul._sizes(3072, 3072, 1536, matmul.IN_PLACE, tile, 1, 1 << 20, panels, sums)
        assert s.columns == (96 if rooms == 1 else 192 if rooms == 2 else 384)
        s = matmul._sizes(3072, 768, 2048, matmul.BY_PARTS, tile, 2, 1 << 20, panels // 2, sums // 2)
        assert rooms < 64 or s == (1024, 688, 1024, 384, 688, 240)


SHAPES_OF_REGISTERS = """
import numpy as np
import torch

from llmc.kernels_cpu import door, tiles
from test_kernels_cpu import BF16, attention, matmul, matmul_room
from test_layers import numba_attention_room


@door.njit
def shapes(factors, outside, inside, afterwards):
    tiles.open_tiles(factors, outside)
    tiles.open_tiles(factors, inside)
    tiles.close_tiles(factors, outside)
    tiles.open_tiles(factors, afterwards)
    tiles.close_tiles(factors, outside)


kept = [np.full(64, 9, np.uint8) for _ in range(3)]
shapes(np.zeros(1, np.uint32), *kept)
assert [bytes(x) for x in kept] == ([bytes(64), tiles.SHAPES, bytes(64)] if tiles.MULTIPLIES_TILES else 3 * [bytes([9] * 64)])
before = bytes(kept[0])


@door.njit
def look(factors, now):
    tiles.open_tiles(factors, now)
    tiles.close_tiles(factors, now)


def left_as_they_were():
    now = np.full(64, 9, np.uint8)
    look(np.zeros(1, np.uint32), now)
    return bytes(now) == before


torch.set_num_threads(1)  # this one, whose registers can be seen
x, weight = torch.ones(2, 64, 64, dtype=BF16), torch.ones(64, 64, dtype=BF16)
matmul.matmul_forward(torch.empty_like(x), x, weight, scratch=matmul_room(BF16, workers=1))
assert left_as_they_were()
qkvr, lse, room = torch.ones(2, 64, 192, dtype=BF16), torch.empty(2, 1, 64), numba_attention_room(2, 64, 64, 1, BF16, workers=1)
attention.attention_forward(x, lse, qkvr, 1, room)
assert left_as_they_were()
attention.attention_backward(torch.empty_like(qkvr), torch.empty(192, dtype=BF16), x, qkvr, x, lse, 1, room, accumulate=False)
assert left_as_they_were()
print(tiles.MULTIPLIES_TILES)
"""


def test_amx_is_used_where_there_is_one_and_what_others_set_of_it_is_kept():
    """By each kernel, on its threads. That Linux has granted it is asked by another call than the one that asks for it."""
    said = said_by(SHAPES_OF_REGISTERS)
    granted = ctypes.c_uint64(0)
    if "amx_bf16" in Path("/proc/cpuinfo").read_text():
        assert ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(granted)) == 0
    assert said.strip() == str(bool(granted.value >> 18 & 1))


def test_matmuls_have_the_names_and_arguments_of_torch_s():
    for name, theirs in matmul_operations("native", "torch").items():
        ours = inspect.signature(matmul_operations("numba", "numba")[name])
        assert list(ours.parameters) == list(inspect.signature(theirs).parameters)


@dtypes
def test_the_matmul_that_is_measured_multiplies(dtype):
    a, b = (torch.arange(64 * 64).view(64, 64).remainder(m).to(dtype) for m in (5, 7))
    out = torch.full_like(a, nan)
    other_matmuls("numba")[0](out, a, b)
    assert same_bits(out, a @ b)
    assert not other_matmuls("native")


@pytest.mark.parametrize("precision, factors", [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")])
def test_losses_of_a_model_with_numba_s_matmuls_are_those_with_torch_s_but_for_noise(precision, factors):
    """Three steps, the second half in a recompute of everything."""
    losses = {}
    for way in ("native", "numba"):
        model = GPT2(Plan(PlanOptions(CONFIG, 4, 32, precision, kernels="numba", matmul=way, factors=factors, recompute=6)))
        model.init_random()
        losses[way] = []
        for step in range(3):
            tokens = np.random.default_rng(step).integers(0, CONFIG.vocab_size, (2, 4, 32))
            model.train(*tokens)
            losses[way].append(model.mean_loss())
            model.update(1e-3, 0.1, step + 1, model.grad_norm())
    assert np.abs(np.subtract(*losses.values())).max() <= (1e-5 if precision == "fp32" else 2e-2)
