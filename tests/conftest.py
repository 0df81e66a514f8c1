"""Shared fixtures: the golden case A, written anew, and small helpers every test file may use."""

import gc
import os
import signal
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

# before torch is imported: threads that wait for one another sleep at once. Tests beside each other have fewer cores than threads, and one
# that spins keeps a core from the one it waits for
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

REPO = Path(__file__).resolve().parent.parent
SHARED = REPO.parent / "shared"  # reference material beside the checkout; users do not have it

# files that take half a minute or more of a core, the longest among the first: a process that is done with its own finds another short one
# to the end. The second and third need none of the kernels that the first compiles, which no other process should do meanwhile
LONG = """kernels_cpu kernels kernels_ptx resume gpt2 tensor_parallel failure errors zero memory ranks async_checkpoint parts_program layers
forms traffic report choose plan rendezvous graphs triton_attention""".split()

# before any kernel is defined: without a card Triton's interpreter runs them, on CPU tensors
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference material, or skip."""
    if not SHARED.is_dir():
        pytest.skip(f"no reference material at {SHARED}")
    return SHARED


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """What is there before a file's tests stays: half a million objects of libraries and compilers, which no collection looks at again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def signals_of_before():
    """A training run here takes these, and would answer for pytest by the end."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def plain_torch():
    """As the program has it: no autograd; and one thread, as on models this small several only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    yield
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)


def pytest_configure():
    """No run in which hundreds of tests fail for one reason."""
    if interprets_no_kernels():
        pytest.exit("Triton before 3.7 interprets kernels with numpy before 2.4 only: python -m pip install 'numpy<2.4'", returncode=2)


def pytest_unconfigure():
    """What little_to_collect froze is let go: libraries complain of what they find left at Python's end."""
    gc.unfreeze()


def interprets_no_kernels() -> bool:
    try:
        triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    except PackageNotFoundError:  # no triton, and its tests are skipped
        return False
    return triton < (3, 7) and numpy >= (2, 4) and not torch.cuda.is_available()


def pytest_collection_modifyitems(items):
    """Long files first. Tests marked gpu are skipped, with the reason, where there is no CUDA device."""
    place = {f"test_{name}": i for i, name in enumerate(LONG)}
    assert all((REPO / "tests" / f"{name}.py").exists() for name in place), "LONG names a file that is gone"
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
