"""The command line: llm.c's commands run unchanged, wrong values stop with a sentence, and every list of flags is the table."""

import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

import train_gpt2
from llmc.errors import UserError
from llmc.flags import (
    BY_NAME, EXAMPLES, EXIT_CODES, FLAGS, ELSEWHERE, Settings, check_contradictions, flag_table_markdown, format_help, parse,
)  # fmt: skip
from llmc.memory.ladder import NOT_KEPT

REPO = Path(__file__).resolve().parent.parent

# what llm.c's train_gpt2.cu starts from, under the spellings of its parser and its usage
LLMC_DEFAULTS = {
    "-i": "dev/data/tinyshakespeare/tiny_shakespeare_train.bin", "-j": "dev/data/tinyshakespeare/tiny_shakespeare_val.bin",
    "-e": "gpt2_124M_bf16.bin", "-o": "", "-lg": -1, "-n": 0, "-nk": 0, "-nm": 0, "-y": 0, "-b": 4, "-t": 1024, "-d": -1, "-x": -1,
    "-k": "cosine", "-l": 3e-4, "-u": 0, "-q": 1.0, "-c": 0.0, "-sl": 0.0, "-sg": 0.0, "-v": 20, "-m": 20, "-s": 20, "-g": 64, "-h": 0,
    "-a": 0, "-f": 1, "-w": 1, "-ge": 0, "-z": 0, "-r": 1, "-pn": 1, "-pr": 0, "-pg": 8, "-pm": "mpi", "-pi": "mpi", "-ps": "",
    "-pp": "/tmp", "-pf": "/tmp",
}  # fmt: skip

# text -> what it must be read as, for one flag of each kind
READ = {
    "-x": {"-1": -1, "0": 0, "40": 40}, "-m": {"-1": -1, "1": 1}, "-d": {"-1": -1, "524288": 524288}, "-lg": {"-1": -1},
    "-n": {"-1": -1}, "-nk": {"-1": -1}, "-s": {"-1": -1}, "-v": {"0": 0}, "-g": {"0": 0}, "-l": {"6e-4": 6e-4, "0": 0.0},
    "-sl": {"7": 7.0}, "--temperature": {"0": 0.0, "0.8": 0.8},
    "-e": {"gpt3:c768": "gpt3:c768"}, "-o": {"": "", "a b": "a b"}, "-i": {"x/*.bin": "x/*.bin"}, "-k": {"wsd": "wsd"}, "-y": {"1": 1},
    "--ranks": {"0": 0, "1024": 1024}, "--link": {"400": 400.0, "0": 0.0, "12.5": 12.5}, "--node-link": {"3600": 3600.0},
    "--device": {"cpu": "cpu", "cuda": "cuda", "cuda:12": "cuda:12"}, "--precision": {"bf16": "bf16"},
    "-b": {"auto": "auto", "1": 1}, "-r": {"auto": "auto", "0": 0, "6": 6},
    "--master": {"auto": "auto", "fp32": "fp32", "bits16": "bits16", "none": "none"}, "--optimizer-state": {"bf16": "bf16"},
    "--kernels": {"auto": "auto", "torch": "torch", "triton": "triton"}, "--attention": {"cudnn": "cudnn", "flash": "flash"},
    "--matmul": {"auto": "auto", "cublaslt": "cublaslt", "fp8": "fp8", "numba": "numba", "widened": "widened"},
    "--grad-dtype": {"auto": "auto", "fp32": "fp32", "bf16": "bf16"}, "--memory-budget": {"h100-80": "h100-80", "500 MiB": "500 MiB"},
}  # fmt: skip

WRONG = {
    "-b": ("0", "-1", "four", "4.5", "", "nan", "Auto", "auto "), "-n": ("-2",), "-nk": ("-2",), "-nm": ("-2",),
    "-lg": ("-2",), "-x": ("-2", "inf"), "-u": ("-1",), "-l": ("nan", "inf", "-1e-4", "1e999", "x"), "-q": ("-0.1",), "-c": ("-1",),
    "-sl": ("-1", "nan"), "-sg": ("-1",), "-v": ("-1",), "-m": ("0", "-2"), "-s": ("-2",), "-g": ("-1",), "-k": ("cos", ""),
    "-y": ("2", "yes", "-1"), "-h": ("2",), "-a": ("2",), "-f": ("true",), "-w": ("-1",), "-ge": ("4", "-1"), "-z": ("4", "-1"),
    "-r": ("-1", "auto5", "1.0"), "-pn": ("0",), "-pr": ("-1",), "-pg": ("0",), "-pi": ("nccl",), "--timeout": ("0", "-1", "1.5"),
    "--ranks": ("-1", "auto", "1.5"), "--link": ("-1", "fast", "inf", "400,3600"), "--node-link": ("-1", "nan"),
    "--device": ("gpu", "cuda:", "cuda:-1", "cpu:0"),
    "--precision": ("fp16",), "--head-chunk": ("-1", "auto"), "--threads": ("-1",), "--master": ("x", "bf16", ""),
    "--temperature": ("-0.1", "nan", "inf"), "--kernels": ("cuda", ""), "--attention": ("math", "cpu"), "--matmul": ("lt", "fp4"),
    "--optimizer-state": ("fp16", "auto"), "--grad-dtype": ("x", "fp16"), "-t": ("0", "auto"), "-d": ("0", "-2", "1e5", "auto"),
}  # fmt: skip

UNBUILT = ("-r 7", "-r 7 --plan")

# flags that each are fine and together ask for what cannot be -> the sentence's beginning
AT_ODDS = {
    "-r auto -b auto": "-r auto -b auto: each is chosen for the other", "-b auto -r auto --plan": "-r auto -b auto: each is chosen",
    "--json": "--json is a form of the plan; add --plan", "--tensors -b 2": "--tensors is a form of the plan; add --plan",
    "--ranks 8": "--ranks is about processes that are only planned for; add --plan, or leave it out",
    "-pn 8 --link 400": "--link is about processes that are only planned for; add --plan", "--node-link 3600": "--node-link is about",
    "--plan --ranks 8 --node-link 3600": "--node-link is the speed inside a machine, beside --link's between machines",
    "-r 6 --offload-residual": "-r 6 --offload-residual: this level keeps too few residuals to be worth moving",
    "--offload-residual --recompute=6 --plan": "-r 6 --offload-residual: this level keeps too few residuals to be worth moving",
    "--master fp32 -w 0": "--master fp32 -w 0: one asks for master weights and the other for none",
    "-w 0 --master=bits16": "--master bits16 -w 0: one asks for master weights and the other for none",
    "--temperature 0.5 -s -1": "--temperature is that of samples, and -s -1 prints none; add -s 1, or leave it out",
    "--prompt Once -s 0": "--prompt is what samples go on from, and -s 0 prints none; add -s 1, or leave it out",
}  # fmt: skip
NOT_AT_ODDS = ("--plan --ranks 8", "--plan --link 400", "--plan -pn 8 --link 400 --node-link 3600", "--ranks 0", "--link 0",
               "-ge 2 -r 3", "-ge 2 -r auto", "-ge 1 -r 6", "-ge 3 -r 6",
               "-r auto", "-b auto", "-r auto -b 2", "-b auto -r 6", "--plan --json", "--plan --tensors", "-r auto --offload-residual",
               "-r 5 --offload-residual", "--master none", "--master none -w 0", "--master none -w 1", "--master auto -w 0",
               "--master bits16", "--master fp32 -w 1", "--optimizer-state bf16 --grad-dtype fp32")  # fmt: skip


def error_of(argv):
    with pytest.raises(UserError) as caught:
        parse(argv)
    return str(caught.value)


def test_short_options_and_defaults_are_llmc_s():
    assert {name: BY_NAME[name].default for flag in FLAGS for name in flag.short} == LLMC_DEFAULTS


def test_no_two_options_share_a_name_or_a_field():
    names = [name for flag in FLAGS for name in flag.names]
    assert len(names) == len(set(names)) and len({flag.field for flag in FLAGS}) == len(FLAGS)


def test_empty_command_line_gives_the_defaults_frozen():
    settings = parse([])
    assert settings == Settings() and dataclasses.asdict(settings) == {flag.field: flag.default for flag in FLAGS}
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.batch_size = 8


@pytest.mark.parametrize("name,text,value", [(name, *pair) for name, pairs in READ.items() for pair in pairs.items()])
def test_every_spelling_reads_the_same_value(name, text, value):
    flag = BY_NAME[name]
    spellings = [[spelling, text] for spelling in flag.names] + [[f"--{flag.long}={text}"]]
    for argv in spellings:
        assert parse(argv) == Settings(**{flag.field: value})


def test_a_value_after_an_equals_sign_may_be_a_flag_s_name():
    assert parse(["--output-dir=-s", "--prompt=--help"]) == Settings(output_dir="-s", prompt="--help")
    assert parse(["--prompt=-e=mc2"]) == Settings(prompt="-e=mc2")


def test_a_command_line_written_for_llmc_runs_unchanged():
    """scripts/run_gpt2_124M.sh of llm.c, as its shell would pass it."""
    settings = parse(shlex.split(
        "-i 'dev/data/fineweb10B/fineweb_train_*.bin' -j 'dev/data/fineweb10B/fineweb_val_*.bin' -o log_gpt2_124M -v 250 -s 20000 -g 144 "
        "-h 1 -b 64 -t 1024 -d 524288 -r 0 -z 1 -c 0.1 -l 0.0006 -q 0.0 -u 700 -n 5000 -y 1 -e d12"
    ))  # fmt: skip
    check_contradictions(settings)  # ZeRO-1 over one process has nothing to shard
    assert settings == Settings(
        train_data="dev/data/fineweb10B/fineweb_train_*.bin", val_data="dev/data/fineweb10B/fineweb_val_*.bin", output_dir="log_gpt2_124M",
        val_loss_every=250, sample_every=20000, sample_length=144, hellaswag=1, batch_size=64, sequence_length=1024,
        total_batch_size=524288, recompute=0, zero_stage=1, weight_decay=0.1, learning_rate=0.0006, final_lr_fraction=0.0,
        warmup_steps=700, checkpoint_every=5000, resume=1, model="d12",
    )  # fmt: skip


def test_a_tilde_is_the_home_folder_where_a_shell_leaves_it(monkeypatch):
    """In --output-dir=~/log, and in a pattern's quotes; a prompt may begin with one."""
    monkeypatch.setenv("HOME", "/home/me")
    s = parse(["--output-dir=~/log", "-i", "~/data/*.bin", "-e", "~/m.bin", "--prompt", "~ 3", "--tokenizer", "a~b"])
    assert (s.output_dir, s.train_data, s.model) == ("/home/me/log", "/home/me/data/*.bin", "/home/me/m.bin")
    assert (s.prompt, s.tokenizer) == ("~ 3", "a~b")


def test_the_last_of_repeated_options_wins():
    assert parse("-b 8 --batch-size 16 -b 32".split()).batch_size == 32


def test_a_switch_takes_no_value():
    assert parse(["--plan", "-b", "2"]) == Settings(plan=True, batch_size=2)
    assert "takes no value" in error_of(["--plan=1"])


@pytest.mark.parametrize("asked", ["help", "version"])
def test_help_and_version_win_over_a_wrong_command(asked):
    assert getattr(parse(["-b", "zero", f"--{asked}"]), asked) is True


@pytest.mark.parametrize("name,text", [(name, text) for name, texts in WRONG.items() for text in texts])
def test_a_wrong_value_is_refused_with_flag_value_and_expectation(name, text):
    flag = BY_NAME[name]
    message = error_of([name, text])
    assert message.startswith(f"{flag.title} is {text!r}, but must be {flag.expected}") and "\n" not in message


@pytest.mark.parametrize(
    "argv,expected",
    [
        (["-b"], "-b (--batch-size) needs a value, auto, or a whole number of 1 or more, but the command line ends there"),
        (["-o", "-y", "1"], "-o (--output-dir) needs a value, DIR, but the flag -y follows"),
        (["-o", "--seed=3"], "-o (--output-dir) needs a value, DIR, but the flag --seed=3 follows"),
        (["--prompt", "-e=mc2"], "but the flag -e=mc2 follows; for a text that reads like a flag: --prompt=TEXT"),
        (["-b="], "-b=: only a long flag takes its value after =; use -b B"),
        (["-h"], "--help"),  # who types -h alone wants help, which it is not
        (["-i", "a_1.bin", "a_2.bin"], "unexpected 'a_2.bin' after -i (--train-data)"),  # a pattern the shell has expanded
        (["train"], "unexpected 'train'"),
        (["-"], "unexpected '-'"),
        (["--batch_size", "4"], "unknown flag --batch_size: did you mean --batch-size?"),
        (["--learning-rat", "1"], "did you mean --learning-rate?"),
        (["--input_bin", "x.bin"], "unknown flag --input_bin: did you mean --train-data?"),
        (["--flash", "1"], "unknown flag --flash: did you mean --attention?"),
        (["--grad_clip", "1"], "unknown flag --grad_clip: gradients are always clipped to a norm of 1, as llm.c clips them; leave it out"),
        (["--dropout", "0.1"], "unknown flag --dropout: there is no dropout, as in llm.c; leave it out"),
        (["-help"], "did you mean --help?"),
        (["-o=log"], "-o=log: only a long flag takes its value after =; use -o log"),
        (["-x=10", "-b", "4"], "-x=10: only a long flag takes its value after =; use -x 10"),
        (["-lr", "1e-3"], "did you mean -l?"),
        (["--lr", "1e-3"], "unknown flag --lr: did you mean --learning-rate?"),
        (["-B", "4"], "unknown flag -B: did you mean -b?"),
        (["-GE", "1"], "unknown flag -GE: did you mean -ge?"),
        (["--t", "64"], "unknown flag --t: did you mean -t?"),
        (["-O", "log"], "unknown flag -O: did you mean -o?"),
        (["-bs", "4"], "unknown flag -bs: did you mean -b?"),
        (["--bs", "4"], "unknown flag --bs: did you mean -b?"),
        (["-9"], "unknown flag -9: --help lists them all"),  # half of it is in every short name, and no flag begins with it
        (["--"], "unknown flag --: --help lists them all"),
        (["--zzzzzzzzzz"], "unknown flag --zzzzzzzzzz: --help lists them all"),
        (["--model-", "d12"], "did you mean --model?"),  # no abbreviations, no near misses taken
        (["--mod", "d12"], "unknown flag --mod"),
    ],
)
def test_a_mistake_of_form_is_named(argv, expected):
    assert expected in error_of(argv)


def test_numbers_beyond_float_are_read_or_refused_not_crashed_on():
    assert parse(["-x", "9" * 400]).max_steps == int("9" * 400)
    assert "must be" in error_of(["-x", "9" * 5000])
    for flag in ("-b", "--timeout"):
        assert "must be at most 2147483647" in error_of([flag, "9" * 400])


@pytest.mark.parametrize("line", UNBUILT)
def test_what_is_not_built_stops_with_a_sentence(line):
    with pytest.raises(UserError, match=line.split()[0]):
        check_contradictions(parse(line.split()))


def test_the_sentence_on_a_level_lists_them_all():
    assert tuple(NOT_KEPT) == (0, 1, 2, 3, 4, 5, 6)
    with pytest.raises(UserError, match="^-r 9: no such recompute level; use one of 0, 1, 2, 3, 4, 5, 6, or auto$"):
        check_contradictions(parse(["-r", "9"]))


@pytest.mark.parametrize("line", AT_ODDS)
def test_flags_at_odds_with_each_other_stop_with_a_sentence_that_names_both(line):
    with pytest.raises(UserError) as caught:
        check_contradictions(parse(line.split()))
    assert str(caught.value).startswith(AT_ODDS[line]) and "\n" not in str(caught.value)


@pytest.mark.parametrize("level", [0, 1, 2, 3, 4, 5, 6, "auto"])
def test_what_is_built_is_not_refused(level):
    check_contradictions(parse(f"-r {level} -z 1 -pn 1 -pr 0 -ge 0".split()))


@pytest.mark.parametrize("line", NOT_AT_ODDS)
def test_flags_that_go_together_are_not_refused(line):
    check_contradictions(parse(line.split()))


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_help_names_every_flag_and_keeps_to_the_width(width):
    """What a flag means is beside its names, or below names that are too long for the first column."""
    text = format_help(width)
    for flag in FLAGS:
        names = f"  {', '.join(flag.names)} {flag.value}".rstrip()
        begin = (f"{names:<32}" if len(names) <= 30 else f"{names}\n{'':32}") + flag.help.split()[0]
        assert f"\n{begin}" in text, names
    listed = text[text.index("\nfiles\n") : text.index("\nexamples ")]
    assert max(map(len, listed.splitlines())) <= max(width, 80)


def test_what_a_flag_means_is_said_without_the_line_above():
    """As in --help | grep."""
    assert [flag.title for flag in FLAGS if re.search(r"^the same |\bthat text\b", flag.help)] == []


@pytest.mark.parametrize("what,arguments", EXAMPLES)
def test_examples_of_the_help_are_accepted(what, arguments):
    check_contradictions(parse(shlex.split(arguments)))


def test_readme_lists_the_exit_codes():
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (REPO / "README.md").read_text(encoding="utf-8"), re.M)
    assert {int(code): meaning.replace("`", "") for code, meaning in rows} == EXIT_CODES


def test_the_program_s_first_lines_name_every_module_and_those_of_a_package_its_own():
    packages = sorted(path.parent.name for path in (REPO / "llmc").glob("*/__init__.py"))
    assert len(packages) == 7
    guides = {"": train_gpt2.__doc__.partition("What it uses")[2]} | {name: import_module(f"llmc.{name}").__doc__ for name in packages}
    for folder, guide in guides.items():
        modules = {path.stem for path in (REPO / "llmc" / folder).glob("*.py")} - {"__init__"} | (set() if folder else set(packages))
        rows = re.findall(r"^ *((?:\w+ )*\w+)(?:  |$)", guide, re.M) if folder else [guide]  # names, before what is said of them
        assert modules - set(re.findall(r"\w+", " ".join(rows))) == set(), folder


def test_the_page_on_changes_names_places_that_there_are():
    """Every file and folder, and every name in one of the files beside it."""
    items = (REPO / "llmc/README.md").read_text(encoding="utf-8").partition("## To change it")[2].split("\n- ")[1:]
    assert len(items) == 4
    for item in items:
        paths = re.findall(r"`([\w/]+(?:\.py|/))`", item)
        assert [path for path in paths if not (REPO / "llmc" / path).exists()] == []
        text = "".join((REPO / "llmc" / path).read_text(encoding="utf-8") for path in paths if path.endswith(".py"))
        assert [name for name in re.findall(r"`(\w+)`", item) if not re.search(rf"\b{name}\b", text)] == [], item


def test_readme_lists_the_flags_of_the_table():
    text = (REPO / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- flags -->") == text.count("<!-- /flags -->") == 1, (
        "README.md needs <!-- flags --> and <!-- /flags --> around the list"
    )
    listed = text.split("<!-- flags -->")[1].split("<!-- /flags -->")[0].strip()
    assert listed == flag_table_markdown(), "paste the output of llmc.flags.flag_table_markdown() between README.md's markers"


def test_importing_the_flags_loads_neither_torch_nor_numpy():
    code = (
        "import sys, llmc.flags; llmc.flags.parse(['-b', '1']); print(sorted({'torch', 'numpy', 'argparse', 'difflib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True).stdout == "[]\n"


# ---- the run scripts: their flags, and when their loop ends

SCRIPTS = sorted(path.name for path in (REPO / "scripts").glob("run_gpt*.sh"))


def run_script(name, folder, body):
    """Run a script whose python is `body`, a shell script that finds the run's folder in $log and its arguments in $@."""
    stub, log = folder / "python", folder / "log"
    log.mkdir(exist_ok=True)
    stub.write_text(
        f'#!/bin/sh\nlog={shlex.quote(str(log))}\nprintf "%s\\n" "$@" > {shlex.quote(str(folder))}/argv\necho x >> $log/calls\n{body}\n'
    )
    stub.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(stub), "LOG_DIR": str(log), "MAX_TRIES": "3", "RETRY_AFTER_S": "0"}
    listens = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # in a background job Ctrl-C is ignored, and a shell cannot undo that
    command = ["bash", str(REPO / "scripts" / name)]
    code = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, preexec_fn=listens).returncode
    calls = (log / "calls").read_text().count("x") if (log / "calls").exists() else 0
    return code, calls


def test_the_loop_s_script_without_a_run_is_told_how_it_is_called():
    done = subprocess.run(["bash", str(REPO / "scripts/run_until_done.sh"), "log"], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (2, "usage: run_until_done.sh LOG_DIR LAST_STEP FLAG VALUE...\n")


@pytest.mark.parametrize("flags, runs, told", [
    (["-b", "4"], 0, "add -n STEPS, how often to write a checkpoint: without it the run would keep nothing to go on from"),
    (["-n", "0"], 1, "the run ended well and left no checkpoint in {log}: look at -n"),
])  # fmt: skip
def test_the_loop_s_script_does_not_train_again_what_is_not_kept(tmp_path, flags, runs, told):
    (tmp_path / "python").write_text(f"#!/bin/sh\necho x >> {tmp_path}/calls\n")
    (tmp_path / "python").chmod(0o755)
    command = ["bash", str(REPO / "scripts/run_until_done.sh"), str(tmp_path / "log"), "9", *flags]
    done = subprocess.run(command, env={**os.environ, "PYTHON": str(tmp_path / "python")}, capture_output=True, text=True, timeout=20)
    calls = (tmp_path / "calls").read_text().count("x") if (tmp_path / "calls").exists() else 0
    assert (done.returncode, done.stderr, calls) == (2, told.format(log=tmp_path / "log") + "\n", runs)


@pytest.mark.parametrize("name", SCRIPTS)
def test_run_scripts_pass_flags_that_are_accepted_and_resume(name, tmp_path):
    assert run_script(name, tmp_path, "exit 2") == (2, 1)
    program, *argv = (tmp_path / "argv").read_text().splitlines()
    settings = parse(argv)
    check_contradictions(settings)
    assert program == "train_gpt2.py" and settings.resume == 1 and settings.checkpoint_every > 0
    assert settings.total_batch_size % (settings.batch_size * settings.sequence_length) == 0


@pytest.mark.parametrize(
    "body,expected",
    [
        ("exit 2", (2, 1)),  # a user error would repeat for ever
        ("exit 3", (3, 1)),  # and so would running out of memory
        ("exit 130", (130, 1)),  # Ctrl-C
        ("kill -INT $PPID; exit 1", (130, 1)),
        ("exit 4", (1, 3)),  # a lost rank: tried again
        ("exit 1", (1, 3)),  # three crashes without a checkpoint between them
        ("kill -9 $$", (1, 3)),
        ("n=$(grep -c x $log/calls); [ $n -lt 6 ] || n=18865; touch $log/DONE_$(printf %08d $n); exit 1", (0, 6)),  # crashes, but gets on
    ],
)
def test_the_restart_loop_ends(body, expected, tmp_path):
    assert run_script("run_gpt2_124M.sh", tmp_path, body) == expected


LAUNCHERS = {
    "run_torchrun.sh": ("torchrun", "--no-python --nnodes 1 --node-rank 0 --nproc-per-node 8 --master-addr 127.0.0.1 --master-port 29500"),
    "run_mpirun.sh": ("mpirun", "--host localhost:8 --map-by slot --bind-to none -x MASTER_ADDR -x MASTER_PORT=12345"),
    "run_slurm.sh": ("srun", "--kill-on-bad-exit=0 --wait=60 --cpus-per-task=8"),
}


@pytest.mark.parametrize("body,expected", [("exit 2", (2, 1)), ("exit 3", (3, 1)), ("exit 4", (1, 3))])
@pytest.mark.parametrize("name", LAUNCHERS)
def test_scripts_for_several_processes_launch_them_and_start_lost_ones_again(name, body, expected, tmp_path, monkeypatch):
    """A launcher that writes down its arguments and runs what they end with, as a script of the same names."""
    launcher, options = LAUNCHERS[name]
    (tmp_path / launcher).write_text(
        f'#!/bin/sh\necho "$@" > {shlex.quote(str(tmp_path))}/launched\nexec {shlex.quote(str(tmp_path))}/python\n'
    )
    (tmp_path / launcher).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for variable in ("SLURM_SUBMIT_DIR", "SLURM_CPUS_PER_TASK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(REPO)
    assert run_script(name, tmp_path, body) == expected
    before, program, flags = (tmp_path / "launched").read_text().partition(f" {tmp_path}/python train_gpt2.py ")
    settings = parse(shlex.split(flags))
    check_contradictions(settings)
    assert before == options and program and settings.resume == 1 and settings.zero_stage == 1
    assert settings.total_batch_size % (settings.batch_size * settings.sequence_length * 16) == 0, "two machines of eight"


def test_the_restart_loop_passes_sigterm_on_and_waits_for_the_checkpoint(tmp_path):
    body = "trap 'sleep 0.2; touch $log/written; exit 0' TERM\nkill -TERM $PPID; while :; do sleep 0.05; done"
    assert run_script("run_gpt2_124M.sh", tmp_path, body) == (130, 1)
    assert (tmp_path / "log" / "written").exists()


def test_a_finished_run_is_not_started_again(tmp_path):
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "DONE_00018865").touch()
    assert run_script("run_gpt2_124M.sh", tmp_path, "exit 1") == (0, 0)


def test_flags_of_other_trainers_are_told_by_names_that_there_are():
    assert ELSEWHERE.keys().isdisjoint(BY_NAME) and set(ELSEWHERE.values()) <= BY_NAME.keys()
