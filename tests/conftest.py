"""Shared fixtures: the golden case A, written anew, and small helpers every test file may use."""
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SHARED = REPO.parent / "shared"  # reference material beside the checkout; users do not have it


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reference material, or skip."""
    if not SHARED.is_dir():
        pytest.skip(f"no reference material at {SHARED}")
    return SHARED
