"""What a run says of itself before its first step: each sentence where it is true, with its numbers, and nowhere else."""

from dataclasses import replace

import pytest

from llmc.config import config_from_descriptor
from llmc.distributed.world import World
from llmc.flags import parse
from llmc.memory.plan import Plan
from llmc.preamble import chosen_line, flag_notes, print_device, print_settings, print_sizes
from llmc.request import plan_options
from llmc.units import MIB

D12, D48 = config_from_descriptor("d12"), config_from_descriptor("d48")


def planned(flags="", kind="cuda", config=D12, processes=1, precision="bf16"):
    """The settings and the plan's options of a command."""
    settings = parse(flags.split())
    return settings, plan_options(settings, config, precision, kind, World(num_processes=processes))


MEMORY = "-x 0 trains nothing: no memory is planned for gradients, optimizer state or backward, whatever -r is"
NOTHING_WRITTEN = "note: neither logs nor the trained weights are written without -o, the folder for them"


def said(flags="", *, steps=1, max_steps=100, has_tokenizer=True, resumes=False, **planned_for) -> list[str]:
    """The notes of a run of max_steps steps, of as many micro-steps as `steps`, but for NOTHING_WRITTEN."""
    lines = flag_notes(*planned(flags, **planned_for), steps, max_steps, has_tokenizer=has_tokenizer, resumes=resumes)
    return [line for line in lines if line != NOTHING_WRITTEN]


def rows(out) -> dict[str, str]:
    """A printed table, by the names of its rows."""
    cells = (line.strip("| ").split("|") for line in out.splitlines() if line.startswith("|"))
    return {name.strip(): value.strip() for name, value in cells}


# ----------------------------------------------------------------------------
# notes


@pytest.mark.parametrize("flags", [
    "", "-r 0 -ge 2", "-r 6 -ge 3", "-n 10 -o log --async-checkpoint 1", "--attention flash", "-n -1", "-k constant", "-k linear -q 0",
    "-q 0.1 -u 5", "-h 1 --hellaswag-data mine.bin",
])  # fmt: skip
def test_nothing_is_noted_of_what_anybody_expects(flags):
    assert said(flags) == []


@pytest.mark.parametrize("flags, lost", [("", True), ("-v 5", True), ("-o log", False), ("-n 5", False), ("-x 0", False)])
def test_a_run_that_leaves_nothing_behind_says_so(flags, lost):
    """With -n but no -o it says that instead."""
    assert (NOTHING_WRITTEN in flag_notes(*planned(flags), 1, 100, has_tokenizer=True, resumes=False)) == lost


@pytest.mark.parametrize("flags", ["-pi tcp", "-pi fs", "-ps 10.0.0.1"])
def test_how_a_run_of_one_would_meet_others_is_noted(flags):
    sentence = "note: -pi and -ps are where several processes meet, and this run is one alone; -pn says how many there are"
    assert said(flags) == [sentence] and said(flags, processes=2) == said(f"{flags} --tensor-parallel 2", processes=2) == []


@pytest.mark.parametrize("parts, more", [(2, 1), (4, 3), (8, 7)])
def test_heads_that_parts_do_not_divide_are_counted(parts, more):
    """25 heads in 4 equal parts are 7 each: 28. 12 are 3 each."""
    assert said(f"--tensor-parallel {parts}", config=D48, processes=parts) == [
        f"note: 25 heads in {parts} equal parts: {more} more are computed, whose weights are zero, and are in no file"
    ]
    assert said("--tensor-parallel 4", processes=4) == []


def test_sums_of_every_micro_step_are_noted_where_another_setting_would_send_less():
    """Of several micro-steps of several ranks; not where ZeRO stages 2 and 3 must."""
    two_steps = f"-b 4 -d {2 * 2 * 4 * 1024}"
    for flags in (two_steps, f"{two_steps} -z 1"):
        assert said(flags, steps=2, processes=2) == [
            "gradients are summed over processes after each of 2 micro-steps, which gives the bits of -z 2 and 3; "
            "--reduce-every-micro-step 0 does so once a step and sends less"
        ]
    for flags in (f"{two_steps} -z 2", f"{two_steps} -z 3", f"{two_steps} --reduce-every-micro-step 0", "-b 4 -d 8192", "-b 4"):
        assert said(flags, processes=2) == []
    assert said(two_steps) == []
    assert said(f"-b 4 -d {2 * 5 * 4 * 1024}", processes=5) == []  # 5 ranks do not divide 768 channels, and sum whole tensors once a step


@pytest.mark.parametrize("flags, sentence", [
    ("--attention cudnn",
     "note: cuDNN's attention does not repeat its bits: two runs, or a run and its resumption, differ in the last ones"),
    ("-ge 1 -r 1", "note: with -ge 1 the GELU that -r 1 computes again is not the matmul's to the last bit"),
    ("-ge 2 -r 4", "note: with -ge 2 the GELU that -r 4 computes again is not the matmul's to the last bit"),
    ("--matmul fp8", "note: --matmul fp8 has other bits and other losses than bf16; MFU stays relative to the bf16 peak"),
    ("-t 1023", "note: -t 1023 is below the model's 1024 positions; the rest of wpe will not be trained"),
    ("-n 7", "note: -n 7 writes no checkpoints without -o, the folder for them"),
    ("-o log", "note: without -n no checkpoint is written to log when training is done, only when something stops it before"),
    ("-o log -n -1 -x 5", "note: without -n no checkpoint is written to log when training is done, only when something stops it before"),
    ("-k constant -u 5", "note: -k constant has the learning rate of -l from the first step to the last; -u and -q change nothing"),
    ("-k linear", "note: -k linear decays to -q times -l, and -q is 1: the learning rate stays; add -q 0 for it to fall"),
    ("-k wsd -u 5", "note: -k wsd decays to -q times -l, and -q is 1: the learning rate stays; add -q 0 for it to fall"),
    ("-nk 3", "note: -nk and -nm say which of -n's checkpoints stay, and there is no -n"),
    ("-nm 100", "note: -nk and -nm say which of -n's checkpoints stay, and there is no -n"),
    ("--hellaswag-data mine.bin", "note: --hellaswag-data mine.bin is only read with -h 1"),
    ("-k constant -q 0", "note: -k constant has the learning rate of -l from the first step to the last; -u and -q change nothing"),
])  # fmt: skip
def test_each_note_is_said_where_it_is_true(tmp_path, monkeypatch, flags, sentence):
    monkeypatch.chdir(tmp_path)
    assert said(flags) == [sentence]


def test_a_warmup_as_long_as_the_run_is_noted():
    """A run of one epoch has as many steps as its data; one that trains nothing has no learning rate."""
    sentence = "note: -u 100 warms up over all of the 100 steps: the learning rate only rises"
    assert said("-u 100") == [sentence] and said("-u 100 -k wsd -q 0", max_steps=101) == []
    assert sentence not in said("-u 100 -x 0", max_steps=0)


@pytest.mark.parametrize("length", [0, 1])
def test_samples_of_nothing_are_noted(length):
    note = f"note: -g {length} leaves nothing to generate after the end-of-text that samples start with; -s 0 prints none"
    assert said(f"-g {length}") == [note]
    assert said("-g 2") == said(f"-g {length} -s 0") == []


@pytest.mark.parametrize("flags", [
    "-x 0 -ge 1 -r 2", "-x 0 -b 1 -d 8192", "-x 0 -u 200", "-x 0 -t 64", "-x 0 -k linear", "-x 0 -k constant -u 5", "-x 0 -n 5",
])  # fmt: skip
def test_nothing_is_noted_of_training_where_there_is_none(flags):
    assert said(flags, steps=4, max_steps=0, processes=2) == [MEMORY]


@pytest.mark.parametrize("flags", ["-o log", "-n 5", ""])
def test_room_for_checkpoints_that_nothing_writes_is_noted(flags):
    """They need both: how often, and where to."""
    sentence = "note: --async-checkpoint 1 keeps room for checkpoints, but none is written beside training without -n and -o"
    assert said(f"{flags} --async-checkpoint 1")[-1] == sentence
    assert sentence not in said(f"{flags} --async-checkpoint 0")


def test_samples_without_a_tokenizer_are_noted_where_there_are_samples():
    (line,) = said("-s 5", has_tokenizer=False)
    where = "here or beside the data: samples are printed as token ids"
    s, o = planned("-s 5")
    other = replace(o, config=replace(o.config, vocab_size=50260))  # for which nothing here makes one
    assert f"no gpt2_tokenizer.bin of 50260 tokens {where}" in flag_notes(s, other, 1, 100, has_tokenizer=False, resumes=False)
    assert line == f"no gpt2_tokenizer.bin of 50257 tokens {where} (python scripts/write_tokenizer.py makes one)"
    assert said("-s 0", has_tokenizer=False) == said("-s -1", has_tokenizer=False) == said("-s 5") == []


def test_checkpoints_of_an_earlier_run_are_noted_where_a_run_begins_anew(tmp_path):
    """A folder's name may have the signs of a pattern. What a run resumes from is no news."""
    folder = tmp_path / "run[1]*"
    folder.mkdir()
    assert said(f"-o {folder} -n 1") == []
    (folder / "DONE_00000004").touch()
    assert said(f"-o {folder} -n 1") == [
        f"note: {folder} holds checkpoints of an earlier run; a later -y 1 resumes from the highest step, whichever run wrote it"
    ]
    assert said(f"-o {folder} -n 1 -y 1", resumes=True) == []


def test_logs_of_an_earlier_run_are_noted_where_nothing_is_trained(tmp_path):
    assert said(f"-o {tmp_path} -x 0") == [MEMORY]
    (tmp_path / "main.log").write_text("s:0 tel:4.0000\n")
    assert said(f"-o {tmp_path} -x 0") == [MEMORY]  # another evaluation, which this one replaces
    (tmp_path / "main.log").write_text("s:0 tel:4.0000\ns:0 trl:4.0000\n")
    assert said(f"-o {tmp_path} -x 0") == [
        MEMORY,
        f"note: nothing is trained, so the logs of the run in {tmp_path} stay, and what is measured now is only printed",
    ]
    assert said(f"-o {tmp_path} -n 1 -y 1", resumes=True) == []


def test_a_resumption_that_finds_nothing_says_what_it_starts_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert said("-y 1 -o log -n 1 -e d12") == ["-y 1: no complete checkpoint in log, starting from d12"]
    assert said("-y 1 -o log -n 1 -e d12", resumes=True) == []
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "main.log").write_text("s:0 tel:4.0000\ns:0 trl:4.0000\n")
    assert said("-y 1 -o log -n 1 -e d12") == [
        "-y 1: no complete checkpoint in log, starting from d12",
        "note: the logs in log are of an earlier run, and stay there under other names, such as main.log.1",
    ]
    assert said("-y 1 -o log -n 1 -e d12", resumes=True) == []


def test_an_evaluation_that_writes_a_checkpoint_says_what_it_takes(tmp_path):
    assert said(f"-o {tmp_path} -n 1 -x 0", max_steps=0) == [
        "note: with -n and -o, -x 0 writes the weights as a checkpoint of step 0, which takes the memory of training"
    ]


# ----------------------------------------------------------------------------
# what was chosen


@pytest.mark.parametrize("flags, form, graphs, line", [
    ("", {}, True, "kernels: triton, attention: triton, head: 4096 rows of logits at once, matmul: cublas, CUDA graphs: on"),
    ("--matmul cublaslt --attention cudnn --head-chunk 100", {}, False,
     "kernels: triton, attention: cudnn, head: 100 rows of logits at once, matmul: cublaslt, CUDA graphs: off"),
    ("--matmul fp8 --kernels triton -b 2", {}, True,
     "kernels: triton, attention: triton, head: 2048 rows of logits at once, matmul: fp8 in layers, CUDA graphs: on"),
    ("--kernels torch --matmul native", {"kind": "cpu"}, False,
     "kernels: torch, attention: in blocks, head: 1024 rows of logits at once, matmul: torch, graphs: off"),
    ("--kernels torch --matmul widened", {"kind": "cpu"}, False,
     "kernels: torch, attention: in blocks, head: 1024 rows of logits at once, matmul: torch of factors widened to fp32, graphs: off"),
    ("--kernels numba --matmul numba", {"kind": "cpu", "precision": "fp32"}, True,
     "kernels: numba, attention: in blocks, head: 512 rows of logits at once, matmul: numba, graphs: on"),
])  # fmt: skip
def test_the_line_of_choices_has_what_the_plan_has(flags, form, graphs, line):
    settings, options = planned(flags, **form)
    assert chosen_line(settings, replace(options, factors=""), graphs) == line


def test_the_line_of_choices_says_where_numba_s_matmuls_widen_their_factors():
    settings, options = planned("--kernels numba --matmul numba", kind="cpu")
    lines = {factors: chosen_line(settings, replace(options, factors=factors), True) for factors in ("bf16", "fp32")}
    assert "matmul: numba, graphs: on" in lines["bf16"] and "matmul: numba of factors widened to fp32, graphs: on" in lines["fp32"]


# ----------------------------------------------------------------------------
# tables


@pytest.mark.parametrize("flags, said", [
    ("", "enabled"), ("-w 0", "disabled"), ("--master none", "disabled"), ("--master bits16", "enabled"),
])  # fmt: skip
def test_the_table_says_whether_there_are_master_weights(capsys, flags, said):
    settings, options = planned(flags)
    print_settings(settings, 4096)
    assert rows(capsys.readouterr().out)["use_master_weights"] == said
    assert (said == "enabled") == (options.keeps_master or options.keeps_bits)


def test_the_table_names_the_data_that_are_trained_on(capsys):
    for flags, pattern in (("-i train -j val", "train"), ("-i train -j val -a 1", "val"), ("-i train -j val -x 0", "val")):
        print_settings(parse(flags.split()), 4096)
        table = rows(capsys.readouterr().out)
        assert (table["train data pattern"], table["val data pattern"], table["total batch size"]) == (pattern, "val", "4096")


@pytest.mark.parametrize("tflops, printed", [(989.43, "989.4"), (1.0, "1.0"), (0.0426, "0.043")])
def test_a_peak_has_digits_however_small_it_is(capsys, tflops, printed):
    print_device("x" * 60, tflops, "BF16")
    assert rows(capsys.readouterr().out) == {"device": "x" * 50, "peak TFlops": printed, "precision": "BF16"}


def test_sizes_are_the_rank_s_arena_and_its_share_of_the_step(capsys):
    """Two groups of two parts: each group is one of two that train on data of their own."""
    _, options = planned(f"-b 4 --tensor-parallel 2 -d {3 * 2 * 4 * 1024}", processes=4)
    plan = Plan(options)
    print_sizes(plan, 24576, 3)
    parameters = plan.arenas["parameters"]
    assert capsys.readouterr().out.splitlines() == [
        f"num_parameters: 124475904 => bytes: {parameters}", f"allocated {parameters // MIB} MiB for model parameters",
        "batch_size B=4 * seq_len T=1024 * groups=2 and total_batch_size=24576", "=> setting grad_accum_steps=3",
    ]  # fmt: skip
