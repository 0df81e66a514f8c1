"""Learning rates repeat llm.c's, and are defined where it divides by zero."""

import json
from pathlib import Path

import pytest

from llmc.schedulers import learning_rate

GOLDEN = Path(__file__).parent / "golden"
KINDS = ("cosine", "linear", "constant", "wsd")


def rates(kind, steps, *, lr=1.0, warmup=0, total_steps=40, final_fraction=0.1):
    return [learning_rate(kind, step, lr=lr, warmup=warmup, total_steps=total_steps, final_fraction=final_fraction) for step in steps]


@pytest.mark.parametrize("kind", KINDS)
def test_forty_steps_are_llmc_s(kind):
    golden = json.loads((GOLDEN / f"lr_{kind}.json").read_text())
    assert rates(kind, range(40), lr=3e-4, warmup=5) == pytest.approx(golden, rel=1e-6, abs=0)


@pytest.mark.parametrize("kind", ("cosine", "linear", "wsd"))
def test_decay_ends_at_the_final_fraction_and_stays_there(kind):
    assert rates(kind, (40, 41, 1000), warmup=5) == pytest.approx([0.1] * 3)


@pytest.mark.parametrize("kind", ("cosine", "linear", "wsd"))
@pytest.mark.parametrize("warmup", (40, 41, 80))
def test_a_warmup_as_long_as_the_run_only_rises(kind, warmup):
    assert rates(kind, range(40), warmup=warmup) == pytest.approx([(step + 1) / warmup for step in range(40)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("total_steps", (0, 1, 2))
@pytest.mark.parametrize("warmup", (0, 1, 2))
def test_the_shortest_runs_have_a_rate_at_every_step(kind, total_steps, warmup):
    """Step total_steps is asked for too when a run was resumed beyond a lowered -x."""
    assert all(0 < rate <= 1 for rate in rates(kind, range(total_steps + 1), warmup=warmup, total_steps=total_steps))


def test_the_first_step_without_warmup_has_the_highest_rate():
    assert [rates(kind, (0,)) for kind in KINDS] == [[1.0]] * 4


def test_wsd_warmup_beyond_its_decay_point_keeps_rising_first():
    assert rates("wsd", (35, 36), warmup=36) == pytest.approx([1.0, 1 - (1 - 0.1) * (4 / 8) ** 0.5])


@pytest.mark.parametrize("total_steps, decays_from", [(43, 34), (44, 35), (45, 36), (46, 36)])
def test_wsd_decays_from_a_whole_step(total_steps, decays_from):
    """llm.c's is (int)(0.8f * steps)."""
    found = rates("wsd", (decays_from, decays_from + 1), total_steps=total_steps)
    assert found == pytest.approx([1.0, 1 - (1 - 0.1) * (1 / (total_steps - decays_from)) ** 0.5])


@pytest.mark.parametrize("kind", KINDS)
def test_a_final_fraction_of_one_does_not_decay(kind):
    assert rates(kind, range(41), lr=3e-4, final_fraction=1.0) == [3e-4] * 41
