"""The model .bin against bytes built by hand, every way it can be wrong, and writes that fail half way."""

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from llmc.checkpoint.model_file import read_model_header, write_model
from llmc.config import ModelConfig
from llmc.errors import UserError
from llmc.files import write_atomically

CONFIG = ModelConfig(max_seq_len=5, vocab_size=7, num_layers=2, num_heads=3, channels=6, padded_vocab_size=8)
# 8*6 wte + 5*6 wpe + 2 * (4*6 layernorms + 18*6+18 qkv + 6*6+6 attproj + 24*6+24 fc + 6*24+6 fcproj) + 2*6 lnf
NUM_PARAMETERS = 48 + 30 + 2 * (24 + 126 + 42 + 168 + 150) + 12


def header_bytes(*entries: int) -> bytes:
    """llm.c's `int model_header[256]`, packed without any of our code."""
    return struct.pack("<256i", *entries, *[0] * (256 - len(entries)))


def noise(n_bytes: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, n_bytes).astype(np.uint8)


@pytest.mark.parametrize("precision, version, element", [("fp32", 3, 4), ("bf16", 5, 2)])
def test_a_written_model_is_byte_for_byte_llmc_s(tmp_path, precision, version, element):
    """Header entries 0 to 7, zeros, then the parameters, however they were cut into pieces; and its header reads back."""
    path, data = tmp_path / "m.bin", noise(NUM_PARAMETERS * element)
    write_model(path, CONFIG, precision, iter([data[:10], data[10:1000], data[1000:1000], data[1000:]]))
    assert path.read_bytes() == header_bytes(20240326, version, 5, 7, 2, 3, 6, 8) + data.tobytes()
    assert read_model_header(path) == (CONFIG, precision)


@pytest.mark.parametrize("n_bytes", [NUM_PARAMETERS * 4 - 1, NUM_PARAMETERS * 4 + 1, NUM_PARAMETERS * 2])
def test_pieces_that_do_not_add_up_leave_the_earlier_file(tmp_path, n_bytes):
    """A bug in the caller is an assertion, and costs no checkpoint."""
    path = tmp_path / "m.bin"
    path.write_bytes(b"earlier")
    with pytest.raises(AssertionError):
        write_model(path, CONFIG, "fp32", [noise(n_bytes)])
    assert path.read_bytes() == b"earlier" and os.listdir(tmp_path) == ["m.bin"]


GOOD = header_bytes(20240326, 3, 5, 7, 2, 3, 6, 8)
BODY = bytes(NUM_PARAMETERS * 4)
SIZE = 1024 + NUM_PARAMETERS * 4


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", ["is empty", "a model file"]),
        (GOOD[:1000], ["only 1000 bytes", "1024"]),
        (header_bytes(20240520, 1) + BODY, ["is a token shard", "expected a model file"]),
        (header_bytes(20240522, 1) + BODY, ["is an evaluation file"]),
        (header_bytes(20240328, 2) + BODY, ["is a tokenizer file"]),
        (header_bytes(20240527, 1) + BODY, ["is a training state file"]),
        (header_bytes(20240327, 2) + BODY, ["is a debug state file"]),
        (header_bytes(20240801, 7) + BODY, ["Llama-3 token shard", "uint32"]),
        (header_bytes(20240803, 3) + BODY, ["Llama-3 model", "rotary"]),
        (header_bytes(12345) + BODY, ["begins with the number 12345", "expected 20240326"]),
        (header_bytes(20240326, 1, 5, 7, 2, 3, 6, 8) + BODY, ["version 1", "before the vocabulary was padded", "3 (fp32) or 5 (bf16)"]),
        (header_bytes(20240326, 2, 5, 7, 2, 3, 6, 8) + BODY, ["version 2", "before the vocabulary was padded"]),
        (header_bytes(20240326, 9, 5, 7, 2, 3, 6, 8) + BODY, ["version 9", "unknown"]),
        (header_bytes(20240326, 3, 5, 7, 2, -3, 6, 8) + BODY, ["num_heads = -3"]),
        (header_bytes(20240326, 3, 5, 7, 2, 4, 6, 8) + BODY, ["6 channels", "4 heads"]),
        (header_bytes(20240326, 3, 5, 7, 2, 3, 6, 6) + BODY, ["vocabulary of 7 to 6"]),
        (GOOD + BODY[:-1], [f"has {SIZE - 1} bytes", "truncated by 1", f"exactly {SIZE}"]),
        (GOOD, ["has 1024 bytes", "truncated", f"exactly {SIZE}"]),
        (GOOD + BODY + b"xyz", [f"has {SIZE + 3} bytes", "oversized by 3", f"exactly {SIZE}"]),
        (header_bytes(20240326, 3, *[2**31 - 1] * 6) + BODY, ["truncated"]),  # sizes whose product no int64 holds
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, content, words):
    """The path, what was found, and what was expected."""
    path = tmp_path / "m.bin"
    path.write_bytes(content)
    with pytest.raises(UserError) as raised:
        read_model_header(path)
    for word in [str(path), *words]:
        assert word in str(raised.value)


def test_a_missing_model_and_a_folder_are_refused(tmp_path):
    """Neither is a traceback."""
    with pytest.raises(UserError, match="nowhere.bin does not exist; expected a model file"):
        read_model_header(tmp_path / "nowhere.bin")
    with pytest.raises(UserError, match="cannot be read .*directory"):
        read_model_header(tmp_path)


def test_reading_a_header_imports_no_torch(tmp_path):
    """--plan must be instant."""
    write_model(tmp_path / "m.bin", CONFIG, "bf16", [noise(NUM_PARAMETERS * 2)])
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from llmc.checkpoint.model_file import read_model_header; print(read_model_header({str(tmp_path / 'm.bin')!r})[1])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    assert done.stdout == "bf16\n", done.stderr


# --- writes that fail: the earlier file survives, and nothing else is left


def disk_is_full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fails(path, pieces, error):
    """Write over an earlier file, failing; return the exception after checking what is on disk."""
    path.write_bytes(b"earlier")
    with pytest.raises(error) as raised:
        write_atomically(path, pieces)
    assert path.read_bytes() == b"earlier"
    assert os.listdir(path.parent) == [path.name]
    return str(raised.value)


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_disk_that_fills_up_costs_nothing_on_it(tmp_path, monkeypatch, function):
    """ENOSPC from the flush or the rename."""
    monkeypatch.setattr(os, function, disk_is_full)
    message = fails(tmp_path / "m.bin", [b"new"], UserError)
    assert "m.bin" in message and "No space left on device" in message and "make room" in message


def test_a_file_too_large_for_its_disk_costs_nothing_on_it(tmp_path):
    """A real write that the kernel refuses half way, through buffers larger and smaller than python's own."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for piece in (bytes(100), bytes(100_000)):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
            message = fails(tmp_path / "m.bin", (piece for _ in range(100)), UserError)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "File too large" in message


def test_a_large_file_is_waited_for_in_parts(tmp_path, monkeypatch):
    """A sync for as many bytes each, before the next piece is asked for, and one for the rest; then the folder's."""
    real, synced = os.fsync, []
    monkeypatch.setattr("llmc.files.SYNC_BYTES", 1000)
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), real(handle)))
    write_atomically(tmp_path / "m.bin", (np.full(100, i, "<i4") for i in range(7)))
    assert synced[:-1] == [1200, 2400, 2800]
    assert (tmp_path / "m.bin").read_bytes() == np.repeat(np.arange(7, dtype="<i4"), 100).tobytes()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_leaves_no_temporary_file(tmp_path, error):
    """Ctrl-C in the middle of a write passes through, cleaned up."""

    def pieces():
        yield b"half"
        raise error

    fails(tmp_path / "m.bin", pieces(), error)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="the folder .*nowhere does not exist; create it"):
        write_atomically(tmp_path / "nowhere" / "m.bin", [b""])
