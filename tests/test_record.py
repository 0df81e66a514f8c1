"""memory.json: what a run measured beside what was planned."""

import json
from types import SimpleNamespace

import pytest

from llmc.config import config_from_descriptor
from llmc.flags import parse
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.memory.record import RECORD_NAME, MemoryRecord


@pytest.fixture
def record(tmp_path):
    """A record in tmp_path, of a device whose peaks are the given ones, over a baseline of 100."""

    def make(*peaks):
        readings = iter(peaks)
        backend = SimpleNamespace(name="a device", baseline_bytes=lambda: 100, peak_bytes=lambda: next(readings))
        return MemoryRecord(tmp_path, Plan(PlanOptions(config_from_descriptor("d6"), 1, 64)), parse([]), backend)

    return make


def written(tmp_path):
    return json.loads((tmp_path / RECORD_NAME).read_text())


def test_a_peak_is_that_since_the_start_though_a_later_reading_may_be_lower(record, tmp_path):
    """Also lower than the baseline."""
    memory = record(90, 500, 480, 510)
    for step, name in enumerate(("build", "first step", "evaluation")):
        memory.phase(name, step)
    memory.end(7, 2.0, 1000)
    assert [(row["phase"], row["step"], row["peak_bytes"], row["over_baseline_bytes"]) for row in written(tmp_path)["measured"]] == [
        ("build", 0, 100, 0), ("first step", 1, 500, 400), ("evaluation", 2, 500, 400), ("end", 7, 510, 410),
    ]  # fmt: skip
    assert written(tmp_path)["speed"] == {"average_step_ms": 2.0, "tokens_per_s": 500_000.0}


def test_a_phase_counts_when_it_first_ends(record, tmp_path):
    memory = record(200, 300)
    for step in range(3):
        memory.phase("first step", step)
        assert [row["step"] for row in written(tmp_path)["measured"]] == [0]


def test_a_run_of_no_counted_step_has_no_speed(record, tmp_path):
    record(100).end(1, None, 1000)
    assert written(tmp_path)["speed"] is None


@pytest.mark.parametrize("begins", ["first step", "end"])
def test_nothing_is_written_before_the_run_has_trained_or_ends(record, tmp_path, begins):
    """An earlier run's record stays when a resume is refused."""
    memory = record(200, 300, 400)
    memory.phase("build", 0)
    memory.phase("evaluation", 0)
    assert not (tmp_path / RECORD_NAME).exists()
    memory.phase(begins, 1)
    assert [row["phase"] for row in written(tmp_path)["measured"]] == ["build", "evaluation", begins]


def test_a_fresh_run_that_trains_nothing_leaves_the_record_of_one_that_did(record, tmp_path):
    """But not that of an evaluation, nor a damaged one; a resumed run writes its own."""

    def recorded(*phases):
        memory = record(*range(200, 200 + len(phases)))
        for phase in phases:
            memory.phase(phase, 3)
        return [row["phase"] for row in written(tmp_path)["measured"]]

    assert recorded("build", "evaluation", "end") == ["build", "evaluation", "end"]
    assert recorded("build", "end") == ["build", "end"]
    trained = recorded("build", "first step", "end")
    assert recorded("build", "evaluation", "end") == trained == ["build", "first step", "end"]
    assert recorded("build", "resume", "end") == ["build", "resume", "end"]
    for damaged in ("", "[]", '{"measured": 3}', '{"measured": [{}]}'):
        (tmp_path / RECORD_NAME).write_text(damaged)
        assert recorded("build", "end") == ["build", "end"]


def test_a_record_that_cannot_be_written_is_told_once(record, tmp_path):
    memory, told = record(200, 300), []
    memory.go_ahead(told.append)
    (tmp_path / RECORD_NAME).mkdir()
    for step, name in enumerate(("first step", "evaluation")):
        memory.phase(name, step)
    assert [str(error).partition(":")[0] for error in told] == [f"writing the memory record failed at {tmp_path / RECORD_NAME}"]
