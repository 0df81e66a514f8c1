"""Eval files are read and written as llm.c does, and the score is that of a plain loop at any batch size and any split."""

import json
from pathlib import Path

import case_a
import numpy as np
import pytest

from llmc.data.evals import EvalLoader, Example, Row, completion_loss, likeliest, read_eval_file, write_eval_file
from llmc.data.shards import write_shard
from llmc.errors import UserError

T, V = 32, 96


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("evals") / "eval.bin"
    path.write_bytes(case_a.eval_bytes())
    return path


def fake_losses(inputs, targets):
    """A causal stand-in for a model: the loss at t depends on the inputs up to t and on the target, and on nothing else."""
    history = np.cumsum(inputs * (1 + np.arange(inputs.shape[1])), axis=1)
    return ((history * 31 + targets * 17) % 101 / 10).astype(np.float32)


def plain_score(examples, token_losses):
    """One completion at a time, the way the format's description reads."""
    correct = 0
    for example in examples:
        means = []
        for completion in example.completions:
            tokens = np.array([[*example.context, *completion]], dtype=np.int64)
            losses, total = token_losses(tokens[:, :-1], tokens[:, 1:])[0], np.float32(0)
            for loss in losses[len(example.context) - 1 :]:
                total += loss
            means.append(total / np.float32(len(completion)))
        correct += means.index(min(means)) == example.label
    return correct


@pytest.mark.parametrize("B", [1, 2, 3, 4, 8, 500])
def test_the_score_does_not_depend_on_the_batch_size(path, B):
    """Rows of one example straddle batches when 4 does not divide B, and llm.c refuses B < 4."""
    loader = EvalLoader(path, B, T, vocab_size=V)
    expected = plain_score(read_eval_file(path), fake_losses)
    assert 0 < expected < loader.num_examples == 50
    assert loader.evaluate(fake_losses) == expected
    assert loader.evaluate(fake_losses) == expected  # the second time in a run, too


@pytest.mark.parametrize("data_ranks", [1, 2, 3, 7, 64])
def test_ranks_share_the_work_and_make_the_same_number_of_calls(path, data_ranks):
    """llm.c's split, ceil(examples / processes) each; a rank with less to do still joins every call."""
    calls, correct = [], 0
    for rank in range(data_ranks):
        made = []
        loader = EvalLoader(path, 6, T, rank=rank, data_ranks=data_ranks, vocab_size=V)
        correct += loader.evaluate(lambda x, y, made=made: made.append(1) or fake_losses(x, y))
        calls.append(len(made))
    assert set(calls) == {loader.num_batches}
    assert correct == plain_score(read_eval_file(path), fake_losses)


def test_batches_hold_context_and_completion_with_targets_shifted_and_zeros_elsewhere(path):
    first, seen = read_eval_file(path)[0], []
    EvalLoader(path, 3, T, vocab_size=V).evaluate(lambda x, y: seen.append((x.copy(), y.copy())) or fake_losses(x, y))
    inputs, targets = seen[0]
    assert inputs.shape == targets.shape == (3, T) and inputs.dtype == targets.dtype == np.int64
    row = [*first.context, *first.completions[1]]
    assert inputs[1].tolist() == row + [0] * (T - len(row))
    assert targets[1].tolist() == row[1:] + [0] * (T - len(row) + 1)
    last_inputs, last_targets = seen[-1]  # 200 rows in batches of 3 leave one place
    assert last_inputs[2].tolist() == last_targets[2].tolist() == [0] * T and last_inputs[1].any()


def test_the_first_of_equal_losses_wins_and_nan_is_never_less():
    nan = float("nan")
    assert likeliest([2.0, 1.0, 1.0, 3.0]) == 1
    assert likeliest([2.0, nan, 1.0, 1.0]) == 2
    assert likeliest([nan, 1.0, 1.0, 1.0]) == 0


def test_losses_are_added_one_by_one_in_float32():
    """Where numpy's pairwise sum would differ."""
    losses = np.float32(0.1) + np.arange(1000, dtype=np.float32) / 7
    total = np.float32(0)
    for loss in losses:
        total += loss
    assert total != losses.sum()
    assert completion_loss(losses, Row(np.zeros(1001), 1)) == total / np.float32(1000)


def test_writing_what_was_read_gives_the_same_bytes(path, tmp_path):
    assert write_eval_file(tmp_path / "again.bin", read_eval_file(path)) == 50
    assert (tmp_path / "again.bin").read_bytes() == path.read_bytes()


def test_more_examples_than_the_format_can_number_are_refused(tmp_path):
    """Their number has 16 bits, and what begins an example may not be one."""
    example = Example(2, [5, 6], [[1], [2], [3], [4]])
    assert write_eval_file(tmp_path / "most.bin", [example] * 65535) == 65535
    with pytest.raises(UserError, match="example 65535 takes .* bytes; the eval format ends at 65535 examples"):
        write_eval_file(tmp_path / "more.bin", [example] * 65536)


def test_golden_score_belongs_to_this_file(path):
    golden = json.loads((Path(__file__).parent / "golden/eval_A.json").read_text())
    assert EvalLoader(path, 8, T, vocab_size=V).num_examples == golden["num_examples"]


def one_example(**changes):
    """The words of a valid file's only example, some of them replaced by place."""
    words = [65535, 0, 0, 2, 4, 2, 5, 6] + [1, 7] * 4
    words[1] = 2 * len(words)
    for place, word in changes.items():
        words[int(place[1:])] = word
    return words


@pytest.mark.parametrize(
    "words, count, message",
    [
        (one_example(w0=7), 1, "damaged at example 0: found delimiter 7 and index 0"),
        (one_example(w2=3), 1, "found delimiter 65535 and index 3"),
        (one_example(w3=4), 1, "example 0 has label 4, expected one from 0 to 3"),
        (one_example(w4=5), 1, "example 0 has 5 completions, expected 4"),
        (one_example(w5=99), 1, "example 0 has a context or completion that is empty or longer"),
        (one_example(w8=0), 1, "example 0 has a context or completion that is empty"),
        (one_example(w5=1), 1, "example 0 has a context or completion that is empty or longer"),
        (one_example(w1=4), 1, "example 0 has 0 completions"),
        (one_example(), 2, "cut short in example 1 of 2"),
        (one_example()[:-1], 1, "cut short in example 0 of 1"),
        (one_example() + [1], 1, "too long: 2 bytes follow its 1 examples"),
        (one_example(), 0, "says it holds 0 examples"),
        (one_example(w7=96), 1, "example 0 has token 96, outside the model's vocabulary of 96"),
        (one_example(w15=96), 1, "example 0 has token 96, outside the model's vocabulary of 96"),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(tmp_path, words, count, message):
    path = tmp_path / "bad.bin"
    path.write_bytes(case_a.header(20240522, 1, count, 32) + np.array(words, np.uint16).tobytes())
    with pytest.raises(UserError, match=message) as caught:
        EvalLoader(path, 4, T, vocab_size=V)
    assert str(path) in str(caught.value)


def test_half_a_word_at_the_end_is_too_long(tmp_path):
    path = tmp_path / "bad.bin"
    path.write_bytes(case_a.header(20240522, 1, 1, 32) + np.array(one_example(), np.uint16).tobytes() + b"x")
    with pytest.raises(UserError, match="too long: 1 bytes follow its 1 examples"):
        read_eval_file(path)


def test_files_of_another_kind_are_refused_by_name(tmp_path):
    write_shard(tmp_path / "shard.bin", [1, 2])
    with pytest.raises(UserError, match="is a token shard; expected an eval"):
        EvalLoader(tmp_path / "shard.bin", 4, T, vocab_size=V)
    (tmp_path / "later.bin").write_bytes(case_a.header(20240522, 2, 1, 32) + np.array(one_example(), np.uint16).tobytes())
    with pytest.raises(UserError, match="later.bin is an eval file of version 2, expected 1"):
        EvalLoader(tmp_path / "later.bin", 4, T, vocab_size=V)
    with pytest.raises(UserError, match="gone.bin does not exist"):
        EvalLoader(tmp_path / "gone.bin", 4, T, vocab_size=V)


def test_an_example_longer_than_a_row_says_what_would_fit(path):
    longest = max(len(e.context) + len(c) for e in read_eval_file(path) for c in e.completions)
    EvalLoader(path, 4, longest, vocab_size=V)
    with pytest.raises(UserError, match=rf"tokens and a row has -t {longest - 1}; choose a -t of {longest} or more, or -h 0"):
        EvalLoader(path, 4, longest - 1, vocab_size=V)


def test_what_the_format_cannot_hold_is_not_written(tmp_path):
    long = Example(0, np.zeros(40_000, np.uint16), (np.zeros(1, np.uint16),) * 4)
    with pytest.raises(UserError, match="example 0 takes 80028 bytes"):
        write_eval_file(tmp_path / "x.bin", [long])
    size = 65536 // 2 - len(one_example()) + 2  # tokens of a context with which an example takes one word too many
    with pytest.raises(UserError, match="example 0 takes 65536 bytes"):
        write_eval_file(tmp_path / "x.bin", [Example(2, [5] * size, [[7]] * 4)])
    with pytest.raises(UserError, match="no examples"):
        write_eval_file(tmp_path / "x.bin", [])
    assert not list(tmp_path.iterdir())
