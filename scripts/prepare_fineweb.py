"""FineWeb and FineWeb-Edu: 10 or 100 billion tokens of web pages, in shards of 100 million, the first for validation.

    python scripts/prepare_fineweb.py --version 10B
    python scripts/prepare_fineweb.py --version 100B --edu

Token for token llm.c's dev/data/fineweb.py. The .parquet files are downloaded one at a time, as they are needed (30 GB for 10B), and
kept in DIR/parquet: a killed run goes on where its last whole shard ends. --input takes a folder that has them. Needs pyarrow.
"""

import json
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.errors import UserError, run_script
from scripts import inputs, prepare

SITE = "https://huggingface.co"


def remote_files(repository: str, folder: str) -> list[tuple[str, int]]:
    """(path, bytes) of the .parquet files in a folder of a Hugging Face dataset, sorted."""
    url = f"{SITE}/api/datasets/{repository}/tree/main/{folder}"
    try:
        with urllib.request.urlopen(url, timeout=inputs.SILENCE_S) as response:
            files = sorted((entry["path"], int(entry["size"])) for entry in json.load(response) if entry["path"].endswith(".parquet"))
        if not files:
            raise ValueError("no .parquet file is there")
    except (OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError) as error:  # the last four: it answers otherwise
        raise UserError(
            f"cannot list {SITE}/datasets/{repository} ({error}); "
            f"download the files of its folder {folder} by hand and run again with --input and their folder"
        ) from error
    return files


def download_in_turn(repository: str, paths: list[str], folder: Path) -> Iterator[Path]:
    """Each file, on the disk when it is asked for."""
    for path in paths:
        yield inputs.download(f"{SITE}/datasets/{repository}/resolve/main/{path}", folder / Path(path).name)


def main(argv: list[str] | None = None) -> None:
    parser = prepare.argument_parser(
        __doc__, "dev/data/fineweb10B, fineweb100B, edu_fineweb10B or edu_fineweb100B", shard_tokens=100_000_000
    )
    parser.set_defaults(output=None)
    parser.add_argument("--version", choices=("10B", "100B"), default="10B", help="which sample [%(default)s]")
    parser.add_argument("--edu", action="store_true", help="FineWeb-Edu instead of FineWeb")
    args = parser.parse_args(argv)
    name, repository = ("edu_fineweb", "HuggingFaceFW/fineweb-edu") if args.edu else ("fineweb", "HuggingFaceFW/fineweb")
    args.output = args.output or Path(f"dev/data/{name}{args.version}")
    inputs.need_pyarrow()  # rather now than after the first 2 GB
    if args.input:
        local = inputs.input_files([args.input], [".parquet"])
        sizes = [(path.name, path.stat().st_size) for path in local]
        files = partial(iter, local)
    else:
        remote = remote_files(repository, f"sample/{args.version}T")
        sizes = [(Path(path).name, size) for path, size in remote]
        files = partial(download_in_turn, repository, [path for path, _ in remote], args.output / "parquet")
    corpus = prepare.Corpus(
        name=name,
        documents=lambda: inputs.read_documents(files()),
        source=inputs.fingerprint(sizes),  # no times of change, so the files may move from parquet/ to --input half-way
        file_name=lambda number: f"{name}_{'train' if number else 'val'}_{number:06d}.bin",
        shard_tokens=args.shard_tokens,
    )
    encoder = prepare.start(args)
    if len(prepare.write_corpus(corpus, args.output, encoder, args.workers)) == 1:
        raise UserError("all of it is one shard, for validation; give more files, or a smaller --shard-tokens and another --output")
    prepare.finish(args, encoder, f"{name}_train_*.bin", f"{name}_val_*.bin")


if __name__ == "__main__":
    run_script(main, prepare.GOES_ON)
