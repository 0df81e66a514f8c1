"""Types of scripts' arguments, for argparse."""

import argparse
from collections.abc import Callable


def number_from(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """A whole number of at least `lowest`, and at most `highest`, if that is given."""
    expected = f"a whole number of {lowest} or more" if highest is None else f"a whole number from {lowest} to {highest}"

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < lowest or highest is not None and int(text) > highest:
            raise argparse.ArgumentTypeError(f"{text} is not {expected}")
        return int(text)

    return number
