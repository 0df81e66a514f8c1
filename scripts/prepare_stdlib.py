"""Python's own standard library as a corpus: some 5 million tokens that every machine has, with no network.

    python scripts/prepare_stdlib.py

Each *.py file is a document, in the order of their paths; 1 in 20 is for validation. Tests, installed packages and files made for
this one machine are left out, so the same Python version gives the same corpus. --input takes any other folder of *.py files.
"""

import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.data.shards import MAX_SHARD_TOKENS
from llmc.errors import UserError, run_script
from scripts import prepare

# tests are full of odd strings, encodings of tables of code points
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}


def is_wanted(relative: Path) -> bool:
    """Not in a folder that is left out, and not written by the build of this Python (config-*, _sysconfigdata*)."""
    machine_made = relative.name.startswith("_sysconfigdata") or relative.parts[0].startswith("config-")
    return LEFT_OUT.isdisjoint(relative.parts[:-1]) and not machine_made


def source_files(folder: Path) -> list[Path]:
    """The corpus's files, sorted by their path in the folder, the same way on every system."""
    relative = (path.relative_to(folder) for path in folder.rglob("*.py"))
    found = [folder / path for path in sorted(filter(is_wanted, relative), key=Path.as_posix) if (folder / path).stat().st_size]
    if not found:
        raise UserError(f"{folder} holds no *.py files; give a folder that does with --input")
    return found


def main(argv: list[str] | None = None) -> None:
    args = prepare.argument_parser(__doc__, "dev/data/stdlib", shard_tokens=MAX_SHARD_TOKENS).parse_args(argv)
    files = source_files(args.input or Path(sysconfig.get_path("stdlib")))
    source = prepare.fingerprint(prepare.file_facts(files))
    prepare.write_splits(lambda: map(prepare.read_text, files), source, args, "stdlib", prepare.one_file)


if __name__ == "__main__":
    run_script(main, prepare.GOES_ON)
