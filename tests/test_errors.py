"""Bad input gives one sentence on stderr and exit code 2 (3: it does not fit in memory), no traceback, and loses no file.

A row of a table is a name, what is broken and the flags, and words that the sentence must hold: what is wrong, found in which place.
"""

import errno
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from unittest.mock import patch
from urllib.error import HTTPError

import numpy as np
import pytest
import torch
from case_a import CONFIG, header, write_case_a
from conftest import REPO
from test_loop import QUIET, inputs, losses, ran, run, tokenizer_bytes, words_of

from llmc.checkpoint.store import find_last_step
from llmc.errors import file_error, lines_of, tell, unusable_path
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.tables import num_parameters

N = num_parameters(CONFIG)
STEPS = "-b 4 -t 32 -x 2 -v 1 -m 1 -s 0"
HUGE = 2**31 - 1
WRITTEN_BY_A_RUN = {"log/main.log", "log/speed.log", "log/memory.json"}  # what changes as soon as a run into log/ goes ahead


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """Case A, a tokenizer, and log/: the checkpoints 2 and 4 of a run."""
    folder = write_case_a(tmp_path_factory.mktemp("pristine"))
    (folder / "tokenizer.bin").write_bytes(tokenizer_bytes([b"%d " % i for i in range(96)], 95))
    ran(*inputs(folder), "-b 4 -t 32 -x 4 -n 2", QUIET, "-o", folder / "log")
    return folder


@pytest.fixture
def case(pristine, tmp_path, monkeypatch) -> Path:
    """A copy to break, and the current folder."""

    def link(source, target):  # 6 MB for each of 500 tests otherwise; replace() and the program make new files, only logs are appended to
        (shutil.copy if source.endswith(".log") else os.link)(source, target)

    folder = shutil.copytree(pristine, tmp_path / "case", copy_function=link)
    monkeypatch.chdir(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below, and the bytes of what is a regular file and not very large."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() and os.access(p, os.R_OK) and p.stat().st_size < 1 << 24 else None
            for p in sorted(folder.rglob("*"))}  # fmt: skip


def refused(case: Path, argv, *words: str, goes_ahead: bool = False, **options) -> str:
    """The sentence of a run that must be refused: one line, with these words, and every file as it was.

    goes_ahead  the run fails only after it has begun, so that its logs, its record and new checkpoints may be there
    """
    before = contents(case)
    result = run(*argv, **options)
    assert result.code == 2, f"exit code {result.code}: {result.err or result.out[-300:]}"
    assert result.err.startswith("error: ") and result.err.count("\n") == 1 and result.err.endswith("\n"), result.err
    for word in words:
        assert word in result.err, f"{word!r} is not in {result.err!r}"
    after = contents(case)
    if not goes_ahead:
        assert after == before
    for name in before.keys() - WRITTEN_BY_A_RUN:
        assert after.get(name, "gone") == before[name], f"{name} has changed"
    assert not [name for name in after if name.endswith(".tmp")]
    return result.err


def replace(path: Path, content: bytes) -> None:
    """New bytes under a name, leaving what is linked to the old ones alone."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def patched(raw: bytes, *values, at: int, form: str = "<i") -> bytes:
    return raw[:at] + struct.pack(form, *values) + raw[at + struct.calcsize(form) :]


def word(index: int, value: int):
    """A break that sets one int32 of the header."""
    return lambda raw: patched(raw, value, at=4 * index)


def token(index: int, value: int):
    return lambda raw: patched(raw, value, at=1024 + 2 * index, form="<H")


def cut(n: int):
    return lambda raw: raw[:n]


def plus(extra: bytes):
    return lambda raw: raw + extra


# ----------------------------------------------------------------------------
# damaged input files: name -> (file, break, words)

EVAL = "-h 1 --hellaswag-data eval.bin"
FILES = {  # file -> (what its sentences call it, the flags that read it)
    "train_01.bin": ("a token shard", ""), "val.bin": ("a token shard", ""), "model.bin": ("a model file", ""),
    "eval.bin": ("an evaluation file", EVAL), "tokenizer.bin": ("a tokenizer file", "-s 1 --tokenizer tokenizer.bin"),
}  # fmt: skip

EVERY_FILE = {
    "empty": (lambda raw: b"", "is empty"),
    "half a header": (cut(500), "has only 500 bytes"),
    "no magic": (word(0, 0), "begins with the number 0"),
    "text": (lambda raw: b"To be, or not to be" * 100, "begins with the number"),
    "wrong version": (word(1, 99), "version 99"),
    "negative version": (word(1, -1), "version -1"),
    "llama 3 shard": (word(0, 20240801), "Llama-3 token shard"),
    "another kind": (word(0, 20240327), "debug state"),
    "header alone": (cut(1024), ""),
    "truncated by one": (lambda raw: raw[:-1], ""),
    "oversized by one": (plus(b"\0"), ""),
    "oversized by two": (plus(b"\0\0"), ""),
    "half": (lambda raw: raw[: len(raw) // 2], ""),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("fault", EVERY_FILE)
def test_a_damaged_file_is_named(case, file, fault):
    damage, words = EVERY_FILE[fault]
    kind, flags = FILES[file]
    replace(case / file, damage((case / file).read_bytes()))
    named = kind if fault in ("empty", "half a header", "no magic", "text", "another kind") else ""
    refused(case, [*inputs(case), STEPS, flags], file, words, named)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("what", ["missing", "directory", "link to nowhere", "link to itself", "pipe", "unreadable"])
def test_a_file_that_is_not_one_is_named(case, file, what):
    """A pipe would wait for ever, so it is not opened."""
    path, flags = case / file, FILES[file][1]
    path.unlink()
    if what == "directory":
        path.mkdir()
    elif what.startswith("link"):
        path.symlink_to(path if what == "link to itself" else "nowhere")
    elif what == "pipe":
        os.mkfifo(path)
        filled = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # so that a program that does open it fails here, and does not wait
        os.write(filled, b"x" * 2000)
    elif what == "unreadable":
        path.write_bytes(b"x" * 2000)
        path.chmod(0)
        if os.access(path, os.R_OK):
            pytest.skip("root reads everything")
    argv = [*inputs(case), "-i", path if file == "train_01.bin" else case / "train_*.bin", STEPS, flags]
    refused(case, argv, file, "a directory, a pipe or a device" if what == "pipe" else "")


@pytest.mark.parametrize("index", range(2, 8))
@pytest.mark.parametrize("value", [0, -1, 10**6, HUGE, -HUGE - 1])
def test_impossible_model_sizes_are_refused_before_anything_is_planned(case, index, value):
    """Also with --plan: L = 10^6 layers or 2^31-1 channels are refused because the file is not that long."""
    replace(case / "model.bin", word(index, value)((case / "model.bin").read_bytes()))
    for plan in ("", "--plan"):
        refused(case, [*inputs(case), STEPS, plan], "model.bin", "expected a positive number" if value <= 0 else "")


BROKEN = {
    # -- token shards
    "shard: no tokens": ("train_01.bin", word(2, 0), "", "says it holds 0 tokens"),
    "shard: negative": ("train_01.bin", word(2, -5), "", "says it holds -5 tokens"),
    "shard: 2^31-1 tokens": ("val.bin", word(2, HUGE), "", "truncated by"),
    "shard: smaller than a batch": ("train_01.bin", lambda raw: word(2, 128)(raw[: 1024 + 256]), "",
        "holds 128 tokens, and one batch takes 129"),
    "val: smaller than a batch": ("val.bin", lambda raw: word(2, 5)(raw[: 1024 + 10]), "", "-j", "holds 5 tokens"),
    "token 96 in training": ("train_01.bin", token(77, 96), "-x 70", "-i",
        "train_01.bin: token 96 at position 77 is outside the model's vocabulary of 96"),
    "token 65535 in validation": ("val.bin", token(3, 65535), "", "-j", "val.bin: token 65535 at position 3"),
    "token 96 in validation, used for -a": ("val.bin", token(0, 96), "-a 1 -v 0", "-j", "token 96 at position 0"),
    # -- model
    "model: version 1": ("model.bin", word(1, 1), "", "from before the vocabulary was padded"),
    "model: heads do not divide": ("model.bin", word(5, 5), "", "64 channels, which 5 heads do not divide"),
    "model: padded below the vocabulary": ("model.bin", word(7, 95), "", "pads a vocabulary of 96 to 95"),
    "model: bf16 in an fp32 file": ("model.bin", word(1, 5), "", "oversized"),
    "model: is a tokenizer": ("model.bin", lambda raw: tokenizer_bytes([b"x"], 0) + bytes(2000), "",
        "is a tokenizer file; expected a model file"),
    # -- eval
    "eval: no examples": ("eval.bin", word(2, 0), EVAL, "says it holds 0 examples"),
    "eval: negative": ("eval.bin", word(2, -1), EVAL, "says it holds -1 examples"),
    "eval: more than there are": ("eval.bin", word(2, 51), EVAL, "cut short in example 50 of 51"),
    "eval: 2^31-1": ("eval.bin", word(2, HUGE), EVAL, "cut short in example 50"),
    "eval: fewer than there are": ("eval.bin", word(2, 49), EVAL, "is too long"),
    "eval: no delimiter": ("eval.bin", token(0, 5), EVAL, "damaged at example 0", "found delimiter 5"),
    "eval: zero bytes long": ("eval.bin", token(1, 0), EVAL, "example 0"),
    "eval: odd length": ("eval.bin", token(1, 3), EVAL, "example 0"),
    "eval: longer than the file": ("eval.bin", token(1, 65535), EVAL, "cut short in example 0"),
    "eval: wrong index": ("eval.bin", token(2, 7), EVAL, "index 7"),
    "eval: label 4": ("eval.bin", token(3, 4), EVAL, "has label 4"),
    "eval: 3 completions": ("eval.bin", token(4, 3), EVAL, "has 3 completions, expected 4"),
    "eval: empty context": ("eval.bin", token(5, 0), EVAL, "empty or longer"),
    "eval: context beyond the example": ("eval.bin", token(5, 60000), EVAL, "empty or longer"),
    "eval: token 96": ("eval.bin", token(6, 96), EVAL, "example 0 has token 96, outside the model's vocabulary of 96"),
    "eval: longer than T": ("eval.bin", plus(b""), EVAL + " -t 8", "takes", "a row has -t 8"),
    # -- tokenizer
    "tokenizer: a token of no bytes": ("tokenizer.bin", lambda raw: raw[:1024] + b"\0" + raw[1024:], "--tokenizer tokenizer.bin",
        "token 0 of 96 has no bytes"),
    "tokenizer: 2^31-1 tokens": ("tokenizer.bin", word(2, HUGE), "--tokenizer tokenizer.bin", "token 96 of 2147483647"),
    "tokenizer: no tokens": ("tokenizer.bin", word(2, 0), "--tokenizer tokenizer.bin", "of 0"),
    "tokenizer: end of text outside": ("tokenizer.bin", word(3, 96), "--tokenizer tokenizer.bin", "end-of-text is token 96 of 96"),
    "tokenizer: version 1 of another size": ("tokenizer.bin", word(1, 1), "--tokenizer tokenizer.bin", "version stands for GPT-2's 50257"),
    "tokenizer: of another model": ("tokenizer.bin", lambda raw: tokenizer_bytes([b"x"] * 95, 94), "--tokenizer tokenizer.bin",
        "has 95 tokens and the model 96"),
    "tokenizer: found by chance, damaged": ("gpt2_tokenizer.bin", lambda raw: header(20240328, 2, 96, 95) + b"\x05ab",
        "-s 1", "gpt2_tokenizer.bin", "cut short"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_field_is_named(case, name):
    file, damage, flags, *words = BROKEN[name]
    path = case / file
    replace(path, damage(path.read_bytes() if path.exists() else b""))
    refused(case, [*inputs(case), STEPS, flags], *words)


# ----------------------------------------------------------------------------
# flags: name -> (flags, words)

FLAGS = {
    "T above the model's": ("-t 65", "-t 65: the model knows 64 positions; use -t 64 or less"),
    "g above the model's": ("-s 1 -g 65", "-g 65: the model knows 64 positions"),
    "total batch does not divide": ("-d 200", "-d 200 is not a multiple of B*T*processes = 4*32*1 = 128; use -d 128 or 256"),
    "total batch below one": ("-d 100", "use -d 128"),
    "batch larger than every shard": ("-b 1000", "one batch takes 32001"),
    "batch enormous": ("-b 2147483647", "one batch takes"),
    "batch beyond any": ("-b 1000000000000000000000", "but must be at most 2147483647"),
    "epoch shorter than a step": ("-x -1 -d 16384", "has 8333 tokens, less than one step of 16384"),
    "no such file for -i": ("-i no_*.bin", "-i no_*.bin: no such file", "prepare_tinyshakespeare"),
    "empty -i": ("--train-data=", "no such file"),
    "-i is a folder": ("-i .", "-i .: that is a folder; name the shards in it, as in './*.bin'"),
    "no such file for -j": ("-j no.bin", "-j no.bin: no such file"),
    "no such hellaswag": ("-h 1", "hellaswag_val.bin does not exist"),
    "no such tokenizer": ("--tokenizer no.bin", "no.bin does not exist"),
    "no such model": ("-e no.bin", "-e no.bin: no such file", "-e d12"),
    "no model and no data": ("-e no.bin -i no.bin", "neither a model no.bin (-e) nor training data no.bin (-i)"),
    "-i is the tokenizer": ("-i tokenizer.bin", "is a tokenizer file; expected a token shard"),
    "-i is the model": ("-i model.bin", "is a model file; expected a token shard"),
    "-i matches the model too": ("-i *.bin", "expected a token shard"),
    "-e is a shard": ("-e val.bin", "is a token shard; expected a model file"),
    "-e is a state": ("-e log/state_00000002_00000.bin", "is a training state file; expected a model file"),
    "unknown descriptor": ("-e d13", "-e d13: neither a .bin file nor a known model descriptor; expected d{6,12,",
        "2560,4096,12288}"),
    "unknown family": ("-e gpt4:d12", "-e gpt4:d12: neither"),
    "descriptor llm.c refuses": ("-e gpt3:c5140", "5140 channels are not a multiple"),
    "T above the model's, -r auto": ("-r auto -t 100000000 --memory-budget 1GiB", "-t 100000000: the model knows 64 positions"),
    "a file without .bin": ("-e log/main.log", "neither a .bin file"),
    "empty -e": ("--model=", "neither a .bin file"),
    "unknown scheduler": ("-k cos", "-k (--lr-scheduler) is 'cos', but must be cosine, linear, constant or wsd"),
    "precision against the file": ("--precision bf16", "holds fp32 weights, but --precision bf16 was asked for"),
    "resume without a folder": ("-y 1", "-y 1 resumes from the folder that -o names, and there is no -o"),
    "two processes, one started": ("-pn 2", "-pn 2: this process was started alone, and -pi mpi means that a launcher starts them all"),
    "rank 1 of 1": ("-pr 1", "-pr 1", "the only rank is 0"),
    "rank 2 of 2": ("-pn 2 -pr 2 -pi tcp", "-pr 2: with 2 processes ranks go from 0 to 1"),
    "tcp without a server": ("-pn 2 -pi tcp", "-pi tcp: there is no -ps"),
    "a folder that is not there to meet in": ("-pn 2 -pi fs -pp nowhere", "-pp nowhere: no such folder"),
    "GELU fusion": ("-ge 1", "-ge 1 fuses GELU into matmuls of a GPU, and this run is on a CPU; leave it out"),
    "a GPU's attention": ("--attention flash", "--attention flash is a GPU's, and this run is on a CPU"),
    "a GPU's matmuls": ("--matmul cublaslt", "--matmul cublaslt is a GPU's, and this run is on a CPU; leave it out"),
    "matmuls without their kernels": (
        "--matmul numba --kernels torch",
        "--matmul numba goes with --kernels numba, and this run has --kernels torch; leave one of them out",
    ),
    "nothing to widen": ("--matmul widened", "--matmul widened is for a bf16 model, and this one is fp32; leave it out"),
    "a GPU's kernels": ("--kernels triton", "--kernels triton: they are for a GPU, and this run is on a CPU; leave it out"),
    "no such level": ("-r 9", "-r 9: no such recompute level; use one of 0, 1, 2, 3, 4, 5, 6, or auto"),
    "no such level, planned": ("-r 9 --plan", "-r 9: no such recompute level; use one of 0, 1, 2, 3, 4, 5, 6, or auto"),
    "a level that is neither": ("-r most", "-r (--recompute) is 'most', but must be auto, or a whole number of 0 or more"),
    "a batch that is neither": ("-b most", "-b (--batch-size) is 'most', but must be auto, or a whole number of 1 or more"),
    "both auto": ("-r auto -b auto", "-r auto -b auto: each is chosen for the other; give one of them, such as -b 4, or -r 6"),
    "both auto, planned": ("-r auto -b auto --plan", "-r auto -b auto: each is chosen for the other"),
    "total batch does not divide, -b auto": ("-b auto -d 200", "-d 200 is not a multiple of B*T*processes = 1*32*1 = 32; use -d 192 or"),
    "total batch does not divide, -r auto": ("-r auto -d 200", "-d 200 is not a multiple of B*T*processes = 4*32*1 = 128; use -d 128"),
    "T above the model's, -b auto": ("-b auto -t 65", "-t 65: the model knows 64 positions; use -t 64 or less"),
    "JSON of no plan": ("--json", "--json is a form of the plan; add --plan"),
    "tensors of no plan": ("--tensors", "--tensors is a form of the plan; add --plan"),
    "offload at a level that keeps no residuals": ("-r 6 --offload-residual", "-r 6 --offload-residual: this level keeps", "use -r 5"),
    "offload at such a level, planned": ("-r 6 --offload-residual --device cuda --plan", "-r 6 --offload-residual: this level keeps"),
    "offload on a CPU": ("--offload-residual", "--offload-residual moves residuals from a GPU to host memory, and this run is on a CPU"),
    "offload on a CPU, planned": ("--offload-residual --plan", "--offload-residual moves residuals from a GPU to host memory"),
    "optimizer off a CPU": ("--offload-optimizer", "--offload-optimizer moves m, v and the master from a GPU to host memory"),
    "optimizer off a CPU, planned": (
        "--offload-optimizer --plan", "--offload-optimizer moves", "this plan is for a CPU; name a card with --memory-budget, or"
    ),
    "a master and none": ("--master fp32 -w 0", "--master fp32 -w 0: one asks for master weights and the other for none"),
    "master bits and none": ("--master bits16 -w 0", "--master bits16 -w 0: one asks for master weights and the other for none"),
    "master bits of fp32 weights": ("--master bits16", "--master bits16 is for a bf16 model, and this one is fp32"),
    "master bits of fp32 weights, planned": ("--master bits16 --plan", "--master bits16 is for a bf16 model, and this one is fp32"),
    "bf16 gradients of fp32 weights": ("--grad-dtype bf16", "--grad-dtype bf16 is for a bf16 model, and this one is fp32"),
    "bf16 gradients of fp32 weights, planned": ("--grad-dtype bf16 --plan", "--grad-dtype bf16 is for a bf16 model, and this one is fp32"),
    "unknown master": ("--master x", "--master is 'x', but must be auto, fp32, bits16 or none"),
    "unknown optimizer state": ("--optimizer-state fp16", "--optimizer-state is 'fp16', but must be fp32 or bf16"),
    "unknown gradients": ("--grad-dtype x", "--grad-dtype is 'x', but must be auto, fp32 or bf16"),
    "budget in another unit": ("--memory-budget 12parsecs", "--memory-budget 12parsecs: expected a size such as", "known cards: v100-16,"),
    "budget without a unit": ("--memory-budget 24", "--memory-budget 24: expected a size such as", "did you mean 24GiB?"),
    "budget of half a card": ("--memory-budget 1080", "--memory-budget 1080: expected a size such as", "did you mean v100 or h100 or"),
    "budget of no number": ("--memory-budget 1.2.3", "--memory-budget 1.2.3: expected a size such as", "known cards: v100-16,"),
    "budget in bare MiB": ("--memory-budget 80000", "--memory-budget 80000: expected a size such as", "did you mean 80000MiB?"),
    "budget with half a unit": ("--memory-budget 500m", "--memory-budget 500m: expected a size such as", "did you mean 500MiB?"),
    "budget of nothing": ("--memory-budget 0GiB", "--memory-budget 0GiB: expected a size such as 24GiB or 500MiB, or a card such as"),
    "budget of a card that is none": ("--memory-budget h10", "--memory-budget h10: expected a size such as", "did you mean h100 or"),
    "budget of a card that is none, planned": ("--memory-budget h10 --plan", "--memory-budget h10: expected", "did you mean h100 or"),
    "unknown flag": ("-lr 3e-4", "unknown flag -lr: did you mean -l?"),
    "unknown long flag": ("--learning_rate 1", "unknown flag --learning_rate: did you mean --learning-rate?"),
    "a flag glued to its value": ("-b=4", "-b=4: only a long flag takes its value after =; use -b 4"),
    "a value without a flag": ("stray", "unexpected 'stray' after -s (--sample-every)"),
    "an expanded glob": ("-i train_01.bin train_02.bin", "put a pattern such as 'data/*.bin' in quotes"),
    "a dash": ("-", "unexpected '-'"),
    "two dashes": ("--", "unknown flag --"),
    "a switch with a value": ("--plan=1", "--plan is a switch and takes no value"),
    "the last value is missing": ("-b",
        "-b (--batch-size) needs a value, auto, or a whole number of 1 or more, but the command line ends there"),
    "a value is missing": ("-o -y 1", "-o (--output-dir) needs a value, DIR, but the flag -y follows"),
    "nan": ("-l nan", "-l (--learning-rate) is 'nan', but must be a number of 0 or more"),
    "inf": ("-c inf", "-c (--weight-decay) is 'inf'"),
    "too large for a float": ("-q 1e999", "-q (--final-lr-fraction) is '1e999'"),
    "too many digits": ("-x " + "9" * 5000, "-x (--max-steps)"),
    "warmup beyond all floats": ("-u 1" + "0" * 400, "must be at most 2147483647"),
    "more threads than any machine": ("--threads 100000", "--threads is 100000, but must be at most 1024"),
    "-v 0.5": ("-v 0.5", "-v (--val-loss-every) is '0.5'"),
    "help is not -h": ("-h", "the list of flags is --help"),
    "-h --help=yes": ("--help=yes", "--help is a switch"),
    "no such device": ("--device tpu", "--device is 'tpu', but must be auto|cpu|cuda[:N]"),
    "GPU state on a CPU": ("-lg 1", "-lg asks a GPU for its state, and this run is on", "leave -lg out"),
    "-o is a file": ("-o val.bin", "val.bin is a file; expected a folder"),
    "-o below a file": ("-o val.bin/log", "preparing the output folder failed at val.bin/log: Not a directory"),
    "-o has a name too long": ("-o " + "a" * 300, "File name too long"),
    "-e has a name too long": ("-e " + "a" * 300 + ".bin", "no such file"),
    "-i has a name too long": ("-i " + "a" * 300, "no such file"),
    "-o /proc": ("-o /proc/self", "preparing the output folder failed"),
    "-o of too long a name": (f"-o {'x' * 300}", "preparing the output folder failed at", "File name too long; choose another path"),
    "-y 1 and -o is a file": ("-y 1 -o val.bin", "val.bin is a file; expected a folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_a_wrong_flag_gets_a_sentence(case, name):
    flags, *words = FLAGS[name]
    refused(case, [*inputs(case), STEPS, *([flags] if "too" not in name else flags.split(" ", 1))], *words)
    assert not (case / "main.log").exists()


@pytest.mark.parametrize(
    "flag", "-b -t -d -x -n -nk -nm -lg -u -l -q -c -sl -sg -v -m -s -g -r -z -pn -pr -pg -ge -h -a -f -w -y --threads --head-chunk".split()
)
@pytest.mark.parametrize("value", ["-2", "-2147483649", "-0.5", "nan", "inf", "4x", "0x4", "1e3"])
def test_a_wrong_number_names_its_flag_and_itself(case, flag, value):
    """1e3 is a fine learning rate; everything else is wrong everywhere."""
    if value == "1e3" and flag in ("-l", "-q", "-c", "-sl", "-sg"):
        return
    code, out, err = vars(run(flag, value)).values()
    assert (code, out) == (2, "") and err.startswith(f"error: {flag} ") and f" is {value!r}, but must be " in err and err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:9", "cuda:99999999999999999999"])
def test_a_gpu_that_is_not_there_gets_a_sentence(case, device):
    argv = [*inputs(case), STEPS, "--device", device]
    refused(case, argv, f"--device {device}: torch", "use --device cpu")
    assert not run(*argv).out, "the device is opened before the table of parameters"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_gpu_number_that_is_not_there_gets_a_sentence(case):
    refused(case, [*inputs(case), STEPS, "--device cuda:9"], "--device cuda:9: there are", "choose one of them")


# ----------------------------------------------------------------------------
# memory


WAY = re.compile(r"  (-\S.*?) {2,}(\d+) MiB; \S.*")


def explained(err: str) -> tuple[str, str, list[tuple[str, int]]]:
    """What exit code 3 says, taken apart: the sentence; -b and -r of the table of all -r below it; ways to fit as (flags, MiB)."""
    sentence, empty, *lines = err.removesuffix("\n").split("\n")
    assert sentence.startswith("error: ") and not empty, err
    B = re.match(r"memory plan in MiB: .* B=(\d+) ", lines[0])[1]
    levels = [line.split()[0] for line in lines if re.match(r" *\d\*? ", line)]
    (asked,) = (level.rstrip("*") for level in levels if level.endswith("*"))
    assert [level.rstrip("*") for level in levels] == [str(level) for level in NOT_KEPT]
    head, *ways = lines[max(i for i, line in enumerate(lines) if not line) + 1 :]
    if not ways:
        advice = r"use a smaller model \(-e\) or shorter sequences \(-t\)|weights and gradients alone take \d+ MiB; use a smaller model .*"
        assert re.fullmatch(rf"no flag makes it fit \d+ MiB: ({advice})", head), head
        return sentence, f"-b {B} -r {asked}", []
    fit = int(re.fullmatch(r"the cheapest ways to fit (\d+) MiB, flags to add:", head)[1])
    found = [(match[1], int(match[2])) for match in map(WAY.fullmatch, ways)]
    assert len(found) <= 3 and all(mib <= fit for _, mib in found), err
    return sentence, f"-b {B} -r {asked}", found


def does_not_fit(case: Path, argv, *words: str) -> list[str]:
    """The flags of the ways to fit that a run of exit code 3 names: each, added, gives a plan of that size for as many tokens a step.
    The run leaves nothing behind."""
    before = contents(case)
    result = run(*argv)
    assert result.code == 3, f"exit code {result.code}: {result.err or result.out[-300:]}"
    assert contents(case) == before
    sentence, planned, ways = explained(result.err)
    for word in words:
        assert word in sentence, f"{word!r} is not in {sentence!r}"

    def plan_with(flags):
        plan = json.loads(ran(*argv, planned, "--memory-budget 1TiB", flags, "--plan --json"))
        (total,) = (level["total_mib"] for level in plan["levels"] if level["recompute"] == plan["recompute"])
        return plan["batch_size"] * plan["sequence_length"] * plan["grad_accum_steps"], int(total)

    for flags, mib in ways:
        assert plan_with(flags) == (plan_with("")[0], mib), flags
    return [flags for flags, _ in ways]


def test_a_plan_beyond_memory_is_exit_code_3_before_allocating(case):
    """-b 3000000 needs terabytes: a sparse file of 2^31-1 tokens lets the batch itself be possible."""
    path = case / "sparse.bin"
    path.write_bytes(header(20240520, 1, HUGE))
    os.truncate(path, 1024 + 2 * HUGE)
    argv = [*inputs(case), "-i", path, "-b 3000000 -t 64 -x 1", QUIET]
    ways = does_not_fit(case, argv, "the plan needs", "MiB (free on ")
    assert ways and all(flags.startswith("-b ") and " -d 192000000" in flags for flags in ways)
    assert int(run(*argv).err.split("the plan needs ")[1].split()[0]) > 10**6
    assert "total" in ran(*argv, "--plan"), "asking for the plan is no error"


def test_a_model_beyond_memory_is_exit_code_3(case):
    """No flag but a smaller model helps: the parameters alone are 333 GB or more."""
    argv = ["-e gpt3:c12288 -b 1 -t 16 -x 1 -i", case / "train_01.bin", QUIET, "-o", case / "new"]
    assert not does_not_fit(case, argv, "the plan needs", "MiB (free on ")


@pytest.mark.parametrize("level,words", [("-r 0", "MiB, and there are 6 MiB (--memory-budget 6MiB)"),
                                         ("-r 5", "MiB, and there are 6 MiB (--memory-budget 6MiB)"),
                                         ("-r auto", "no recompute level fits -b 32 -t 64 in 6 MiB: -r 6 still needs ")])  # fmt: skip
def test_each_way_to_fit_a_budget_trains_as_many_tokens_a_step(case, level, words):
    """64 sequences in two micro-steps do not fit 6 MiB; what is advised then does."""
    argv = [*inputs(case), "-b 32 -t 64 -d 4096 -x 1 --memory-budget 6MiB", level, QUIET]
    ways = does_not_fit(case, argv, words)
    assert ways
    for flags in ways:
        out = ran(*argv, flags)
        assert "and total_batch_size=4096\n" in out and len(losses(out)) == 1


@pytest.mark.parametrize("flags", ["-b auto", "-b auto -d 2048", "-b 1 -r auto"])
def test_less_memory_than_one_sequence_needs_is_exit_code_3_and_no_way_is_made_up(case, flags):
    words = "no recompute level fits -b 1 -t 64 in 2 MiB" if "-r" in flags else "not even -b 1 -t 64 fits 2 MiB at -r 5: it needs"
    assert not does_not_fit(case, [*inputs(case), "-t 64 -x 1 -r 5 --memory-budget 2MiB", flags, QUIET], words)


@pytest.mark.parametrize("flags", ["--memory-budget " + "9" * 400 + "GiB", "-b " + "9" * 400], ids=["budget", "batch"])
def test_sizes_beyond_float_end_in_a_plan_or_a_sentence(case, flags):
    code, out, err = vars(run(*inputs(case), "-t 32 --plan", *flags.split())).values()
    assert code == 0 and out.startswith("memory plan") and not err or code == 2 and not out and err.count("\n") == 1


def test_a_batch_of_billions_that_does_not_fit_is_judged_at_once(case):
    """Ways to fit are sought below it without trying every number up to it."""
    words = words_of([*inputs(case), "--device cpu -t 32 -b 2147483647 -r auto --memory-budget 1GiB --plan"])
    result = subprocess.run([sys.executable, "train_gpt2.py", *words], cwd=REPO, capture_output=True, text=True, timeout=15)
    assert result.returncode == 3 and not result.stdout
    assert explained(result.stderr)[0].startswith("error: no recompute level fits -b 2147483647 -t 32 in 1024 MiB")


LIMITED = """
import resource, sys, torch, train_gpt2
train_gpt2.measure_matmul_tflops = lambda *_: 1.0
kind, amount = getattr(resource, sys.argv[1]), int(sys.argv[2])
if kind == resource.RLIMIT_AS:
    amount += int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(kind, (amount, amount))
sys.exit(train_gpt2.main(sys.argv[3:]))
"""


def run_limited(limit: str, amount: int, *argv):
    """The program under a limit of the system's."""
    words = words_of(["--device cpu --threads 1", *argv])
    return subprocess.run([sys.executable, "-c", LIMITED, limit, str(amount), *words], cwd=REPO, capture_output=True, text=True, timeout=60)


def test_memory_that_the_system_promised_and_denies_is_exit_code_3(case):
    """d6 in fp32 needs 480 MB, the limit leaves 200: enough for torch's operations, but not for a compiler."""
    argv = "-e d6 --precision fp32 -b 1 -t 16 -x 1 --kernels torch"
    result = run_limited("RLIMIT_AS", 200 << 20, argv, "-i", case / "train_01.bin", QUIET)
    assert result.returncode == 3, result.stderr
    sentence, planned, ways = explained(result.stderr)
    total = json.loads(ran(argv, "--plan --json"))["levels"][1]["total_mib"]
    assert f"ran out of memory within a plan of {int(total)} MiB; something else takes memory there" in sentence
    assert planned == "-b 1 -r 1" and all(mib < 0.9 * total for _, mib in ways)


# ----------------------------------------------------------------------------
# resuming: what is done to log/, the flags, and words. The checkpoints in it are 2 and 4

RESUME = "-b 4 -t 32 -x 6 -n 2 -v 0 -s 0 -y 1 -o log"
MODEL, STATE, EXTRA = "model_00000004.bin", "state_00000004_00000.bin", "extra_00000004_00000.json"
LOADER = 1024 + 12 * N  # where the loader's section of a state file begins: counts, 2 shards, samples, the generator


def without(*names):
    return lambda log: [(log / name).unlink() for name in names]


def damaged(name, damage):
    return lambda log: replace(log / name, damage((log / name).read_bytes()))


def forged(damage):
    """Damage to the state of which the extra file gives the CRC-32."""

    def forge(log):
        damaged(STATE, damage)(log)
        entries = json.loads((log / EXTRA).read_text())
        entries["crc32"]["state"] = f"{zlib.crc32((log / STATE).read_bytes()):08x}"
        replace(log / EXTRA, json.dumps(entries).encode())

    return forge


def another_bit(raw: bytes) -> bytes:
    """In the middle, which for a state file is in its tensors."""
    half = len(raw) // 2
    return raw[:half] + bytes([raw[half] ^ 1]) + raw[half + 1 :]


def at(offset: int, form: str, *values):
    return lambda raw: patched(raw, *values, at=offset if offset >= 0 else len(raw) + offset, form=form)


def extra_with(text: str):
    return damaged(EXTRA, lambda raw: text.encode())


def windows(text: str) -> str:
    """An extra file of the right batch with `text` for both outlier windows."""
    return f'{{"B": 4, "T": 32, "loss_outliers": {text}, "norm_outliers": {text}}}'


RESUMES = {
    "model is gone": (without(MODEL), "", MODEL, "is missing, though log/DONE_00000004 marks"),
    "state is gone": (without(STATE), "", STATE, "is missing"),
    "all but DONE is gone": (without(MODEL, STATE, EXTRA), "", "is missing"),
    "DONE of step 99999999 alone": (lambda log: (log / "DONE_99999999").touch(), "", "model_99999999.bin is missing",
        "remove DONE_99999999"),
    "DONE of a step with 20 digits": (lambda log: (log / ("DONE_" + "9" * 20)).touch(), "", "is missing"),
    "model is a folder": (lambda log: ((log / MODEL).unlink(), (log / MODEL).mkdir()), "", MODEL, "is missing"),
    "model is a link to nowhere": (lambda log: ((log / MODEL).unlink(), (log / MODEL).symlink_to("x")), "", MODEL, "is missing"),
    "model is empty": (damaged(MODEL, cut(0)), "", MODEL, "is empty"),
    "model is truncated": (damaged(MODEL, cut(5000)), "", MODEL, "truncated by", "or resume from another checkpoint: remove"),
    "model is oversized": (damaged(MODEL, plus(b"x")), "", MODEL, "oversized by 1"),
    "model of the other checkpoint": (lambda log: replace(log / MODEL, (log / "model_00000002.bin").read_bytes()),
        "", MODEL, "is damaged or another file", EXTRA, "or resume from another checkpoint: remove"),
    "another bit in the model": (damaged(MODEL, another_bit), "", MODEL, "is damaged or another file", EXTRA),
    "another bit in the state": (damaged(STATE, another_bit), "", STATE, "is damaged or another file", EXTRA),
    "a CRC-32 of null": (damaged(EXTRA, lambda raw: re.sub(rb'"state": ".*"', b'"state": null', raw)),
        "", EXTRA, "expected those of files"),
    "model of 0 layers": (damaged(MODEL, word(4, 0)), "", MODEL, "num_layers = 0"),
    "model and state are swapped": (
        lambda log: ((log / MODEL).rename(log / "x"), (log / STATE).rename(log / MODEL), (log / "x").rename(log / STATE)),
        "", "is a model file; expected a training state file"),
    "state is empty": (damaged(STATE, cut(0)), "", STATE, "is empty"),
    "state is truncated in m": (damaged(STATE, cut(5000)), "", STATE, "truncated by"),
    "state is truncated in the loader": (damaged(STATE, lambda raw: raw[:-600]), "", STATE, "truncated by"),
    "state is oversized": (damaged(STATE, plus(b"1234")), "", STATE, "oversized by 4"),
    "state of version 2": (damaged(STATE, word(1, 2)), "", STATE, "version 2"),
    "state of two processes": (damaged(STATE, word(2, 2)), "", "state_00000004_00001.bin is missing"),
    "state of 0 processes": (damaged(STATE, word(2, 0)), "", "rank 0 of 0"),
    "state of rank 3": (damaged(STATE, word(3, 3)), "", "rank 3 of 1"),
    "state of a negative step": (damaged(STATE, word(10, -4)), "", "step -4"),
    "state of another step": (damaged(STATE, word(10, 3)), "", STATE, "written at step 3; expected 4"),
    "state of the other checkpoint": (lambda log: replace(log / STATE, (log / "state_00000002_00000.bin").read_bytes()),
        "", "written at step 2; expected 4"),
    "state with master 7": (damaged(STATE, word(4, 7)), "", "use_master_weights 7"),
    "state that forgot its master": (damaged(STATE, word(4, 0)), "", STATE),
    "state that says it did not shuffle": (damaged(STATE, word(5, 0)), "", STATE, "oversized"),
    "shard index 5": (forged(at(120, "<Q", 5)), "", "not a permutation"),
    "shard index 2^64-1": (forged(at(120, "<Q", 2**64 - 1)), "", "not a permutation"),
    "sample index 2^63": (forged(at(128, "<Q", 2**63)), "", "not a permutation"),
    "number of shards 2^64-1": (damaged(STATE, at(LOADER, "<Q", 2**64 - 1)), "", STATE, "truncated"),
    "number of samples 2^62": (damaged(STATE, at(LOADER + 16, "<Q", 2**62)), "", STATE, "truncated"),
    "a shard twice": (forged(at(LOADER + 8, "<2i", 1, 1)), "", "not a permutation"),
    "a negative sample": (forged(at(LOADER + 24, "<i", -1)), "", "not a permutation"),
    "the generator's place": (forged(at(-2520 + 8, "<iI", 5, 5)), "", "not a Mersenne Twister's state"),
    "the generator's constants": (forged(at(-4, "<I", 0)), "", "not a Mersenne Twister's state"),
    "extra is empty": (extra_with(""), "", EXTRA, "is damaged"),
    "extra is cut": (damaged(EXTRA, lambda raw: raw[: len(raw) // 2]), "", EXTRA, "is damaged"),
    "extra is a list": (extra_with("[]"), "", EXTRA, "it holds a list"),
    "extra is binary": (damaged(EXTRA, lambda raw: b"\xff\xfe\0"), "", EXTRA, "is damaged"),
    "extra is very deep": (extra_with("[" * 100000), "", EXTRA, "is damaged"),
    "extra is a folder": (lambda log: ((log / EXTRA).unlink(), (log / EXTRA).mkdir()), "", EXTRA, "is damaged"),
    "extra lacks entries": (extra_with('{"loss_outliers": {}}'), "", EXTRA, "lacks norm_outliers"),
    "extra holds no window": (extra_with(windows("{}")), "", EXTRA, "damaged outlier window"),
    "extra holds a number": (extra_with(windows("5")), "", EXTRA, "damaged outlier window"),
    "extra holds nothing but null": (extra_with('{"loss_outliers": null, "norm_outliers": null}'), "", EXTRA, "damaged outlier window"),
    "extra holds bad floats": (extra_with(windows('{"window": ["zz"], "index": 0, "sum": "0x0p+0", "sum_sq": "0x0p+0"}')),
        "", "damaged outlier window"),
    "extra's shards are as many tokens as a number can be": (damaged(EXTRA, lambda raw: raw.replace(b"5000", b"4611686018427387904")),
        "-b 2", "error: step 4 in log: the checkpoint's place in its training data is damaged", "makes no sense"),
    "extra's -b is a word, and to be taken": (extra_with('{"B": "four", "T": 32, "loss_outliers": {}, "norm_outliers": {}}'),
        "-b auto", EXTRA),
    "extra's -b is 0, and to be taken": (extra_with('{"B": 0, "T": 32, "loss_outliers": {}, "norm_outliers": {}}'), "-b auto", EXTRA),
    "extra's -b is more than -b can be": (extra_with(f'{{"B": {2**31}, "T": 32, "loss_outliers": {{}}, "norm_outliers": {{}}}}'),
        "-b auto", EXTRA, f"says B {2**31}; expected a whole number from 1 to {2**31 - 1}"),
    "extra's -b is negative, and to be taken": (extra_with('{"B": -4, "T": 32, "loss_outliers": {}, "norm_outliers": {}}'),
        "-b auto", EXTRA),
    "extra is cut, and its -b to be taken": (damaged(EXTRA, lambda raw: raw[: len(raw) // 2]), "-b auto", EXTRA, "is damaged"),
    "another order": (lambda log: None, "-a 1", "shuffled", "resume with the -a"),
    "another model": (lambda log: None, "-e d12", "is L=3 NH=4 C=64 V=96 maxT=64, but -e d12 is L=12 NH=12 C=768"),
    "T above the checkpoint's": (lambda log: None, "-t 128", "the model knows 64 positions"),
}  # fmt: skip


@pytest.mark.parametrize("name", RESUMES)
def test_a_checkpoint_that_cannot_be_resumed_is_refused_and_kept(case, name):
    """Every file, logs and memory.json included, is as it was: the next try may be with the right flags.

    The logs end as a crash after the checkpoint leaves them, in lines that a resumed run would drop.
    """
    damage, flags, *words = RESUMES[name]
    damage(case / "log")
    for log, line in (("main.log", "s:4 trl:1.0000 lr:0.000300 norm:1.00\ns:5 t"), ("speed.log", "s:4 ms:8.00 tok/s:16000.0\ns:5 m")):
        with open(case / "log" / log, "a") as file:
            file.write(line)
    assert WRITTEN_BY_A_RUN <= contents(case).keys()
    refused(case, [*inputs(case), RESUME, flags], *words)


@pytest.mark.parametrize("name", sorted(WRITTEN_BY_A_RUN))
def test_a_folder_in_the_place_of_a_log_or_the_record_is_a_sentence_and_changes_nothing(case, name):
    (case / name).unlink()
    (case / name).mkdir()
    words = f"{name} is a directory; expected a file" if name.endswith("json") else f"opening the log failed at {name}: Is a directory"
    refused(case, [*inputs(case), RESUME], words)


def test_removing_done_as_the_sentence_says_resumes_from_the_checkpoint_before(case):
    (case / "log" / MODEL).unlink()
    refused(case, [*inputs(case), RESUME], "remove DONE_00000004 to resume from the checkpoint before")
    (case / "log" / "DONE_00000004").unlink()
    assert "resuming at step 2 from log" in ran(*inputs(case), RESUME)


@pytest.mark.parametrize("flags,words", [
    ("-b 2", "with -b 2 -t 32 on 1 data-parallel rank, after -b 4 -t 32 on 1 data-parallel rank"),
    ("-t 16", "with -b 4 -t 16 on 1 data-parallel rank"),
    ("-i train_01.bin", "note: train_02.bin is gone"),
])  # fmt: skip
def test_with_other_batches_or_shards_what_is_left_of_the_epoch_comes_first(case, flags, words):
    out = ran(*inputs(case), RESUME, flags)
    assert words in out and "tokens of this epoch are left" in out and "resuming at step 4 from log" in out


@pytest.mark.parametrize("precision,form", [("fp32", "-w 1"), ("bf16", "-w 1"), ("bf16", "--master bits16")])
def test_master_weights_that_were_not_saved_start_from_the_weights(case, precision, form):
    """Exactly so, and where that matters a line says it; an fp32 model is its own master, so it ends as the run without one."""
    bf16 = precision == "bf16"
    if bf16:
        raw = (case / "model.bin").read_bytes()
        replace(case / "model.bin", patched(raw[:1024], 5, at=4) + (np.frombuffer(raw[1024:], "<u4") >> 16).astype("<u2").tobytes())
    argv = [*inputs(case), "-b 4 -t 32 -n 2 -l 1e-2", QUIET]
    ran(*argv, "-x 2 -w 0 -o w0")
    for name in ("looked at", "without"):
        shutil.copytree(case / "w0", case / name)

    found = []

    def look(run):
        found.append(torch.cat([piece.clone() for piece in run.model.master_pieces()] if bf16 else [run.model.flat["parameters"]]))

    assert run(*argv, "-x 4 -y 1 -o", case / "looked at", form, faked={"loop": look}).code == 0
    saved = np.frombuffer((case / "w0" / "model_00000002.bin").read_bytes()[1024:], "<u2" if bf16 else "<u4").astype("<u4")
    assert found[0].dtype == torch.float32
    assert np.array_equal(found[0].numpy().view("<u4"), saved << 16 if bf16 else saved)

    out, without = ran(*argv, "-x 4 -y 1 -o w0", form), ran(*argv, "-x 4 -y 1 -w 0 -o without")
    line = "w0/state_00000002_00000.bin holds no fp32 master weights: they start from the bf16 weights\n"
    assert out.count(line) == bf16 and out.count("master weights") == bf16 and "master weights:" not in without
    assert len(losses(out)) == len(losses(without)) == 2 and all(math.isfinite(float(loss)) for loss in losses(out))
    assert losses(out)[0] == losses(without)[0], "the same weights"
    model, state = (case / "w0" / name for name in (MODEL, STATE))
    assert (model.read_bytes() == (case / "without" / MODEL).read_bytes()) == (not bf16)
    assert struct.unpack_from("<I", state.read_bytes(), 16) == (1,) and state.stat().st_size > 1024 + 3 * 4 * N


def test_y_1_without_a_checkpoint_starts_anew_and_says_so(case):
    """Also for a folder that is not there, and one with other files, half a checkpoint and unrelated names."""
    (case / "odd").mkdir()
    for name in ("DONE_4", "DONE_00000004.tmp", "DONE_x", "model_00000004.bin", "notes.txt"):
        (case / "odd" / name).write_text("x")
    for folder in ("new/deep", "odd"):
        out = ran(*inputs(case), STEPS, "-y 1 -o", folder)
        assert f"-y 1: no complete checkpoint in {folder}, starting from" in out and len(losses(out)) == 2
    assert sorted(p.name for p in (case / "odd").iterdir()) == [
        "DONE_4", "DONE_x", "main.log", "memory.json", "model_00000004.bin", "notes.txt", "speed.log",
    ]  # fmt: skip


# ----------------------------------------------------------------------------
# writing


def test_a_name_in_any_script_and_with_spaces_works(case):
    name = Path("log ü 日本 [x] 'q'")
    ran(*inputs(case), STEPS, "-n 1 -o", name)
    assert "resuming at step 2" in ran(*inputs(case), STEPS, "-y 1 -o", name)
    shutil.copy(case / "train_01.bin", case / "a[1].bin")
    assert len(losses(ran(*inputs(case), STEPS, "-i", Path("a[1].bin")))) == 2


def test_a_folder_that_cannot_be_written_is_refused_before_training(case):
    folder = case / "readonly"
    folder.mkdir(mode=0o500)
    if os.access(folder, os.W_OK):
        pytest.skip("root writes everywhere")
    refused(case, [*inputs(case), STEPS, "-o", folder], "preparing the output folder failed")


@pytest.mark.parametrize("name", ["link", "file"])
def test_an_output_folder_that_something_else_is_in_the_place_of(case, name):
    (case / "link").symlink_to("nowhere")
    (case / "file").write_text("precious")
    refused(case, [*inputs(case), STEPS, "-o", name], {"link": "is a link to nowhere", "file": "is a file"}[name], "choose another name")


@pytest.mark.parametrize("file", ["model_", "extra_", "state_", "DONE_"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_a_disk_that_fails_while_saving_costs_one_checkpoint_and_no_other(case, file, number):
    """The rename of each of the four files in turn; checkpoint 4 stays the newest and loadable, and the run can go on from it."""
    real = os.replace

    def full(source, target):
        if Path(target).name.startswith(file):
            raise OSError(number, os.strerror(number))
        return real(source, target)

    with patch("os.replace", full):
        kept = "; step 4 is kept in log: once that is mended, -y 1 goes on there\n"
        refused(case, [*inputs(case), RESUME], "failed at log/" + file, os.strerror(number), kept, goes_ahead=True)
    assert find_last_step(case / "log") == 4
    assert "resuming at step 4" in ran(*inputs(case), RESUME)


@pytest.mark.parametrize("numbers, what_to_do", [
    ("ENOSPC EDQUOT", "make room"), ("EFBIG", "raise ulimit -f, or choose a file system that takes files of that size"),
    ("EACCES EPERM EROFS", "fix the permissions, or choose another place"), ("EMFILE ENFILE", "raise ulimit -n"),
    ("ENAMETOOLONG ENOTDIR EISDIR ELOOP", "choose another path"), ("EIO", "look at what is there, and whether that disk is well"),
])  # fmt: skip
def test_every_reason_of_a_file_s_failure_has_its_advice(numbers, what_to_do):
    for number in (getattr(errno, name) for name in numbers.split()):
        sentence = f"writing it failed at x: {os.strerror(number)}; {what_to_do}, then run again"
        assert str(file_error(OSError(number, os.strerror(number)), "x", "writing it")) == sentence


def test_an_error_without_a_message_has_a_line_all_the_same():
    assert [lines_of(error) for error in (RuntimeError("\none\ntwo\n"), ValueError(), OSError(" \n"))] == [
        ["one", "two"], ["ValueError()"], ["OSError(' \\n')"],
    ]  # fmt: skip


def test_only_what_names_a_file_is_an_unusable_path():
    """A server's refusal has its address as a filename."""
    assert unusable_path(OSError(errno.EACCES, "Permission denied", "x")).startswith("x: Permission denied; check the path")
    assert unusable_path(HTTPError("http://x", 404, "Not Found", {}, None)) == unusable_path(OSError(errno.EIO, "Input/output error")) == ""


def test_a_file_in_the_place_of_a_checkpoint_is_a_sentence(case):
    (case / "log" / "model_00000006.bin").mkdir()
    refused(case, [*inputs(case), RESUME], "writing the model failed at log/model_00000006.bin", "directory", goes_ahead=True)
    assert find_last_step(case / "log") == 4


@pytest.mark.parametrize("limit,what", [(0, "preparing the output folder"), (100_000, "writing the model"), (700_000, "writing the state")])
def test_a_full_disk_for_real_leaves_the_earlier_checkpoint(case, limit, what):
    """RLIMIT_FSIZE: the system itself refuses to write beyond the limit; a model has 650 KB and a state 1950."""
    before = contents(case)
    result = run_limited("RLIMIT_FSIZE", limit, *inputs(case), "-b 4 -t 32 -x 6 -n 2", QUIET, "-y 1 -o", case / "log")
    assert result.returncode == 2 and result.stderr.startswith(f"error: {what} failed at") and result.stderr.count("\n") == 1, result.stderr
    assert "File too large; raise ulimit -f, or choose a file system that takes files of that size, then run again" in result.stderr
    after = contents(case)
    assert all(after[name] == content for name, content in before.items() if not limit or name not in WRITTEN_BY_A_RUN)
    assert not [name for name in after if name.endswith(".tmp")] and find_last_step(case / "log") == 4
    assert "resuming at step 4" in ran(*inputs(case), RESUME)


@pytest.mark.parametrize("name", ["main.log", "speed.log"])
def test_a_disk_too_full_for_a_log_alone_costs_no_step(case, name):
    """A limit just above what the log holds: the line that does not fit ends the run, after a checkpoint from which it goes on, and closing
    the file at exit must stay quiet."""
    path, argv = case / "log" / name, [*inputs(case), "-b 4 -t 32 -x 9", QUIET, "-y 1 -o", case / "log"]
    with open(path, "a") as file:
        file.write("# " + "x" * 3_000_000 + "\n")  # so that everything else that is written has room; a resumed log keeps such a line
    limit = path.stat().st_size + 10
    assert limit > (case / "log" / STATE).stat().st_size
    result = run_limited("RLIMIT_FSIZE", limit, *argv)
    assert result.returncode == 2 and result.stderr.startswith(f"error: writing the log failed at {path}: File too large"), result.stderr
    assert result.stderr.endswith(f"; step 5 is kept in {case}/log: once that is mended, -y 1 goes on there\n"), result.stderr
    assert result.stderr.count("\n") == 1 and "resuming at step 5" in ran(*argv)


@pytest.mark.parametrize("phase, step", [("first step", 5), ("end", 9)])
def test_a_record_that_cannot_be_written_costs_no_step_and_keeps_the_earlier_one(case, phase, step):
    argv, real, before = [*inputs(case), RESUME, "-x 9"], os.replace, (case / "log" / "memory.json").read_bytes()

    def denied(source, target):
        if target.name == "memory.json" and json.loads(source.read_text())["measured"][-1]["phase"] == phase:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(source, target)

    with patch("os.replace", denied):
        ended = run(*argv)
    assert ended.code == 2 and ended.err == (
        "error: writing the memory record failed at log/memory.json: Permission denied; fix the permissions, or choose another place, "
        f"then run again; step {step} is kept in log: once that is mended, -y 1 goes on there\n"
    )
    assert find_last_step(case / "log") == step and (phase == "end" or (case / "log" / "memory.json").read_bytes() == before)
    ran(*argv)


# ----------------------------------------------------------------------------
# streams


def shell(command: str, **environment) -> subprocess.CompletedProcess:
    """A command of sh, in which $TRAIN is the program and $SCRIPTS/name.py another. They buffer what they print, as they do by default."""
    programs = {"TRAIN": f"{sys.executable} {REPO}/train_gpt2.py", "SCRIPTS": f"{sys.executable} {REPO}/scripts"}
    environment = {**os.environ, "PYTHONUNBUFFERED": "", **programs, **environment}
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=300, errors="surrogateescape")


# in Python 3.14 argparse meets the error, and says nothing
HELP_INTO_A_FULL_DISK = (1, "error: printing failed: No space left") if sys.version_info < (3, 14) else (0, "")
STREAMS = {  # command -> exit code of the program, what stderr holds
    "help into a pipe nobody reads": ("$TRAIN --help | true; echo ${PIPESTATUS[0]}", 1, ""),
    "help into a full disk": ("$TRAIN --help > /dev/full; echo $?", 1, "error: printing failed: No space left on device"),
    "version into a full disk": ("$TRAIN --version > /dev/full; echo $?", 1, "error: printing failed: No space left on device"),
    "a script's help into a pipe nobody reads": ("$SCRIPTS/prepare_text.py --help | true; echo ${PIPESTATUS[0]}", (0, 1), ""),
    "a script's help into a full disk": ("$SCRIPTS/plot_log.py --help > /dev/full; echo $?", *HELP_INTO_A_FULL_DISK),
    "too large a bench": ("$SCRIPTS/bench.py -e gpt3:c12288 -b 1 -t 64 --only ours > /dev/null; echo $?", 2,
                          "error: a step of gpt3:c12288 -b 1 -t 64 -r 0 in"),
    "a sweep of one size": ("$SCRIPTS/bench.py --sweep -b 4 > /dev/null; echo $?", 2, "leave out -b and -t, or --sweep"),
    "too long a bench": ("$SCRIPTS/bench.py -b 1 -t 1030 --only ours > /dev/null; echo $?", 2, "error: -t 1030: the model knows 1024"),
    "a script's path that nobody may have": (f"$SCRIPTS/plot_log.py {'x' * 300}; echo $?", 2, "x: File name too long; check the path"),
    "a script's error without stdout": ("exec 3>&1; $SCRIPTS/plot_log.py nothing >&- 3>&3; echo $? >&3", 2, "error: "),
    "a name that nobody can read, to a closed stderr": ("$TRAIN -i $'/tmp/\\xff.bin' > /dev/null 2>&-; echo $?", 2, ""),
    "an error into a full disk": ("$TRAIN -b x > /dev/full 2>&1; echo $?", 2, ""),
    "too large a model, into a full disk": ("$TRAIN -i x -e d48 -b 4096 --plan -r auto --memory-budget 1GiB 2> /dev/full; echo $?", 3, ""),
    "a script's error into a pipe nobody reads": ("$SCRIPTS/plot_log.py nothing 2>&1 | true; echo ${PIPESTATUS[0]}", 2, ""),
    "an error without stdout": ("exec 3>&1; $TRAIN -b x >&- 3>&3; echo $? >&3", 2, "error: -b"),
    "help without stdin": ("$TRAIN --version <&- > /dev/null; echo $?", 0, ""),
    "version into a pipe nobody reads": ("$TRAIN --version | true; echo ${PIPESTATUS[0]}", (0, 1), ""),
    "20 columns": ("COLUMNS=20 $TRAIN --help > /dev/null; echo $?", 0, ""),
    "0 columns": ("COLUMNS=0 $TRAIN --help > /dev/null; echo $?", 0, ""),
    "columns of text": ("COLUMNS=wide $TRAIN --help > /dev/null; echo $?", 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_that_is_closed_full_or_narrow_ends_without_a_traceback(name):
    command, codes, words = STREAMS[name]
    result = shell(command)
    assert int(result.stdout) in (codes if isinstance(codes, tuple) else (codes,)), result.stderr
    assert words in result.stderr and "Traceback" not in result.stderr and "Exception ignored" not in result.stderr
    assert result.stderr.count("\n") == bool(words)


FILLED = """
import os, sys
from llmc.errors import fill_closed_streams
fill_closed_streams()
sys.exit([sys.stdout.fileno(), sys.stderr.fileno(), os.open(os.devnull, os.O_RDONLY)] != [1, 2, 3])
"""


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-", ">&-"])
def test_closed_streams_leave_their_numbers_to_no_other_file(closed):
    """Which what a library prints by itself would be written into."""
    assert shell(f"cd {REPO}; {sys.executable} -c '{FILLED}' {closed}; echo $?").stdout == "0\n"


FAILING = """
from llmc.errors import UserError, run_script

def main():
    print("a line that stays in the buffer")
    raise UserError("the reason")

run_script(main)
"""
TRAINING_THAT_FAILS = """
import sys, train_gpt2
from llmc.errors import UserError

def parse(words):
    print("a line that stays in the buffer")
    raise UserError("the reason")

train_gpt2.parse = parse
train_gpt2.leave(train_gpt2.main([]))
"""


@pytest.mark.parametrize("program", [FAILING, TRAINING_THAT_FAILS], ids=["a script", "training"])
@pytest.mark.parametrize("into", ["> /dev/full", "| true"])
def test_what_fails_says_why_although_it_could_not_print(into, program):
    result = shell(f"cd {REPO}; {sys.executable} -c '{program}' {into}; echo ${{PIPESTATUS[0]}}")
    assert (result.stdout, result.stderr) == ("2\n", "error: the reason\n")


def test_an_error_that_is_none_of_printing_is_raised_again(capfd, monkeypatch):
    """A full disk below another file than the output; an error that no print meets, where the output is lost too."""
    with pytest.raises(OSError, match="No space left"):
        tell(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "interrupted")
    monkeypatch.setattr("llmc.errors._can_print", lambda: False)
    with pytest.raises(OSError, match="Cannot allocate"):
        tell(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "interrupted")
    assert capfd.readouterr().err == ""


STOPPED = """
import signal
from llmc.interrupt import StopRequest

stop = StopRequest()
input()
signal.raise_signal(signal.SIGINT)
print("a step line", flush=True)
print("requested" if stop.requested else "not asked", end="")
"""


def test_a_run_asked_to_stop_goes_on_when_nobody_reads_it_any_more():
    """As Ctrl-C ends `| tee log` too: the checkpoint is still to come."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", STOPPED], cwd=REPO, **pipes) as program:
        program.stdout.close()
        program.stdin.write("nobody reads now\n")
        program.stdin.close()
        assert (program.stderr.read(), program.wait()) == ("", 0)


def test_training_into_head_ends_quietly(case):
    flags = " ".join(f"'{word}'" for word in words_of([*inputs(case), "-b 1 -t 8 -x 100000 --device cpu --threads 1", QUIET]))
    result = shell(f"$TRAIN {flags} | head -1; echo ${{PIPESTATUS[0]}}")
    assert result.stdout.splitlines()[-1] == "1" and result.stdout.startswith("+--") and not result.stderr


def test_a_terminal_without_the_letters_still_trains(case):
    """An ASCII terminal, a folder with umlauts and a sample that cuts a character: escaped, not a traceback at step 20."""
    replace(case / "tokenizer.bin", tokenizer_bytes([b"\xe4"] * 95 + [b"end"], 95))
    flags = " ".join(
        f"'{word}'" for word in words_of([*inputs(case), "-b 1 -t 8 -x 1 -v 0 -g 4 --device cpu --threads 1 --tokenizer tokenizer.bin"])
    )
    result = shell(f"cd {case}; $TRAIN {flags} -o $'log\\xfc\\xc3\\xa9'; echo $?", PYTHONIOENCODING="ascii")
    assert result.stdout.splitlines()[-1] == "0" and not result.stderr and "\\ufffd" in result.stdout


# ----------------------------------------------------------------------------
# the wrong Python

WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; import train_gpt2; sys.exit(train_gpt2.main(['-e', 'd6']))"
PROGRAMS = ["train_gpt2.py", *(f"scripts/{f.name}" for f in sorted((REPO / "scripts").glob("*.py")) if "\nif __name__ ==" in f.read_text())]
WRONG_PYTHON = {  # the interpreter -> its arguments, what is said
    f"without packages, for {program}": (["-S", program, "--help"], "error: numpy is not installed for ") for program in PROGRAMS
} | {
    "without torch": (["-c", WITHOUT_TORCH], "error: torch is not installed for "),
    "too old": (["-c", "import sys; sys.version_info = 3, 9, 18; import train_gpt2"], ", and llmc needs 3.10 or later; "),
}


@pytest.mark.parametrize("name", WRONG_PYTHON)
def test_a_python_that_cannot_run_this_is_told_to_activate_the_environment(name):
    """As the system's own, when that was forgotten."""
    arguments, said = WRONG_PYTHON[name]
    result = subprocess.run([sys.executable, *arguments], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert said in result.stderr and "activate the environment that make train makes" in result.stderr
