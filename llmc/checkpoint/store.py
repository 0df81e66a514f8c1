"""One folder of checkpoints: names, completeness, rotation. Source: llm.c train_gpt2.cu write_checkpoint, utils.h find_max_step.

A checkpoint is complete when its empty DONE file exists. DONE is written last and removed first, so at no instant does it
stand over missing files.
"""

import os
import re
import socket
import tempfile
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from llmc.checkpoint.state_file import read_num_processes
from llmc.errors import UserError, file_error
from llmc.files import sync_folder, write_atomically


def model_path(folder, step: int) -> Path:
    """DIR/model_00000010.bin, written by rank 0."""
    return Path(folder) / f"model_{step:08d}.bin"


def state_path(folder, step: int, rank: int) -> Path:
    """DIR/state_00000010_00000.bin, written by every rank that has data of its own."""
    return Path(folder) / f"state_{step:08d}_{rank:05d}.bin"


def extra_path(folder, step: int, rank: int) -> Path:
    """DIR/extra_00000010_00000.json, what llm.c's state file has no room for."""
    return Path(folder) / f"extra_{step:08d}_{rank:05d}.json"


def done_path(folder, step: int) -> Path:
    """DIR/DONE_00000010, written by rank 0 after all ranks have written theirs."""
    return Path(folder) / f"DONE_{step:08d}"


def find_last_step(folder) -> int | None:
    """The highest step with a DONE file, or None where there is none (also: no such folder).

    Raises UserError naming the missing file when that checkpoint lacks its model or the state of one of its ranks.
    """
    step = highest_step(folder)
    if step is None:
        return None
    require(model_path(folder, step), folder, step)
    require(state_path(folder, step, 0), folder, step)
    for rank in range(1, read_num_processes(state_path(folder, step, 0))):
        require(state_path(folder, step, rank), folder, step)
    return step


def highest_step(folder) -> int | None:
    """The highest step with a DONE file, whatever else there is of that checkpoint; None as in find_last_step."""
    return max(steps_done(folder), default=None)


def steps_done(folder) -> set[int]:
    """The steps that have a DONE file; none where there is no such folder."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return set()
    except OSError as error:
        reason = f"{folder} cannot be read ({error.strerror}); expected a folder of checkpoints"
        raise UserError(f"{reason}, so check the path and its permissions") from None
    return {int(match[1]) for name in names if (match := re.fullmatch(r"DONE_(\d{8,})", name))}


def require(path: Path, folder, step: int) -> None:
    """Raise UserError unless this file of a checkpoint marked complete exists."""
    if not path.is_file():
        raise UserError(
            f"{path} is missing, though {done_path(folder, step)} marks that checkpoint complete; "
            f"put it back, or remove {done_path(folder, step).name} to resume from the checkpoint before"
        )


def mark_done(folder, step: int) -> None:
    """Mark a checkpoint complete; rank 0 calls this last, after every rank has written. Raises UserError where the disk denies it."""
    write_atomically(done_path(folder, step), [], doing="marking the checkpoint complete")


def unmark(folder, step: int) -> None:
    """Remove a checkpoint's DONE, and sync that before any other of its files changes. Raises UserError where the disk denies it."""
    try:
        done_path(folder, step).unlink(missing_ok=True)
        sync_folder(folder)  # otherwise the disk may reorder removals
    except OSError as error:
        raise file_error(error, folder, f"removing {done_path(folder, step).name}") from error


def files_of(folder, step: int) -> list[Path]:
    """The model, state and extra files that exist of a checkpoint, for any number of ranks."""
    names = re.compile(rf"model_{step:08d}\.bin|(state|extra)_{step:08d}_\d{{5,}}\.(bin|json)")
    return sorted(path for path in Path(folder).iterdir() if names.fullmatch(path.name))


def delete(folder, step: int) -> None:
    """Remove a checkpoint, DONE first; a missing file is no error. Only rank 0 calls this. Raises UserError where the disk denies it."""
    unmark(folder, step)
    try:
        for path in files_of(folder, step):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise file_error(error, folder, f"deleting the checkpoint of step {step}") from error


def step_to_delete(step: int, every: int, keep: int, major_every: int) -> int | None:
    """Which checkpoint to delete after writing the one of `step`; None for none.

    every        -n, steps between checkpoints
    keep         -nk, how many to keep, 0 or -1 = all
    major_every  -nm, checkpoints at multiples of this step are never deleted, 0 or less = no exceptions
    """
    old = step - keep * every
    if keep <= 0 or old <= 0 or (major_every > 0 and old % major_every == 0):
        return None
    return old


def first_without_room(room: int, start: int, end: int, there: set[int], *, every: int, keep: int, major_every: int) -> int | None:
    """The step of the first checkpoint after `start` that a disk has no room for; None if all fit that are due up to `end`.

    room                      checkpoints that fit beside those of the steps `there`
    every, keep, major_every  as in step_to_delete
    """
    if every <= 0 or end <= start:
        return None
    there = set(there)
    for step in chain(range(start // every * every + every, end, every), [end]):
        if step not in there:
            room -= 1
        if room < 0:
            return step
        there.add(step)
        old = step_to_delete(step, every, keep, major_every)
        if old in there:
            there.remove(old)
            room += 1
        if keep > 0 and major_every <= 0 and step > start + (keep + 1) * every:  # from here on each takes the place of another
            return None
    return None


TEMPORARY = re.compile(
    r"(model_\d+\.bin|state_\d+_\d+\.bin|extra_\d+_\d+\.json|DONE_\d+|(shared|writable)_\w+|memory\.json|(main|speed)\.log)\.tmp"
)


LOCK_NAME = ".llmc_run.lock"


@contextmanager
def held_folder(folder):
    """Create the folder, prove that it can be written, and remove the temporary files of a crashed run. No other run can hold it
    meanwhile, as two would write the same files. Folders that were created here are removed again if they stay empty.

    Rank 0 holds the folder, from before it looks for a checkpoint there until all ranks have ended, or until it is killed. Raises UserError
    when the folder is held by another run, or cannot be created or written.
    """
    folder = Path(folder)
    if os.path.lexists(folder) and not os.path.isdir(folder):  # unlike Path's, these never raise OSError
        found = "a file" if os.path.exists(folder) else "a link to nowhere"
        raise UserError(f"{folder} is {found}; expected a folder to write checkpoints and the log to, so choose another name")
    made = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    with _refusals_told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder / LOCK_NAME)
    try:
        with _refusals_told(folder):
            with tempfile.NamedTemporaryFile(dir=folder, prefix="writable_", suffix=".tmp") as file:
                file.write(bytes(1))  # on a full disk an empty file can still be created
            for name in os.listdir(folder):
                if TEMPORARY.fullmatch(name):
                    (folder / name).unlink()
        yield
    finally:
        with suppress(OSError):
            (folder / LOCK_NAME).unlink()
        lock.close()
        with suppress(OSError):  # not empty
            for each in made:
                each.rmdir()


@contextmanager
def _refusals_told(folder: Path):
    try:
        yield
    except OSError as error:
        raise file_error(error, folder, "preparing the output folder") from error


def _lock(path: Path):
    """Open and lock the file, and return it. The system releases the lock however the process ends; a file that then stays behind means
    nothing. Raises UserError where another process holds the lock."""
    import fcntl  # Windows lacks it; --plan and --help do without

    while True:
        lock = open(path, "a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "another run"
            lock.close()
            raise UserError(f"{path.parent} is being written by {owner}; wait for its end, stop it, or choose another -o") from None
        except OSError as error:  # on some network file systems
            print(f"note: {path.parent} cannot be locked ({error.strerror}), so nothing would stop a second run in it; do not start one")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(lock.fileno())):
                break
        lock.close()  # its last holder has just removed the file
    lock.truncate(0)
    with suppress(OSError):  # a full disk, which is reported in a moment
        os.write(lock.fileno(), f"process {os.getpid()} on {socket.gethostname()}".encode())
    return lock
