"""Every kernel of a training run, compiled for cards that are not here: what the machine code may and may not contain."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import compress
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="no triton here, and so no kernels: python -m pip install triton")

REPO = Path(__file__).resolve().parent.parent
LEAST_SHARED = 99 << 10

pytestmark = pytest.mark.kernels


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of compiled kernels for this file alone: a test compiles what it tests, and the next need not again."""
    return tmp_path_factory.mktemp("triton")


def run(cache, *command):
    """Standard output of a Python command at the repository's root."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *map(str, command)], cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("channels, cards, forms", [(768, (90,), ()), (1600, (90,), ()), (768, (80, 100), ("--plain",))])
def test_every_kernel_compiles_for_every_card_and_spills_nothing(cache, channels, cards, forms):
    """As often as there are kinds of launches, for Hopper of models of every form; there with no local memory, wherever cuobjdump can tell.
    A tile of whole rows is 1024 and 2048 columns wide with these channels, and 1600 fills neither it nor blocks of 256. Shared memory is
    what the cards with least have for a program: those of compute capability 8.6, 8.9 and 12.0."""
    out = run(cache, "scripts/compile_kernels.py", "--capability", *cards, "--channels", channels, "--resources", *forms)
    names = ", ".join(f"sm{c}" for c in cards)
    (kinds,) = re.findall(rf"^C={channels}: (\d+) kernels for each of {names}, FP8's from sm90 on$", out, re.M)
    lines = re.findall(r"^sm(\d+) (\S+) +(\d+) B shared(?:, +\S+ registers, +(\S+) B stack)?", out, re.M)
    for_all = [name for card, name, *_ in lines if int(card) == cards[-1] and not name.startswith("fp8.")]
    assert Counter(int(card) for card, *_ in lines) == {card: int(kinds) if card > 80 else len(for_all) for card in cards}
    assert out.splitlines()[-1] == f"{len(lines)} compilations" and (20 if forms else 30) < len(for_all) < int(kinds)
    assert {name.partition(".")[0] for _, name, *_ in lines} == MODULES
    assert [line for line in lines if int(line[2]) > LEAST_SHARED] == []
    assert [line for line in lines if line[0] == "90" and line[3] not in ("0", "")] == []


# kinds of instructions of each kernel at sm90, whose PTX is that of the other cards but for what they alone have
INSTRUCTIONS = """
import json, re, sys
from scripts.compile_kernels import recorded_launches
import torch
from llmc.kernels import door

torch.set_grad_enabled(False)
for (module, name, types, *_), launch in recorded_launches(int(sys.argv[1])).items():
    ptx = door.compile_only(*launch, 90).asm["ptx"]
    name += "_of_bf16" * (module == "gelu" and "torch.bfloat16" in str(types))
    print(json.dumps([module, name, sorted(set(re.findall(r"^\\s+(?:@!?%\\w+ )?([a-z]\\w*(?:\\.\\w+)+)\\s", ptx, re.M)))]))
"""
MODULES = {"adamw", "attention", "columns", "encoder", "fp8", "fused_classifier", "gelu", "global_norm", "layernorm"}
# which say so; the logarithm of the classifier brings some of another kind, with .ftz
ATTENTION = {"attention_forward", "attention_backward_queries", "attention_backward_keys"}
WITH_FMA = {"adamw", "gelu_forward", "gelu_backward", "layernorm_backward", *ATTENTION}
TO_THE_BIT = {"adamw", "attention", "encoder", "fp8", "gelu"}  # all that elementwise kernels compute, but for GELU's reciprocal in bf16


@pytest.fixture(scope="module")
def instructions(cache):
    """[(module, kernel, instructions)] of every kind of launch."""
    lines = run(cache, "-c", INSTRUCTIONS, 768).splitlines()
    assert {json.loads(line)[0] for line in lines} == MODULES
    return [json.loads(line) for line in lines]


def test_multiplications_and_additions_are_contracted_only_where_a_kernel_asks_for_it(instructions):
    """Bits equal torch's only if every other product is rounded before it is added to: what enable_fp_fusion=False promises."""
    for module, name, found in instructions:
        contracted = [i for i in found if re.fullmatch(r"(fma|mad)\.rn\.f32(x2)?", i)]
        assert bool(contracted) == bool(WITH_FMA & {module, name.lstrip("_")}), f"{module}.{name}: {contracted}"


def test_divisions_and_roots_are_correctly_rounded_where_bits_count(instructions):
    """Everywhere in what is elementwise; and nowhere is a root a card's approximation. Reciprocals by instruction are GELU's alone."""
    for module, name, found in instructions:
        rough = [
            i
            for i in found
            if i.startswith(("sqrt.approx", "rsqrt.approx")) or module in TO_THE_BIT and i.startswith(("div.full", "div.approx"))
        ]
        assert rough == [], f"{module}.{name}"
        assert module == "gelu" or not any(i.startswith("rcp.approx") for i in found), f"{module}.{name}"


WHOLE_HEADS = """
from scripts.compile_kernels import SIZES, resources  # the first, as it sees to it that nothing is interpreted
import torch
from llmc.kernels import door
from scripts.gpu_tune import WholeHeads

found = []

def compiled(kernel, grid, *args, num_warps=8, **constants):
    names = [name for name in kernel.arg_names if name not in constants]
    args = [SIZES.get(name, value) for name, value in zip(names, args)]
    found.append((kernel.fn.__name__, door.compile_only(kernel, args, constants, num_warps, 90)))

torch.set_grad_enabled(False)
door.launch = compiled
x, qkvr = (torch.empty(1, 128, n * 128, dtype=torch.bfloat16) for n in (1, 3))
scratch = {"attention_delta": torch.empty(2, 128), "attention_sums": torch.empty(2 * 384), "column_partials": torch.empty(4, 384)}
for tiles in ((128, 32, 8), (64, 32, 4)):
    WholeHeads(*tiles)(qkvr, qkvr[0, 0], x, qkvr, x, scratch["attention_delta"], 2, scratch, accumulate=False)
for name, kernel in found:
    if "heads" in name:
        print(name, resources(kernel), "wgmma" in kernel.asm["ptx"])
"""


def test_backward_by_whole_heads_runs_on_hopper_s_tensor_cores_and_spills_nothing(cache):
    lines = run(cache, "-c", WHOLE_HEADS).splitlines()
    assert len(lines) == 2 and all(line.startswith("_attention_backward_heads") and line.endswith("True") for line in lines)
    assert [line for line in lines if "registers" in line and " 0 B stack" not in line] == []


REWRITTEN = """
import json, re
from scripts.compile_kernels import PLAIN, recorded_launches
from llmc.kernels import door
from scripts.gpu_tune import LAST_FIRST, LOGITS_LEAVE, READ_ONCE, SOURCE, rewritten

def found(kernel, args, constants, num_warps):
    text = door.compile_only(kernel, args, constants, num_warps, 90).asm["ttir"]  # Triton 3.6 drops hints of staged loads later
    words = ("get_num_programs", "tt.load.* evict_first", "tt.load.* evict_last", "tt.store.* evict_first")
    return [bool(re.search(word, text)) for word in words]

for kernel, *launch in recorded_launches(768, PLAIN).values():
    name = kernel.fn.__name__
    if read_once := READ_ONCE.get((name, SOURCE)):
        for change in ((), LAST_FIRST, read_once, *[LOGITS_LEAVE] * (name == "_classify")):
            print(json.dumps([name, change, found(rewritten(kernel, change), *launch)]))
try:
    rewritten(kernel, (("a line", "another"),))
except ValueError as error:
    print(error)
"""


def test_kernels_are_rewritten_for_trials_and_stay_as_they_are(cache):
    """In some of a kernel's forms: not every launch of layernorm adds a residual, nor every one of the classifier writes gradients."""
    *lines, error = run(cache, "-c", REWRITTEN).splitlines()
    assert error.endswith(" has 0 times, expected once: a line")
    seen = {}  # kernel -> change -> what there is in any launch
    for name, change, found in map(json.loads, lines):
        seen.setdefault(name, {}).setdefault(str(change), set()).update(compress(("last first", "leaves", "stays", "stored"), found))
    usual = [set(), {"last first"}, {"leaves"}]
    assert {name: list(changes.values()) for name, changes in seen.items()} == {
        "_layernorm_forward": usual, "_gelu_forward": usual,
        "_classify": [set(), {"last first"}, {"leaves", "stays"}, {"leaves", "stays", "stored"}],
    }  # fmt: skip


SIZES_OF_ONE = """
from scripts.compile_kernels import recorded_launches
import pytest
import torch
from triton.backends.nvidia.compiler import CUDABackend
from llmc.kernels import door

class Typed(Exception):
    pass

def typed(*_):  # what comes after Triton's own language
    raise Typed

CUDABackend.make_ttgir = typed

torch.set_grad_enabled(False)
for kernel, args, constants, warps in recorded_launches(64, [dict(precision="bf16")]).values():
    args = [1 if isinstance(x, int) else x for x in args]
    with pytest.raises(Typed):
        door.compile_only(kernel, args, constants, warps, 90)
    print(kernel.fn.__name__, sum(isinstance(x, int) for x in args))
"""


def test_kernels_compile_where_sizes_are_one(tmp_path):
    """Triton makes a constant of an integer argument that is 1, and then some expressions have no type of their own."""
    assert len(run(tmp_path, "-c", SIZES_OF_ONE).splitlines()) > 10
