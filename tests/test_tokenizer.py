"""Tokenizer files are llm.c's, GPT-2's ids are tiktoken's, and without its files bytes are encoded with GPT-2's own ids."""

import pickle
import socket
import sys
import time

import case_a
import numpy as np
import pytest
from conftest import REPO

from llmc.data import tokenizer as module
from llmc.data.tokenizer import ByteEncoder, GPT2Encoder, Tokenizer, load_encoder
from llmc.errors import UserError

TEXT = "Hello, wörld!\n\n  <|endoftext|> 123 \N{SNOWMAN}\0"


@pytest.fixture
def bpe_files(shared, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "tiktoken-cache"))


@pytest.fixture
def no_bpe_files(tmp_path, monkeypatch):
    """An empty cache and a network that takes the connection and never answers."""
    import tiktoken.registry

    silent = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{silent.getsockname()[1]}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{silent.getsockname()[1]}")
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(module, "DOWNLOAD_TIMEOUT_S", 0.2)
    yield
    silent.close()


def small():
    return Tokenizer([b"a", b"bc", b"\xff\x00", b"<eot>"], 3)


def test_written_file_is_llmc_s_version_2(tmp_path):
    small().write(tmp_path / "t.bin")
    raw = (tmp_path / "t.bin").read_bytes()
    assert raw == case_a.header(20240328, 2, 4, 3) + b"\x01a\x02bc\x02\xff\x00\x05<eot>"
    again = Tokenizer.read(tmp_path / "t.bin")
    assert (again.table, again.end_of_text, again.vocab_size) == (small().table, 3, 4)


def test_version_1_means_gpt2_s_end_of_text(tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(case_a.header(20240328, 1, 50257) + b"\x01x" * 50257)
    assert Tokenizer.read(path).end_of_text == 50256
    path.write_bytes(case_a.header(20240328, 1, 4) + b"\x01x" * 4)
    with pytest.raises(UserError, match="version 1 and 4 tokens; that version stands for GPT-2's 50257"):
        Tokenizer.read(path)


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"", "is empty"),
        (case_a.header(20240520, 1, 4), "is a token shard; expected a tokenizer file"),
        (case_a.header(20240328, 3, 1, 0) + b"\x01x", "version 3, expected 1 or 2"),
        (case_a.header(20240328, 2, 2, 2) + b"\x01x\x01y", "end-of-text is token 2 of 2"),
        (case_a.header(20240328, 2, 2, 0) + b"\x01x", "token 1 of 2 is cut short"),
        (case_a.header(20240328, 2, 2, 0) + b"\x01x\x03y", "token 1 of 2 is cut short"),
        (case_a.header(20240328, 2, 2, 0) + b"\x00\x01y", "token 0 of 2 has no bytes"),
        (case_a.header(20240328, 2, 1, 0) + b"\x01x\x01y", "too long: 2 bytes follow its 1 tokens"),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(tmp_path, raw, message):
    path = tmp_path / "t.bin"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=message) as caught:
        Tokenizer.read(path)
    assert str(path) in str(caught.value)


def test_ids_outside_the_table_are_refused():
    assert small().decode([1, 0, 2]) == b"bca\xff\x00"
    for wrong in (4, -1):
        with pytest.raises(UserError, match=f"token {wrong} is outside the tokenizer's vocabulary of 4"):
            small().decode([0, wrong])


def test_gpt2_encodes_and_decodes_as_tiktoken(bpe_files, tmp_path):
    encoder = load_encoder()
    assert (encoder.name, encoder.end_of_text) == ("gpt2", 50256)
    ids = encoder.encode(TEXT)
    assert max(ids) < 50256  # the end-of-text written out is ordinary text
    table = encoder.tokenizer()
    assert (table.vocab_size, table.end_of_text, table.table[50256]) == (50257, 50256, b"<|endoftext|>")
    assert table.decode(ids) == TEXT.encode()
    assert encoder.encode("Hello world") == [15496, 995]
    assert pickle.loads(pickle.dumps(encoder)).encode(TEXT) == ids  # as it goes to worker processes


def test_a_table_encodes_as_the_encoding_that_it_is_of(bpe_files):
    """GPT-2's, as tiktoken does, a lone surrogate and its own sign for one included; one of bytes as the byte encoder does."""
    gpt2, readme = GPT2Encoder(), (REPO / "README.md").read_text(encoding="utf-8")
    text = "".join((*map(chr, range(0x500)), TEXT, readme, "\udcff\ufffd don't"))
    assert gpt2.tokenizer().encode(text, like=gpt2.encode("some data")) == gpt2.encode(text)
    plain, data = text.replace("\udcff", ""), [*ByteEncoder().encode("some data").tolist(), 50256]
    for table in (Tokenizer.from_bytes_only(), gpt2.tokenizer()):  # of bytes are data that may lie beside either
        assert table.encode(plain, like=data) == ByteEncoder().encode(plain).tolist()
        assert table.encode("", like=data) == []


def test_gpt2_s_merges_are_those_of_its_own_file(bpe_files, shared):
    """OpenAI's vocab.bpe names them in the order of their ids, bytes that do not print as the characters from 256 on."""
    files = (path.read_text(encoding="utf-8") for path in (shared / "tiktoken-cache").iterdir())
    lines = next(text for text in files if text.startswith("#version")).splitlines()[1:]
    merges = Tokenizer.from_gpt2().merges()
    name = module.CHARACTER_OF_BYTE
    assert [" ".join("".join(name[byte] for byte in half) for half in pair) for pair in merges] == lines and len(merges) == 50000


def test_merges_are_the_last_ones_of_each_token_and_only_of_tokens_with_lower_ids():
    """abc is encoded as a and bc, as bc comes before ab; cab cannot become one, as ca and ab come after it; x is no token, nor UNKNOWN."""
    table = [b"a", b"b", b"c", b"bc", b"cab", b"ab", b"abc", b"ax", module.UNKNOWN, module.UNKNOWN, b"<eot>"]
    assert Tokenizer(table, 10).merges() == [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc")]
    assert Tokenizer.from_bytes_only().merges() == []


def test_tiktoken_that_cannot_be_imported_is_said_and_bytes_are_used(monkeypatch, capsys):
    """Nor what it imports in its turn."""
    monkeypatch.setitem(sys.modules, "requests", None)
    assert isinstance(load_encoder(), ByteEncoder)
    assert "needs tiktoken (import of requests halted" in capsys.readouterr().out


def test_a_table_without_some_bytes_encodes_nothing():
    with pytest.raises(UserError, match="has no tokens for 255 of the 256 bytes"):
        small().encode("a", like=[0])


def test_byte_ids_are_gpt2_s_own(bpe_files):
    """A model trained on bytes can be decoded, and trained further, with GPT-2's table."""
    assert Tokenizer.from_bytes_only().table[:256] == Tokenizer.from_gpt2().table[:256]


def test_byte_ids_follow_gpt2_s_rule():
    """Those that print first, in order; then the other 68. The same check as against tiktoken, for machines without it."""
    table = Tokenizer.from_bytes_only().table
    assert b"".join(table[:188]).decode("latin-1") == "".join(chr(b) for b in range(256) if chr(b).isprintable() and b not in (0x20, 0xA0))
    assert b"".join(table[188:256]) == bytes([*range(0x21), *range(0x7F, 0xA1), 0xAD])


def test_byte_encoder_round_trips_any_text():
    encoder = load_encoder(force_bytes=True)
    ids = encoder.encode(TEXT)
    assert (encoder.name, encoder.end_of_text, ids.dtype, len(ids)) == ("bytes", 50256, np.uint16, len(TEXT.encode()))
    assert encoder.tokenizer().decode(ids) == TEXT.encode()
    assert encoder.tokenizer().decode([50256]) == "\N{REPLACEMENT CHARACTER}".encode()
    assert encoder.tokenizer().decode(encoder.encode("a\ud800b")) == b"a?b"


def test_without_files_and_network_bytes_are_used_soon_and_said(no_bpe_files, capsys):
    start = time.monotonic()
    assert isinstance(load_encoder(), ByteEncoder)
    assert time.monotonic() - start < 5
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and "one token per byte" in printed
    with pytest.raises(UserError, match="TIKTOKEN_CACHE_DIR"):
        GPT2Encoder()
