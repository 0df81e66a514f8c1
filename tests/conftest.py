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


def pytest_collection_modifyitems(items):
    """Tests marked gpu are skipped, with the reason, where there is no CUDA device."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))
