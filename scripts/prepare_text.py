"""Any text of your own: .txt, .md, .rst, .py, .jsonl or .parquet files, or folders of them.

    python scripts/prepare_text.py --input my_corpus/ --name mine
    python scripts/prepare_text.py --input a.jsonl b.jsonl --jsonl-field body

A line of .jsonl or a row of .parquet is a document; any other text is cut, at blank lines where there are any, into documents of 8,192 to
16,384 characters and a last one that may be shorter. One document in 20 (--val-every) goes to validation; of fewer than 11, one. A killed
run goes on when the same command is given again.

Below a folder, files and folders whose names begin with "." (.git, .venv) and __pycache__ are passed over, unless named themselves.
Links to folders are followed, but no folder or file is taken twice, nor a folder that holds the one given. How many files of other kinds
are left out is printed.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.data.shards import MAX_SHARD_TOKENS
from llmc.errors import run_script
from scripts import inputs, prepare
from scripts.arguments import number_from


def file_name(text: str) -> str:
    """An argparse type: a name without folders, which --output has."""
    if not text or Path(text).name != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file; put the folder into --output")
    return text


def main(argv: list[str] | None = None) -> None:
    parser = prepare.argument_parser(__doc__, "dev/data/text", shard_tokens=100_000_000, local=True)
    parser.add_argument("--name", type=file_name, default="text", help="what the shards are called: NAME_train_000000.bin [%(default)s]")
    parser.add_argument(
        "--jsonl-field",
        default="text",
        metavar="NAME",
        help="the field of .jsonl, or column of .parquet, that holds the text [%(default)s]",
    )
    parser.add_argument(
        "--val-every",
        type=number_from(2, MAX_SHARD_TOKENS),
        metavar="N",
        help=f"one document in N is for validation [{prepare.VAL_EVERY}; of fewer than 11, one]",
    )
    args = parser.parse_args(argv)
    files = inputs.input_files(args.input, [*inputs.TEXT_SUFFIXES, ".jsonl", ".parquet"], tell=True)
    if any(path.suffix.lower() == ".parquet" for path in files):
        inputs.need_pyarrow()  # rather now than after an hour of the other files
    source = inputs.fingerprint([inputs.file_facts(files), args.jsonl_field, args.val_every or prepare.VAL_EVERY, inputs.PIECE_CHARS])
    prepare.write_splits(lambda: inputs.read_documents(files, args.jsonl_field), source, args, args.name, prepare.numbered)


if __name__ == "__main__":
    run_script(main, prepare.GOES_ON)
