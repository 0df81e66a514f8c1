"""The JSON beside a state file: its bytes, what files of before say, every way it can be damaged, and the flags that it tells of."""

import math
import re
from dataclasses import replace

import pytest

from llmc.checkpoint.extra_file import NO_FILE, Extra, changes_since, optimisation, read_extra, write_extra
from llmc.errors import UserError
from llmc.flags import Settings, parse


def test_the_bytes_are_those_of_every_version(tmp_path):
    """All entries in their order; what is not known, no seed among it, is left out."""
    path = tmp_path / "e.json"
    write_extra(path, Extra({"sum": "0x0p+0"}, {}, 4, 64, {"shards": []}, optimisation={"warmup_steps": 2}, crc32={"state": "0a1b2c3d"}))
    text = """{
 "loss_outliers": {
  "sum": "0x0p+0"
 },
 "norm_outliers": {},
 "B": 4,
 "T": 64,
 "data": {
  "shards": []
 },
 "optimisation": {
  "warmup_steps": 2
 },
 "crc32": {
  "state": "0a1b2c3d"
 }
}"""
    assert path.read_text() == text
    write_extra(path, replace(read_extra(path), seed=3))
    assert path.read_text() == text.replace(' "optimisation"', ' "seed": 3,\n "optimisation"')


def test_values_come_back_exactly(tmp_path):
    """As json has them: numbers of any length, floats to the last bit, and any name that a shard may have. It has no nan."""
    path = tmp_path / "e.json"
    data = {"n": 2**70, "nested": {"on": True, "none": None, "name": "float:0.bin", "empty": []}, "shards": [["\udcff é", 3]]}
    data["floats"] = [0.1, 1 / 3, 5e-324, 1e300]
    extra = Extra({}, {}, data=data)
    write_extra(path, extra)
    assert read_extra(path) == extra and type(read_extra(path).data["n"]) is int
    with pytest.raises(ValueError):
        write_extra(path, replace(extra, data={"loss": float("nan")}))
    assert read_extra(path) == extra


def test_entries_that_a_file_lacks_or_has_besides_do_not_matter(tmp_path):
    """Those of earlier versions had only the windows, and later ones may have more."""
    path = tmp_path / "e.json"
    path.write_text('{"later": 1, "norm_outliers": {}, "loss_outliers": {}}')
    assert read_extra(path) == Extra({}, {}, B=None, T=None, data=None, seed=0, optimisation={}, crc32={})


def test_a_checkpoint_of_llmc_has_no_extra(tmp_path):
    """It is not an error that the file is absent."""
    assert read_extra(tmp_path / "e.json") == NO_FILE


@pytest.mark.parametrize("content", [b"", b'{"a": 1', b"[1, 2]", b"\xff\xfe\x00", b"[" * 99999, None])
def test_a_damaged_extra_is_refused(tmp_path, content):
    """Half a file, another file, one that nests without end, a folder."""
    path = tmp_path / "e.json"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match="e.json is damaged"):
        read_extra(path)


def test_flags_that_a_resumed_run_changes_are_told():
    """A checkpoint from before they were written down says nothing, nor does one of the same."""
    before, now = (optimisation(parse(flags.split()), tokens) for flags, tokens in (("-l 1e-5 -k linear -q 0", 4096), ("-c 0.1", 8192)))
    assert list(changes_since(before, now, "e.json")) == [
        "note: the checkpoint was written with -l 1e-05 -k linear -q 0.0 -c 0.0 -d 4096, and the run goes on with "
        "-l 0.0003 -k cosine -q 1.0 -c 0.1 -d 8192"
    ]
    assert list(changes_since({}, now, "e.json")) == list(changes_since(now, now, "e.json")) == []


@pytest.mark.parametrize("written, found", [
    ([], "optimisation []"), ("text", "optimisation 'text'"), (None, "optimisation None"),
    ({"learning_rate": math.nan}, "learning_rate nan"), ({"weight_decay": "a\nb"}, "weight_decay 'a\\nb'"),
    ({"total_batch_size": True}, "total_batch_size True"), ({"total_batch_size": -1.0}, "total_batch_size -1.0"),
    ({"lr_scheduler": "cos"}, "lr_scheduler 'cos'"),
    ({"warmup_steps": -1}, "warmup_steps -1"), ({"warmup_steps": None}, "warmup_steps None"), ({"skip_loss_z": []}, "skip_loss_z []"),
    ({"total_batch_size": 1 << 99}, f"total_batch_size {1 << 99}"),
])  # fmt: skip
def test_values_that_a_flag_does_not_take_are_damage(written, found):
    with pytest.raises(UserError, match=f"^{re.escape(f'e.json says {found}; expected ')}.* damaged; resume from another checkpoint"):
        list(changes_since(written, optimisation(Settings(), 64), "e.json"))
