"""Several GPUs of one machine, over NCCL: what other tests show of several ranks on CPUs."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from case_a import write_case_a

REPO = Path(__file__).resolve().parent.parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 CUDA devices, and there are {torch.cuda.device_count()}"),
]
COMMON = (
    "-i train_*.bin -j val.bin -e model.bin -t 32 -l 3e-3 -u 3 -q 0.1 -c 0.1 -v 4 -m 4 -s 4 -g 16 -x 8 -n 4 --device cuda --timeout 120"
).split()


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return write_case_a(tmp_path_factory.mktemp("case_a"))


def train(case, ranks, log, *flags):
    """Run the program on so many GPUs; its folder."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--"]
    done = subprocess.run([*launch, str(REPO / "train_gpt2.py"), *COMMON, "-o", log, *flags], cwd=case, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return case / log


def losses(folder):
    return [float(line.split("trl:")[1].split()[0]) for line in (folder / "main.log").read_text().splitlines() if "trl:" in line]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_all_stages_train_the_same_model(case, accumulation):
    total = ["-b", "2", "-d", str(2 * 2 * 32 * accumulation)]
    folders = [train(case, 2, f"z{z}_{accumulation}", "-z", str(z), *total) for z in range(4)]
    models = [(folder / "model_00000008.bin").read_bytes() for folder in folders]
    assert models == models[:1] * 4


def test_two_runs_and_a_resumed_one_repeat_every_bit(case):
    first, second = (train(case, 2, name, "-b", "2", "-z", "3", "-r", "6") for name in ("first", "second"))
    stopped = train(case, 2, "stopped", "-b", "2", "-z", "3", "-r", "6", "-x", "4", "-k", "constant")
    assert (first / "model_00000008.bin").read_bytes() == (second / "model_00000008.bin").read_bytes()
    straight = train(case, 2, "straight", "-b", "2", "-z", "3", "-r", "6", "-k", "constant")
    resumed = train(case, 2, "stopped", "-b", "2", "-z", "3", "-r", "6", "-k", "constant", "-y", "1")
    assert stopped == resumed
    assert (straight / "model_00000008.bin").read_bytes() == (resumed / "model_00000008.bin").read_bytes()


@pytest.mark.parametrize("keep", ["0", "1"])
def test_tensor_parallelism_has_the_losses_of_one_gpu(case, keep):
    one = train(case, 1, f"one_{keep}", "-b", "4", "-r", "1")
    two = train(case, 2, f"two_{keep}", "-b", "4", "-r", "1", "--tensor-parallel", "2", "--tp-recompute-allgather", keep)
    assert max(abs(a - b) for a, b in zip(losses(one), losses(two), strict=True)) <= 2e-4


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason=f"needs 4 CUDA devices, and there are {torch.cuda.device_count()}")
@pytest.mark.parametrize("z", ["0", "3"])
def test_two_copies_of_two_parts_have_the_losses_of_two_gpus(case, z):
    """Every rank is in a group of parts, in a group of shares, and in that of all."""
    two = train(case, 2, f"two_of_4_{z}", "-b", "2", "-r", "1", "-z", z)
    four = train(case, 4, f"four_{z}", "-b", "2", "-r", "1", "--tensor-parallel", "2", "-z", z)
    assert max(abs(a - b) for a, b in zip(losses(two), losses(four), strict=True)) <= 2e-4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_lost_rank_ends_the_other_which_says_so(case, tmp_path, number):
    """Though that one waits in a kernel of NCCL's, which never ends, and there is no launcher to end it."""
    flags = [*COMMON, "-b", "2", "-x", "1000000", "-n", "0", "-v", "0", "-s", "0", "-pn", "2", "-pi", "fs", "-pp", str(tmp_path)]
    command, pipe = [sys.executable, str(REPO / "train_gpt2.py"), *flags], subprocess.PIPE
    ranks = [subprocess.Popen([*command, "-pr", str(rank)], cwd=case, stdout=pipe, stderr=pipe, text=True) for rank in range(2)]
    try:
        next(line for line in ranks[0].stdout if line.startswith("step    5/"))
        ranks[1].send_signal(number)
        _, err = ranks[0].communicate(timeout=90)
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 4 and err.startswith("error: rank 1 of 2 (host ") and "is gone" in err and err.count("\n") == 1, err
