"""A folder of checkpoints: what counts as complete, what is deleted, and in which order."""

import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

import pytest

from llmc.checkpoint import store
from llmc.errors import UserError


def checkpoint(folder: Path, step: int, num_processes: int = 1, done: bool = True) -> None:
    """The files of one checkpoint; only the state headers mean anything."""
    store.model_path(folder, step).write_bytes(b"model")
    for rank in range(num_processes):
        store.state_path(folder, step, rank).write_bytes(struct.pack("<256i", 20240527, 1, num_processes, rank, *[0] * 252))
        store.extra_path(folder, step, rank).write_bytes(b"{}")
    if done:
        store.mark_done(folder, step)


def raising(code: int):
    """A system call that always fails with this errno."""

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail


def test_names_are_llmc_s():
    """8 digits of step, 5 of rank; more where they do not suffice."""
    assert str(store.model_path("log", 7)) == "log/model_00000007.bin"
    assert str(store.state_path("log", 7, 3)) == "log/state_00000007_00003.bin"
    assert str(store.extra_path("log", 7, 3)) == "log/extra_00000007_00003.json"
    assert str(store.done_path("log", 123456789)) == "log/DONE_123456789"


def test_the_last_step_is_the_highest_done(tmp_path):
    """Not the highest model, and no temporary file or stranger."""
    assert store.find_last_step(tmp_path / "nowhere") is None
    assert store.find_last_step(tmp_path) is None
    for step in (5, 100, 20):
        checkpoint(tmp_path, step, num_processes=3)
    checkpoint(tmp_path, 200, done=False)
    for name in ("DONE_00000300.tmp", "DONE_", "DONE_abc", "xDONE_00000300"):
        (tmp_path / name).touch()
    assert store.find_last_step(tmp_path) == 100
    assert store.done_path(tmp_path, 100).read_bytes() == b""


@pytest.mark.parametrize("missing", ["model_00000009.bin", *(f"state_00000009_0000{rank}.bin" for rank in range(3))])
def test_a_done_over_a_missing_file_is_refused_by_name(tmp_path, missing):
    """Rather than silently resuming from an older checkpoint."""
    checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 9, num_processes=3)
    (tmp_path / missing).unlink()
    with pytest.raises(UserError, match=f"{missing} is missing.*DONE_00000009") as raised:
        store.find_last_step(tmp_path)
    assert "remove DONE_00000009" in str(raised.value)


def test_a_step_and_a_rank_of_more_digits_are_found_and_deleted(tmp_path):
    checkpoint(tmp_path, 99999999)
    checkpoint(tmp_path, 123456789)
    store.state_path(tmp_path, 123456789, 100000).touch()
    assert store.find_last_step(tmp_path) == 123456789
    store.delete(tmp_path, 123456789)
    assert store.find_last_step(tmp_path) == 99999999 and not list(tmp_path.glob("*123456789*"))


def test_a_missing_extra_is_a_checkpoint_of_llmc(tmp_path):
    """It must load."""
    checkpoint(tmp_path, 9)
    store.extra_path(tmp_path, 9, 0).unlink()
    assert store.find_last_step(tmp_path) == 9


def test_a_file_is_no_folder_of_checkpoints(tmp_path):
    (tmp_path / "log").touch()
    with pytest.raises(UserError, match="log cannot be read"):
        store.find_last_step(tmp_path / "log")


def test_every_instant_of_a_deletion_is_consistent(tmp_path, monkeypatch):
    """After each single removal the older checkpoint is found or the newer is whole."""
    checkpoint(tmp_path, 4, num_processes=3)
    checkpoint(tmp_path, 9, num_processes=3)
    unlink, seen = Path.unlink, []

    def watched(path, *args, **kwargs):
        unlink(path, *args, **kwargs)
        seen.append(store.find_last_step(tmp_path))  # raises where a DONE stands over missing files

    monkeypatch.setattr(Path, "unlink", watched)
    store.delete(tmp_path, 9)
    assert seen == [4] * 8  # DONE, 1 model, 3 states, 3 extras
    ranks = [f"extra_00000004_0000{r}.json" for r in range(3)] + [f"state_00000004_0000{r}.bin" for r in range(3)]
    assert sorted(os.listdir(tmp_path)) == sorted(["DONE_00000004", "model_00000004.bin", *ranks])
    store.delete(tmp_path, 9)  # again: nothing left to delete is no error


def test_that_a_done_is_gone_is_synced_before_any_other_file_goes(tmp_path, monkeypatch):
    """Else a disk may remove these first, and a power cut leave DONE over what is left."""
    checkpoint(tmp_path, 4)
    synced = []
    monkeypatch.setattr(store, "sync_folder", lambda folder: synced.append(sorted(os.listdir(folder))))
    store.delete(tmp_path, 4)
    assert synced == [["extra_00000004_00000.json", "model_00000004.bin", "state_00000004_00000.bin"]]


@pytest.mark.parametrize(
    "step, every, keep, major_every, expected",
    [
        (50, 10, 0, 0, None),  # keep all
        (50, 10, -1, 0, None),
        (50, 10, 2, 0, 30),
        (20, 10, 2, 0, None),  # step 0 is not a checkpoint
        (10, 10, 2, 0, None),
        (50, 10, 2, 30, None),  # 30 is major
        (50, 10, 2, 20, 30),
        (50, 10, 2, 15, None),  # 30 is a multiple of 15 too
        (47, 10, 2, 0, 27),  # the last step of a run, off the period: llm.c computes the same
    ],
)  # fmt: skip
def test_rotation_is_llmc_s(step, every, keep, major_every, expected):
    """The contract, section Rotation."""
    assert store.step_to_delete(step, every, keep, major_every) == expected


def test_a_prepared_folder_has_no_temporary_files_but_everything_else(tmp_path):
    """Made with its parents; a crashed run's half files go, a user's files stay."""
    folder = tmp_path / "a" / "b"
    with store.held_folder(folder):
        assert folder.is_dir()
    assert os.listdir(tmp_path) == [], "nothing was written there"
    folder.mkdir(parents=True)
    ours = ["model_00000010.bin", "state_00000010_00000.bin", "extra_00000010_00000.json", "DONE_00000010"]
    kept = [*ours, "notes.tmp", "main.log", "model_best.bin.tmp"]
    crashed = [f"{name}.tmp" for name in (*ours, "main.log", "speed.log", "memory.json", "shared_0123abcd", "writable_x1_y")]
    for name in [*kept, *crashed]:
        (folder / name).touch()
    with store.held_folder(folder):
        assert sorted(os.listdir(folder)) == sorted([*kept, store.LOCK_NAME])
    assert sorted(os.listdir(folder)) == sorted(kept)


def test_an_unwritable_folder_is_refused_before_training(tmp_path, monkeypatch):
    """A file in its place, a read-only disk, a full one."""
    (tmp_path / "log").touch()
    with pytest.raises(UserError, match="log is a file; expected a folder"), store.held_folder(tmp_path / "log"):
        pass
    with pytest.raises(UserError, match="preparing the output folder failed at .*log/x.*Not a dir"), store.held_folder(tmp_path / "log/x"):
        pass
    for code, words in ((errno.EROFS, "Read-only"), (errno.ENOSPC, "No space left")):
        monkeypatch.setattr(store.tempfile, "NamedTemporaryFile", raising(code))
        with pytest.raises(UserError, match=f"{tmp_path}.*{words}"), store.held_folder(tmp_path):
            pass
        assert os.listdir(tmp_path) == ["log"]
    monkeypatch.setattr(store.tempfile, "NamedTemporaryFile", lambda **_: open("/dev/full", "wb"))  # a file can be made, but not written
    with pytest.raises(UserError, match=f"{tmp_path}.*No space left"), store.held_folder(tmp_path):
        pass


def test_a_folder_is_held_once_and_whoever_waits_gets_it_afterwards(tmp_path, monkeypatch):
    """Also where the file of the one before is gone when its lock is free."""
    (tmp_path / store.LOCK_NAME).write_text("process 12345678901234567890 on a machine that has a longer name than any other machine has")
    with store.held_folder(tmp_path):
        other = f"{tmp_path} is being written by process {os.getpid()} on {socket.gethostname()}; wait for its end, stop it, or choose"
        for _ in range(2):
            with pytest.raises(UserError, match=other), store.held_folder(tmp_path):
                pass
        assert os.listdir(tmp_path) == [store.LOCK_NAME]
    real, once = fcntl.flock, [lambda: (tmp_path / store.LOCK_NAME).unlink()]
    monkeypatch.setattr(fcntl, "flock", lambda *args: (once and once.pop()(), real(*args)))
    with store.held_folder(tmp_path):
        assert not once and os.listdir(tmp_path) == [store.LOCK_NAME]
        with pytest.raises(UserError, match="is being written"), store.held_folder(tmp_path):
            pass
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_is_used_with_a_word_about_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fcntl, "flock", raising(errno.ENOLCK))
    with store.held_folder(tmp_path):
        assert f"note: {tmp_path} cannot be locked (No locks available), so nothing would stop a second run" in capsys.readouterr().out
    assert os.listdir(tmp_path) == []


def test_a_denied_done_or_deletion_is_one_sentence(tmp_path, monkeypatch):
    """The disk turns read-only in the middle of a run."""
    checkpoint(tmp_path, 4)
    monkeypatch.setattr(os, "replace", raising(errno.EROFS))
    monkeypatch.setattr(Path, "unlink", raising(errno.EROFS))
    with pytest.raises(UserError, match="marking the checkpoint complete failed at .*DONE_00000005.*Read-only"):
        store.mark_done(tmp_path, 5)
    with pytest.raises(UserError, match="removing DONE_00000004 failed.*Read-only"):
        store.delete(tmp_path, 4)


def test_an_unmarked_checkpoint_is_not_found(tmp_path):
    """Before a checkpoint's files are replaced its DONE goes, so that it never stands over a mixture."""
    checkpoint(tmp_path, 2)
    checkpoint(tmp_path, 4)
    store.unmark(tmp_path, 4)
    assert store.find_last_step(tmp_path) == 2
    store.unmark(tmp_path, 4)  # nothing there is no error


@pytest.mark.parametrize("room, start, end, there, rotation, step", [
    (3, 0, 30, set(), (10, 0, 0), None), (2, 0, 30, set(), (10, 0, 0), 30), (2, 0, 25, set(), (10, 0, 0), 25),
    (0, 0, 5, set(), (10, 0, 0), 5),
    (2, 0, 30, set(), (10, 1, 0), None), (1, 0, 30, set(), (10, 1, 0), 20),  # the next is written before one is deleted
    (1, 20, 60, {10, 20}, (10, 2, 0), None), (0, 20, 60, {10, 20}, (10, 2, 0), 30), (1, 20, 60, {20}, (10, 2, 0), 40),
    (3, 0, 60, set(), (10, 1, 30), None), (2, 0, 60, set(), (10, 1, 30), 50),
    (2, 4, 6, set(), (5, 0, 0), None), (1, 4, 6, set(), (5, 0, 0), 6),
    (1, 0, 20, {10, 20}, (10, 0, 0), None),  # of an earlier run, and replaced
    (0, 0, 0, set(), (10, 0, 0), None), (0, 30, 20, set(), (10, 0, 0), None), (0, 0, 30, set(), (0, 0, 0), None),
    (0, 0, 30, set(), (-1, 0, 0), None), (2, 0, 10**12 + 5, set(), (1, 1, 0), None), (6, 3, 10**12, {1, 2, 3}, (1, 9, 0), 10),
    (7, 3, 10**12, {1, 2, 3}, (1, 9, 0), None),
])  # fmt: skip
def test_the_first_checkpoint_that_a_disk_has_no_room_for(room, start, end, there, rotation, step):
    every, keep, major_every = rotation
    assert store.first_without_room(room, start, end, there, every=every, keep=keep, major_every=major_every) == step
