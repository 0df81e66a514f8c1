"""Section of gpu_check.py: llm.c's own program at the same sizes, its steps beside ours."""

import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from llmc.data.shards import write_shard
from scripts.gpu_common import Skip, attempt, free_memory, summarize, table, while_time
from scripts.gpu_steps import measure_steps, our_step, speed

STEPS, SETTLING = 15, 5  # of llm.c's STEPS steps, the first SETTLING do not count
LONGEST_SECONDS = 90  # of a process
# "step    3/15 | loss 10.912345 (+nanz)| norm 13.2045 (+nanz)| lr 3.00e-04 | 123.45 ms | -100.0% bf16 MFU | 530712 tok/s"
STEP_LINE = re.compile(r"^step +(\d+)/\d+ \| loss +(\S+) .*\| ([0-9.]+) ms \|", re.MULTILINE)


def llmc(run, record):
    """At each level our step, then llm.c's, which has the card's memory to itself."""
    if not run.args.llmc:
        raise Skip("only with --llmc, the path of llm.c's train_gpt2cu")
    s = run.sizes
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder) / "tokens.bin"
        tokens = np.random.default_rng(0).integers(0, s.config.vocab_size, (STEPS + 1) * s.B * s.T + 1)
        write_shard(shard, tokens.astype(np.uint16))
        for level in while_time(run, record, (0, 1, 2), 12, name=lambda level: f"-r {level}"):
            with attempt(record, f"-r {level}"):
                ours, our_spread, _ = measure_steps(run, our_step(run, s.config, s.B, s.T, recompute=level)[0])
                if run.cuda:
                    free_memory()
                theirs, spread = summarize(step_times(run_program(run, shard, level)))
                row = {"run": f"-r {level}", "ours ms": ours, "our spread": our_spread, "llm.c ms": theirs, "spread": spread}
                row |= {"ratio": ours / theirs, "ours tokens/s": s.B * s.T / ours * 1e3}
                row |= {f"llm.c {key}": value for key, value in speed(run, s.config, s.B, s.T, theirs).items()}
                table(record, "").append(row)
                run.summary[f"llm.c -r {level}"] = {"ms": theirs, "tokens/s": row["llm.c tokens/s"], "ratio": row["ratio"]}
    record["notes"] += [
        f"{run.args.llmc}: its own times of its steps, the median of those after {SETTLING}",
        "ratio is our time over llm.c's: below 1, ours is faster",
    ]


def run_program(run, shard, level) -> str:
    """What llm.c's program prints. Raises RuntimeError with the last lines of it if it fails."""
    s = run.sizes
    # it computes step % -v, so -v 0 would end it; -m 1 keeps the validations before step 0 and after the last step short
    options = dict(i=shard, j=shard, e="d12", b=s.B, t=s.T, d=s.B * s.T, x=STEPS, v=1000, m=1, s=0, h=0, r=level)
    words = [str(word) for name, value in options.items() for word in (f"-{name}", value)]
    seconds = max(10, min(LONGEST_SECONDS, run.left()))
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        try:
            command = [run.args.llmc, *words]
            status = subprocess.run(command, cwd=shard.parent, stdout=out, stderr=subprocess.STDOUT, timeout=seconds).returncode
            how = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            status, how = 1, f"had not ended after {seconds:.0f} s"
        out.seek(0)
        text = out.read()
    if status:
        raise RuntimeError("\n".join([f"{' '.join(command)} {how}; its last lines:", *text.strip().splitlines()[-6:]]))
    return text


def step_times(text) -> list[float]:
    """Milliseconds of the steps that count, from what the program printed."""
    times = [float(ms) for number, loss, ms in STEP_LINE.findall(text) if int(number) > SETTLING]
    if not times:
        raise RuntimeError("\n".join(["it printed no step that counts; its last lines:", *text.strip().splitlines()[-6:]]))
    return times
