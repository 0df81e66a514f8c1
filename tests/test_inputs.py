"""What --input names is read whole, cut and taken in order; and what is wrong with it is said with its place."""

import errno
import http.client
import io
import os
import random
import urllib.request
from pathlib import Path

import pytest

from llmc.errors import UserError
from scripts import inputs


def test_a_long_text_is_cut_at_blank_lines_and_loses_nothing(tmp_path):
    paragraphs = [f"Paragraph {i}.\n" + "word " * (i % 900) + "\n\n" for i in range(200)]
    (tmp_path / "a.txt").write_text("".join(paragraphs))
    documents = list(inputs.read_documents([tmp_path / "a.txt"]))
    assert "".join(documents) == "".join(paragraphs)
    assert len(documents) > 5 and all(d.endswith("\n\n") and len(d) <= inputs.PIECE_CHARS for d in documents)
    long = "".join("word " * (2400 + i % 7) + "\n\n" for i in range(100))  # each cut takes less than is read at once
    (tmp_path / "c.txt").write_text(long)
    documents = list(inputs.read_documents([tmp_path / "c.txt"]))
    assert "".join(documents) == long and {len(d) // 1000 for d in documents} == {12}
    (tmp_path / "b.txt").write_text("x" * 40_000)  # nowhere to cut
    assert [len(d) for d in inputs.read_documents([tmp_path / "b.txt"])] == [16384, 16384, 40_000 - 2 * 16384]
    (tmp_path / "e.txt").write_text("x" * 5000 + "\n\n" + "x" * 10_000 + " " + "x" * 5000)  # not into a short one and a long one
    assert len(next(inputs.read_documents([tmp_path / "e.txt"]))) == 15_003


@pytest.mark.parametrize("name, content", [("a.txt", "text"), ("a.jsonl", '{"text": "text"}')])
def test_a_byte_order_mark_is_no_text(tmp_path, name, content):
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert list(inputs.read_documents([tmp_path / name])) == ["text"]


def test_bad_parquet_is_named(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match='a.parquet has no column "text" but body; .*--jsonl-field'):
        list(inputs.read_documents([tmp_path / "a.parquet"]))
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match="b.parquet is not a parquet file, or a damaged one; download or copy it again"):
        list(inputs.read_documents([tmp_path / "b.parquet"]))
    parquet.write_table(pyarrow.table({"text": [f"row {i}" for i in range(1000)]}), tmp_path / "c.parquet", use_dictionary=False)
    content, random_ = (tmp_path / "c.parquet").read_bytes(), random.Random(1)
    for _ in range(50):  # pages, lengths of texts, or what describes them: the library has an exception for each
        at = random_.randrange(4, len(content) - 64)
        (tmp_path / "c.parquet").write_bytes(content[:at] + random_.randbytes(64) + content[at + 64 :])
        try:
            list(inputs.read_documents([tmp_path / "c.parquet"]))
        except UserError as error:
            assert "c.parquet" in str(error) and "\n" not in str(error)


def test_downloads_appear_whole_and_only_once(tmp_path):
    source, target = tmp_path / "source", tmp_path / "new" / "target"
    source.write_bytes(b"x" * 3_000_000)
    assert inputs.download(source.as_uri(), target) == target
    assert target.read_bytes() == source.read_bytes() and list(target.parent.iterdir()) == [target]
    source.unlink()
    assert inputs.download(source.as_uri(), target) == target
    with pytest.raises(UserError, match="cannot download file:.*download it by hand and run again with --input"):
        inputs.download(source.as_uri(), tmp_path / "other")
    assert not (tmp_path / "other").exists() and not (tmp_path / "other.part").exists()


@pytest.mark.parametrize("then, told", [
    (b"", "the connection closed after 7 of 100 bytes"), (http.client.IncompleteRead(b""), "IncompleteRead"),
    (TimeoutError("timed out"), "timed out"),
])  # fmt: skip
def test_a_download_that_ends_early_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch, then, told):
    class Response(io.BytesIO):
        headers = {"Content-Length": "100"}

        def read(self, n):
            block = super().read(n)
            if not block and isinstance(then, Exception):
                raise then
            return block

    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Response(b"7 bytes"))
    with pytest.raises(UserError, match=rf"cannot download http://host/name \(.*{told}.*\); download it by hand"):
        inputs.download("http://host/name", tmp_path / "name")
    assert list(tmp_path.iterdir()) == []


def test_a_hidden_file_named_like_a_suffix_is_none_of_the_text_files(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / ".md").write_text("b")
    assert inputs.input_files([tmp_path], inputs.TEXT_SUFFIXES) == [tmp_path / "a.txt"]


def test_a_folder_below_that_cannot_be_read_is_named_and_not_left_out(tmp_path, monkeypatch):
    """By the system's answer and not by permissions, as root reads everything."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "a.txt").write_text("a")
    scandir = os.scandir

    def denied(path):
        if Path(path).name == "b":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(UserError, match="^cannot read .*/a/b: Permission denied; check the path and its permissions$"):
        inputs.input_files([tmp_path], inputs.TEXT_SUFFIXES)


def test_what_is_hidden_or_python_s_own_below_a_folder_is_passed_over_unless_it_is_named(tmp_path):
    folder = tmp_path / ".cache"  # that one above is hidden makes no difference
    names = ["a.txt", "b/.c.txt", "b/d.txt", ".venv/e.py", "b/.git/f/g.md", "__pycache__/h.txt", "i.j/k.txt"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    given = [folder, folder / ".venv", folder / "__pycache__", folder / "b" / ".c.txt"]
    taken = [str(path.relative_to(folder)) for path in inputs.input_files(given, inputs.TEXT_SUFFIXES)]
    assert taken == ["a.txt", "b/d.txt", "i.j/k.txt", ".venv/e.py", "__pycache__/h.txt", "b/.c.txt"]


def test_a_file_is_taken_once_by_the_first_of_its_paths(tmp_path):
    """Or a document would be trained on and validated on."""
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    (tmp_path / "d.txt").symlink_to("a.txt")
    given = [tmp_path / "b.txt", tmp_path, tmp_path / "d.txt", tmp_path / ".." / tmp_path.name / "b.txt"]
    assert [path.name for path in inputs.input_files(given, inputs.TEXT_SUFFIXES)] == ["b.txt", "a.txt", "c.txt"]


def test_links_to_folders_are_followed_and_no_folder_is_taken_twice(tmp_path):
    """Not by links in a circle, nor to what holds the folder; what is there by its own path has that path."""
    (tmp_path / "above.txt").touch()
    folder, outside = tmp_path / "in", tmp_path / "outside"
    for path in (folder / "b" / "own.txt", folder / "z.txt", outside / "x.txt", outside / "deep" / "y.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    links = "a=b b/c=. b/up=.. above=.. o1=../outside o2=../outside/deep o3=../outside .hidden=../outside"
    for name, target in (link.split("=") for link in links.split()):
        (folder / name).symlink_to(target)
    (outside / "back").symlink_to(folder)
    (outside / "deep" / "around").symlink_to(outside)
    taken = inputs.input_files([folder], inputs.TEXT_SUFFIXES)
    assert [str(path.relative_to(folder)) for path in taken] == ["b/own.txt", "o1/deep/y.txt", "o1/x.txt", "z.txt"]


@pytest.mark.parametrize("target", ["gone.txt", "a.txt"])
def test_a_link_to_nothing_is_named_if_it_would_be_a_text(tmp_path, target):
    """A link to itself too; a pipe, which would wait for ever, is no file."""
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.gz").symlink_to("gone")
    os.mkfifo(tmp_path / "c.txt")
    assert inputs.input_files([tmp_path], inputs.TEXT_SUFFIXES) == [tmp_path / "b.txt"]
    (tmp_path / "a.txt").symlink_to(target)
    with pytest.raises(UserError, match=f"/a.txt is a link to {target}, which leads to no file; mend or remove the link$"):
        inputs.input_files([tmp_path], inputs.TEXT_SUFFIXES)


@pytest.mark.parametrize("value, told", [
    (None, "null"), (True, "a boolean"), (1, "a number"), (0.5, "a number"), (["a"], "an array"), ({"a": 1}, "an object"), (b"a", "bytes"),
])  # fmt: skip
def test_what_is_no_text_has_json_s_name(value, told):
    with pytest.raises(UserError, match=f'^p: field "t" holds {told}, expected text; mend the file$'):
        inputs.text_field({"t": value}, "t", "p")


@pytest.mark.parametrize("rows, told", [
    (["a", None], 'a.parquet, row 1: field "text" holds null, expected text; write the table again without such rows$'),
    ([7, 8], 'a.parquet, row 0: field "text" holds a number, expected text; name the one that holds the text with --jsonl-field$'),
])  # fmt: skip
def test_rows_without_text_are_told_with_what_can_be_done_about_a_table(tmp_path, rows, told):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=told):
        list(inputs.read_documents([tmp_path / "a.parquet"]))
