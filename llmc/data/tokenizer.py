"""Token ids to bytes, through llm.c's tokenizer file; and text to token ids, for preparing data.

The file is 256 int32 (20240328, version, number of tokens, in version 2 the end-of-text id), then for every token a length byte
and that many bytes. Training needs nothing else. Text is encoded by GPT-2's byte-pair encoding through tiktoken; without tiktoken's
files, the 256 ids that GPT-2 gives to single bytes still encode any text, in more tokens (see ByteEncoder).
"""

from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from llmc.config import GPT2_END_OF_TEXT, GPT2_VOCAB_SIZE
from llmc.errors import UserError
from llmc.files import HEADER_BYTES, TOKENIZER_MAGIC, new_header, read_header, write_atomically

REMAKE = "make it again with scripts/prepare_*.py"
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()  # the format requires at least one byte for each token
DOWNLOAD_TIMEOUT_S = 10.0  # without an answer; not a limit on the whole download

# GPT-2's vocabulary starts with the 256 single bytes, printable ones first; BYTE_OF_ID is the byte of each id from 0 to 255. In its own
# files a byte is a character: a printable one stands for itself, the others are the characters from 256 on
PRINTABLE_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTE_OF_ID = bytes(PRINTABLE_BYTES + [b for b in range(256) if b not in PRINTABLE_BYTES])
CHARACTER_OF_BYTE = {byte: chr(byte if byte in PRINTABLE_BYTES else 256 + i - len(PRINTABLE_BYTES)) for i, byte in enumerate(BYTE_OF_ID)}
ID_OF_BYTE = np.argsort(np.frombuffer(BYTE_OF_ID, np.uint8)).astype(np.uint16)


def are_single_bytes(ids) -> bool:
    """Whether all ids are of single bytes, or end-of-text, in GPT-2's vocabulary: ByteEncoder's tokens."""
    return set(ids) <= {*range(len(BYTE_OF_ID)), GPT2_END_OF_TEXT}


class Tokenizer:
    """The bytes of every token id: decodes ids, and reads and writes llm.c's tokenizer file. path: the file it was read from, if any."""

    def __init__(self, table: list[bytes], end_of_text: int, path=None):
        self.table, self.end_of_text, self.path = table, end_of_text, path

    @property
    def vocab_size(self) -> int:
        return len(self.table)

    def decode(self, ids) -> bytes:
        """The text of token ids, as bytes: a token may end inside a UTF-8 character. Raises UserError for an id not in the table."""
        ids = np.asarray(ids, dtype=np.int64).ravel().tolist()
        for i in ids:
            if not 0 <= i < len(self.table):
                raise UserError(
                    f"token {i} is outside the tokenizer's vocabulary of {len(self.table)}; use the tokenizer file made for this model"
                )
        return b"".join(self.table[i] for i in ids)

    def ids(self) -> dict[bytes, int]:
        """The id of every token that has bytes of its own: not of end-of-text, nor of those that share theirs, as all UNKNOWN do, or have
        none."""
        found = Counter(self.table)
        return {token: i for i, token in enumerate(self.table) if token and i != self.end_of_text and found[token] == 1}

    def merges(self) -> list[tuple[bytes, bytes]]:
        """The merges of byte-pair encoding, in their order, for a table whose ids are in that order too, as GPT-2's are."""
        ids = self.ids()
        merges = (_last_merge(token, ids) for token in sorted(ids, key=ids.get) if len(token) > 1)
        return [merge for merge in merges if merge]

    def need_all_bytes(self, ids) -> None:
        """Raise UserError unless each of the 256 bytes is a token of `ids`, so that any text can be encoded."""
        if missing := sum(bytes([b]) not in ids for b in range(256)):
            of = f"the tokenizer {self.path}" if self.path else "this tokenizer"
            raise UserError(f"{of} has no tokens for {missing} of the 256 bytes, so it cannot encode text; use one that has all")

    def encode(self, text: str, like) -> list[int]:
        """The ids of `text` by GPT-2's byte-pair encoding, whose ids are in the order of its merges; each byte for itself where the ids
        `like` it are all of single bytes, as ByteEncoder's are. Raises UserError for a table that lacks bytes, or without tiktoken."""
        ids = self.ids()
        single = {token: i for token, i in ids.items() if len(token) == 1}
        if set(like) <= {*single.values(), self.end_of_text}:
            ids = single
        self.need_all_bytes(ids)
        with _tiktoken_needed():
            from tiktoken import Encoding
            from tiktoken_ext.openai_public import r50k_pat_str
        return Encoding("table", pat_str=r50k_pat_str, mergeable_ranks=ids, special_tokens={}).encode_ordinary(text)

    def with_added(self, vocab_size: int) -> "Tokenizer":
        """This tokenizer, or if it has GPT-2's number of tokens one of vocab_size, if that is more: the others are added, without bytes."""
        added = max(0, vocab_size - self.vocab_size) if self.vocab_size == GPT2_VOCAB_SIZE else 0
        return Tokenizer(self.table + [b""] * added, self.end_of_text, self.path)

    def is_part_of(self, other: "Tokenizer") -> bool:
        """Whether the other decodes all that this one knows, and to the same bytes."""
        return (self.vocab_size, self.end_of_text) == (other.vocab_size, other.end_of_text) and all(
            mine in (theirs, UNKNOWN) for mine, theirs in zip(self.table, other.table)
        )

    @classmethod
    def read(cls, path) -> "Tokenizer":
        """Read a tokenizer file of version 1 or 2. Raises UserError if it is missing, damaged or of another kind."""
        _, version, size, end_of_text, *_ = read_header(path, TOKENIZER_MAGIC).tolist()
        if version not in (1, 2):
            raise UserError(f"{path} is a tokenizer file of version {version}, expected 1 or 2; {REMAKE}")
        if version == 1:  # the header does not give end_of_text, so the table must be GPT-2's
            end_of_text = GPT2_END_OF_TEXT
            if size != GPT2_VOCAB_SIZE:
                raise UserError(f"{path} has version 1 and {size} tokens; that version stands for GPT-2's {GPT2_VOCAB_SIZE}, {REMAKE}")
        if not 0 <= end_of_text < size:
            raise UserError(f"{path} says its end-of-text is token {end_of_text} of {size}; it is damaged, {REMAKE}")
        return cls(_split_table(Path(path).read_bytes()[HEADER_BYTES:], size, path), end_of_text, path)

    def write(self, path) -> None:
        """Write a tokenizer file of version 2, whole or not at all."""
        assert all(0 < len(token) < 256 for token in self.table), "a token has 1 to 255 bytes in this format"
        header = new_header(TOKENIZER_MAGIC, 2, len(self.table), self.end_of_text)
        body = b"".join(bytes([len(token)]) + token for token in self.table)
        write_atomically(path, (header, body), doing="writing the tokenizer")

    @classmethod
    def from_gpt2(cls) -> "Tokenizer":
        """GPT-2's table, through tiktoken. Raises UserError if tiktoken or its files are unavailable."""
        bpe = _tiktoken_gpt2()
        return cls([bpe.decode_single_token_bytes(i) for i in range(bpe.n_vocab)], bpe.eot_token)

    @classmethod
    def from_bytes_only(cls) -> "Tokenizer":
        """A table of GPT-2's size that knows only the 256 single-byte tokens: all that a model trained on ByteEncoder's data uses."""
        table = [bytes([b]) for b in BYTE_OF_ID]
        return cls(table + [UNKNOWN] * (GPT2_VOCAB_SIZE - len(table)), GPT2_END_OF_TEXT)


def _last_merge(token: bytes, ids: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The last of the merges that make this token of tokens of lower ids; None if they do not make it."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ids.get(a + b, ids[token]) for a, b in zip(parts, parts[1:])]
        if min(joined) >= ids[token]:
            return None
        first = joined.index(min(joined))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return tuple(parts) if all(part in ids for part in parts) else None


def _split_table(body: bytes, size: int, path) -> list[bytes]:
    """The `size` tokens in `body`, each a length byte and its bytes."""
    table, at = [], 0
    for token in range(size):
        length = body[at] if at < len(body) else 0
        if length == 0 or at + 1 + length > len(body):
            fault = "is cut short" if at + 1 + length > len(body) else "has no bytes"
            raise UserError(f"{path}: token {token} of {size} {fault}; copy the file again or {REMAKE}")
        table.append(body[at + 1 : at + 1 + length])
        at += 1 + length
    if at != len(body):
        raise UserError(f"{path} is too long: {len(body) - at} bytes follow its {size} tokens; copy the file again or {REMAKE}")
    return table


def find_tokenizer(path, folders, vocab_size: int) -> Tokenizer | None:
    """The tokenizer that decodes samples: the file at `path`, or else the first gpt2_tokenizer.bin in `folders` that has vocab_size tokens,
    or GPT-2's number, where the model has more: those were added to fine-tune it, and decode to nothing.

    None if there is none. Raises UserError if the file at `path` has another number of tokens, or if any file it reads is damaged.
    """
    if path:
        tokenizer = Tokenizer.read(path).with_added(vocab_size)
        if tokenizer.vocab_size != vocab_size:
            raise UserError(
                f"--tokenizer {path} has {tokenizer.vocab_size} tokens and the model {vocab_size}; give the one the data was made with"
            )
        return tokenizer
    for found in (Path(folder) / "gpt2_tokenizer.bin" for folder in folders):
        if found.exists() and (tokenizer := Tokenizer.read(found).with_added(vocab_size)).vocab_size == vocab_size:
            return tokenizer
    return None


class GPT2Encoder:
    """GPT-2's byte-pair encoding. Raises UserError if tiktoken or its files are unavailable."""

    name = "gpt2"
    end_of_text = GPT2_END_OF_TEXT

    def __init__(self):
        self._bpe = _tiktoken_gpt2()

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; "<|endoftext|>" written out in it is ordinary text."""
        return self._bpe.encode_ordinary(text)

    def tokenizer(self) -> Tokenizer:
        """The table that decodes these ids."""
        return Tokenizer.from_gpt2()


class ByteEncoder:
    """One token per UTF-8 byte, with GPT-2's ids for them, so any GPT-2 model accepts the data. Takes 3 to 4 times as many tokens."""

    name = "bytes"
    end_of_text = GPT2_END_OF_TEXT

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, uint16; a lone surrogate, which JSON can hold and UTF-8 cannot, becomes "?"."""
        return ID_OF_BYTE[np.frombuffer(text.encode("utf-8", "replace"), np.uint8)]

    def tokenizer(self) -> Tokenizer:
        """The table that decodes these ids."""
        return Tokenizer.from_bytes_only()


Encoder = GPT2Encoder | ByteEncoder


def load_encoder(force_bytes: bool = False) -> Encoder:
    """GPT-2's encoder if tiktoken has its files or can download them; otherwise the byte encoder, after printing a line that says so."""
    if force_bytes:
        return ByteEncoder()
    try:
        return GPT2Encoder()
    except UserError as error:
        print(f"{error}; until then: one token per byte, 3 to 4 times as many")
        return ByteEncoder()


def _tiktoken_gpt2():
    """tiktoken's encoding "gpt2", from its cache or the network. Raises UserError with the reason if neither has it."""
    try:
        with _tiktoken_needed(), _impatient_tiktoken():
            import tiktoken

            return tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # OSError covers all of requests' failures; ValueError: the download is not the file
        raise UserError(
            f"GPT-2's byte-pair encoding is not in tiktoken's cache and did not download ({type(error).__name__}); connect to the "
            f"network once, or point TIKTOKEN_CACHE_DIR at a folder that has it"
        ) from error


@contextmanager
def _tiktoken_needed():
    """An import that fails inside is a UserError."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"GPT-2's byte-pair encoding needs tiktoken ({error}); pip install -U tiktoken") from error


@contextmanager
def _impatient_tiktoken():
    """Give tiktoken's downloads a time limit. It sets none, so behind a firewall that drops packets it would wait for minutes."""
    import requests
    import tiktoken.load

    patient = tiktoken.load.read_file

    def read_file(blobpath: str) -> bytes:
        if not blobpath.startswith("http"):
            return patient(blobpath)
        response = requests.get(blobpath, timeout=DOWNLOAD_TIMEOUT_S)
        response.raise_for_status()
        return response.content

    tiktoken.load.read_file = read_file
    try:
        yield
    finally:
        tiktoken.load.read_file = patient
