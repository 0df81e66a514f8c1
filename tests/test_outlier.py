"""Z-scores repeat llm.c's; a value taken back, or a state carried through JSON, leaves no trace."""

import json
import math
from pathlib import Path

import pytest

from llmc.errors import UserError
from llmc.outlier import WINDOW_SIZE, OutlierDetector

GOLDEN = json.loads((Path(__file__).parent / "golden/outlier_99.json").read_text())["z"]
MASK = 2**64 - 1


def values(count=200, state=99, outlier=150):
    """xorshift* floats in [0, 1), the one numbered `outlier` 5 higher."""
    drawn = []
    for i in range(count):
        state ^= state >> 12
        state = (state ^ (state << 25)) & MASK
        state ^= state >> 27
        u32 = (state * 0x2545F4914F6CDD1D & MASK) >> 32
        drawn.append((u32 >> 8) / 2**24 + (5 if i == outlier else 0))
    return drawn


def after(xs):
    detector = OutlierDetector()
    scores = [detector.update(x) for x in xs]
    return detector, scores


def test_scores_are_llmc_s_and_nan_until_the_window_is_full():
    _, scores = after(values())
    assert all(math.isnan(z) for z in scores[:WINDOW_SIZE])
    assert scores[WINDOW_SIZE:] == pytest.approx(GOLDEN, abs=1e-9)


def test_sums_are_updated_in_llmc_s_order_to_the_bit():
    """Recomputed ones would differ in the last digits."""
    xs = values()
    total, total_sq = 0.0, 0.0
    for i, x in enumerate(xs):
        if i >= WINDOW_SIZE:
            total -= xs[i - WINDOW_SIZE]
            total_sq -= xs[i - WINDOW_SIZE] ** 2
        total += x
        total_sq += x * x
    state = after(xs)[0].state()
    assert (state["sum"], state["sum_sq"]) == (total.hex(), total_sq.hex())


@pytest.mark.parametrize("count", (0, 1, WINDOW_SIZE - 1, WINDOW_SIZE, WINDOW_SIZE + 1, 199))
@pytest.mark.parametrize("x", (0.1, 1e30, math.nan, math.inf))
def test_an_undone_value_leaves_the_state_bitwise_as_it_was(count, x):
    detector, _ = after(values()[:count])
    before = detector.state()
    detector.update(x)
    detector.undo()
    assert detector.state() == before


def test_skipped_updates_stay_out_of_the_window():
    """Scores after an undone outlier are those of a run that never saw it."""
    xs = values()
    without, expected = after(xs[:150] + xs[151:])
    detector, scores = OutlierDetector(), []
    for x in xs:
        z = detector.update(x)
        if z > 7:
            detector.undo()
        else:
            scores.append(z)
    assert len(scores) == 199 and str(scores) == str(expected) and detector.state() == without.state()


def test_only_the_last_update_can_be_undone():
    detector, _ = after([1.0, 2.0])
    detector.undo()
    with pytest.raises(AssertionError):
        detector.undo()


def test_a_nan_does_not_poison_the_scores_after_it():
    xs = values()
    _, expected = after(xs)
    _, scores = after(xs[:140] + [math.nan, -math.inf] + xs[140:])
    assert math.isnan(scores[140]) and math.isnan(scores[141]) and scores[142:] == expected[140:]


@pytest.mark.parametrize("huge", [[1e4], [3e6], [1e9, 1e5], [1e5, 1e9], [1e8, -1e8], [1e30, 1e15, 1e6], [1e200, 1e200]], ids=str)
def test_huge_values_do_not_spoil_the_scores_after_they_left(huge):
    """In sums that are only updated their squares would leave digits of rounding, more than all the others are together."""
    xs = [3 + 0.02 * x for x in values()]
    _, expected = after(xs)
    detector, scores = after(huge + xs)
    assert scores[len(huge) + WINDOW_SIZE :] == pytest.approx(expected[WINDOW_SIZE:], rel=1e-4, abs=1e-4)
    resumed = OutlierDetector()
    resumed.restore(json.loads(json.dumps(detector.state())))
    assert resumed.state() == detector.state()


@pytest.mark.parametrize("constant", (0.0, 3.3, 1e8 + 0.1))
def test_values_that_never_vary_score_zero(constant):
    _, scores = after([constant] * 300)
    assert scores[WINDOW_SIZE:] == [0.0] * (300 - WINDOW_SIZE)


@pytest.mark.parametrize("count", (0, 1, 128, 170))
def test_a_detector_restored_from_json_goes_on_to_the_bit(count):
    xs = values()
    detector, _ = after(xs[:count])
    restored = OutlierDetector()
    restored.restore(json.loads(json.dumps(detector.state())))
    assert str([restored.update(x) for x in xs[count:]]) == str([detector.update(x) for x in xs[count:]])
    assert restored.state() == detector.state()


def test_a_restored_detector_knows_how_large_its_sums_have_been():
    """What a large value left in them shows only when all others are small: that is when they must be recomputed."""
    detector, _ = after([1e4] + [3 + x for x in values()])
    restored = OutlierDetector()
    restored.restore(json.loads(json.dumps(detector.state())))
    small = [x / 1000 for x in values()]
    assert [restored.update(x) for x in small] == [detector.update(x) for x in small]


def test_values_that_are_no_numbers_are_counted_in_a_row_undone_or_not():
    detector, lost = OutlierDetector(), []
    for x in (1.0, math.nan, math.inf, 2.0, -math.inf):
        detector.update(x)
        detector.undo()
        lost.append(detector.lost)
    assert lost == [0, 1, 2, 0, 1]


def test_a_checkpoint_without_the_largest_sum_goes_on_from_what_it_has():
    """As those of earlier versions are."""
    detector, _ = after(values())
    state = detector.state()
    del state["largest"]
    restored = OutlierDetector()
    restored.restore(state)
    assert restored.state() == state | {"largest": state["sum_sq"]}


@pytest.mark.parametrize(
    "damage",
    [
        {"window": ["0x1p+0"] * 129},
        {"window": ["x"]},
        {"window": [1.0]},
        {"window": None},
        {"index": 5},
        {"index": "0"},
        {"sum": None},
        {"sum_sq": "0x1p+99999"},
    ],  # fmt: skip
)
def test_a_damaged_state_is_refused_by_name(damage):
    detector, _ = after([1.0])
    with pytest.raises(UserError, match="sidecar.json"):
        OutlierDetector().restore({**detector.state(), **damage}, "sidecar.json")
    with pytest.raises(UserError):
        OutlierDetector().restore({})
