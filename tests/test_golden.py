"""llm.c's golden case A through the public program: the same losses, norms, rates, weights, samples and score at every -r.

The numbers in golden/train_A.jsonl and eval_A.json were measured from llm.c's own C code in fp32.
"""

import contextlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import train_gpt2
from case_a import CONFIG, write_case_a
from llmc.memory.ladder import NOT_KEPT
from llmc.memory.tables import parameter_shapes

GOLDEN = Path(__file__).parent / "golden"
ROWS = [json.loads(line) for line in (GOLDEN / "train_A.jsonl").read_text().splitlines()]
STEPS = [row for row in ROWS if "loss" in row]
VALIDATIONS = {row["step"]: row["val"] for row in ROWS if "val" in row}
(ABS_SUMS,) = (row["abs_sum"] for row in ROWS if "abs_sum" in row)
(TOKENS,) = (row["sample"] for row in ROWS if "sample" in row)
STEP_LINE = re.compile(r"step +(\d+)/40 \| loss ([\d.]+) \(.*?\)\| norm ([\d.]+) \(.*?\)\| lr ([\d.e+-]+) \|")
FLAGS = "-b 4 -t 32 -d 256 -l 3e-3 -u 3 -q 0.1 -c 0.1 -x 40 -k cosine -v 5 -m 4 -g 24".split()
FLAGS += "-s 40 -n 40 --precision auto --device cpu --threads 1".split()


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return write_case_a(tmp_path_factory.mktemp("case_a"))


@pytest.fixture(autouse=True)
def autograd_stays_on():
    """The program turns autograd off and chooses its threads for its whole process; the tests after this one have their own."""
    threads = torch.get_num_threads()
    yield
    torch.set_grad_enabled(True)
    torch.set_num_threads(threads)


def run(case, *flags) -> int:
    return train_gpt2.main(["-e", f"{case}/model.bin", "-i", f"{case}/train_*.bin", "-j", f"{case}/val.bin", *flags])


@pytest.fixture(scope="module", params=list(NOT_KEPT), ids=lambda r: f"r{r}")
def trained(request, case, tmp_path_factory):
    """(folder, what was printed) of the golden run at one recompute level."""
    folder, out = tmp_path_factory.mktemp("run"), io.StringIO()
    with contextlib.redirect_stdout(out):
        assert run(case, *FLAGS, "-r", str(request.param), "-o", str(folder)) == 0
    return folder, out.getvalue()


def printed_steps(text):
    return [(int(step), float(loss), float(norm), float(lr)) for step, loss, norm, lr in STEP_LINE.findall(text)]


def test_the_golden_file_is_whole():
    assert [row["step"] for row in STEPS] == list(range(1, 41))
    assert sorted(VALIDATIONS) == list(range(0, 41, 5)) and len(ABS_SUMS) == 16 and len(TOKENS) == 23


def test_every_step_has_llmc_s_loss_norm_and_learning_rate(trained):
    steps = printed_steps(trained[1])
    assert [s[0] for s in steps] == [row["step"] for row in STEPS]
    for (step, loss, norm, lr), row in zip(steps, STEPS):
        assert abs(loss - row["loss"]) <= 2e-4, f"step {step}"
        assert abs(norm - row["norm"]) <= 1e-3, f"step {step}"
        assert abs(lr - row["lr"]) <= 0.0051 * 10.0 ** np.floor(np.log10(row["lr"])), f"step {step}"  # printed with 3 digits


def test_every_validation_has_llmc_s_loss(trained):
    losses = [float(x) for x in re.findall(r"^val loss ([\d.]+)$", trained[1], re.M)]
    assert np.abs(np.array(losses) - [VALIDATIONS[step] for step in sorted(VALIDATIONS)]).max() <= 2e-4


def test_the_log_says_the_same(trained):
    """main.log counts steps from 0 and prints 4, 6 and 2 decimals: half of the last is added to each tolerance."""
    lines = (trained[0] / "main.log").read_text().splitlines()
    validations = {int(s): float(x) for s, x in re.findall(r"^s:(\d+) tel:(\S+)$", "\n".join(lines), re.M)}
    steps = {int(s): tuple(map(float, x)) for s, *x in re.findall(r"^s:(\d+) trl:(\S+) lr:(\S+) norm:(\S+)$", "\n".join(lines), re.M)}
    assert len(lines) == len(validations) + len(steps) == 9 + 40
    assert validations.keys() == VALIDATIONS.keys() and sorted(steps) == list(range(40))
    for step, loss in VALIDATIONS.items():
        assert abs(validations[step] - loss) <= 2e-4 + 0.51e-4
    for row in STEPS:
        loss, lr, norm = steps[row["step"] - 1]
        assert abs(loss - row["loss"]) <= 2e-4 + 0.51e-4 and abs(lr - row["lr"]) <= 0.51e-6 and abs(norm - row["norm"]) <= 1e-3 + 0.51e-2


def read_weights(path):
    """Name -> tensor of an fp32 model file."""
    flat, tensors, at = np.fromfile(path, dtype="<f4", offset=1024).astype(np.float64), {}, 0
    for name, shape in parameter_shapes(CONFIG).items():
        tensors[name] = flat[at : at + np.prod(shape)].reshape(shape)
        at += tensors[name].size
    assert at == len(flat)
    return tensors


def test_the_model_written_after_40_steps_has_llmc_s_weights(case, trained):
    """The sum of |w| of each of the 16 tensors, to 1e-5 (two fp32 runs part by about 1e-7 here).

    Key biases apart: softmax does not see them, so their gradient is nothing but rounding, which AdamW magnifies into a walk of its own
    on every machine. As far as they walked here they may have walked the other way in llm.c.
    """
    first, last = read_weights(case / "model.bin"), read_weights(trained[0] / "model_00000040.bin")
    assert len(last) == len(ABS_SUMS) == 16
    C = CONFIG.channels
    walked = np.abs(last["qkvb"] - first["qkvb"])[:, C : 2 * C].sum()
    assert walked < 0.01 * np.abs(last["qkvb"]).sum()
    for (name, tensor), want in zip(last.items(), ABS_SUMS):
        assert abs(np.abs(tensor).sum() - want) <= 1e-5 * want + (2 * walked if name == "qkvb" else 0), name


def test_the_sampled_tokens_are_llmc_s(trained):
    generated = re.findall(r"generating:\n---\n(.*?)\n---", trained[1], re.S)
    assert [list(map(int, text.split())) for text in generated] == [TOKENS]


def test_every_recompute_level_prints_the_same_numbers_and_writes_the_same_model(case, tmp_path, capsys):
    """To the last digit and bit, also on several threads: what -r trades is memory for time."""
    results = []
    for level in NOT_KEPT:
        folder = tmp_path / f"r{level}"
        assert run(case, *FLAGS, "-x", "4", "-v", "0", "-s", "0", "-n", "4", "--threads", "2", "-r", str(level), "-o", str(folder)) == 0
        text = capsys.readouterr().out
        steps = re.findall(r"^step .*? lr \S+", text, re.M)
        assert len(steps) == 4
        files = ("main.log", "model_00000004.bin", "state_00000004_00000.bin")
        results.append((steps, [(folder / file).read_bytes() for file in files]))
    assert all(other == results[0] for other in results[1:])


@pytest.mark.parametrize("B", [8, 3, 1])
def test_the_untrained_model_scores_as_llmc_s(case, tmp_path, capsys, B):
    """-x 0 only evaluates. llm.c needs a batch of 4 or more and scored with 8; any batch must find the same answers."""
    want = json.loads((GOLDEN / "eval_A.json").read_text())
    folder = tmp_path / "eval"
    flags = f"-b {B} -t 32 -x 0 -v 5 -m 1 -s 0 -h 1 --hellaswag-data {case}/eval.bin --device cpu --threads 1 -o {folder}".split()
    assert run(case, *flags) == 0
    correct, total = want["correct"], want["num_examples"]
    assert f"HellaSwag: {correct}/{total} = {correct / total:f}" in capsys.readouterr().out.splitlines()
    assert f"s:0 eval:{correct / total:.4f}" in (folder / "main.log").read_text().splitlines()
