"""plot_log.py reads main.log, speed.log and printed lines, this trainer's and llm.c's, and draws what is in them."""

import math
import subprocess
import sys

import pytest
from conftest import REPO

from llmc.errors import UserError
from llmc.logger import LOG_NAME, SPEED_NAME, Logger, format_step_line
from scripts import plot_log
from scripts.plot_log import Log, parse_lines, read_log

EMPTY = {name: {} for name in plot_log.SERIES}


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")


def written(folder, steps=6, val_every=3, speed=True):
    """A run's folder as the trainer leaves it, and the lines it printed on the way."""
    folder.mkdir()
    log, speed_log, lines = Logger(folder), Logger(folder if speed else None, name="speed.log"), ["+---+", "a note"]
    for step in range(steps + 1):
        if step % val_every == 0:
            log.val(step, 4 - step / 10)
            lines.append(f"val loss {4 - step / 10:f}")
        if step < steps:
            loss, norm, lr, ms = 5 - step / 10, 2 + step / 4, 1e-4 * (step + 1), 10.0 + step
            log.train(step, loss, lr, norm)
            speed_log.speed(step, ms, 1e5 / ms)
            lines.append(format_step_line(
                step, steps, loss=loss, loss_z=math.nan, norm=norm, norm_z=-0.5, lr=lr, dt_ms=ms, mfu=0.3, tokens_per_s=1e5 / ms
            ))  # fmt: skip
    return folder, lines


def series_of(path) -> dict:
    return read_log("run", path).series


def drawn(panel) -> dict[str, list[tuple]]:
    """label -> points of a panel's lines."""
    return {line.get_label(): list(zip(line.get_xdata(), line.get_ydata())) for line in panel.lines}


# --- reading


def test_a_log_and_the_printed_lines_of_one_run_say_the_same(tmp_path):
    folder, lines = written(tmp_path / "run")
    read, printed = series_of(folder), parse_lines(lines)
    assert read["loss"] == {step: pytest.approx(5 - step / 10) for step in range(6)} == printed["loss"]
    assert read["val"] == {0: 4.0, 3: 3.7, 6: 3.4} == printed["val"]
    assert read["lr"] == {step: pytest.approx(1e-4 * (step + 1)) for step in range(6)} == printed["lr"]
    assert read["norm"] == {step: 2 + step / 4 for step in range(6)} == printed["norm"]
    assert read["speed"][5] == 6666.7 and printed["speed"][5] == 6667  # 15 ms; rounded where printed
    assert series_of(folder / "main.log") == read


@pytest.mark.parametrize("line, name, step, value", (
    ("s:12 trl:3.1416 lr:0.000600 norm:1.25", "loss", 12, 3.1416),
    ("s:12 trl:3.1416 lr:0.000600 norm:1.25", "lr", 12, 6e-4),
    ("s:12 trl:-nan lr:0.000600 norm:inf", "norm", 12, math.inf),
    ("s:12 trl:3.1416", "loss", 12, 3.1416),
    ("s:250 tel:4.5", "val", 250, 4.5),
    ("s:250 eval:0.2946", "accuracy", 250, 0.2946),
    ("s:7 ms:123.45 tok/s:2259.5", "speed", 7, 2259.5),
    ("step    1/700 | loss 10.705630 (+nanz)| norm 40.5481 (+nanz)| lr 1.67e-05 | 248.1 ms | 35.4% bf16 MFU | 103 tok/s", "lr", 0, 1.67e-5),
    ("step  700/700 | loss 2.2 (+0.1z)| norm 4.5 (-0.1z)| lr 1.67e-05 | 24.06 ms | n/a bf16 MFU | 1032 tok/s", "speed", 699, 1032),
    ("step 1234/9999 | loss     inf (+nanz)| norm   -nan (+nanz)| lr 6.00e-04 | 9 ms | -100.0% bf16 MFU | 7 tok/s", "loss", 1233, math.inf),
    ("step    1/10 | train loss 5.270009 | norm 30.1 | lr 3.00e-04 | (900.00 ms | 284 tok/s)", "norm", 0, 30.1),  # llm.c's train_gpt2.py
))  # fmt: skip
def test_every_form_of_line(line, name, step, value):
    assert parse_lines([line])[name] == {step: value}


def test_not_a_number_stays_one():
    assert math.isnan(parse_lines(["s:1 trl:nan lr:0.000600 norm:-nan"])["loss"][1])
    assert math.isnan(
        parse_lines(["step    2/9 | loss     nan (+nanz)| norm    nan (+nanz)| lr 0.00e+00 | 1.0 ms | n/a bf16 MFU | 7 tok/s"])["norm"][1]
    )


@pytest.mark.parametrize("line", (
    "", "s:1", f"s:{'1' * 400} trl:1.0", "s:x trl:1.0", "s:1 trl:", "s:1 trl:1.0 lr:", "s:1 hello", "val loss", "val loss low", "step 1/2",
    "generating:", "---",
    "step    1/700 | loss 10.7 (+nanz)| norm 40.5 (+na", "| val_loss_every        | 20 |", "total average iteration time: 218.9 ms",
))  # fmt: skip
def test_lines_in_another_form_are_skipped(line):
    assert parse_lines([line, "s:3 tel:2.5", line]) == EMPTY | {"val": {3: 2.5}}


def test_of_a_step_that_is_there_twice_the_later_line_counts():
    """llm.c's resumed log runs backward; the plot must not."""
    lines = ["s:0 trl:5.0", "s:1 trl:4.0", "s:2 trl:3.0", "s:2 tel:3.3", "s:1 trl:4.5", "s:2 trl:3.5", "s:2 tel:3.6", "s:3 trl:2.5"]
    series = parse_lines(lines)
    assert list(series["loss"].items()) == [(0, 5.0), (1, 4.5), (2, 3.5), (3, 2.5)]
    assert series["val"] == {2: 3.6}


def test_a_printed_evaluation_belongs_to_the_step_that_follows():
    step = "step {}/4 | loss 2.0 (+0.1z)| norm 1.0 (-0.1z)| lr 1.0e-04 | 24.06 ms | n/a bf16 MFU | 1032 tok/s"
    lines = ["val loss 9.5", step.format(1), step.format(2), "val loss 8.5", "HellaSwag: 3/10 = 0.300000", step.format(3), "val loss 8.0"]
    assert parse_lines(lines)["val"] == {0: 9.5, 2: 8.5, 3: 8.0}
    assert parse_lines(lines)["accuracy"] == {2: 0.3}
    # the output of a run that went on from step 2, behind that
    lines += ["resuming at step 2 from log", "val loss 8.25", step.format(3), step.format(4), "val loss 7.0"]
    assert parse_lines(lines)["val"] == {0: 9.5, 2: 8.25, 3: 8.0, 4: 7.0}


def test_speed_log_counts_beside_a_main_log_only(tmp_path):
    folder, lines = written(tmp_path / "run")
    (folder / "out.txt").write_text("\n".join(lines[:4]))
    assert len(series_of(folder)["speed"]) == 6
    assert list(series_of(folder / "out.txt")["speed"]) == [0]
    folder, _ = written(tmp_path / "slow", speed=False)
    assert series_of(folder)["speed"] == {}


def test_an_earlier_run_s_log_is_beside_the_speed_of_that_run(tmp_path):
    """As the trainer leaves them."""
    for tokens_per_s in (100.0, 200.0, 300.0):
        log, speed_log = Logger(tmp_path), Logger(tmp_path, name=SPEED_NAME)
        log.train(0, 5.0, 1e-4, 2.0)
        speed_log.speed(0, 10.0, tokens_per_s)
        log.close(), speed_log.close()
    logs = [tmp_path / name for name in ("main.log.1", "main.log.2", "main.log")]
    assert [series_of(path)["speed"] for path in logs] == [{0: 100.0}, {0: 200.0}, {0: 300.0}]
    for name in ("main.log", "speed.log"):
        (tmp_path / f"{name}.2").rename(tmp_path / f"{name}.10")
    assert series_of(tmp_path / "main.log.10")["speed"] == {0: 200.0}
    (tmp_path / "speed.log.1").unlink()
    assert series_of(logs[0])["speed"] == {}


def test_labels_are_short_where_they_tell_logs_apart(tmp_path):
    a, b = tmp_path / "a" / "log", tmp_path / "b" / "log"
    assert plot_log.labels_of([a, a.parent / "main.log", b.parent / "out.txt"]) == ["log", "a", "out.txt"]
    assert plot_log.labels_of([a, b]) == [str(a), str(b)]


def test_the_summary_line():
    series = EMPTY | {"loss": {0: 3.0, 1: 2.5, 2: 2.25}, "val": {0: math.nan, 1: 2.75, 2: 3.0}, "speed": {0: 10.0, 1: 100.0, 2: 90.0}}
    assert (
        plot_log.summary(Log("a", series)) == "a: 3 steps, last train loss 2.2500, best validation loss 2.7500 at step 1, median 90 tok/s"
    )
    assert plot_log.summary(Log("b", EMPTY | {"val": {0: math.inf}})) == "b: no training step, no finite validation loss, no tok/s"
    assert plot_log.summary(Log("c", EMPTY | {"loss": {0: math.nan}})) == "c: 1 steps, last train loss nan, no validation loss, no tok/s"


def test_tokens_are_counted_by_the_speed_log(tmp_path):
    """As many a step as it says; of steps it does not hold, as many as before, and as at first."""
    folder, _ = written(tmp_path / "run")
    assert read_log("run", folder).trained is None
    assert read_log("run", folder, by_tokens=True).trained == {step: 100 * step for step in range(7)}
    rows = {2: (10.0, 6400.0), 3: (9.999, 6399.9), 5: (5.0, 25600.0)}  # 64, 64 and 128 tokens
    (folder / SPEED_NAME).write_text("".join(f"s:{step} ms:{ms} tok/s:{speed}\n" for step, (ms, speed) in rows.items()))
    assert read_log("run", folder, by_tokens=True).trained == {0: 0, 1: 64, 2: 128, 3: 192, 4: 256, 5: 320, 6: 448}
    (folder / LOG_NAME).write_text(f"s:0 trl:1.0\ns:{10**17} tel:1.0\n")
    assert read_log("run", folder, by_tokens=True).trained[10**17] == pytest.approx(128e17)


# --- drawing


def test_each_panel_holds_its_numbers(matplotlib, tmp_path):
    folder, _ = written(tmp_path / "run")
    figure = plot_log.draw([read_log("run", folder)])
    loss, lr, norm, speed = figure.axes
    assert drawn(loss) == {"loss": [(s, pytest.approx(5 - s / 10)) for s in range(6)], "val": [(0, 4.0), (3, 3.7), (6, 3.4)]}
    assert drawn(lr)["lr"][5] == (5, pytest.approx(6e-4)) and lr.get_ylim() == (0, pytest.approx(1.1 * 6e-4))
    assert drawn(norm)["norm"] == [(s, 2 + s / 4) for s in range(6)] and norm.get_yscale() == "log"
    assert drawn(speed)["speed"][0] == (0, 10000.0) and speed.get_ylim()[0] == 0
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["training", "validation"]


def test_runs_of_other_batches_are_drawn_by_tokens(matplotlib, tmp_path):
    folder, _ = written(tmp_path / "run")
    loss, lr, norm, speed = plot_log.draw([read_log("run", folder, by_tokens=True)]).axes
    assert drawn(loss)["val"] == [(0, 4.0), (300, 3.7), (600, 3.4)] and [x for x, _ in drawn(speed)["speed"]] == [*range(0, 600, 100)]
    assert norm.get_xlabel() == speed.get_xlabel() == "tokens trained on"


def test_logs_have_colours_of_their_own_and_a_legend(matplotlib):
    logs = [Log(name, EMPTY | {"loss": {0: 1.0, 1: 2.0}}) for name in "ab"]
    figure = plot_log.draw(logs)
    assert len({line.get_color() for line in figure.axes[0].lines}) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_a_fifth_panel_only_for_hellaswag(matplotlib):
    figure = plot_log.draw([Log("a", EMPTY | {"loss": {0: 1.0}, "accuracy": {0: 0.25, 10: 0.3}})])
    assert len(figure.axes) == 5 and drawn(figure.axes[4])["accuracy"] == [(0, 0.25), (10, 0.3)]
    assert len(plot_log.draw([Log("a", EMPTY | {"loss": {0: 1.0}})]).axes) == 4


def test_a_line_of_one_point_has_a_mark_that_can_be_seen(matplotlib):
    figure = plot_log.draw([Log("a", EMPTY | {"loss": {0: 1.0}, "norm": {0: 1.0, 1: 2.0}})])
    assert [panel.lines[0].get_marker() for panel in (figure.axes[0], figure.axes[2])] == ["o", "None"]


def test_a_panel_with_nothing_to_show_says_so(matplotlib):
    figure = plot_log.draw([Log("a", EMPTY | {"loss": {0: 1.0, 1: 2.0}, "norm": {0: 0.0, 1: math.nan}})])
    said = [[text.get_text() for text in panel.texts] for panel in figure.axes]
    assert said == [[], ["nothing to show"], ["nothing to show"], ["nothing to show: no speed.log beside main.log"]]


@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf, 1e308))
def test_nan_and_inf_are_gaps(bad, matplotlib, tmp_path):
    values = {0: 3.0, 1: bad, 2: 2.0}
    figure = plot_log.draw([Log("a", {name: values for name in plot_log.SERIES}), Log("b", EMPTY | {"loss": {0: bad}, "val": {5: bad}})])
    for panel in figure.axes:
        for line in panel.lines:
            assert line.get_ydata()[[0, 2]].tolist() == [3.0, 2.0] and math.isnan(line.get_ydata()[1])
        assert all(map(math.isfinite, panel.get_ylim()))
    plot_log.save_picture(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_picture_is_written_and_not_blank(matplotlib, tmp_path, capsys):
    folder, lines = written(tmp_path / "run")
    (tmp_path / "out.txt").write_text("\n".join(lines) + "\n")
    plot_log.main([str(folder), str(tmp_path / "out.txt"), "-o", str(tmp_path / "log.png"), "--labels", "one", "two"])
    expected = "6 steps, last train loss 4.5000, best validation loss 3.4000 at step 6, median "
    assert capsys.readouterr().out.splitlines() == [
        f"one: {expected}8013 tok/s", f"two: {expected}8012 tok/s", f"wrote {tmp_path / 'log.png'}",
    ]  # fmt: skip
    from matplotlib.image import imread

    picture = imread(tmp_path / "log.png")
    assert picture.shape[1] == 1350 and 0.02 < (picture[..., :3] < 0.9).any(axis=-1).mean() < 0.5
    assert not list(tmp_path.glob("*.tmp"))


SHORT, LONG = {0: 11.0, 250: 6.0}, {0: 11.0, 250: 6.0, 5000: 4.0}
BASELINE = "OpenAI's GPT-2 124M: 3.425"


@pytest.mark.parametrize("vals, top", (
    ((SHORT, LONG), 11.0), ((LONG, SHORT), 11.0), ((LONG, LONG), 1.3 * 3.424958), (({0: 3.5, 5: 3.25}, {}), 3.5),
), ids=["one is far above", "the other is", "both come near", "all is near"])  # fmt: skip
def test_a_baseline_is_drawn_where_a_log_has_its_like_and_runs_are_seen_near_it(vals, top, matplotlib):
    series = {"val": vals[0]}, {"loss": vals[1]}, {"accuracy": {0: 0.25, 5: math.nan}}
    logs = [Log(name, EMPTY | values) for name, values in zip("abc", series)]
    loss, *_, accuracy = plot_log.draw(logs, "d12").axes
    assert {label: points[0][1] for label, points in drawn(loss).items() if "OpenAI" in label} == {BASELINE: 3.424958}
    assert BASELINE in [text.get_text() for text in loss.get_legend().get_texts()]
    expected = ["OpenAI's GPT-2 124M: 29.4%", "OpenAI's GPT-3 125M: 33.7%"]
    assert [label for label in drawn(accuracy) if "OpenAI" in label] == expected
    assert [text.get_text() for text in accuracy.get_legend().get_texts()] == expected
    assert top <= loss.get_ylim()[1] <= 1.05 * top  # matplotlib's margin is 5%
    assert not any("OpenAI" in label for panel in plot_log.draw(logs).axes for label in drawn(panel))


def test_a_baseline_on_the_command_line_is_drawn(matplotlib, tmp_path, monkeypatch):
    """Of a log whose scores are nan, beside its losses alone."""
    folder, _ = written(tmp_path / "run")
    with open(folder / LOG_NAME, "a") as f:
        f.write("s:6 eval:nan\n")
    figures = []
    monkeypatch.setattr(plot_log, "save_picture", lambda figure, path: figures.append(figure))
    plot_log.main([str(folder), "--baseline", "d12", "-o", str(tmp_path / "a.png")])
    loss, *_, accuracy = figures[0].axes
    assert BASELINE in drawn(loss) and not drawn(accuracy) and not accuracy.get_legend()


def test_readme_says_what_the_baseline_is():
    """Beside the command that draws it."""
    text = (REPO / "README.md").read_text(encoding="utf-8").partition("## Reproduce GPT-2 124M")[2].partition("\n## ")[0]
    loss, accuracy = (plot_log.BASELINES["d12"][series]["GPT-2 124M"] for series in ("val", "accuracy"))
    assert f"OpenAI's GPT-2 124M, which has a loss of {loss:.3f}" in text and f"an accuracy of {accuracy:.3f} on HellaSwag" in text
    assert "python scripts/plot_log.py log_gpt2_124M --baseline d12" in text


def test_the_best_hellaswag_accuracy_is_told():
    log = Log("a", EMPTY | {"loss": {0: 1.0}, "accuracy": {0: 0.25, 5: math.nan, 10: 0.3125, 15: 0.3}})
    expected = "a: 1 steps, last train loss 1.0000, no validation loss, best HellaSwag accuracy 0.3125 at step 10, no tok/s"
    assert plot_log.summary(log) == expected


def test_dollars_in_a_name_are_no_formula(matplotlib, tmp_path):
    logs = [Log(f"cost_$5_or_$6{bracket}", EMPTY | {"loss": {0: 1.0, 1: 2.0}}) for bracket in "{}"]
    for count in (1, 2):
        plot_log.save_picture(plot_log.draw(logs[:count]), tmp_path / "a.png")


# --- what is refused


def broken(tmp_path, what):
    """A file or folder with nothing to draw."""
    path = tmp_path / what
    if what == "empty":
        path.mkdir()
    elif what != "missing.log":
        path.write_bytes({"main.log": b"", "text.txt": b"val loss\nhello\n", "noise.bin": bytes(range(256)) * 4}[what])
    return path


@pytest.mark.parametrize("what, words", (
    ("empty", "holds no main.log"), ("missing.log", "cannot read"), ("main.log", "holds no line"), ("text.txt", "holds no line"),
    ("noise.bin", "holds no line"),
))  # fmt: skip
def test_a_log_without_a_line_is_named(what, words, matplotlib, tmp_path):
    path = broken(tmp_path, what)
    with pytest.raises(UserError, match=words) as caught:
        plot_log.main([str(path), "-o", str(tmp_path / "a.png")])
    assert str(path) in str(caught.value) and not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("flags, words", (
    (["--labels", "a", "b"], "--labels has 2 names for 1 logs"), (["-o", "a.txt"], "expected a name that ends in .png, .svg or .pdf"),
    (["-o", "no/a.png"], "the folder no does not exist"), (["--baseline", "d24"], "no log has any; leave it out"),
    (["--tokens"], "nothing beside run/main.log tells how many tokens a step has"),
))  # fmt: skip
def test_flags_that_cannot_be_honoured(flags, words, matplotlib, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "run")
    (tmp_path / "run" / LOG_NAME).write_text("s:0 trl:1.0\ns:0 tel:nan\n")
    (tmp_path / "run" / SPEED_NAME).unlink()
    with pytest.raises(UserError, match=words):
        plot_log.main(["run", *flags])


def test_without_matplotlib_one_sentence_says_how_to_install_it(tmp_path, monkeypatch):
    folder, _ = written(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib$"):
        plot_log.main([str(folder), "-o", str(tmp_path / "a.png")])


def test_as_a_program_a_bad_log_is_one_line_and_exit_code_2(matplotlib, tmp_path):
    command = [sys.executable, REPO / "scripts" / "plot_log.py", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2 and result.stdout == ""
    assert result.stderr.startswith(f"error: {tmp_path} holds no main.log") and result.stderr.count("\n") == 1
