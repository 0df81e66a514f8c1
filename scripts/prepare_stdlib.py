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
from llmc.errors import run_script
from scripts import inputs, prepare
from scripts.stdlib_sources import source_files


def main(argv: list[str] | None = None) -> None:
    args = prepare.argument_parser(__doc__, "dev/data/stdlib", shard_tokens=MAX_SHARD_TOKENS).parse_args(argv)
    files = source_files(args.input or Path(sysconfig.get_path("stdlib")))
    source = inputs.fingerprint(inputs.file_facts(files))
    prepare.write_splits(lambda: map(inputs.read_text, files), source, args, "stdlib", prepare.one_file)


if __name__ == "__main__":
    run_script(main, prepare.GOES_ON)
