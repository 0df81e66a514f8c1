"""Which files of Python's standard library are a corpus; for what needs no more than Python itself."""

from pathlib import Path

from llmc.errors import UserError

# tests are full of odd strings, and the encodings of tables of code points
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}


def is_wanted(relative: Path) -> bool:
    """Whether a file is neither hidden, nor in a folder that is left out, nor written by the build of this Python (config-*,
    _sysconfigdata*)."""
    hidden = any(part.startswith(".") for part in relative.parts)
    machine_made = relative.name.startswith("_sysconfigdata") or relative.parts[0].startswith("config-")
    return LEFT_OUT.isdisjoint(relative.parts[:-1]) and not hidden and not machine_made


def source_files(folder: Path) -> list[Path]:
    """The corpus's files, sorted by their path in the folder, in the same order on every system. Raises UserError if there are none."""
    relative = (path.relative_to(folder) for path in folder.rglob("*.py"))
    found = [folder / path for path in sorted(filter(is_wanted, relative), key=Path.as_posix) if (folder / path).stat().st_size]
    if not found:
        raise UserError(f"{folder} holds no *.py files; give a folder that does with --input")
    return found
