"""main.log and the printed lines are llm.c's, and a resumed log reads as if the run had never stopped."""

import math
import os

import pytest

from llmc.errors import UserError
from llmc.logger import LOG_NAME, SPEED_NAME, Logger, format_step_line, table_row, table_rule


def train(log, steps, val_every=2):
    """A run in small: validate, then train, as the training loop does."""
    for step in steps:
        if step % val_every == 0:
            log.val(step, 4 - step / 10)
        log.train(step, 5 - step / 10, 3e-4, 1.234)


def run(log, steps):
    """What the loop writes to the file of this name: train, or the time of each step."""
    if log._path.name == LOG_NAME:
        return train(log, steps)
    for step in steps:
        log.speed(step, 100 + step / 8, 500 - step / 8)


def text(folder, name="main.log"):
    return (folder / name).read_text()


def test_lines_are_llmc_s(tmp_path):
    log = Logger(tmp_path)
    log.val(0, 10.98765)
    log.eval(250, 0.29456)
    log.train(7, 3.14159, 0.00059996, 1.005)
    log.train(8, math.nan, 6e-4, math.inf)
    assert text(tmp_path) == (
        "s:0 tel:10.9877\ns:250 eval:0.2946\ns:7 trl:3.1416 lr:0.000600 norm:1.00\ns:8 trl:nan lr:0.000600 norm:inf\n"
    )  # read while still open: each line is out when its call returns


def test_the_time_of_a_step_has_a_line_in_a_file_of_its_own(tmp_path):
    log = Logger(tmp_path, name=SPEED_NAME)
    log.speed(0, 360.8341, 709.4721)
    log.speed(18864, 0.004, 1e7)
    assert text(tmp_path, "speed.log") == "s:0 ms:360.83 tok/s:709.5\ns:18864 ms:0.00 tok/s:10000000.0\n"
    assert [path.name for path in tmp_path.iterdir()] == ["speed.log"]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (None, ""):
        log = Logger(folder)
        train(log, range(3))
        log.speed(3, 1.0, 1.0)
        log.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", (LOG_NAME, SPEED_NAME))
def test_a_fresh_run_empties_the_log_with_its_first_step(name, tmp_path):
    """Before that, whatever ends it has cost nothing: not even its own end, where it trains nothing."""
    run(Logger(tmp_path, name=name), range(5))
    before, log = text(tmp_path, name), Logger(tmp_path, name=name)
    assert text(tmp_path, name) == before
    other = Logger(tmp_path, name=name)
    other.val(0, 4.0)
    other.eval(0, 0.25)
    assert text(tmp_path, name) == before
    other.close()
    assert text(tmp_path, name) == before
    run(log, range(1))
    assert text(tmp_path, name).count("\n") == (2 if name == LOG_NAME else 1)


def test_a_run_that_trains_nothing_writes_its_lines_where_no_other_has(tmp_path):
    log = Logger(tmp_path)
    log.val(0, 4.0)
    log.eval(0, 0.25)
    assert text(tmp_path) == ""
    log.close()
    assert text(tmp_path) == "s:0 tel:4.0000\ns:0 eval:0.2500\n"
    again = Logger(tmp_path)
    again.val(0, 3.0)
    again.close()
    assert text(tmp_path) == "s:0 tel:3.0000\n"


@pytest.mark.parametrize("name", (LOG_NAME, SPEED_NAME))
def test_a_fresh_run_keeps_the_log_of_one_that_trained_before(name, tmp_path):
    """From its first step on, under the next free number."""
    texts = []
    for steps in (4, 2, 3):
        log = Logger(tmp_path, name=name)
        assert not texts or text(tmp_path, name) == texts[-1]
        run(log, range(steps))
        log.close()
        texts.append(text(tmp_path, name))
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(set(texts)) == 3 and found == {name: texts[2], f"{name}.1": texts[0], f"{name}.2": texts[1]}


@pytest.mark.parametrize("checkpoint", range(9))
@pytest.mark.parametrize("torn", ("", "s:1", "s:10 trl:3.9", "s:10 ms:3"))
@pytest.mark.parametrize("name", (LOG_NAME, SPEED_NAME))
def test_a_resumed_log_equals_that_of_a_run_never_stopped(checkpoint, torn, name, tmp_path):
    """Crash after step 8, in the middle of a line; resume anywhere before; every line is there once, in order."""
    log = Logger(tmp_path, name=name)
    run(log, range(12))
    log.close()
    expected = text(tmp_path, name)
    (tmp_path / name).unlink()
    log = Logger(tmp_path, name=name)
    run(log, range(9))
    log.close()
    with open(tmp_path / name, "a") as file:
        file.write(torn)
    log = Logger(tmp_path, resume_step=checkpoint, name=name)
    run(log, range(checkpoint, 12))
    assert text(tmp_path, name) == expected
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_step_that_takes_another_time_after_a_resume_is_in_the_log_once(tmp_path):
    """The times are not the crashed run's; those before the checkpoint stay."""
    log = Logger(tmp_path, name=SPEED_NAME)
    run(log, range(4))
    log.close()
    log = Logger(tmp_path, resume_step=2, name=SPEED_NAME)
    log.speed(2, 1.0, 2.0)
    assert text(tmp_path, SPEED_NAME) == "s:0 ms:100.00 tok/s:500.0\ns:1 ms:100.12 tok/s:499.9\ns:2 ms:1.00 tok/s:2.0\n"


def test_a_longer_run_keeps_the_last_validation_of_the_shorter_one(tmp_path):
    log = Logger(tmp_path)
    train(log, range(3))
    log.val(3, 3.5)  # at the end of the run, though 3 is no multiple of 2
    log.close()
    train(Logger(tmp_path, resume_step=3), range(3, 5))
    measured = [line.split(":")[1] for line in text(tmp_path).splitlines()]
    assert measured == ["0 tel", "0 trl", "1 trl", "2 tel", "2 trl", "3 tel", "3 trl", "4 tel", "4 trl"]


def test_lines_in_another_form_survive_a_resume(tmp_path):
    (tmp_path / "main.log").write_text("# second node\ns:x y\ns:5 trl:1.0000 lr:0.1 norm:1.00\n")
    log = Logger(tmp_path, resume_step=2)
    assert "s:5 trl" in text(tmp_path)
    log.close()
    assert text(tmp_path) == "# second node\ns:x y\n"


def test_resuming_without_a_log_starts_one(tmp_path):
    log = Logger(tmp_path, resume_step=5)
    log.val(5, 3.0)
    log.close()
    assert text(tmp_path) == "s:5 tel:3.0000\n"


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="missing/main.log"):
        Logger(tmp_path / "missing")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full to write to")
def test_a_full_disk_is_told_once_in_a_sentence():
    told = []
    log = Logger(None, resume_step=1, failed=told.append)
    log._path, log._file, log._waiting = "/dev/full", open("/dev/full", "w", buffering=1), None
    file = log._file
    log.val(0, 1.0)
    assert file.closed, "or Python would try once more, and from 3.13 on tell of it"
    log.val(0, 1.0)
    log.close()
    assert [str(error) for error in told] == ["writing the log failed at /dev/full: No space left on device; make room, then run again"]


def test_a_line_is_with_the_system_at_once_and_opens_no_file(tmp_path, monkeypatch):
    log, opened = Logger(tmp_path), []
    monkeypatch.setattr("builtins.open", lambda *args, **kwargs: opened.append(args))
    for step in range(3):
        log.train(step, 3.0, 1e-4, 1.0)
        assert (tmp_path / LOG_NAME).read_text().count("\n") == step + 1  # with the system at once
    assert not opened


STEP = dict(loss=3.1415926, loss_z=math.nan, norm=1.23456, norm_z=-0.5, lr=6e-4, dt_ms=123.456, tokens_per_s=424242.4)


def test_step_line_is_llmc_s():
    assert format_step_line(9, 18865, mfu=0.5128, **STEP) == (
        "step   10/18865 | loss 3.141593 (+nanz)| norm 1.2346 (-0.50z)| lr 6.00e-04 | 123.46 ms | 51.3% bf16 MFU | 424242 tok/s"
    )


@pytest.mark.parametrize(
    "row",
    [
        ("| checkpoint_every      | 5000                                               |", "checkpoint_every", 5000),
        ("| learning rate (LR)    | 3.000000e-04                                       |", "learning rate (LR)", 3e-4),
        ("| LR scheduler          | cosine                                             |", "LR scheduler", "cosine"),
        ("| max_sequence_length T | 1024                                               |", "max_sequence_length T", 1024),
        (f"| train data pattern    | {'x' * 60} |", "train data pattern", "x" * 60),  # longer values push the edge out, as printf does
    ],
)
def test_table_rows_are_printf_s(row):
    line, *arguments = row
    assert table_row(*arguments) == line


def test_table_rule_is_as_wide_as_a_row():
    assert table_rule() == "+-----------------------+----------------------------------------------------+"
    assert len(table_rule()) == len(table_row("Parameter", "Value"))
