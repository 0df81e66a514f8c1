"""The checkpoints of a run: on their way, counting, proven; what -nk deletes and when, and what is taken back.

Whole runs whose weights become no numbers are test_loop's and test_ranks'.
"""

import errno
import os
from dataclasses import replace

import pytest
from case_a import CONFIG, NoLoader

from llmc.checkpoint import keeper
from llmc.checkpoint.extra_file import Extra
from llmc.checkpoint.keeper import Checkpoints
from llmc.checkpoint.store import find_last_step, step_to_delete
from llmc.errors import UserError
from llmc.files import write_atomically
from llmc.flags import parse
from llmc.gpt2 import GPT2
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan


class Record:
    """Stands in for memory.json."""

    def __init__(self):
        self.phases = []

    def phase(self, name, step):
        self.phases.append((name, step))


@pytest.fixture(scope="module")
def models():
    """A model by whether its checkpoints are written beside training."""
    plans = {beside: Plan(PlanOptions(CONFIG, 1, 8, precision="fp32", async_checkpoint=beside)) for beside in (False, True)}
    return {beside: GPT2(plan) for beside, plan in plans.items()}


@pytest.fixture
def keep(models, tmp_path):
    """Checkpoints in tmp_path, of the flags given."""

    def made(flags="-n 2 -nk 1", resume_step=None):
        s = replace(parse(flags.split()), output_dir=str(tmp_path))
        return Checkpoints(s, models[bool(s.async_checkpoint)], Record(), resume_step)

    return made


def steps(folder) -> list[int]:
    return sorted(int(path.name[-8:]) for path in folder.glob("DONE_*"))


def write(checkpoints, step, doubtful=False):
    checkpoints.write(step, NoLoader(), Extra({}, {}), doubtful=doubtful)


def test_one_is_due_on_its_period_at_the_end_and_when_asked_to_stop(keep):
    checkpoints = keep("-n 4", resume_step=8)
    assert [step for step in range(13) if checkpoints.due(step, False, False)] == [4, 12]  # 8 is there already, 0 is nothing
    assert checkpoints.due(11, True, False) and checkpoints.due(11, False, True) and checkpoints.due(0, True, False)
    assert not checkpoints.due(8, True, True) and not checkpoints.due(0, False, True) and not checkpoints.due(0, True, True)
    never = keep("-n 0")
    assert not never.due(4, True, False) and never.due(4, False, True)


def test_without_a_folder_none_is_ever_due(models):
    checkpoints = Checkpoints(parse(["-n", "1"]), models[False], Record(), None)
    assert not any(checkpoints.due(step, last, stopping) for step in (0, 1) for last in (False, True) for stopping in (False, True))
    assert checkpoints.disown() == ""


def test_one_replaces_another_only_once_proven_and_by_weights_as_late_as_its_own(keep, tmp_path):
    checkpoints = keep()
    write(checkpoints, 2)
    checkpoints.prove(2)
    write(checkpoints, 4)
    assert steps(tmp_path) == [2, 4] and checkpoints.unproven == 4 and find_last_step(tmp_path) == 4
    checkpoints.prove(3)
    assert steps(tmp_path) == [2, 4] and checkpoints.unproven == 4
    checkpoints.prove(4)
    assert steps(tmp_path) == [4] and checkpoints.unproven is None
    assert not list(tmp_path.glob("*_00000002*"))


def test_one_whose_weights_are_proven_before_it_is_written_replaces_at_once(keep, tmp_path):
    """As after a validation, which comes before the checkpoint of a step."""
    checkpoints = keep()
    for step in (2, 4):
        checkpoints.prove(step)
        write(checkpoints, step)
    assert steps(tmp_path) == [4] and checkpoints.unproven is None


def test_weights_that_nothing_was_trained_on_have_to_be_proven_too(keep, tmp_path):
    """The end of a run with -x 0, whose model file may hold no numbers."""
    checkpoints = keep()
    write(checkpoints, 0)
    assert checkpoints.unproven == 0 and checkpoints.disown().startswith("DONE_00000000 removed again") and steps(tmp_path) == []
    checkpoints = keep()
    write(checkpoints, 0)
    checkpoints.prove(0)
    assert checkpoints.unproven is None and steps(tmp_path) == [0]


def test_without_a_period_one_replaces_none_not_even_itself(keep, tmp_path):
    checkpoints = keep("-n 0 -nk 1")
    for step in (3, 4):
        write(checkpoints, step)
        checkpoints.prove(step)
    assert steps(tmp_path) == [3, 4]


def test_while_one_is_unproven_no_other_is_written(keep, tmp_path, capsys):
    checkpoints = keep()
    write(checkpoints, 2)
    write(checkpoints, 4)
    out = capsys.readouterr().out
    assert steps(tmp_path) == [2] and "no checkpoint at step 4: since that of step 2 every loss" in out
    assert "still being written" not in out
    checkpoints.prove(4)
    write(checkpoints, 6)
    assert steps(tmp_path) == [2, 6] and step_to_delete(6, 2, 1, 0) == 4
    checkpoints.prove(6)
    assert "Deleting" not in capsys.readouterr().out  # there is no checkpoint of step 4


def test_one_of_doubtful_weights_is_not_written(keep, tmp_path, capsys):
    checkpoints = keep()
    write(checkpoints, 2)
    checkpoints.prove(2)
    write(checkpoints, 4, doubtful=True)
    said = "no checkpoint at step 4: the last loss was nan or infinite, and no update was made since\n"
    assert steps(tmp_path) == [2] and capsys.readouterr().out.endswith(said) and checkpoints.newest == 2


def test_the_first_of_all_ranks_alone_marks_deletes_and_disowns(keep, tmp_path, monkeypatch):
    checkpoints = keep()
    write(checkpoints, 2)
    checkpoints.prove(2)
    monkeypatch.setattr(keeper, "is_first", lambda model: False)
    write(checkpoints, 4)
    assert steps(tmp_path) == [2] and checkpoints.newest == 4
    checkpoints.prove(4)
    assert (tmp_path / "model_00000002.bin").exists()
    write(checkpoints, 6)
    (tmp_path / "DONE_00000006").touch()  # by the first one
    assert checkpoints.disown() == "" and steps(tmp_path) == [2, 6]


def test_what_was_resumed_from_still_has_to_replace_its_older_one_once_proven(keep, tmp_path):
    first = keep()
    write(first, 2)
    first.prove(2)
    write(first, 4)  # and killed here
    again = keep(resume_step=4)
    assert again.unproven == 4 and again.kept() == f"step 4 is kept in {tmp_path}: -y 1 goes on there"
    again.prove(4)
    assert steps(tmp_path) == [4]


def test_an_earlier_run_s_done_is_gone_before_its_files_are_replaced(keep, tmp_path, monkeypatch):
    """Or a crash in between would leave it over files of both runs."""
    write(keep(), 4)
    seen = []

    def replace_file(path, pieces, **options):
        seen.append((path.name[:5], steps(tmp_path)))
        return write_atomically(path, pieces, **options)

    for module in ("model_file", "extra_file", "state_file"):
        monkeypatch.setattr(f"llmc.checkpoint.{module}.write_atomically", replace_file)
    write(keep(), 4)
    assert seen == [("model", []), ("state", []), ("extra", [])] and steps(tmp_path) == [4]


def test_ranks_have_settled_and_know_that_a_done_is_gone_before_any_of_them_writes(keep, models, monkeypatch):
    """Weights may still be on their way, and another rank must not replace its files under a DONE."""
    checkpoints, calls = keep(), []
    for owner, name in ((models[False].sharing, "release_all"), (models[False].sharing, "barrier"), (checkpoints._writer, "begin")):
        monkeypatch.setattr(owner, name, lambda *args, name=name: calls.append(name))
    monkeypatch.setattr("llmc.checkpoint.snapshot.unmark", lambda folder, step: calls.append("unmark"))
    write(checkpoints, 2)
    assert calls[:4] == ["release_all", "unmark", "barrier", "begin"]


def test_disowning_takes_back_what_is_unproven_and_keeps_its_files(keep, tmp_path):
    checkpoints = keep()
    write(checkpoints, 2)
    checkpoints.prove(2)
    write(checkpoints, 4)
    assert checkpoints.disown() == f"DONE_00000004 removed again, -y 1 resumes from step 2 in {tmp_path}"
    assert find_last_step(tmp_path) == 2 and (tmp_path / "model_00000004.bin").exists()


def test_disowning_says_where_the_proven_ones_are_and_touches_none(keep, tmp_path):
    checkpoints = keep()
    write(checkpoints, 2)
    checkpoints.prove(2)
    assert checkpoints.disown() == f"-y 1 resumes from step 2 in {tmp_path}" and steps(tmp_path) == [2]


def test_disowning_says_where_none_is_left(keep, tmp_path):
    checkpoints = keep()
    assert checkpoints.disown() == f"no checkpoint is left in {tmp_path}"
    write(checkpoints, 2)
    assert checkpoints.disown() == f"DONE_00000002 removed again, no checkpoint is left in {tmp_path}" and steps(tmp_path) == []


def test_disowning_leaves_what_was_resumed_from_to_the_user(keep, tmp_path):
    write(keep(), 2)
    assert "remove DONE_00000002 from" in keep(resume_step=2).disown() and steps(tmp_path) == [2]


@pytest.mark.parametrize("flags", ["-n 2", "-n 2 --async-checkpoint 1"])
def test_a_disk_that_fails_is_told_with_what_is_kept(keep, tmp_path, flags):
    """Nothing, at first; then the one before, or the new one where the one before cannot be deleted. Once each."""
    blocked = tmp_path / "model_00000002.bin"
    blocked.mkdir()
    checkpoints = keep(flags)

    def failure():
        with pytest.raises(UserError) as error:
            checkpoints.write(2 if checkpoints.newest is None else 4, NoLoader(), Extra({}, {}), doubtful=False)
            checkpoints.complete()
        return str(error.value)

    assert f"failed at {blocked}: " in failure() and "kept" not in failure()
    blocked.rmdir()
    write(checkpoints, 2)
    checkpoints.complete()
    checkpoints.prove(2)
    (tmp_path / "state_00000004_00000.bin").mkdir()
    kept = f"; step 2 is kept in {tmp_path}: once that is mended, -y 1 goes on there"
    assert failure().endswith(kept) and failure().count("kept") == 1
    (tmp_path / "DONE_00000016").touch()  # of an earlier run
    assert failure().endswith(f"{kept}, if DONE_00000016 of an earlier run is moved away")
    (tmp_path / "DONE_00000009").touch()
    assert failure().endswith(f"{kept}, if DONE_00000009 and DONE_00000016 of an earlier run are moved away")
    (tmp_path / "DONE_00000009").unlink()


def test_what_was_moved_away_meanwhile_is_not_said_to_be_kept(keep, tmp_path):
    checkpoints = keep()
    write(checkpoints, 2)
    assert checkpoints.kept() == f"step 2 is kept in {tmp_path}: -y 1 goes on there"
    (tmp_path / "DONE_00000002").unlink()
    assert checkpoints.kept() == ""


@pytest.mark.parametrize("what", ["a file", "cannot be listed"])
def test_a_folder_that_fails_altogether_is_told_without_what_it_kept(keep, tmp_path, monkeypatch, what):
    """And with the error that was met first."""
    checkpoints = keep()
    write(checkpoints, 2)
    checkpoints.prove(2)
    (tmp_path / "state_00000004_00000.bin").mkdir()
    if what == "a file":
        tmp_path.rename(tmp_path.with_name("moved"))
        tmp_path.touch()
    else:
        monkeypatch.setattr("os.listdir", refused_by_the_disk)
    with pytest.raises(UserError, match="(writing|making) .* failed at ") as error:
        write(checkpoints, 4)
    assert "kept" not in str(error.value)


def refused_by_the_disk(path):
    raise OSError(errno.EIO, os.strerror(errno.EIO), path)


def test_one_that_cannot_be_deleted_is_told_with_the_one_that_was_to_replace_it(keep, tmp_path, monkeypatch):
    checkpoints = keep()
    write(checkpoints, 2)
    checkpoints.prove(2)
    write(checkpoints, 4)

    def refuse(folder, step):
        raise UserError(f"deleting step {step} failed")

    monkeypatch.setattr("llmc.checkpoint.keeper.delete", refuse)
    with pytest.raises(UserError, match=f"^deleting step 2 failed; step 4 is kept in {tmp_path}: once that is mended, -y 1 goes on there$"):
        checkpoints.prove(4)


def test_one_written_beside_counts_once_all_ranks_have_written_and_not_before(keep, tmp_path, capsys):
    checkpoints = keep("-n 2 --async-checkpoint 1")
    write(checkpoints, 2)
    checkpoints.complete_if(0)
    assert steps(tmp_path) == [] and checkpoints.unproven is None
    checkpoints._writer.wait()
    assert checkpoints.written == 1 and not checkpoints._writer.busy
    checkpoints.complete_if(checkpoints.written)
    assert steps(tmp_path) == [2] and checkpoints.unproven == 2 and "Wrote checkpoint at step 2" in capsys.readouterr().out
    assert checkpoints._record.phases == [("checkpoint", 2)]
    checkpoints.complete_if(checkpoints.written)  # not twice
    assert checkpoints._record.phases == [("checkpoint", 2)]


def test_one_written_beside_is_disowned_before_it_counts(keep, tmp_path):
    checkpoints = keep("-n 2 --async-checkpoint 1")
    write(checkpoints, 2)
    assert checkpoints.disown() == f"no checkpoint is left in {tmp_path}"
    checkpoints.complete()
    checkpoints.complete_alone()
    assert steps(tmp_path) == [] and (tmp_path / "model_00000002.bin").exists()


def test_the_next_waits_for_one_that_is_still_being_written_and_says_so_once(keep, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(keeper.Writer, "busy", True)
    checkpoints = keep("-n 2 --async-checkpoint 1")
    for step in (2, 4, 6):
        write(checkpoints, step)
        checkpoints.prove(step)
    checkpoints.complete()
    assert steps(tmp_path) == [2, 4, 6]
    assert capsys.readouterr().out.count("is still being written") == 1
