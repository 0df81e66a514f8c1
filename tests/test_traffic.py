"""What a step sends on paper, to the byte: counted where a real model asks for collectives, and in real runs of 2 and 4 ranks."""

import json
import pickle
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import sent_program
from forked import Program
from sent_program import Counting, sent_by

from llmc.config import ModelConfig, config_from_descriptor
from llmc.kernels_cpu import why_no_cpu_kernels
from llmc.memory.ladder import NOT_KEPT, segments
from llmc.memory.options import PlanOptions
from llmc.memory.slots import LAYER_SLOTS
from llmc.memory.tables import num_parameters
from llmc.memory.traffic import PURPOSES, Links, Sent, ring, step_traffic
from llmc.memory.tuning import RANK_NUMBERS

# 4 heads of 16; the last part of a vocabulary is padding
CONFIG = ModelConfig(max_seq_len=16, vocab_size=61, num_layers=3, num_heads=4, channels=64, padded_vocab_size=64)
# heads and vocabulary as odd as ranks: 3 of them, or 3 x 5
ODD = ModelConfig(max_seq_len=15, vocab_size=70, num_layers=2, num_heads=3, channels=45, padded_vocab_size=75)
pytestmark = pytest.mark.usefixtures("plain_torch")
LEVELS = tuple(NOT_KEPT)
needs_numba = pytest.mark.skipif(bool(why_no_cpu_kernels()), reason="tensor parallelism needs numba on a CPU")


def case(ranks=1, parts=1, stage=0, *, layers=3, level=1, keep=False, config=CONFIG, precision="fp32", B=2, **forms) -> PlanOptions:
    """Of `ranks` in all, which form models of so many parts. Logits come in chunks, the last of which is smaller."""
    return PlanOptions(
        replace(config, num_layers=layers), B, config.max_seq_len, precision=precision, recompute=level, head_chunk=12, sample_length=4,
        data_ranks=ranks // parts, zero_stage=stage, tensor_parallel=parts, keep_gathered=keep, kernels="numba" if parts > 1 else "torch",
        **forms,
    )  # fmt: skip


def counted(o, micro_steps=1) -> Counter:
    """(among, kind) -> bytes that a step of a real model asks to send. test_real_ranks_send_what_is_planned has those that compute."""
    data, parts = Counting(o.data_ranks), Counting(o.tensor_parallel)
    return flat(sent_by(o, micro_steps, data, parts, data if o.tensor_parallel == 1 else Counting(o.ranks), computes=False))


def flat(sent: dict) -> Counter:
    return Counter({(among, kind): n_bytes for among, kinds in sent.items() for kind, n_bytes in kinds.items() if n_bytes})


def planned(o, micro_steps=1) -> Counter:
    """The same, on paper. Where there are no parts, all ranks are those with the same part."""
    sent = Counter()
    for one in step_traffic(o, micro_steps):
        sent["data" if o.tensor_parallel == 1 else one.among, one.kind] += one.bytes
    return sent


# ----------------------------------------------------------------------------
# bytes


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("layers", [1, 2, 3, 5, 7])
def test_zero_sends_what_is_planned(stage, layers):
    """At every level, as -r 6 needs weights again; the third micro-step and those after it send what the second does."""
    for level, micro_steps, ranks in product(LEVELS, (1, 2, 4), (2, 4)):
        o = case(ranks, stage=stage, layers=layers, level=level)
        assert planned(o, micro_steps) == counted(o, micro_steps), (level, micro_steps, ranks)
    o = case(4, stage=stage, layers=layers, reduce_every_micro_step=True, step_sequences=6)
    assert planned(o, 3) == counted(o, 3)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("ranks", [2, 64])
def test_zero_sends_what_is_planned_in_every_type(stage, ranks):
    for forms in ({"precision": "bf16"}, {"precision": "bf16", "grad_dtype": "fp32"}, {"precision": "bf16", "optimizer_state": "bf16"}):
        for micro_steps in (1, 3):
            o = case(ranks, stage=stage, **forms)
            assert planned(o, micro_steps) == counted(o, micro_steps), forms


@pytest.mark.parametrize("ranks", [3, 5, 1000])
def test_ranks_that_divide_nothing_sum_whole_tensors(ranks):
    """Each sends what a ring of equal shares would, less the remainder."""
    o = case(ranks)
    assert not o.shares and planned(o, 2) == counted(o, 2)
    assert {one.kind for one in step_traffic(o) if one.purpose != "loss and norm"} == {"all-reduce"}


@needs_numba
@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_parts_send_what_is_planned(parts, layers):
    """At every level, gathering again in backward and not."""
    for level, keep in [*((level, False) for level in LEVELS), (0, True), (1, True)]:
        for micro_steps, precision in ((1, "fp32"), (2, "bf16")):
            o = case(parts, parts, layers=layers, level=level, keep=keep, precision=precision)
            assert planned(o, micro_steps) == counted(o, micro_steps), (level, keep, micro_steps)


@needs_numba
@pytest.mark.parametrize("ranks, parts", [(4, 2), (8, 4), (16, 2)])
@pytest.mark.parametrize("stage", range(4))
def test_parts_of_a_sharded_model_send_what_is_planned(ranks, parts, stage):
    for level, micro_steps, precision in product((1, 3, 6), (1, 3), ("fp32", "bf16")):
        o = case(ranks, parts, stage, level=level, precision=precision, layers=5)
        assert planned(o, micro_steps) == counted(o, micro_steps), (level, micro_steps, precision)


@needs_numba
def test_odd_sizes_send_what_is_planned():
    """3 heads and 75 rows of vocabulary in 3 parts, of 5 copies or 4; a head whose chunks are one row of each part."""
    for ranks, stage, B in product((3, 15, 12), range(4), (1, 3)):
        if stage and ranks != 15:
            continue
        o = replace(case(ranks, 3, stage, config=ODD, layers=2, B=B, level=4), head_chunk=3)
        assert planned(o, 2) == counted(o, 2), (ranks, stage, B)


@needs_numba
@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_send_what_is_planned(ranks, tmp_path):
    """Over gloo, in processes of their own: every stage, every number of parts, both settings, all levels, one and two micro-steps."""
    cases = [(case(ranks, stage=stage, level=level), 2) for stage, level in zip(range(4), (0, 2, 4, 6))]
    cases += [(case(ranks, 2, level=level, precision="bf16", layers=2), 1) for level in (3, 4, 5)]
    cases += [(case(ranks, 2, level=1, keep=True), 2), (case(ranks, ranks, level=6, layers=5), 1)]
    cases += [(case(ranks, 2, stage, precision="bf16"), 2) for stage in (1, 2, 3) if ranks == 4]
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    processes = [Program(sent_program.main, [rank, ranks, tmp_path / "store", tmp_path / "cases"]) for rank in range(ranks)]
    try:
        said = [process.communicate() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(err for _, err in said)
    for (o, micro_steps), sent in zip(cases, json.loads(said[0][0]), strict=True):
        assert planned(o, micro_steps) == flat(sent) == counted(o, micro_steps), o


# ----------------------------------------------------------------------------
# by hand


def purposes(o, micro_steps=1) -> Counter:
    sent = Counter()
    for one in step_traffic(o, micro_steps):
        sent[one.purpose] += one.bytes
    return sent


def test_alone_nothing_is_sent():
    assert step_traffic(case()) == ()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_stages_0_to_2_send_each_parameter_twice(stage):
    """The gradient's sum, and either the rest of it or the weights: 2 n (N-1)/N, as the ZeRO paper counts (arXiv 1910.02054, 7.1)."""
    o = case(8, stage=stage)
    of_model = sum(one.bytes for one in step_traffic(o) if one.purpose != "loss and norm")
    assert of_model == 2 * 4 * num_parameters(o.config) * 7 // 8


@pytest.mark.parametrize("layers", [1, 2, 3, 12])
def test_stage_3_gathers_each_layer_forward_and_backward_but_the_last_two_once(layers):
    """They are still in their slots when backward begins; what belongs to no layer stays until the head's gradient is there."""
    o = case(8, stage=3, layers=layers, level=1)
    layer, n = 4 * o.layer_elements, 4 * num_parameters(o.config)
    sent = purposes(o)
    assert sent["weights outside layers"] == (n - layers * layer) * 7 // 8
    assert sent["weights of layers"] == (layers + max(0, layers - LAYER_SLOTS)) * layer * 7 // 8


def test_stages_2_and_3_sum_every_micro_step_the_others_the_last():
    for stage, times in ((0, 1), (1, 1), (2, 5), (3, 5)):
        once, five = (purposes(case(4, stage=stage), micro_steps) for micro_steps in (1, 5))
        assert five["gradients of layers"] == times * once["gradients of layers"]
        assert five["gradients of the embedding"] == times * once["gradients of the embedding"]
        assert five["weights of layers"] == once["weights of layers"] or stage == 3


@pytest.mark.parametrize("level, keep, passes", [
    (0, False, 10), (0, True, 8), (1, True, 8), (2, False, 10), (3, False, 11), (4, False, 11), (5, False, 13),
])  # fmt: skip
def test_a_layer_of_parts_gathers_and_sums_so_often(level, keep, passes):
    """Forward gathers 2 and sums 2. Backward gathers dresidual for fcproj, ln2, dresidual for attproj and ln1, and sums for ln2 and ln1.

    Kept rows are 2 less. An fc that runs again gathers ln2 once more, over which dresidual is gathered. The ln1 of -r 4's qkv is still
    there for its gradient; that of -r 5 is not, and attproj's sum comes again.
    """
    few, more = (purposes(case(4, 4, layers=layers, level=level, keep=keep)) for layers in (2, 3))
    assert sum((more - few)[name] for name in ("rows for matmuls", "sums of matmuls")) == passes * ring(2 * 16 * 64 * 4, 4)


def test_what_runs_again_in_segments_is_gathered_again():
    """-r 6 of 12 layers runs some forward again; each needs its weights once more, and of parts 2 gathers and 2 sums."""
    s = segments(6, 12)
    again = sum(map(len, s.again))
    assert again > 0
    rows = [purposes(case(4, 4, layers=12, level=level)) for level in (5, 6)]
    more = rows[1] - rows[0]
    assert more == {"rows for matmuls": 2 * again * ring(8192, 4), "sums of matmuls": 2 * again * ring(8192, 4)}
    fetched = [purposes(case(4, stage=3, layers=12, level=level))["weights of layers"] for level in (5, 6)]
    assert fetched[1] > fetched[0]


def test_every_purpose_is_known_and_said_once():
    o = case(16, 4, 3)
    sent = step_traffic(o, 2)
    assert len({(one.purpose, one.kind) for one in sent}) == len(sent)
    assert {one.purpose for one in sent} == set(PURPOSES)
    assert [one for one in sent if one.among == "all"] == [Sent("loss and norm", "all-gather", 15 * RANK_NUMBERS * 4)]


# ----------------------------------------------------------------------------
# time


def test_time_is_bits_over_speed():
    """1e9 bytes are 8 Gbit: 20 ms at 400."""
    o, sent = case(1024), Sent("gradients of layers", "reduce-scatter", 10**9)
    assert Links(400.0).ms(o, sent) == pytest.approx(20.0)
    assert Links().ms(o, sent) is None


@pytest.mark.parametrize("ranks, parts, machine, data, inside", [
    (1024, 8, 8, 400, 7200),   # a copy of the model in a machine; of each part one there
    (1024, 1, 8, 3200, None),  # all 8 ranks of a machine are in the one ring, which leaves it once, over 8 ports
    (1024, 2, 8, 1600, 7200),
    (8, 2, 8, 7200, 7200),     # one machine
    (4, 1, 8, 7200, None),     # a part of one
    (4, 2, 8, 7200, 7200),
    (64, 16, 8, 400, 3200),    # a copy in two machines
    (64, 4, 32, 3200, 7200),
    (60, 6, 8, 400, 800),      # of a copy 2 ranks in one machine and 4 in the next: over 2 ports
    (1024, 1, 32, 7200, None),  # 32 ports are more than what a rank sends inside
])  # fmt: skip
def test_a_ring_is_as_fast_as_its_way_between_machines(ranks, parts, machine, data, inside):
    o, links = case(ranks, parts), Links(400.0, 7200.0, machine)
    assert links.gbit_s(o, "data") == data
    if inside:
        assert links.gbit_s(o, "parts") == inside
    assert {Links(400.0).gbit_s(o, among) for among in ("data", "parts", "all")} == {400.0}


def test_a_thousand_ranks_are_as_quick_to_plan_as_two():
    """Only the counts depend on them, and micro-steps are not walked one by one."""
    o = PlanOptions(
        config_from_descriptor("gpt3:c12288"), 1, 2048, device="cuda", data_ranks=128, zero_stage=3, tensor_parallel=8, recompute=6
    )
    few, more, most = (purposes(o, micro_steps)["weights of layers"] for micro_steps in (2, 3, 10**6))
    assert most - few == (more - few) * (10**6 - 2)
