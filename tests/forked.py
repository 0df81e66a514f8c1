"""Processes forked from one that has imported what they need: torch, numba and the program take longer than most of what they do."""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from unittest.mock import patch

from conftest import REPO


def started(function, *args):
    """A process that runs the function, as multiprocessing has it. It ends with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    path = os.pathsep.join([str(REPO / "tests"), str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    with patch.dict(os.environ, PYTHONPATH=path):  # Python 3.11 does not pass sys.path on
        forkserver.ensure_running()
    process = context.Process(target=_with_imports, args=(function, args), daemon=True)
    process.start()
    return process


def _with_imports(function, args):
    assert "preloaded" in sys.modules, "preloaded.py cannot be imported, which multiprocessing does not say"
    function(*args)
