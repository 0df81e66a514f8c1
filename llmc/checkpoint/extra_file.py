"""extra_STEP_RANK.json: what a resumed run needs and llm.c's state file has no room for. Each state file has one beside it.

Among it are the values of flags that a resumed run may change, so that it can tell which it does.
"""

import json
from dataclasses import dataclass, field, fields

from llmc.errors import RESUME_FROM_ANOTHER, UserError
from llmc.files import write_atomically
from llmc.flags import FLAGS, Flag, Settings

# flags that a resumed run may change, of which a line then tells (changes_since). total_batch_size is -d, or what -b and -t come to
OPTIMISATION = (
    "learning_rate", "lr_scheduler", "warmup_steps", "final_lr_fraction", "weight_decay", "skip_loss_z", "skip_grad_z", "total_batch_size",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Extra:
    """The entries of an extra file, in its order. What is as here is left out, and is so again when read: older files lack some."""

    loss_outliers: dict | None = None  # as OutlierDetector.state has it. No file lacks this one
    norm_outliers: dict | None = None  # nor this
    B: int | None = None
    T: int | None = None
    data: dict | None = None  # as TokenLoader.data_state has it
    seed: int = 0  # --seed; llm.c's checkpoints have its seeds
    optimisation: dict = field(default_factory=dict)  # values of the flags above
    crc32: dict = field(default_factory=dict)  # of the "state" file beside it and, in the first rank's, of the "model" file


NO_FILE = Extra()  # as in a checkpoint of llm.c


def write_extra(path, extra: Extra) -> None:
    """Write an extra file as JSON, whole or not at all. Floats come back to the last bit. JSON has no nan and no infinity: what may be one,
    such as a loss, must be text.

    Raises UserError where the disk is full or denies the write; ValueError for nan and infinity.
    """
    entries = {f.name: getattr(extra, f.name) for f in fields(Extra)}
    entries = {name: value for name, value in entries.items() if value != getattr(NO_FILE, name)}
    write_atomically(path, [json.dumps(entries, indent=1, allow_nan=False).encode()], doing="writing the state")


def read_extra(path) -> Extra:
    """What write_extra wrote; NO_FILE where there is none. Raises UserError when it is damaged, of which each reader of an entry that is
    there has yet to make sure."""
    try:
        with open(path, "rb") as file:
            entries = json.loads(file.read())
    except FileNotFoundError:
        return NO_FILE
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, error) from None
    if not isinstance(entries, dict):
        raise damaged(path, f"it holds a {type(entries).__name__}")
    if entries and (missing := {"loss_outliers", "norm_outliers"} - entries.keys()):
        raise UserError(f"{path} lacks {', '.join(sorted(missing))}, so it is damaged; {RESUME_FROM_ANOTHER}")
    return Extra(**{f.name: entries[f.name] for f in fields(Extra) if f.name in entries}) if entries else NO_FILE


def damaged(path, reason) -> UserError:
    """The error for what is not an extra file."""
    return UserError(f"{path} is damaged ({reason}); expected the JSON written beside a state file; {RESUME_FROM_ANOTHER}")


def read_number(path, entry: str, flag: Flag) -> int | None:
    """The entry of an extra file that is the value of a flag. Raises UserError for what the flag would not take."""
    value = getattr(read_extra(path), entry)
    if value is not getattr(NO_FILE, entry) and (type(value) is not int or not flag.at_least <= value <= flag.at_most):
        expected = f"a whole number from {flag.at_least} to {flag.at_most}"
        raise UserError(f"{path} says {entry} {value!r}; expected {expected}, so it is damaged; {RESUME_FROM_ANOTHER}")
    return value


def read_crc(path, name: str) -> str | None:
    """The CRC-32 of a file, "state" or "model", that an extra file names; None where it names none. Raises UserError for what is none."""
    written = read_extra(path).crc32
    if not (isinstance(written, dict) and all(isinstance(crc, str) for crc in written.values())):
        raise UserError(f"{path} says crc32 {written!r}; expected those of files, so it is damaged; {RESUME_FROM_ANOTHER}")
    return written.get(name)


def optimisation(s: Settings, total_batch_size: int) -> dict:
    """The entry of that name."""
    return {name: getattr(s, name) for name in OPTIMISATION} | {"total_batch_size": total_batch_size}


def changes_since(written, now: dict, path):
    """A line if a run goes on with other values of these flags than `written` in the extra file at `path`. Raises UserError for values
    that the flags do not take."""
    if not isinstance(written, dict):
        raise UserError(f"{path} says optimisation {written!r}; expected the values of flags, so it is damaged; {RESUME_FROM_ANOTHER}")
    flags = {flag.field: flag for flag in FLAGS if flag.field in now}
    for name in written.keys() & flags.keys():
        if not flags[name].takes(written[name]):
            raise UserError(
                f"{path} says {name} {written[name]!r}; expected {flags[name].expected}, so it is damaged; {RESUME_FROM_ANOTHER}"
            )
    changed = [name for name in now if written.get(name, now[name]) != now[name]]
    if changed:
        before, after = (" ".join(f"{flags[name].short[0]} {values[name]}" for name in changed) for values in (written, now))
        yield f"note: the checkpoint was written with {before}, and the run goes on with {after}"
