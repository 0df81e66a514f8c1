"""GPT-2 training, planned to the byte: layers with explicit forward and backward, and llm.c's files and flags."""

import sys
from importlib.util import find_spec

__version__ = "0.1.0"

ACTIVATE = "activate the environment that make train makes (. .venv/bin/activate)"


def lacks(module: str) -> str:
    """The sentence for a module that is not installed."""
    return f"{module} is not installed for {sys.executable}; {ACTIVATE}, or: {sys.executable} -m pip install torch numpy tiktoken tqdm"


def _end(sentence: str) -> None:
    """End the program as llmc.errors does with bad input."""
    print(f"error: {sentence}", file=sys.stderr)
    sys.exit(2)


# what every program here needs, if only for --help
if sys.version_info < (3, 10):
    _end(f"{sys.executable} is Python {sys.version.split()[0]}, and llmc needs 3.10 or later; {ACTIVATE}, or take a newer Python")
if not find_spec("numpy"):
    _end(lacks("numpy"))
