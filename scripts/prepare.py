"""From documents to token shards: what the prepare_*.py scripts share.

A corpus is a stream of documents in a fixed order. Each is encoded behind an end-of-text token, in parallel, and the stream of
tokens is cut into shards. Memory holds the documents in flight and no more; a shard is finished or not there. Beside the
shards a small JSON says where in the corpus each one ends, so that a killed run goes on where the last whole shard ends, and
gives the same bytes as a run that was not killed.
"""

import argparse
import glob
import json
import os
import signal
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

import numpy as np
from tqdm import tqdm

from llmc.data.shards import MAX_SHARD_TOKENS, count_tokens, inputs_of_shortest, write_shard
from llmc.data.tokenizer import Encoder, GPT2Encoder, Tokenizer, load_encoder
from llmc.errors import UserError, file_error
from llmc.files import make_folder, write_atomically
from llmc.flags import Settings
from llmc.host import own_processors
from scripts.arguments import number_from
from scripts.inputs import PIECE_CHARS

PROGRESS = ".progress.json"
BATCH_CHARS = 1 << 20  # one task of a worker process: some 50 ms of work, so handing it over costs nothing
GOES_ON = "interrupted; the same command goes on after the last shard that was written"
BEGINS_ANEW = "interrupted; the same command begins again, without downloading what is there"
POOL_BATCHES = 16  # with fewer, processes, which take a second to start, are not worth it
VAL_EVERY = 20  # where a split is made by document, 1 in 20 is for validation: 5%


# --- the command line


def argument_parser(
    doc: str, output: str, *, corpus: bool = True, shard_tokens: int | None = None, local: bool = False
) -> argparse.ArgumentParser:
    """The options all scripts have. `doc` is the script's docstring.

    corpus        False for a file of questions, which needs no table to decode it
    shard_tokens  if given, the default of --shard-tokens
    local         --input is required and takes several paths, as there is nothing to download
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if local:
        parser.add_argument("--input", metavar="PATH", type=Path, nargs="+", required=True, help="local files or folders")
    else:
        parser.add_argument("--input", metavar="PATH", type=Path, help="a local file or folder to use instead of the default")
    parser.add_argument("--output", metavar="DIR", type=Path, default=Path(output), help=f"where to write [{output}]")
    parser.add_argument(
        "--encoder",
        choices=("auto", "gpt2", "bytes"),
        default="auto",
        help="gpt2: GPT-2's tokens; bytes: one token per byte; "
        "auto: gpt2 if tiktoken's files can be had, else bytes, and says so [%(default)s]",
    )
    if corpus:
        parser.add_argument(
            "--tokenizer",
            metavar="PATH",
            type=Path,
            help="where to write the table that decodes the tokens [gpt2_tokenizer.bin in the output folder]",
        )
    if shard_tokens:
        parser.add_argument(
            "--shard-tokens",
            metavar="N",
            type=number_from(1, MAX_SHARD_TOKENS),
            default=shard_tokens,
            help="tokens in a shard, at most 2147483647 [%(default)s]",
        )
        parser.add_argument(
            "--workers",
            metavar="N",
            type=number_from(1, MAX_SHARD_TOKENS),
            default=own_processors(),
            help="processes that encode [one per processor: %(default)s]",
        )
    return parser


def start(args: argparse.Namespace) -> Encoder:
    """Make the output folder, and return the encoder chosen."""
    make_folder(args.output)
    return GPT2Encoder() if args.encoder == "gpt2" else load_encoder(force_bytes=args.encoder == "bytes")


def finish(args: argparse.Namespace, encoder: Encoder, train: str, val: str) -> None:
    """Write the tokenizer file, last so that it cannot come to lie beside another encoder's shards; print how to train.

    train and val are patterns of the shards' names. A tokenizer that decodes these tokens, and perhaps more that other shards beside it
    have, stays.
    """
    path, tokenizer = args.tokenizer or args.output / "gpt2_tokenizer.bin", encoder.tokenizer()
    found = _decodes(path, tokenizer)
    if not found:
        tokenizer.write(path)
    print(f"{'found' if found else 'wrote'} {path}: decodes these tokens")
    folder = Path(glob.escape(str(args.output)))
    shortest = min(inputs_of_shortest(str(folder / pattern), "--output") for pattern in (train, val))
    B, T = Settings().batch_size, Settings().sequence_length
    sizes = "" if shortest >= B * T else f" -b 1 -t {1 << max(1, min(shortest, T)).bit_length() - 1} -m -1"
    print(f'train on them with: python train_gpt2.py -e d6 -i "{folder / train}" -j "{folder / val}"{sizes} -o log_d6 -n 500 -nk 1')


def _decodes(path: Path, tokenizer: Tokenizer) -> bool:
    """Whether there is a tokenizer file that decodes all that this one does; one that cannot be read does not."""
    try:
        return path.exists() and tokenizer.is_part_of(Tokenizer.read(path))
    except UserError:
        return False


# --- from documents to tokens


def encoded(documents: Iterable[str], encoder: Encoder, workers: int) -> Iterator[np.ndarray]:
    """For each document, in order, the end-of-text token and its tokens, uint16.

    Bounded memory: POOL_BATCHES batches at the start, and later 2*workers + 1, are in flight.
    """
    if workers == 1:
        yield from (_encode(encoder, text) for text in documents)
        return
    source = batches(documents)
    first = list(islice(source, POOL_BATCHES))
    if len(first) == POOL_BATCHES:
        yield from _encoded_by_pool(chain(first, source), encoder, workers)
    else:
        yield from (_encode(encoder, text) for batch in first for text in batch)


def _encoded_by_pool(source: Iterable[list[str]], encoder: Encoder, workers: int) -> Iterator[np.ndarray]:
    # spawn, not fork: the same on every system, and tqdm's thread cannot be caught holding a lock
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_start_worker, initargs=(encoder,))
    pending = deque()
    try:
        for batch in source:
            pending.append(pool.submit(_encode_batch, batch))
            if len(pending) > 2 * workers:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError("an encoding process ended by itself, perhaps for want of memory; run again with fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


def batches(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in lists of about BATCH_CHARS characters."""
    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _start_worker(encoder: Encoder) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-c is the parent's to answer
    Thread(target=_end_with_parent, daemon=True).start()
    _worker_encoder = encoder


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, and they hold both ends of the pipes that they wait at."""
    parent_process().join()
    os._exit(1)


def _encode_batch(texts: list[str]) -> list[np.ndarray]:
    return [_encode(_worker_encoder, text) for text in texts]


def _encode(encoder: Encoder, text: str) -> np.ndarray:
    ids = encoder.encode(text)
    tokens = np.empty(1 + len(ids), dtype=np.uint16)
    tokens[0], tokens[1:] = encoder.end_of_text, ids
    return tokens


# --- from tokens to shards


@dataclass(frozen=True, slots=True)
class Corpus:
    """One stream of documents and the shards it goes to."""

    name: str  # of the progress file: NAME.progress.json
    documents: Callable[[], Iterator[str]]  # the same documents in the same order at every call
    source: str  # fingerprint of what they come from
    file_name: Callable[[int], str]  # of the n-th shard, n from 0
    shard_tokens: int


def numbered(prefix: str) -> Callable[[int], str]:
    """File names prefix_000000.bin, prefix_000001.bin, ..."""
    return lambda number: f"{prefix}_{number:06d}.bin"


def one_file(prefix: str) -> Callable[[int], str]:
    """File names prefix.bin and, where one shard is not enough, prefix_000001.bin, ..."""
    return lambda number: f"{prefix}_{number:06d}.bin" if number else f"{prefix}.bin"


def write_splits(documents: Callable[[], Iterator[str]], source: str, args: argparse.Namespace, name: str, file_name) -> None:
    """Write a corpus as two, by document: of N, number N/2, N/2 + N, ... are for validation, so it is spread over the whole.

    N is --val-every, where it is given, else VAL_EVERY, or all documents where these are too few for that. file_name is `numbered` or
    `one_file`; the rest is as for Corpus. Raises UserError where there is nothing to validate on, or nothing to train on.
    """
    encoder, asked = start(args), getattr(args, "val_every", None)
    every = asked or VAL_EVERY
    there_are = sum(1 for _ in islice(documents(), every // 2 + 1))
    if there_are < 2:
        raise UserError(
            f"--input holds {there_are or 'no'} document of text; expected two, one of them for validation, so give more text: "
            f"a text file is cut into documents of {PIECE_CHARS // 2:,} to {PIECE_CHARS:,} characters"
        )
    if asked and there_are <= every // 2:
        raise UserError(
            f"--input holds {there_are} documents of text, and 1 in {every} is for validation, number {every // 2 + 1} the first; "
            "give more text, or a smaller --val-every"
        )
    if there_are <= every // 2:
        every = there_are
        print(f"{every} documents are all there are: one of them is for validation")

    def part(validation: bool) -> Iterator[str]:
        return (text for number, text in enumerate(documents()) if (number % every == every // 2) == validation)

    for split, validation in (("val", True), ("train", False)):
        prefix = f"{name}_{split}"
        corpus = Corpus(prefix, partial(part, validation), source, file_name(prefix), args.shard_tokens)
        write_corpus(corpus, args.output, encoder, args.workers)
    finish(args, encoder, f"{glob.escape(name)}_train*.bin", f"{glob.escape(name)}_val*.bin")


def write_corpus(corpus: Corpus, folder: Path, encoder: Encoder, workers: int) -> list[Path]:
    """Write the shards that are not there yet; returns the paths of all. Raises UserError."""
    progress = Progress.load(corpus, folder, encoder)
    for shard in progress.shards:
        print(f"found {folder / shard['file']}: {shard['tokens']:,} tokens")
    if not progress.finished:
        _write_rest(corpus, folder, encoder, workers, progress)
    if not progress.shards:
        raise UserError(f"there are no documents for {folder / corpus.file_name(0)}; check --input")
    return [folder / shard["file"] for shard in progress.shards]


def _write_rest(corpus: Corpus, folder: Path, encoder: Encoder, workers: int, progress: "Progress") -> None:
    """Encode from where the last finished shard ends, cutting the stream of tokens every shard_tokens."""
    number, at = progress.end  # document, and the token in it, that comes next
    documents = islice(corpus.documents(), number, None)
    spool = Spool(folder, corpus.shard_tokens)
    with tqdm(desc=corpus.name, unit="tok", unit_scale=True, disable=None) as bar:
        for tokens in encoded(documents, encoder, workers):
            while at < len(tokens):
                taken = spool.take(tokens[at:])
                at += taken
                bar.update(taken)
                if spool.full:
                    progress.add(spool, number, at)
            number, at = number + 1, 0
    if spool.count:
        progress.add(spool, number, at)
    if progress.shards:
        progress.finish()


class Spool:
    """The tokens of the shard being made: in a file without a name, so memory stays small and a killed run leaves nothing."""

    def __init__(self, folder: Path, capacity: int):
        self.folder, self.capacity, self.count = folder, capacity, 0
        self._file = tempfile.TemporaryFile(dir=folder)

    @property
    def full(self) -> bool:
        return self.count == self.capacity

    def take(self, tokens: np.ndarray) -> int:
        """Append as many tokens as still fit; returns how many."""
        tokens = tokens[: self.capacity - self.count]
        try:
            self._file.write(tokens.astype("<u2"))
        except OSError as error:
            raise file_error(error, self.folder, "writing the tokens") from error
        self.count += len(tokens)
        return len(tokens)

    def write_shard(self, path: Path) -> None:
        """Make a shard of what was taken, and start empty again."""
        try:
            self._file.flush()
        except OSError as error:
            raise file_error(error, path, "writing the tokens") from error
        write_shard(path, np.memmap(self._file, dtype="<u2", mode="r", shape=(self.count,)))
        self._file.seek(0)
        self._file.truncate()
        self.count = 0


class Progress:
    """The shards of a corpus that are finished, and where in the corpus each ends; kept in NAME.progress.json beside them."""

    def __init__(self, corpus: Corpus, folder: Path, encoder: Encoder):
        self.corpus, self.folder = corpus, folder
        self.path = folder / f"{corpus.name}{PROGRESS}"
        self.made_from = {"source": corpus.source, "encoder": encoder.name, "shard_tokens": corpus.shard_tokens}
        self.shards, self.finished = [], False

    @classmethod
    def load(cls, corpus: Corpus, folder: Path, encoder: Encoder) -> "Progress":
        """What an earlier run finished, up to the first shard that is missing or damaged."""
        progress = cls(corpus, folder, encoder)
        if not progress.path.exists():
            return progress
        try:
            saved = json.loads(progress.path.read_text())
            made_from, finished = {key: saved["made_from"].get(key) for key in progress.made_from}, saved["finished"]
            shards = [{"file": str(s["file"])} | {key: int(s[key]) for key in ("tokens", "document", "token")} for s in saved["shards"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise UserError(f"{progress.path} cannot be read ({error}); remove it to prepare this data from the start") from error
        changed = [key for key, value in progress.made_from.items() if made_from[key] != value]
        if changed:
            differs = [f"{key} was {made_from[key]} and is {progress.made_from[key]}" for key in changed if key != "source"]
            differs += ["the input, or how it is read, was another"] * ("source" in changed)
            raise UserError(
                f"{folder} holds shards of {corpus.name} made otherwise ({', '.join(differs)}); "
                f"remove them and {progress.path}, as well as the other split's if there is one, or give another --output"
            )
        whole = [_is_whole(folder, shard) for shard in shards]
        good = whole.index(False) if False in whole else len(whole)
        progress.shards, progress.finished = shards[:good], finished and good == len(shards)
        return progress

    @property
    def end(self) -> tuple[int, int]:
        """The document in which the last finished shard ends, and how many of its tokens, end-of-text included, are in shards."""
        return (self.shards[-1]["document"], self.shards[-1]["token"]) if self.shards else (0, 0)

    def add(self, spool: Spool, document: int, token: int) -> None:
        """Finish a shard. The shard first, then the note: killed in between, a rerun writes the same shard again."""
        path = self.folder / self.corpus.file_name(len(self.shards))
        count = spool.count
        spool.write_shard(path)
        self.shards.append({"file": path.name, "tokens": count, "document": document, "token": token})
        self._save()
        tqdm.write(f"wrote {path}: {count:,} tokens")

    def finish(self) -> None:
        self.finished = True
        self._save()

    def _save(self) -> None:
        content = {"made_from": self.made_from, "finished": self.finished, "shards": self.shards}
        write_atomically(self.path, [json.dumps(content, indent=1).encode()], doing="writing the progress")


def _is_whole(folder: Path, shard: dict) -> bool:
    try:
        return count_tokens(folder / shard["file"]) == shard["tokens"]
    except UserError:
        return False
