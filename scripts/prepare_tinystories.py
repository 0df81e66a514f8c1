"""TinyStories: 925 million tokens of short stories for small models, and 19 million for validation.

    python scripts/prepare_tinystories.py

Downloads 1.5 GB from Hugging Face. The first of its 50 files is validation, the stories of each file are shuffled, and the files are
llm.c's (dev/data/tinystories.py), in a fixed order where that takes them as its processes finish. --input takes the
TinyStories_all_data.tar.gz or the folder of its *.json files. To make a long run resumable give --shard-tokens 100000000.
"""

import gzip
import json
import os
import random
import shutil
import sys
import tarfile
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.data.shards import MAX_SHARD_TOKENS
from llmc.errors import UserError, file_error, run_script
from llmc.files import make_folder
from scripts import inputs, prepare

URL = "https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/TinyStories_all_data.tar.gz"
SOURCE = ".source"  # beside what was unpacked: which archive that came from


def unpack(archive: Path, folder: Path) -> Path:
    """The *.json files of `archive` in `folder`, whatever folders they had inside; `folder` appears when all are out.

    A folder that holds what came out of another archive is made anew; one that somebody made by hand is taken as it is.
    """
    source, noted = inputs.fingerprint(inputs.file_facts([archive])), folder / SOURCE
    if folder.exists() and (not noted.exists() or noted.read_bytes() == source.encode()):
        print(f"found {folder}, not unpacking again")
        return folder
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    make_folder(part)
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and member.name.endswith(".json"):
                    path = part / Path(member.name).name  # the last name only: a path in an archive may lead anywhere
                    with open(path, "wb") as file:
                        shutil.copyfileobj(tar.extractfile(member), file)
                    os.utime(path, (member.mtime, member.mtime))  # by which unfinished shards know what they are made from
            while tar.fileobj.read(1 << 20):  # to the checksum at its end
                pass
        (part / SOURCE).write_text(source)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{archive} is not a whole .tar.gz ({' '.join(str(error).split())}); download it again") from error
    except OSError as error:
        raise file_error(error, folder, "unpacking") from error
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(part, folder)
    return folder


def stories(files: list[Path]) -> Iterator[str]:
    """The stories of all files, each file's shuffled with llm.c's seed. Holds one file (50 MB) in memory."""
    for index, path in enumerate(files):
        try:
            records = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError, OSError) as error:
            raise UserError(f"{path} cannot be read as JSON ({error}); download the data again") from error
        if not isinstance(records, list):
            raise UserError(f"{path} holds {inputs.json_kind(records)}, expected an array of stories; download the data again")
        texts = [inputs.text_field(record, "story", f"{path}, story {number}").strip() for number, record in enumerate(records)]
        random.Random(1337 + index).shuffle(texts)
        yield from texts


def main(argv: list[str] | None = None) -> None:
    args = prepare.argument_parser(__doc__, "dev/data/tinystories", shard_tokens=MAX_SHARD_TOKENS).parse_args(argv)
    data = args.input or inputs.download(URL, args.output / "TinyStories_all_data.tar.gz")
    if data.is_file():
        data = unpack(data, args.output / "TinyStories_all_data")
    files = [path for path in inputs.input_files([data], [".json"]) if not path.name.endswith(prepare.PROGRESS)]
    if len(files) < 2:
        raise UserError(f"{data} holds {len(files)} .json file; expected several, the first for validation: unpack the whole archive there")
    encoder = prepare.start(args)
    for split, part in (("val", files[:1]), ("train", files[1:])):
        prefix, source = f"TinyStories_{split}", inputs.fingerprint(inputs.file_facts(part))
        corpus = prepare.Corpus(prefix, partial(stories, part), source, prepare.one_file(prefix), args.shard_tokens)
        prepare.write_corpus(corpus, args.output, encoder, args.workers)
    prepare.finish(args, encoder, "TinyStories_train*.bin", "TinyStories_val*.bin")


if __name__ == "__main__":
    run_script(main, prepare.GOES_ON)
