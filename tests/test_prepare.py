"""Prepared data is llm.c's, the same with any number of workers and after any kill; and what is wrong with an input is said."""

import glob
import hashlib
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from llmc.data.evals import read_eval_file
from llmc.data.loader import TokenLoader
from llmc.data.shards import count_tokens, open_shard
from llmc.data.tokenizer import ByteEncoder, Tokenizer
from llmc.distributed.watch import is_alive
from llmc.errors import UserError
from llmc.flags import parse
from scripts import (
    inputs, prepare, prepare_fineweb, prepare_hellaswag, prepare_stdlib, prepare_text, prepare_tinyshakespeare, prepare_tinystories,
)  # fmt: skip

REPO = Path(__file__).resolve().parent.parent
EOT = 50256
BYTES = ["--encoder", "bytes"]


def text_of(*paths) -> list[str]:
    """The documents in shards made of bytes: what stands behind each end-of-text token."""
    tokens = np.concatenate([open_shard(path).read(0, count_tokens(path)) for path in paths]).tolist()
    table, documents = Tokenizer.from_bytes_only(), []
    for token in tokens:
        if token == EOT:
            documents.append(b"")
        else:
            documents[-1] += table.decode([token])
    return [document.decode() for document in documents]


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def some_documents(count=40, seed=0):
    rng = random.Random(seed)
    return ["".join(rng.choices("ab é\n", k=rng.randrange(60))) for _ in range(count)]


def corpus(documents=lambda: iter(some_documents()), **changes):
    return prepare.Corpus(
        **{"name": "c", "documents": documents, "source": "s", "file_name": prepare.numbered("c"), "shard_tokens": 100} | changes
    )


# --- shards


def test_shards_cut_the_stream_of_documents_every_shard_tokens(tmp_path):
    paths = prepare.write_corpus(corpus(), tmp_path, ByteEncoder(), 1)
    sizes = [count_tokens(path) for path in paths]
    assert sizes[:-1] == [100] * (len(sizes) - 1) and 0 < sizes[-1] <= 100 and len(sizes) > 5
    assert [path.name for path in paths[:2]] == ["c_000000.bin", "c_000001.bin"]
    assert text_of(*paths) == some_documents()


def test_of_no_documents_nothing_is_left_that_looks_finished(tmp_path):
    """So the same command takes them once they are there."""
    with pytest.raises(UserError, match=f"there are no documents for {tmp_path / 'c_000000.bin'}"):
        prepare.write_corpus(corpus(lambda: iter([])), tmp_path, ByteEncoder(), 1)
    assert contents(tmp_path) == {}
    assert text_of(*prepare.write_corpus(corpus(), tmp_path, ByteEncoder(), 1)) == some_documents()


def test_workers_do_not_change_the_bytes(tmp_path, monkeypatch):
    """Two processes, against none; batches made small, so that there are enough of them for a pool to start."""
    monkeypatch.setattr(prepare, "BATCH_CHARS", 20)
    for workers in (1, 2):
        (tmp_path / str(workers)).mkdir()
        prepare.write_corpus(corpus(), tmp_path / str(workers), ByteEncoder(), workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")


class Stop(Exception):
    """Stands for a kill: nothing in the program catches it."""


def stopping_after(count):
    yield from some_documents()[:count]
    raise Stop


@pytest.mark.parametrize("count", [0, 1, 7, 20, 39, 40])
def test_a_rerun_after_a_kill_gives_the_bytes_of_a_straight_run(tmp_path, count):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    straight.mkdir(), killed.mkdir()
    prepare.write_corpus(corpus(), straight, ByteEncoder(), 1)
    with pytest.raises(Stop):
        prepare.write_corpus(corpus(documents=partial(stopping_after, count)), killed, ByteEncoder(), 1)
    assert set(contents(killed)) <= set(contents(straight))
    prepare.write_corpus(corpus(), killed, ByteEncoder(), 1)
    assert contents(killed) == contents(straight)


def test_finished_shards_are_not_encoded_again(tmp_path):
    """Neither when all are there, nor, after a kill, those before it."""
    encoded = []

    class Watched(ByteEncoder):
        def encode(self, text):
            encoded.append(text)
            return super().encode(text)

    with pytest.raises(Stop):
        prepare.write_corpus(corpus(partial(stopping_after, 20)), tmp_path, Watched(), 1)
    encoded.clear()
    prepare.write_corpus(corpus(), tmp_path, Watched(), 1)
    assert 20 <= len(encoded) < 30  # documents 20 to 39, and those of the shard that was lost
    encoded.clear()
    prepare.write_corpus(corpus(), tmp_path, Watched(), 1)
    assert encoded == []


def test_a_sigkill_leaves_whole_shards_only_and_a_rerun_completes_them(tmp_path):
    """A real process, killed by the system in the middle of a shard."""
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    killed.mkdir(), straight.mkdir()
    program = f"""
import os, signal, sys
sys.path[:0] = [{str(REPO)!r}, {str(REPO / "tests")!r}]
import test_prepare as t
def documents():
    yield from t.some_documents()[:25]
    os.kill(os.getpid(), signal.SIGKILL)
t.prepare.write_corpus(t.corpus(documents), t.Path({str(killed)!r}), t.ByteEncoder(), 1)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    shards = [name for name in contents(killed) if name.endswith(".bin")]
    assert shards and all(count_tokens(killed / name) == 100 for name in shards)
    for folder in (killed, straight):
        prepare.write_corpus(corpus(), folder, ByteEncoder(), 1)
    assert contents(killed) == contents(straight)


def test_workers_of_a_run_that_is_killed_end_too(tmp_path):
    """Killed while they encode, by a signal that it cannot pass on."""
    program = f"""
import os, signal, sys
from dataclasses import replace
sys.path[:0] = [{str(REPO)!r}, {str(REPO / "tests")!r}]
import test_prepare as t
def documents():
    while True:
        yield "a" * t.prepare.BATCH_CHARS
        if len(list(t.Path({str(tmp_path)!r}).glob("*.bin"))) >= 2:
            t.Path({str(tmp_path / "workers")!r}).write_text(open(f"/proc/self/task/{{os.getpid()}}/children").read())
            os.kill(os.getpid(), signal.SIGKILL)
if __name__ == "__main__":
    c = replace(t.corpus(documents), shard_tokens=t.prepare.BATCH_CHARS)
    t.prepare.write_corpus(c, t.Path({str(tmp_path)!r}), t.ByteEncoder(), 2)
"""
    (tmp_path / "program.py").write_text(program)
    nowhere = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)  # a pipe would be open as long as they are
    assert subprocess.run([sys.executable, tmp_path / "program.py"], **nowhere, timeout=100).returncode == -signal.SIGKILL
    workers = list(map(int, (tmp_path / "workers").read_text().split()))
    assert len(workers) >= 2
    deadline = time.monotonic() + 30
    while (living := [process for process in workers if is_alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in living:
        os.kill(process, signal.SIGKILL)
    assert not living, f"of {workers} still there: {living}"


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_shard_that_was_lost_is_made_again(tmp_path, damage):
    paths = prepare.write_corpus(corpus(), tmp_path, ByteEncoder(), 1)
    before = contents(tmp_path)
    paths[3].unlink() if damage == "missing" else paths[3].write_bytes(b"half")
    prepare.write_corpus(corpus(), tmp_path, ByteEncoder(), 1)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("change, told", [
    ({"source": "another"}, "the input, or how it is read, was another"), ({"shard_tokens": 50}, "shard_tokens was .* and is .*"),
])  # fmt: skip
def test_shards_of_another_corpus_are_not_continued(tmp_path, change, told):
    prepare.write_corpus(corpus(), tmp_path, ByteEncoder(), 1)
    words = f"made otherwise \\({told}\\); remove them and .*c.progress.json, as well as the other split's if .*, or give another --output"
    with pytest.raises(UserError, match=words):
        prepare.write_corpus(corpus(**change), tmp_path, ByteEncoder(), 1)


def test_memory_is_bounded_by_the_batches_in_flight(tmp_path, monkeypatch):
    """However long the corpus, documents are drawn only as far ahead of the tokens as the bound says."""
    monkeypatch.setattr(prepare, "BATCH_CHARS", 1)  # one document, one batch
    drawn = 0

    def endless():
        nonlocal drawn
        while True:
            drawn += 1
            yield "x"

    ahead = []
    for used, _ in zip(range(1, 200), prepare.encoded(endless(), ByteEncoder(), 2)):
        ahead.append(drawn - used)
    assert max(ahead) <= prepare.POOL_BATCHES + 2 * 2 + 1
    drawn, stream = 0, prepare.encoded(endless(), ByteEncoder(), 1)
    next(stream)
    assert drawn == 1


def test_a_dead_worker_is_a_sentence(monkeypatch):
    monkeypatch.setattr(prepare, "BATCH_CHARS", 1)
    with pytest.raises(UserError, match="fewer --workers"):
        list(prepare.encoded(["x"] * 40, Deadly(), 2))


class Deadly(ByteEncoder):
    def encode(self, text):
        os._exit(1)


# --- inputs


def test_text_jsonl_and_parquet_become_documents(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [f"row {i}" for i in range(10)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("plain é")
    (tmp_path / "in" / "b.jsonl").write_text("".join(json.dumps({"id": 1, "body": row}) + "\n" for row in rows) + "\n")
    parquet.write_table(pyarrow.table({"body": rows, "n": range(10)}), tmp_path / "in" / "c.parquet", row_group_size=3)
    prepare_text.main(
        ["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--jsonl-field", "body", "--val-every", "4", *BYTES]
    )
    every = ["plain é", *rows, *rows]
    assert text_of(tmp_path / "out" / "text_val_000000.bin") == every[2::4]
    assert text_of(tmp_path / "out" / "text_train_000000.bin") == [d for i, d in enumerate(every) if i % 4 != 2]
    assert Tokenizer.read(tmp_path / "out" / "gpt2_tokenizer.bin").vocab_size == 50257


@pytest.mark.parametrize("documents, validates", [(2, [1]), (3, [1]), (10, [5]), (11, [10]), (31, [10, 30])])
def test_of_few_documents_one_is_for_validation(tmp_path, documents, validates):
    """The same ones in every run."""
    texts = [f"document {i}" for i in range(documents)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for _ in range(2):
        prepare_text.main(["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out"), *BYTES])
    assert text_of(tmp_path / "out" / "text_val_000000.bin") == [texts[i] for i in validates]
    assert text_of(tmp_path / "out" / "text_train_000000.bin") == [text for i, text in enumerate(texts) if i not in validates]


@pytest.mark.parametrize("documents, flags, told", [
    (1, "", "^--input holds 1 document of text; expected two, one of them for validation, so give more text: a text file"),
    (1, "--val-every 2", "^--input holds 1 document of text; expected two, one of them for validation, so give more text: a text file"),
    (10, "--val-every 20", "--input holds 10 documents of text, and 1 in 20 .* 11 the first; give more text, or a smaller --val-every$"),
])  # fmt: skip
def test_too_few_documents_are_told_with_what_to_do(tmp_path, documents, flags, told):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * documents)
    with pytest.raises(UserError, match=told):
        prepare_text.main(["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out"), *flags.split(), *BYTES])
    assert not list(tmp_path.rglob("*.bin"))


def test_a_tokenizer_file_that_knows_more_than_the_new_tokens_stays(tmp_path):
    """GPT-2's decodes bytes too, and other shards beside these may need it. What decodes them otherwise, or not at all, is replaced."""
    (tmp_path / "a.txt").write_text("word " * 10_000)
    path = tmp_path / "out" / "gpt2_tokenizer.bin"
    argv = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--val-every", "2", *BYTES]
    prepare_text.main(argv)
    plain = Tokenizer.read(path)
    table = [*plain.table[:256], *(b"pair %d" % i for i in range(256, plain.vocab_size))]
    more = Tokenizer(table, plain.end_of_text)
    for kept, written in ((True, more), (False, Tokenizer([b"?", *table[1:]], plain.end_of_text)), (False, Tokenizer(table[:300], 299))):
        written.write(path)
        before = path.read_bytes()
        prepare_text.main(argv)
        assert (path.read_bytes() == before) == kept
    path.write_bytes(b"damaged")
    prepare_text.main(argv)
    assert Tokenizer.read(path).table == plain.table


@pytest.mark.parametrize(
    "name, raw, message",
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl:2 is not JSON"),
        ("a.jsonl", b'\n\n{"body": "b", "n": 1}\n', 'a.jsonl:3 has no field "text" but the fields body, n; .*--jsonl-field'),
        ("a.jsonl", b'{"text": "a"}\n{"body": "b"}\n', 'a.jsonl:2 has no field "text" but the fields body; mend or remove this line$'),
        ("a.jsonl", b'{"text": 3}\n', 'a.jsonl:1: field "text" holds a number, expected text; mend or remove this line, or name the one'),
        ("a.jsonl", b'{"text": null}\n', 'a.jsonl:1: field "text" holds null, expected text; mend or remove this line, or name the one'),
        ("a.jsonl", b"[1]\n", 'a.jsonl:1 has no field "text" but is an array; mend or remove this line$'),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"n": ' + b"1" * 5000 + b"}\n",
            "a.jsonl:2 is not JSON \\(Exceeds the limit .*; mend or remove this line$",
        ),
        (
            "a.jsonl",
            b"[" * 100_000 + b"\n",
            "a.jsonl:1 is not JSON \\((maximum recursion depth|Stack overflow) .*; mend or remove this line$",
        ),
        ("a.txt", b"abc\xff", r"a.txt is not UTF-8 text \(line 1: invalid start byte\); convert it"),
        ("b.txt", b"x" * (2 << 20) + b"\nab\nc\xe4d", r"b.txt is not UTF-8 text \(line 3: invalid continuation byte\)"),
        ("c.txt", "UTF-16".encode("utf-16"), r"c.txt is not UTF-8 text \(it begins as UTF-16 or UTF-32 does\); convert it"),
        ("d.txt", b"a\nb\n\xc3", r"d.txt is not UTF-8 text \(line 3: unexpected end of data\); convert it"),
        (
            "a.txt",
            b"",
            "^--input holds no document of text; expected two, one of them for validation, so give more text: a text file",
        ),
        ("a.doc", b"abc", "a.doc: expected a .txt or .md or .rst or .py or .jsonl or .parquet file"),
    ],
)
def test_a_bad_input_is_named_with_its_place(tmp_path, name, raw, message):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=message):
        prepare_text.main(["--input", str(tmp_path / name), "--output", str(tmp_path / "out"), *BYTES])


def test_one_document_in_one_for_validation_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        prepare_text.main(["--input", str(tmp_path), "--val-every", "1"])
    assert "--val-every: 1 is not a whole number from 2 to " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/", ".", ""])
def test_a_name_that_would_leave_the_output_folder_is_refused(tmp_path, capsys, name):
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(SystemExit, match="2"):
        prepare_text.main(["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "in"), "--name", name])
    assert f"--name: {name!r} is not the name of a file; put the folder into --output" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["a.txt"]


def test_the_command_that_is_printed_finds_the_shards_whatever_they_and_their_folder_are_called(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("word " * 100_000)
    prepare_text.main(["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "a[1]*"), "--name", "b[2]*", *BYTES])
    train, val = re.search('-i "(.*)" -j "(.*)"', capsys.readouterr().out).groups()
    assert [len(glob.glob(pattern)) for pattern in (train, val)] == [1, 1]


@pytest.mark.parametrize("characters", [30_000, 60_000, 200_000])
def test_the_command_that_is_printed_has_sizes_that_the_shards_hold(tmp_path, capsys, characters):
    """Five in a hundred are for validation: some hundred tokens, less than a batch of -b's and -t's default, and more."""
    (tmp_path / "text.txt").write_text("line of text\n\n" * (characters // 14))
    prepare_text.main(["--input", str(tmp_path / "text.txt"), "--output", str(tmp_path), *BYTES])
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("train on them with: python train_gpt2.py "))
    s = parse(shlex.split(line.split("train_gpt2.py ")[1]))
    loaders = [TokenLoader(pattern, s.batch_size, s.sequence_length) for pattern in (s.train_data, s.val_data)]
    assert s.model == "d6" and all(loader.num_batches > 0 for loader in loaders)
    assert ("-b" in line) == (min(loader.num_tokens for loader in loaders) <= 4096)


@pytest.mark.parametrize("content", [
    '{"made_from": [], "shards": [], "finished": false}', '{"made_from": {}, "shards": [{}], "finished": 1}', "[]", "[" * 100_000, "{",
    '{"made_from": {}, "shards": [{"file": "a", "tokens": 1e999, "document": 0, "token": 0}], "finished": 1}',
])  # fmt: skip
def test_a_damaged_note_of_progress_is_named(tmp_path, content):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 2)
    (tmp_path / "text_val.progress.json").write_text(content)
    with pytest.raises(UserError, match="text_val.progress.json cannot be read .*; remove it to prepare this data from the start"):
        prepare_text.main(["--input", str(tmp_path / "a.jsonl"), "--output", str(tmp_path), *BYTES])


def test_missing_inputs_are_named(tmp_path):
    with pytest.raises(UserError, match="--input .*gone: no such file or folder"):
        prepare_text.main(["--input", str(tmp_path / "gone"), "--output", str(tmp_path / "out")])
    with pytest.raises(UserError, match="no .parquet file in this folder"):
        inputs.input_files([tmp_path], [".parquet"])


def test_without_pyarrow_it_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").touch()
    for main in (prepare_fineweb.main, prepare_hellaswag.main):
        with pytest.raises(UserError, match="pip install pyarrow"):
            main(["--input", str(tmp_path), "--output", str(tmp_path / "out"), *BYTES])


def test_an_error_is_one_line_and_exit_code_2(tmp_path):
    """As a program, from the repository root."""
    command = [sys.executable, "scripts/prepare_text.py", "--input", str(tmp_path / "gone"), "--output", str(tmp_path / "out")]
    ran = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: --input ") and ran.stderr.count("\n") == 1


# --- the corpora


def test_tinyshakespeare_is_llmc_s(shared, tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "tiktoken-cache"))
    prepare_tinyshakespeare.main(["--input", str(shared / "data/tinyshakespeare/input.txt"), "--output", str(tmp_path)])
    sha256 = {name: hashlib.sha256(raw).hexdigest() for name, raw in contents(tmp_path).items()}
    assert set(sha256) == {"tiny_shakespeare_val.bin", "tiny_shakespeare_train.bin", "gpt2_tokenizer.bin"}
    assert sha256["tiny_shakespeare_val.bin"] == "fe99db720dc7c83e694806d4e047a952909411da1daccde4ccc2e55f40882a62"
    assert sha256["tiny_shakespeare_train.bin"] == "8a70606be574040c26d225694f5f9759973b419852d22f7fe5c118e1b359dcc8"


def test_without_bpe_files_bytes_stand_in(tmp_path, monkeypatch, capsys):
    def unavailable():
        raise UserError("no BPE")

    monkeypatch.setattr("llmc.data.tokenizer._tiktoken_gpt2", unavailable)
    text = "\n\n".join(f"Speaker {i}:\n{'word ' * 30}" for i in range(300))
    (tmp_path / "input.txt").write_text(text)
    arguments = ["--input", str(tmp_path / "input.txt"), "--output", str(tmp_path / "out")]
    prepare_tinyshakespeare.main(arguments)
    assert "no BPE; until then: one token per byte" in capsys.readouterr().out
    written = [tmp_path / "out" / f"tiny_shakespeare_{split}.bin" for split in ("val", "train")]
    assert count_tokens(written[0]) == 32768
    assert "".join(text_of(*written)) == text
    with pytest.raises(UserError, match="no BPE"):  # asked for by name, it is not replaced
        prepare_tinyshakespeare.main([*arguments, "--encoder", "gpt2"])


def test_a_short_text_is_not_tinyshakespeare(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UserError, match="gives 6 tokens and validation alone takes 32768"):
        prepare_tinyshakespeare.main(["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), *BYTES])


def test_stdlib_takes_sources_in_order_without_tests_and_installed_packages(tmp_path):
    folder = tmp_path / "lib"
    wanted = [f"{chr(97 + i)}.py" for i in range(12)] + ["pkg/__init__.py", "unittest/case.py"]
    unwanted = ["test/t.py", "pkg/tests/t.py", "site-packages/x/y.py", "_sysconfigdata_x.py", "config-3/python-config.py", "a.txt"]
    unwanted += [".venv/lib/x.py", "pkg/.hidden.py"]
    for name in wanted + unwanted:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")
    (folder / "empty.py").touch()
    for out in ("1", "2"):
        prepare_stdlib.main(["--input", str(folder), "--output", str(tmp_path / out), *BYTES])
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    texts = [f"# {name}\n" for name in wanted]
    assert text_of(tmp_path / "1" / "stdlib_val.bin") == texts[10:11]
    assert text_of(tmp_path / "1" / "stdlib_train.bin") == texts[:10] + texts[11:]


def test_this_python_s_own_library_is_found():
    import sysconfig

    files = prepare_stdlib.source_files(Path(sysconfig.get_path("stdlib")))
    assert len(files) > 300 and {"argparse.py", "decoder.py"} <= {path.name for path in files}
    with pytest.raises(UserError, match="holds no ..py files"):
        prepare_stdlib.source_files(REPO / "tests" / "golden")


def test_tinystories_first_file_is_validation_and_files_are_shuffled_as_llmc_s(tmp_path):
    (tmp_path / "in").mkdir()
    told = {f"data{i:02d}.json": [{"story": f" story {i}.{j}\n", "summary": ""} for j in range(9)] for i in range(3)}
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as tar:
        for name, records in told.items():
            (tmp_path / "in" / name).write_text(json.dumps(records))
            tar.add(tmp_path / "in" / name, f"./inside/{name}")
    for given, out in ((tmp_path / "in", "1"), (tmp_path / "all.tar.gz", "2")):
        prepare_tinystories.main(["--input", str(given), "--output", str(tmp_path / out), *BYTES])
    expected = []
    for index, i in ((0, 0), (0, 1), (1, 2)):  # the count starts again with the training files
        texts = [f"story {i}.{j}" for j in range(9)]
        random.Random(1337 + index).shuffle(texts)
        expected += texts
    for out in ("1", "2"):
        assert text_of(tmp_path / out / "TinyStories_val.bin") == expected[:9]
        assert text_of(tmp_path / out / "TinyStories_train.bin") == expected[9:]


def test_tinystories_beside_its_shards_is_found_finished_when_prepared_again(tmp_path):
    """The notes of progress are .json files too."""
    stories_of("a", tmp_path)
    for _ in range(2):
        prepare_tinystories.main(["--input", str(tmp_path), "--output", str(tmp_path), *BYTES])
    for number, split in enumerate(("val", "train")):
        assert text_of(tmp_path / f"TinyStories_{split}.bin")[0].startswith(f"a {number} ")


def stories_of(name, tmp_path):
    """An archive of two files, whose stories say its name."""
    for i in range(2):
        (tmp_path / f"{name}{i}.json").write_text(json.dumps([{"story": f"{name} {i} {j}"} for j in range(40)]))
    archive = tmp_path / f"{name}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for i in range(2):
            tar.add(tmp_path / f"{name}{i}.json", f"all/{name}{i}.json")
    return archive


def test_another_archive_of_tinystories_is_not_taken_for_the_one_before(tmp_path, capsys):
    """The same one is not unpacked again; what came out of another goes, but what was put there by hand is taken."""
    unpacked, archives = tmp_path / "unpacked", {name: stories_of(name, tmp_path) for name in "ab"}
    for name in "aabb":
        prepare_tinystories.unpack(archives[name], unpacked)
        assert {path.name for path in unpacked.glob("*.json")} == {f"{name}0.json", f"{name}1.json"}
    assert capsys.readouterr().out == f"found {unpacked}, not unpacking again\n" * 2
    facts = inputs.file_facts(sorted(unpacked.glob("*.json")))
    os.utime(archives["b"], (0, 0))  # downloaded again: the same corpus, whose shards go on
    prepare_tinystories.unpack(archives["b"], unpacked)
    assert inputs.file_facts(sorted(unpacked.glob("*.json"))) == facts and capsys.readouterr().out == ""
    (unpacked / prepare_tinystories.SOURCE).unlink()
    assert (prepare_tinystories.unpack(archives["a"], unpacked) / "b0.json").exists()


@pytest.mark.parametrize("damage", ["empty", "no archive", "cut", "checksum"])
def test_a_damaged_archive_of_tinystories_is_one_sentence_and_leaves_what_was_there(tmp_path, damage):
    archive, before = stories_of("a", tmp_path), stories_of("b", tmp_path)
    unpacked = prepare_tinystories.unpack(before, tmp_path / "unpacked")
    content = archive.read_bytes()
    damaged = {"empty": b"", "no archive": b"x" * 2000, "cut": content[:-40], "checksum": content[:-8] + b"1234" + content[-4:]}
    archive.write_bytes(damaged[damage])
    with pytest.raises(UserError, match=r"a.tar.gz is not a whole .tar.gz \([^\n]*\); download it again$"):
        prepare_tinystories.unpack(archive, unpacked)
    assert (unpacked / "b0.json").exists()


def test_fineweb_downloads_in_turn_and_its_first_shard_is_validation(tmp_path, monkeypatch):
    """The site is a folder here; then the same files given by hand continue nothing, as all is done."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    site, repository = tmp_path / "site", "HuggingFaceFW/fineweb-edu"
    files = site / f"datasets/{repository}/resolve/main/sample/10BT"
    listing = site / f"api/datasets/{repository}/tree/main/sample/10BT"
    files.mkdir(parents=True), listing.parent.mkdir(parents=True)
    documents = some_documents()
    for i in range(2):
        parquet.write_table(pyarrow.table({"text": documents[20 * i : 20 * i + 20]}), files / f"00{i}.parquet")
    entries = [{"type": "file", "path": f"sample/10BT/{p.name}", "size": p.stat().st_size} for p in files.iterdir()]
    listing.write_text(json.dumps([*entries, {"type": "file", "path": "sample/10BT/x.md", "size": 1}]))
    monkeypatch.setattr(prepare_fineweb, "SITE", site.as_uri())
    monkeypatch.chdir(tmp_path)
    prepare_fineweb.main(["--edu", "--shard-tokens", "500", *BYTES])
    out = tmp_path / "dev/data/edu_fineweb10B"
    names = sorted(path.name for path in out.glob("*fineweb*.bin"))
    assert names[:2] == ["edu_fineweb_train_000001.bin", "edu_fineweb_train_000002.bin"] and names[-1] == "edu_fineweb_val_000000.bin"
    assert text_of(out / names[-1], *(out / name for name in names[:-1])) == documents
    before = contents(out / "parquet")
    prepare_fineweb.main(["--edu", "--shard-tokens", "500", "--input", "dev/data/edu_fineweb10B/parquet", *BYTES])
    assert set(before) == {"000.parquet", "001.parquet"}


def test_fineweb_that_is_one_shard_leaves_nothing_to_train_on_and_says_so(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": some_documents()}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="^all of it is one shard, for validation; give more files"):
        prepare_fineweb.main(["--input", str(tmp_path), "--output", str(tmp_path / "out"), *BYTES])


@pytest.mark.parametrize("answer", ["{}", "[]", "[1]", '[{"path": "a.parquet"}]', '{"error": "no such"}', "<html>"])
def test_a_site_that_answers_something_else_is_a_sentence(tmp_path, monkeypatch, answer):
    listing = tmp_path / "api/datasets/HuggingFaceFW/fineweb/tree/main/sample/10BT"
    listing.parent.mkdir(parents=True)
    listing.write_text(answer)
    monkeypatch.setattr(prepare_fineweb, "SITE", tmp_path.as_uri())
    with pytest.raises(UserError, match="cannot list .*; download the files of its folder sample/10BT by hand"):
        prepare_fineweb.remote_files("HuggingFaceFW/fineweb", "sample/10BT")


def test_hellaswag_is_rendered_as_llmc_s(tmp_path, shared, monkeypatch):
    """The context's tokens; each ending behind a space, encoded by itself."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "tiktoken-cache"))
    line = {
        "ind": 24,
        "ctx": "A man is sitting on a roof. he",
        "label": 3,
        "endings": ["is using wrap.", "is ripping tiles.", "holds a cube.", "starts."],
    }
    (tmp_path / "h.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line | {"label": 0}) + "\n")
    prepare_hellaswag.main(["--input", str(tmp_path / "h.jsonl"), "--output", str(tmp_path / "out")])
    first, second = read_eval_file(tmp_path / "out" / "hellaswag_val.bin")
    assert (first.label, second.label) == (3, 0)
    table = Tokenizer.from_gpt2()
    assert first.context.tolist() == [32, 582, 318, 5586, 319, 257, 9753, 13, 339]
    assert [table.decode(completion).decode() for completion in first.completions] == [" " + ending for ending in line["endings"]]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"label": None}, 'h.jsonl:1: "label" is None, expected a number from 0 to 3; the test split has none'),
        ({"label": ""}, """h.jsonl:1: "label" is '', expected a number from 0 to 3; the test split has none, use the validation split$"""),
        ({"label": "4"}, """h.jsonl:1: "label" is '4', expected"""),
        ({"label": True}, 'h.jsonl:1: "label" is True, expected'),
        ({"label": [1]}, 'h.jsonl:1: "label" is \\[1\\], expected'),
        ({"endings": ["a"]}, 'h.jsonl:1: expected "endings", a list of 4 texts'),
        ({"ctx": 7}, 'h.jsonl:1: field "ctx" holds a number'),
        ({"ctx": ""}, 'h.jsonl:1: field "ctx" is empty; mend or remove this line'),
    ],
)
def test_a_bad_question_is_named(tmp_path, change, message):
    line = {"ctx": "a", "label": 0, "endings": ["a", "b", "c", "d"]} | change
    (tmp_path / "h.jsonl").write_text(json.dumps(line))
    with pytest.raises(UserError, match=message):
        prepare_hellaswag.main(["--input", str(tmp_path / "h.jsonl"), "--output", str(tmp_path / "out"), *BYTES])


def test_a_label_may_be_a_text(tmp_path):
    """As in Hugging Face's copy."""
    lines = [{"ctx": "a", "label": label, "endings": ["a", "b", "c", "d"]} for label in ("0", "1", "2", "3", 3)]
    (tmp_path / "h.jsonl").write_text("\n".join(map(json.dumps, lines)))
    prepare_hellaswag.main(["--input", str(tmp_path / "h.jsonl"), "--output", str(tmp_path / "out"), *BYTES])
    assert [example.label for example in read_eval_file(tmp_path / "out" / "hellaswag_val.bin")] == [0, 1, 2, 3, 3]


QUESTION = {"ind": 24, "ctx": "a b", "endings": ["c", "d e", "f", "g"], "label": "2"}


def test_questions_of_hugging_face_s_parquet_give_the_bytes_of_the_jsonl(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lines = [QUESTION | {"label": str(i % 4), "ctx": f"a {i}"} for i in range(10)]
    (tmp_path / "h.jsonl").write_text("\n".join(json.dumps(line | {"label": int(line["label"])}) for line in lines))
    parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "validation.parquet")
    for given in ("h.jsonl", "validation.parquet"):
        prepare_hellaswag.main(["--input", str(tmp_path / given), "--output", str(tmp_path / given[0]), *BYTES])
    assert contents(tmp_path / "h") == contents(tmp_path / "v") and len(read_eval_file(tmp_path / "v" / "hellaswag_val.bin")) == 10


@pytest.mark.parametrize("change, told", [
    ({"label": ""}, """h.parquet, row 1: "label" is '', expected a number from 0 to 3; .* use the validation split$"""),
    ({"ctx": ""}, 'h.parquet, row 1: field "ctx" is empty; write the table again without such rows$'),
    ({"ctx": None}, 'h.parquet, row 1: field "ctx" holds null, expected text; write the table again without such rows$'),
    ({"endings": ["a"]}, 'h.parquet, row 1: expected "endings", a list of 4 texts; write the table again without such rows$'),
    (None, 'h.parquet has no column "endings" but ctx; give Hugging Face\'s validation split of HellaSwag$'),
])  # fmt: skip
def test_a_bad_question_in_a_table_is_named(tmp_path, change, told):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"ctx": "a"}] if change is None else [QUESTION, QUESTION | change]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "h.parquet")
    with pytest.raises(UserError, match=told):
        prepare_hellaswag.main(["--input", str(tmp_path / "h.parquet"), "--output", str(tmp_path / "out"), *BYTES])


def test_of_a_folder_of_questions_the_validation_split_is_taken_and_none_is_guessed(tmp_path):
    for name, label in (("hellaswag_train.jsonl", 0), ("hellaswag_val.jsonl", 1), ("other.jsonl", 2)):
        (tmp_path / name).write_text(json.dumps({"ctx": "a", "label": label, "endings": ["a", "b", "c", "d"]}))
    argv = ["--input", str(tmp_path), "--output", str(tmp_path / "out"), *BYTES]
    prepare_hellaswag.main(argv)
    assert [example.label for example in read_eval_file(tmp_path / "out" / "hellaswag_val.bin")] == [1]
    (tmp_path / "hellaswag_val.jsonl").unlink()
    with pytest.raises(UserError, match="2 .jsonl or .parquet files, expected one, or one named hellaswag_val.jsonl; give the path"):
        prepare_hellaswag.main(argv)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UserError, match="a.txt: a pipe or a device, which cannot be read twice; write it to a file, and give that"):
        prepare_text.main(["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), *BYTES])


def test_questions_that_are_not_utf_8_are_refused(tmp_path):
    (tmp_path / "h.jsonl").write_bytes(b'{"ctx": "caf\xe9"}')
    with pytest.raises(UserError, match="h.jsonl is not UTF-8 text"):
        prepare_hellaswag.main(["--input", str(tmp_path / "h.jsonl"), "--output", str(tmp_path / "out"), *BYTES])


def test_suffixes_count_in_any_case(tmp_path, monkeypatch):
    """Also where a file is named, and where it is told that a library is needed."""
    for name, content in (("a.TXT", "a"), ("b.Md", "b"), ("c.JSONL", '{"text": "c"}')):
        (tmp_path / name).write_text(content)
    for given in ([tmp_path], sorted(tmp_path.iterdir())):
        files = inputs.input_files(given, [*inputs.TEXT_SUFFIXES, ".jsonl"])
        assert list(inputs.read_documents(files)) == ["a", "b", "c"]
    (tmp_path / "d.Parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        prepare_text.main(["--input", str(tmp_path / "d.Parquet"), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names, told", [
    ("", ""), ("c.html", "left out: 1 file of other kinds (.html)\n"),
    ("c.gz d/e.HTML d/f.html .hidden.pdf Makefile", "left out: 4 files of other kinds (.html, no suffix, .gz)\n"),
    ("c.a c.b c.c c.d c.e c.f c.g c.h c.i z.i", "left out: 10 files of other kinds (.i, .a, .b, .c, .d, .e, .f, .g, ...)\n"),
    ("c.\udcff", "left out: 1 file of other kinds (.\\udcff)\n"),  # a name that is no UTF-8, which cannot be printed
])  # fmt: skip
def test_how_many_files_of_other_kinds_are_left_out_of_folders_is_told(tmp_path, capsys, names, told):
    (tmp_path / "in" / "d").mkdir(parents=True)
    for name in ("a.txt", "d/b.md", *names.split()):
        (tmp_path / "in" / name).write_text("words " * 100)
    prepare_text.main(["--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), *BYTES])
    printed = capsys.readouterr().out
    assert printed.startswith(told) and ("left out" in printed) == bool(told)
