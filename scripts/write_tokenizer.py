"""GPT-2's tokenizer as llm.c's gpt2_tokenizer.bin: what turns sampled tokens into text.

    python scripts/write_tokenizer.py gpt2_tokenizer.bin

Needs the network the first time, when tiktoken downloads the vocabulary; it is cached after that.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.data.tokenizer import Tokenizer
from llmc.errors import run_script


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write GPT-2's tokenizer in llm.c's format.")
    parser.add_argument("output", nargs="?", default="gpt2_tokenizer.bin", help="the file to write [%(default)s]")
    args = parser.parse_args(argv)
    Tokenizer.from_gpt2().write(args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    run_script(main)
