"""Tiny Shakespeare: 1.1 MB of plays, 32,768 tokens for validation and 305,260 to train on; ready in seconds.

    python scripts/prepare_tinyshakespeare.py

Token for token llm.c's dev/data/tinyshakespeare.py. The whole text is held in memory; there is nothing to resume.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.errors import UserError, run_script  # first, as it says what is not installed

import numpy as np

from llmc.data.shards import write_shard
from scripts import inputs, prepare

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
VAL_TOKENS = 32768


def speeches(text: str) -> list[str]:
    """The text cut after its blank lines: what llm.c takes for documents. Only the last has no blank line."""
    pieces = text.split("\n\n")
    return [piece + "\n\n" for piece in pieces[:-1]] + pieces[-1:]


def main(argv: list[str] | None = None) -> None:
    args = prepare.argument_parser(__doc__, "dev/data/tinyshakespeare").parse_args(argv)
    name = "tiny_shakespeare.txt"
    path = inputs.one_input(args.input, name, ".txt") if args.input else inputs.download(URL, args.output / name)
    pieces = speeches(inputs.read_text(path))
    encoder = prepare.start(args)
    tokens = np.concatenate(list(prepare.encoded(pieces, encoder, workers=1)))
    if len(tokens) <= VAL_TOKENS:
        raise UserError(
            f"{path} gives {len(tokens)} tokens and validation alone takes {VAL_TOKENS}; "
            "give the whole tinyshakespeare text, or use scripts/prepare_text.py"
        )
    for split, part in (("val", tokens[:VAL_TOKENS]), ("train", tokens[VAL_TOKENS:])):
        shard = args.output / f"tiny_shakespeare_{split}.bin"
        write_shard(shard, part)
        print(f"wrote {shard}: {len(part):,} tokens")
    prepare.finish(args, encoder, "tiny_shakespeare_train.bin", "tiny_shakespeare_val.bin")


if __name__ == "__main__":
    run_script(main, prepare.BEGINS_ANEW)
