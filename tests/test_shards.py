"""Shards are read and written as llm.c does, and a damaged file is refused with a reason."""

import hashlib
import os
from pathlib import Path

import case_a
import numpy as np
import pytest

from llmc.data.shards import count_tokens, find_shards, open_shard, write_shard
from llmc.errors import UserError

CASE_A_SHA256 = {
    "eval.bin": "4e55d7467bebffafda4deba5e87e0cef7c4fc5dfac589fd2ba36a7ff1bdcc3af",
    "model.bin": "9ef3d88e0a72d8cfdab4b4ccecc7857e2c5f2e7864889371055092e4d0d56deb",
    "train_01.bin": "cd2b2e23619f17eff9bcae498243cf3fedce727404e25d647dc122576127293e",
    "train_02.bin": "a7dec268d3ed00bdaca8a60942b20fda513222904a843a3daf8f314293e5ee7d",
    "val.bin": "bf4b668332b60197a313735211c44714a0d3ddcaddcdc5ec7f1c7d342360a223",
}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return case_a.write_case_a(tmp_path_factory.mktemp("case_a"))


def test_case_a_is_the_golden_case(case):
    """Byte for byte the files that llm.c's numbers were measured on."""
    assert {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in case.iterdir()} == CASE_A_SHA256


def test_written_shards_are_llmc_s_bytes(tmp_path):
    write_shard(tmp_path / "a.bin", [7, 65535, 0])
    raw = (tmp_path / "a.bin").read_bytes()
    assert np.frombuffer(raw[:1024], "<i4").tolist() == [20240520, 1, 3] + [0] * 253
    assert raw[1024:] == b"\x07\x00\xff\xff\x00\x00"
    assert count_tokens(tmp_path / "a.bin") == 3 and open_shard(tmp_path / "a.bin").read(0, 3).tolist() == [7, 65535, 0]


def test_a_folder_that_does_not_exist_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="missing.* does not exist"):
        write_shard(tmp_path / "missing" / "a.bin", [1])


def damaged(magic=20240520, version=1, count=3, tokens=3):
    return case_a.header(magic, version, count) + bytes(2 * tokens)


@pytest.mark.parametrize(
    "raw, message",
    [
        (b"", "is empty"),
        (b"abc", "3 bytes"),
        (damaged(magic=20240801, version=7), "Llama-3 token shard .*uint32.*expected a token shard"),
        (damaged(magic=20240326, version=3), "is a model file; expected a token shard"),
        (damaged(magic=1234), "begins with the number 1234; expected 20240520"),
        (damaged(version=2), "a token shard of version 2, expected 1"),
        (damaged(tokens=2), "1028 bytes, truncated by 2: a shard of 3 tokens needs exactly 1030"),
        (damaged(tokens=4), "1032 bytes, oversized by 2"),
        (damaged(count=-3), "says it holds -3 tokens"),
    ],
)
def test_a_damaged_shard_is_named_with_its_fault(tmp_path, raw, message):
    path = tmp_path / "x.bin"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=message) as caught:
        count_tokens(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("left", [4, 1, 0])
def test_a_shard_that_is_cut_short_while_it_is_open_is_an_error_and_no_signal(tmp_path, left):
    path = tmp_path / "x.bin"
    write_shard(path, range(9))
    shard = open_shard(path)
    assert shard.read(3, 6).tolist() == [3, 4, 5, 6, 7, 8]
    os.truncate(path, 1024 + 2 * left)
    assert shard.read(0, left).tolist() == list(range(left))
    with pytest.raises(UserError, match=f"x.bin cannot be read beyond byte {1024 + 2 * max(left, 3)}: .*whole file back"):
        shard.read(3, 6)


def test_missing_files_name_the_flag_and_what_to_run(tmp_path):
    with pytest.raises(UserError, match=r"-j .*nothing_\*.bin: no such file.*python scripts/prepare_tinyshakespeare.py"):
        find_shards(str(tmp_path / "nothing_*.bin"), "-j")
    with pytest.raises(UserError, match="gone.bin does not exist"):
        count_tokens(tmp_path / "gone.bin")


def test_shards_are_found_sorted_and_a_name_with_brackets_is_a_name(tmp_path):
    for name in ("b.bin", "a.bin", "c[1].bin", "d[^1].bin", "e[!1.bin", "e[^1.bin"):
        write_shard(tmp_path / name, [1])
    assert [Path(p).name for p in find_shards(str(tmp_path / "?.bin"), "-i")] == ["a.bin", "b.bin"]
    assert [Path(p).name for p in find_shards(str(tmp_path / "c[1].bin"), "-i")] == ["c[1].bin"]
    assert [Path(p).name for p in find_shards(str(tmp_path / "d[^1].bin"), "-i")] == ["d[^1].bin"]
    assert [Path(p).name for p in find_shards(str(tmp_path / "e[^1.bin"), "-i")] == ["e[^1.bin"]


@pytest.mark.parametrize("pattern, found", [
    ("[^a-b].bin", "c^[!"), ("[!a-b].bin", "c^[!"), ("[a^].bin", "a^"), ("[[^].bin", "[^"), ("[^]a].bin", "bc^[!"), ("?.bin", "abc^[!"),
])  # fmt: skip
def test_a_caret_negates_a_set_as_in_llm_c(tmp_path, pattern, found):
    """glibc's glob takes [^...] for all characters but these, and Python's for ^ and these: the shards that were to be left out."""
    for name in "abc^[!":
        write_shard(tmp_path / f"{name}.bin", [1])
    assert {Path(p).stem for p in find_shards(str(tmp_path / pattern), "-i")} == set(found)
