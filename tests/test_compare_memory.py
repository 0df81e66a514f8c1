"""compare_memory.py: the numbers of its table and picture are those of the run folders, and its sweep makes such folders."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from llmc.data.shards import count_tokens, open_shard, write_shard
from llmc.errors import UserError
from llmc.memory.report import COLUMNS
from llmc.units import MIB
from scripts import compare_memory


@pytest.fixture
def matplotlib():
    return pytest.importorskip("matplotlib", reason="matplotlib is an optional extra")


def record(level=0, kept=100, peaks=(880,), first=0, **changes) -> dict:
    """memory.json of a run, sizes in MiB: 800 but for what is kept."""
    columns = dict(zip(COLUMNS, (100, 100, 400, kept, 40, 80, 50, 30)))
    options = {"batch_size": 4, "sequence_length": 64, "precision": "bf16", "recompute": level, "master": "fp32"}
    flags = {"model": "d6", "total_batch_size": -1}
    for name in changes:
        (flags if name in flags else options)[name] = changes[name]
    return {
        "device": "a processor",
        "flags": flags,
        "plan": {
            "options": options, "total_bytes": sum(columns.values()) * MIB,
            "columns": {name: mib * MIB for name, mib in columns.items()},
        },
        "measured": [
            {"phase": phase, "step": first, "over_baseline_bytes": peak * MIB}
            for phase, peak in zip(("first step", "evaluation", "end"), peaks)
        ],
    }  # fmt: skip


def run_folder(folder: Path, step_ms, **values) -> Path:
    """A folder as a run leaves it; 1000 tokens a step."""
    folder.mkdir(parents=True)
    (folder / "memory.json").write_text(json.dumps(record(**values)))
    (folder / "speed.log").write_text("".join(f"s:{step} ms:{ms:.2f} tok/s:{1e6 / ms:.1f}\n" for step, ms in enumerate(step_ms)))
    return folder


@pytest.fixture
def three(tmp_path) -> list[Path]:
    """Runs of -r 0, 1 and 6."""
    return [
        run_folder(tmp_path / "a", (900, 100, 120, 100), level=0, peaks=(840, 960, 880)),
        run_folder(tmp_path / "b", (900, 125, 125, 125), level=1, kept=20, peaks=(720,)),
        run_folder(tmp_path / "c", (900, 150, 160, 170, 999), level=6, kept=0, peaks=(840,)),
    ]


def table(text: str) -> list[list[str]]:
    """The rows of a printed table as lists of cells."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("run "))
    rows = lines[start + 1 : lines.index("", start)]
    return [[cell.strip() for cell in line.split("  ") if cell] for line in rows]


# --- the table


def test_the_table_of_three_levels(three, capsys):
    compare_memory.main([*map(str, three), "--no-picture"])
    out = capsys.readouterr().out
    assert out.splitlines()[0] == "d6, B=4, T=64, bf16 on a processor"
    assert table(out) == [
        ["-r 0", "900.0", "960.0", "1.067", "10000", "1.000", "1.000"],
        ["-r 1", "820.0", "720.0", "0.878", "8000", "0.911", "1.250"],
        ["-r 6", "800.0", "840.0", "1.050", "6066", "0.889", "1.650"],
    ]
    assert out.endswith("rel.: planned memory and time of a step, relative to -r 0\n")


def test_without_r_0_the_first_row_is_the_measure(three, capsys):
    compare_memory.main([str(three[2]), str(three[1]), "--no-picture"])
    out = capsys.readouterr().out
    assert [row[-2:] for row in table(out)] == [["1.000", "1.000"], ["1.025", "0.758"]]
    assert "relative to -r 6, the first row, as there is no -r 0" in out


def test_r_0_is_the_measure_wherever_it_stands(three, capsys):
    compare_memory.main([*map(str, reversed(three)), "--no-picture"])
    assert [row[-1] for row in table(capsys.readouterr().out)] == ["1.650", "1.250", "1.000"]


@pytest.mark.parametrize("first, step_ms, median", (
    (0, (900, 100, 300, 200), 200),
    (3, (900, 100, 100, 800, 250, 125, 500), 250),  # resumed at 3: the earlier process may have been another -r, the step at 3 set up
    (0, (900,), None),
    (0, (), None),
))  # fmt: skip
def test_steps_that_set_up_or_are_another_process_s_do_not_count(first, step_ms, median, tmp_path):
    run = compare_memory.read_run(run_folder(tmp_path / "a", step_ms, first=first))
    assert run.step_ms == median and run.tokens_per_s == (median and 1e6 / median)


def test_a_last_process_without_a_step_leaves_the_earlier_ones_to_judge_by(tmp_path):
    folder = run_folder(tmp_path / "a", (900, 100, 120))
    values = record()
    values["measured"][0]["phase"] = "resume"
    (folder / "memory.json").write_text(json.dumps(values))
    assert compare_memory.read_run(folder).step_ms == 110


def test_of_a_step_logged_twice_the_later_line_counts(tmp_path):
    folder = run_folder(tmp_path / "a", (900, 100, 120))
    with open(folder / "speed.log", "a") as file:
        file.write("s:1 ms:200.00 tok/s:5.0\ns:2 ms:300.00 tok/s:4.0\ns:3 ms:4")  # cut off by a crash
    assert compare_memory.read_run(folder).steps == ((200.0, 5.0), (300.0, 4.0))


def test_a_run_without_a_timed_step_has_a_dash(three, tmp_path, capsys):
    short = run_folder(tmp_path / "short", (500,), level=2)
    compare_memory.main([str(three[0]), str(short), "--no-picture"])
    out = capsys.readouterr().out
    assert table(out)[1][4:] == ["-", "1.000", "-"] and "train for more steps (-x)" in out


@pytest.mark.parametrize("changes", (
    dict(level=0), dict(level=5, batch_size=8), dict(level=5, master="none"), dict(level=5, model="models/d12.bin"),
    dict(level=5, total_batch_size=512),
))  # fmt: skip
def test_folders_name_the_rows_where_levels_do_not(changes, tmp_path):
    a, b = run_folder(tmp_path / "a", (9, 9), level=0), run_folder(tmp_path / "b", (9, 9), **changes)
    runs = [compare_memory.read_run(folder) for folder in (a, b)]
    assert compare_memory.labels_of(runs) == ["a", "b"]
    same_name = compare_memory.read_run(run_folder(tmp_path / "c" / "a", (9, 9), level=5, batch_size=8))
    assert compare_memory.labels_of([runs[0], same_name]) == [str(a), str(tmp_path / "c" / "a")]


def test_where_runs_differ_the_first_line_says_in_what(tmp_path):
    folders = [run_folder(tmp_path / "a", (9, 9)), run_folder(tmp_path / "b", (9, 9), batch_size=8, precision="fp32", model="m/d12.bin")]
    lines = compare_memory.comparison([compare_memory.read_run(folder) for folder in folders], ["a", "b"])
    assert lines[0] == "d6 or d12.bin, B=4 or 8, T=64, bf16 or fp32 on a processor"
    assert lines[-1].endswith("relative to a (-r 0)")


# --- the picture


def test_the_parts_of_a_bar_add_up_to_the_plan(matplotlib, three):
    runs = [compare_memory.read_run(folder) for folder in three]
    figure = compare_memory.draw(runs, compare_memory.labels_of(runs))
    memory, speed = figure.axes
    assert [container.get_label() for container in memory.containers] == list(COLUMNS)
    for i, run in enumerate(runs):
        parts = [container.patches[i] for container in memory.containers]
        assert sum(part.get_height() for part in parts) == pytest.approx(run.total_bytes / MIB)
        assert [part.get_y() for part in parts] == pytest.approx(np.cumsum([0] + [part.get_height() for part in parts])[:-1])
    assert list(memory.lines[0].get_ydata()) == [960, 720, 840]
    assert speed.lines[0].get_ydata() == pytest.approx([1e4, 8e3, 6066], rel=1e-3)
    assert memory.get_ylim()[0] == speed.get_ylim()[0] == 0
    assert [label.get_text() for label in memory.get_xticklabels()] == ["-r 0", "-r 1", "-r 6"]
    assert "d6, B=4, T=64, bf16" in figure.get_suptitle()
    assert {text.get_text() for text in figure.legends[0].get_texts()} == {*COLUMNS, "measured peak", "tokens/s"}


def test_nothing_in_the_picture_overlaps(matplotlib, tmp_path):
    """The legend lies below the bars and their labels, which do not touch each other, however long the names."""
    folders = [run_folder(tmp_path / f"a_run_with_a_long_name_{i}", (9, 9), level=i) for i in range(7)]
    for labels in (None, [folder.name for folder in folders]):
        runs = [compare_memory.read_run(folder) for folder in folders]
        figure = compare_memory.draw(runs, labels or compare_memory.labels_of(runs))
        figure.canvas.draw()
        boxes = [label.get_window_extent() for label in figure.axes[0].get_xticklabels()]
        legend = figure.legends[0].get_window_extent()
        assert legend.y1 <= min(box.y0 for box in boxes) and legend.x0 >= 0 and legend.x1 <= figure.bbox.width
        if not labels:
            assert all(left.x1 < right.x0 for left, right in zip(boxes, boxes[1:]))
        assert type(figure.canvas).__name__ == "FigureCanvasAgg"


def test_a_run_without_a_timed_step_is_a_gap_in_the_line(matplotlib, three, tmp_path):
    runs = [compare_memory.read_run(folder) for folder in (three[0], run_folder(tmp_path / "short", (500,), level=2))]
    for chosen in (runs, runs[1:]):
        figure = compare_memory.draw(chosen, compare_memory.labels_of(chosen))
        assert math.isnan(figure.axes[1].lines[0].get_ydata()[-1])
        compare_memory.save_picture(figure, tmp_path / "a.png")


def test_the_picture_is_written_and_not_blank(matplotlib, three, tmp_path, capsys):
    compare_memory.main([*map(str, three), "-o", str(tmp_path / "memory.png")])
    assert capsys.readouterr().out.splitlines()[-1] == f"wrote {tmp_path / 'memory.png'}"
    from matplotlib.image import imread

    picture = imread(tmp_path / "memory.png")
    assert picture.shape[1] == 1350 and 0.2 < (picture[..., :3] < 0.9).any(axis=-1).mean() < 0.8


def test_without_matplotlib_the_table_alone_can_be_had(three, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib, or print the table alone with --no-picture"):
        compare_memory.main([*map(str, three)])
    assert capsys.readouterr().out == ""
    compare_memory.main([*map(str, three), "--no-picture"])
    assert len(table(capsys.readouterr().out)) == 3


# --- what is refused


def without(key, values):
    return {name: value for name, value in values.items() if name != key}


@pytest.mark.parametrize("content, words", (
    (None, "holds no memory.json"),
    ("{", "is not a whole record of a run"),
    ("[]", "is not a whole record of a run"),
    (json.dumps(without("plan", record())), "is not a whole record of a run .*'plan'"),
    (json.dumps(record() | {"measured": []}), "is not a whole record of a run"),
    (json.dumps(record() | {"measured": [{"phase": "end", "over_baseline_bytes": None}]}), "is not a whole record of a run"),
    (json.dumps(record() | {"plan": record()["plan"] | {"options": {}}}), "is not a whole record of a run"),
    (json.dumps(record() | {"plan": record()["plan"] | {"total_bytes": 0}}), "is not a whole record of a run .*a plan of 0 bytes"),
    (json.dumps(record() | {"plan": record()["plan"] | {"total_bytes": math.inf}}), "is not a whole record of a run"),
    (json.dumps(record() | {"plan": record()["plan"] | {"options": record()["plan"]["options"] | {"recompute": []}}}),
     "is not a whole record of a run"),
    (json.dumps(record() | {"measured": [record()["measured"][0] | {"phase": "first step", "step": "one"}]}),
     "is not a whole record of a run"),
    ("[" * 100_000, "is not a whole record of a run"),
    (json.dumps(record()), "cannot read .*speed.log"),
))  # fmt: skip
def test_a_folder_that_is_no_run_s_is_named(content, words, three, tmp_path, capsys):
    folder = tmp_path / "bad"
    folder.mkdir()
    if content is not None:
        (folder / "memory.json").write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        compare_memory.main([str(three[0]), str(folder), "--no-picture"])
    assert str(folder) in str(caught.value) and capsys.readouterr().out == ""


@pytest.mark.parametrize("words, said", (
    ("", "nothing to compare"),
    ("no/such/folder --no-picture", "no/such/folder holds no memory.json"),
    ("a --sweep", "a would not be compared"),
    ("a -b 4", "--batch-size is for runs that are made here"),
    ("a -- -w 0", "what stands behind -- is for runs that are made here"),
    ("--sweep -- -r 3", r"-- -r: a sweep decides -r \(--recompute\) for every run; use --levels before the --"),
    ("--sweep -- --max-steps=3", "use --steps before the --"),
    ("--sweep -- --plan", "would print something and train nothing"),
    ("--sweep -- --no-such-flag 1", "--no-such-flag"),
    ("--sweep --no-picture -e d7", "-e d7: neither a .bin file nor a known model descriptor"),
))  # fmt: skip
def test_command_lines_that_cannot_be_honoured(words, said, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_memory, "DATA", ())
    with pytest.raises(UserError, match=said):
        compare_memory.main(words.split())


@pytest.mark.parametrize("words", ("--sweep --levels 7", "--sweep --steps 1", "--sweep -b auto", "--sweep --rounds 0", "--bogus"))
def test_values_that_argparse_refuses(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        compare_memory.main(words.split())
    assert "error: " in capsys.readouterr().err


def test_the_picture_s_name_is_checked_before_any_run(matplotlib, monkeypatch, tmp_path):
    monkeypatch.setattr(compare_memory, "sweep", None)
    for name, said in (("a.txt", "ends in .png"), ("no/a.png", "does not exist")):
        with pytest.raises(UserError, match=said):
            compare_memory.main(["--sweep", "-o", str(tmp_path / name)])


# --- the sweep

TRAINER = """
import json, os, pathlib, sys
value = lambda flag: sys.argv[sys.argv.index(flag) + 1]
level, folder = int(value("-r")), pathlib.Path(value("-o"))
with open({calls!r}, "a") as file:
    print(folder.name, *sys.argv[1:], file=file)
codes = {codes!r}
if folder.name in codes or level in codes:
    print("error: the plan needs 9 MiB", "the table that follows", sep="\\n\\n", file=sys.stderr, flush=True)
    code = codes.get(folder.name, codes.get(level))
    sys.exit(code) if code > 0 else os.kill(os.getpid(), -code)
late = folder.name.endswith("round2")
record = {record!r}
record["plan"]["options"]["recompute"] = level
record["measured"][0]["over_baseline_bytes"] = (950 if late else 900) << 20
folder.mkdir()
(folder / "memory.json").write_text(json.dumps(record))
times = [900, 100 + level, 110 + level] if late else [900, 200 + level, 90 + level]
(folder / "speed.log").write_text("".join(f"s:{{i}} ms:{{ms}}.00 tok/s:{{1e6 / ms:.1f}}\\n" for i, ms in enumerate(times)))
"""


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """Put a program that writes folders in no time in the place of train_gpt2.py; returns its calls, for the exit codes given."""
    monkeypatch.chdir(tmp_path)
    write_shard(tmp_path / "some.bin", np.arange(2000) % 50257)
    monkeypatch.setattr(compare_memory, "DATA", (tmp_path / "missing.bin", tmp_path / "some.bin"))
    monkeypatch.setattr(compare_memory, "TRAIN", tmp_path / "trainer.py")
    calls = tmp_path / "calls.txt"

    def install(**codes):
        codes = {int(name) if name.isdecimal() else name: code for name, code in codes.items()}
        compare_memory.TRAIN.write_text(TRAINER.format(calls=str(calls), codes=codes, record=record()))
        return lambda: [line.split() for line in calls.read_text().splitlines()]

    return install


def test_a_sweep_goes_through_the_levels_in_rounds(trainer, tmp_path, capsys):
    calls = trainer()
    compare_memory.main("--sweep -e d6 -b 2 -t 16 --levels 0 6 --steps 3 --runs kept --no-picture -- --precision fp32".split())
    assert [call[0] for call in calls()] == ["r0_round1", "r6_round1", "r0_round2", "r6_round2"]
    assert calls()[1][1:] == (
        f"-i {tmp_path / 'some.bin'} -e d6 -b 2 -t 16 -x 3 -v 0 -s 0 --precision fp32 -r 6 -o kept/r6_round1".split()
    )  # fmt: skip
    out, err = capsys.readouterr()
    rows = table(out)
    # the median of 200, 90, 100, 110, plus the level; the highest peak is the second round's
    assert rows[0][:1] + rows[0][2:3] + rows[0][4:] == ["-r 0", "950.0", "9545", "1.000", "1.000"]
    assert rows[1][:1] + rows[1][2:3] + rows[1][-1:] == ["-r 6", "950.0", f"{111 / 105:.3f}"]
    assert err.splitlines() == [f"run {i} of 4: -r {level}" for i, level in enumerate((0, 6, 0, 6), 1)]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["r0_round1", "r0_round2", "r6_round1", "r6_round2"]


def test_the_runs_go_to_a_temporary_folder_that_is_removed(trainer, tmp_path):
    calls = trainer()
    compare_memory.main("--sweep --levels 0 --rounds 1 --no-picture".split())
    folder = Path(calls()[0][-1])
    assert folder.name == "r0" and not folder.parent.exists() and tmp_path not in folder.parents


def test_a_level_that_does_not_fit_is_left_out_and_the_others_go_on(trainer, capsys):
    calls = trainer(**{"0": 3, "r6_round2": 3})
    compare_memory.main("--sweep --levels 0 1 6 --no-picture".split())
    assert [call[0] for call in calls()] == ["r0_round1", "r1_round1", "r6_round1", "r1_round2", "r6_round2"]
    out = capsys.readouterr().out
    assert [row[0] for row in table(out)] == ["-r 1"] and "as there is no -r 0" in out
    assert out.splitlines()[-2:] == [f"-r {level} is left out, it does not fit in memory: the plan needs 9 MiB" for level in (0, 6)]


def test_where_no_level_fits_the_code_is_3(trainer, capsys):
    trainer(**{"0": 3, "1": 3})
    with pytest.raises(SystemExit, match="3"):
        compare_memory.main("--sweep --levels 0 1 --no-picture".split())
    out, err = capsys.readouterr()
    assert out == "" and err.count("is left out") == 2


@pytest.mark.parametrize("returncode, code, how", [(7, 7, "ended with exit code 7"), (-9, 137, "was killed by SIGKILL")])
def test_a_run_that_fails_ends_the_sweep_with_its_error_and_code(trainer, tmp_path, capsys, returncode, code, how):
    calls = trainer(**{"1": returncode})
    with pytest.raises(SystemExit, match=f"^{code}$"):
        compare_memory.main("--sweep --levels 0 1 6 --no-picture --runs kept".split())
    out, err = capsys.readouterr()
    assert [call[0] for call in calls()] == ["r0_round1", "r1_round1"] and out == ""
    assert f"the table that follows\nerror: this run {how}: " in err and "-r 1 -o kept/r1_round1" in err


def test_random_tokens_stand_in_for_a_corpus(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare_memory, "DATA", ())
    args = compare_memory.command_line().parse_args("--sweep -e d6 -b 2 -t 16 --steps 3".split())
    path = compare_memory.training_data(args, tmp_path)
    tokens = open_shard(path).read(0, count_tokens(path))
    assert len(tokens) == 2 * 16 * 3 + 1 and len(np.unique(tokens)) > 90 and tokens.max() < 50257
    assert "training on 97 random tokens" in capsys.readouterr().err
    args.data = "mine_*.bin"
    assert compare_memory.training_data(args, tmp_path) == "mine_*.bin"


def test_a_real_sweep(matplotlib, tmp_path, monkeypatch, capsys):
    """Two processes of the smallest model, on random tokens: what the table says is what their plans and logs say."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_memory, "DATA", ())
    compare_memory.main("--sweep -e d6 -b 1 -t 16 --steps 3 --levels 0 6 --rounds 1 --runs kept -- --device cpu --precision fp32".split())
    out = capsys.readouterr().out
    assert out.startswith("d6, B=1, T=16, fp32 on ") and (tmp_path / "memory.png").stat().st_size > 10000
    for (label, planned, measured, ratio, speed, *_), level in zip(table(out), (0, 6)):
        values = json.loads((tmp_path / "kept" / f"r{level}" / "memory.json").read_text())
        assert label == f"-r {level}" and planned == f"{values['plan']['total_bytes'] / MIB:.1f}"
        assert sum(values["plan"]["columns"].values()) == values["plan"]["total_bytes"]
        assert float(measured) == pytest.approx(values["measured"][-1]["over_baseline_bytes"] / MIB, abs=0.1)
        assert 0.9 < float(ratio) < 1.3  # the interpreter's own growth is in it
        steps = (tmp_path / "kept" / f"r{level}" / "speed.log").read_text().splitlines()
        assert float(speed) == pytest.approx(sum(float(line.split("tok/s:")[1]) for line in steps[1:]) / 2, abs=0.6) and len(steps) == 3


def test_a_real_run_that_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_memory, "DATA", ())
    with pytest.raises(SystemExit, match="2"):
        compare_memory.main("--sweep -e d6 -b 1 -t 2000 --steps 2 --levels 0 --no-picture -- --device cpu".split())
    assert "-t 2000: the model knows 1024 positions" in capsys.readouterr().err
