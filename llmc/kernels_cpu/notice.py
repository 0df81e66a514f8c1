"""Saying once that kernels are being compiled, which may take a minute. numba is not imported."""

import os
from contextlib import contextmanager

_say = None  # of told_when_compiling


@contextmanager
def told_when_compiling(say):
    """Inside, say(a sentence) is called before a kernel is compiled, once. For kernels that are found on disk it is not called."""
    global _say
    _say = say
    try:
        yield
    finally:
        _say = None


def compiling(kept: bool = True):
    """The compiler calls this before each kernel. kept: whether the code can be kept on disk."""
    global _say
    if _say:
        named = os.environ.get("NUMBA_CACHE_DIR")
        places = f"NUMBA_CACHE_DIR={named} cannot" if named else "neither their folder nor the home folder can"
        again = "" if kept else f", in every run: {places} be written to; name a folder in NUMBA_CACHE_DIR"
        _say(f"compiling kernels for this processor, which may take a minute{again}")
        _say = None
