"""A run that goes on with other batches, processes or shards finishes its epoch: no input twice, none skipped but a stated tail.

Tokens are numbered through all shards, so a served token says which place of which shard it is.
"""

import base64
import random
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from case_a import restore

from llmc.checkpoint.extra_file import NO_FILE, Extra, read_extra, write_extra
from llmc.checkpoint.state_file import TrainingState, read_facts, write_state
from llmc.data.loader import TokenLoader
from llmc.data.remainder import Geometry, Remainder, count_inputs, merged, pack, unpack
from llmc.data.resume import on_other_shards, plan_resume
from llmc.data.shards import write_shard
from llmc.errors import UserError


class Shards:
    """A folder of shards in which every token of every shard ever added is another number."""

    def __init__(self, folder: Path, sizes):
        self.folder, self.next, self.tokens = folder, 0, {}
        folder.mkdir(exist_ok=True)
        for i, size in enumerate(sizes):
            self.add(f"s_{i}.bin", size)

    def add(self, name: str, size: int):
        self.tokens[name] = range(self.next, self.next + size)
        self.next += size
        assert self.next <= 65536
        write_shard(self.folder / name, np.array(self.tokens[name]))

    def remove(self, name: str) -> set[int]:
        (self.folder / name).unlink()
        return set(self.tokens.pop(name))

    def inputs(self) -> set[int]:
        """Every place that has a target."""
        return {token for tokens in self.tokens.values() for token in tokens[:-1]}

    def loaders(self, B, T, data_ranks, shuffle=True) -> list[TokenLoader]:
        pattern = str(self.folder / "*.bin")
        return [TokenLoader(pattern, B, T, rank=r, data_ranks=data_ranks, shuffle=shuffle) for r in range(data_ranks)]

    def samples(self, B, T, data_ranks) -> int:
        """Micro-steps of an ordinary epoch."""
        return sum((len(tokens) - 1) // (B * T * data_ranks) for tokens in self.tokens.values())


@pytest.fixture
def shards(tmp_path):
    return Shards(tmp_path / "data", (1801, 700, 1213))


def served(loader) -> list[int]:
    """The next batch's inputs, after its targets were found to be the tokens that follow them."""
    inputs, targets = loader.next_batch()
    for x in (inputs, targets):
        assert x.shape == (loader.geometry.B, loader.geometry.T) and x.dtype == np.int64 and x.flags.c_contiguous
    assert np.array_equal(targets, inputs + 1)
    return inputs.ravel().tolist()


def saved(loaders, folder: Path):
    """States and extras of a checkpoint of these ranks, as they come out of its files."""
    states, extras = [], []
    for rank, loader in enumerate(loaders):
        state = TrainingState(3, len(loaders), rank, False, 1, 1, loader.state())
        write_state(folder / "state.bin", state, [np.zeros(8, np.uint8)], 1)
        write_extra(folder / "extra.json", Extra({}, {}, B=loader.geometry.B, T=loader.geometry.T, data=loader.data_state()))
        states.append(read_facts(folder / "state.bin", 1).loader)
        extras.append(read_extra(folder / "extra.json"))
    return states, extras


def go_on(loaders, states, extras):
    """All ranks resume; what each was told, after it was found to be the same for all but for the place and the seed."""
    plans = [plan_resume(states, extras, geometry=x.geometry, rank=x.rank, shards=x.shards) for x in loaders]
    for loader, plan in zip(loaders, plans):
        loader.go_on(plan)
        assert (plan.notes, plan.served, plan.remainder is None) == (plans[0].notes, plans[0].served, plans[0].remainder is None)
    assert plans[0].state or not plans[0].should_shuffle or len({plan.seed for plan in plans}) == len(plans)
    return plans[0]


def resumed(shards, geometry, states, extras):
    """Loaders of the geometry that have gone on, and how."""
    loaders = shards.loaders(*geometry)
    return loaders, go_on(loaders, states, extras)


def batches(loaders, count):
    return [[served(loader) for loader in loaders] for _ in range(count)]


def assert_an_ordinary_epoch(shards, loaders, geometry):
    """Every sample of every shard once, in the geometry's own cut."""
    B, T, N = geometry
    found = sorted(token for step in batches(loaders, shards.samples(*geometry)) for batch in step for token in batch)
    cut = [tokens[: (len(tokens) - 1) // (B * T * N) * B * T * N] for tokens in shards.tokens.values()]
    assert found == sorted(token for tokens in cut for token in tokens)


def random_geometry(chance) -> tuple[int, int, int]:
    return chance.randint(1, 4), chance.choice([1, 5, 8, 13, 32, 40]), chance.randint(1, 4)


@pytest.mark.parametrize("seed", range(60))
def test_through_any_changes_every_input_of_an_epoch_is_served_once(tmp_path, seed):
    """Chains of up to five runs over random shards, some with nothing changed, each stopped anywhere: at once, in a remainder, at its
    end, epochs later. What is missing when an epoch ends is what was said to be dropped."""
    chance = random.Random(seed)
    shards = Shards(tmp_path / "data", [chance.randint(4 * 4 * 40 + 1, 1500) for _ in range(chance.randint(1, 5))])
    geometry = random_geometry(chance)
    loaders, dropped = shards.loaders(*geometry), None
    epoch, remaining, into = set(), 0, 0  # inputs served in this epoch; batches left of its remainder; batches into an ordinary one

    def serve(steps):
        nonlocal remaining, into
        per_epoch = shards.samples(*geometry)
        for _ in range(steps):
            if remaining:
                remaining -= 1
            else:
                if into % per_epoch == 0:
                    cut = sum((len(tokens) - 1) % np.prod(geometry) for tokens in shards.tokens.values())
                    assert not epoch or len(shards.inputs() - epoch) == (cut if into else dropped)
                    epoch.clear()
                into += 1
            batch = [token for loader in loaders for token in served(loader)]
            assert len(set(batch)) == len(batch) and not epoch & set(batch), "an input was served twice"
            epoch.update(batch)

    for _ in range(chance.randint(2, 5)):
        per_epoch = shards.samples(*geometry)
        serve(chance.choice([0, 1, remaining, chance.randint(0, remaining), remaining + chance.randint(0, 2 * per_epoch)]))
        states, extras = saved(loaders, tmp_path)
        geometry = chance.choice([geometry, *(random_geometry(chance) for _ in range(3))])
        loaders, plan = resumed(shards, geometry, states, extras)
        into = into if plan.state else 0
        if plan.remainder:
            remaining, dropped = plan.remainder.num_samples - plan.served, plan.remainder.num_dropped
            assert len(shards.inputs() - epoch) == remaining * np.prod(geometry) + dropped and dropped < np.prod(geometry)
        elif not plan.state:  # less than a batch was left, so the next epoch has begun
            assert len(shards.inputs() - epoch) < np.prod(geometry)
            remaining = 0
            epoch.clear()
    per_epoch = shards.samples(*geometry)
    serve(remaining + (per_epoch if remaining or not into else -into % per_epoch))
    assert_an_ordinary_epoch(shards, loaders, geometry)


@pytest.mark.parametrize("stop", [0, 1, 17, 33, 34, 35, 60, 77, 78, 80])
def test_stops_at_the_ends_of_shards_and_of_the_epoch_leave_what_they_should(shards, tmp_path, stop):
    """-b 2 -t 8 on 3: shards of 37, 14 and 25 samples, an epoch of 76; 77 is one batch into the next, 76 would leave but three tails."""
    old = shards.loaders(2, 8, 3)
    assert shards.samples(2, 8, 3) == 76
    steps = batches(old, stop)
    done = {token for step in (steps[76:] or steps) for batch in step for token in batch}
    loaders, plan = resumed(shards, (3, 7, 2), *saved(old, tmp_path))
    assert plan.remainder.num_inputs == len(shards.inputs() - done) and plan.state is None and plan.served == 0
    left = plan.remainder.num_inputs
    assert plan.notes == (
        f"resuming with -b 3 -t 7 on 2 data-parallel ranks, after -b 2 -t 8 on 3 data-parallel ranks: {left:,} tokens of this epoch "
        f"are left, {left // 42:,} batches for each rank; {left % 42} make no whole batch and are dropped",
    )
    found = {token for step in batches(loaders, left // 42) for batch in step for token in batch}
    assert not found & done and len(found) == left // 42 * 42


def test_at_the_end_of_an_epoch_the_tails_alone_are_left(shards, tmp_path):
    """They are served where they make a batch; else the next epoch begins at once, and the note says so."""
    old = shards.loaders(2, 8, 3)
    done = {token for step in batches(old, 76) for batch in step for token in batch}
    tails = shards.inputs() - done
    assert len(tails) == 24 + 27 + 12
    checkpoint = saved(old, tmp_path)
    (loader,), plan = resumed(shards, (1, 21, 1), *checkpoint)
    assert {token for _ in range(3) for token in served(loader)} == tails and plan.remainder.num_dropped == 0
    assert "dropped" not in plan.notes[0]
    assert_an_ordinary_epoch(shards, [loader], (1, 21, 1))
    loaders, plan = resumed(shards, (8, 8, 1), *checkpoint)
    says = ": 63 tokens of this epoch are left, fewer than a batch takes; the next epoch begins"
    assert plan.remainder is None and plan.notes[0].endswith(says)
    assert "remainder" not in loaders[0].data_state()
    assert_an_ordinary_epoch(shards, loaders, (8, 8, 1))


def test_a_remainder_is_rows_of_neighbours_and_then_rows_of_fragments(tmp_path):
    """By hand: of a shard of 101, inputs 0..9 and 20..49 are left; rows of 8 are 0..7, 20..27, .. 36..43, then 8 9 44..49."""
    remainder = Remainder(np.array([[0, 10], [20, 50]]), Geometry(1, 8, 1))
    assert (remainder.num_inputs, remainder.num_samples, remainder.num_dropped) == (40, 5, 0)
    rows = [remainder.batch(0, sample).tolist() for sample in range(5)]
    assert rows == [[[0, 8]], [[20, 28]], [[28, 36]], [[36, 44]], [[8, 10], [44, 50]]]
    assert sorted(remainder.order(0)) == [0, 1, 2, 3, 4]
    two = Remainder(np.array([[0, 10], [20, 50]]), Geometry(1, 8, 2))
    assert (two.num_samples, two.num_dropped) == (2, 8)
    assert [two.batch(rank, sample).tolist() for sample in range(2) for rank in range(2)] == rows[:4]
    assert two.left(2).tolist() == [[8, 10], [44, 50]] and two.left(0).tolist() == [[0, 10], [20, 50]]


def test_ranks_go_through_the_samples_in_orders_of_their_own():
    """As in an ordinary epoch: so a step's batches come from many places, not from one."""
    remainder = Remainder(np.array([[0, 4000]]), Geometry(2, 10, 2))
    orders = [remainder.order(rank).tolist() for rank in range(2)]
    assert orders[0] != orders[1] and all(sorted(order) == list(range(100)) != order for order in orders)
    assert orders == [Remainder(np.array([[7, 4007]]), Geometry(2, 10, 2)).order(rank).tolist() for rank in range(2)]


# ----------------------------------------------------------------------------
# nothing changed


def state_of(loader):
    return [x.tolist() if isinstance(x, np.ndarray) else x for x in map(loader.state().__getattribute__, loader.state().__slots__)]


@pytest.mark.parametrize("stop", [0, 1, 40, 76, 77, 90])
def test_where_nothing_changed_the_loader_is_the_one_that_never_stopped(shards, tmp_path, stop):
    old = shards.loaders(2, 8, 3)
    batches(old, stop)
    states, extras = saved(old, tmp_path)
    loaders, plan = resumed(shards, (2, 8, 3), states, extras)
    assert plan.remainder is None and plan.notes == () and plan.state is states[0]
    assert batches(loaders, 200) == batches(old, 200)
    assert [*map(state_of, loaders)] == [*map(state_of, old)] and loaders[0].data_state() == old[0].data_state()


def test_a_remainder_stopped_anywhere_goes_on_to_the_bit(shards, tmp_path):
    """At its start, within, at its end and in the epochs after: the same batches, and the same states at the end."""
    old = shards.loaders(2, 8, 3)
    batches(old, 30)
    checkpoint = saved(old, tmp_path)
    straight, plan = resumed(shards, (1, 13, 2), *checkpoint)
    count = plan.remainder.num_samples
    per_epoch = shards.samples(1, 13, 2)
    expected = batches(straight, count + 2 * per_epoch)
    for stop in (0, 1, count // 2, count - 1, count, count + 1, count + per_epoch, count + per_epoch + 1):
        stopped, _ = resumed(shards, (1, 13, 2), *checkpoint)
        assert batches(stopped, stop) == expected[:stop]
        again, plan = resumed(shards, (1, 13, 2), *saved(stopped, tmp_path))
        assert plan.notes == () and (plan.served == stop if stop <= count else plan.remainder is None)
        assert batches(again, len(expected) - stop) == expected[stop:]
        assert [*map(state_of, again)] == [*map(state_of, straight)]


def test_in_a_remainder_the_state_is_the_start_of_the_epoch_that_follows(shards, tmp_path):
    """So whoever knows of no remainder, llm.c for one, begins the next epoch: the one that the run itself begins after it."""
    old = shards.loaders(2, 8, 3)
    batches(old, 30)
    loaders, plan = resumed(shards, (1, 13, 2), *saved(old, tmp_path))
    batches(loaders, 5)
    state = loaders[1].state()
    assert (state.current_shard_idx, state.current_sample_idx) == (0, 0)
    other = shards.loaders(1, 13, 2)[1]
    restore(other, state)
    batches(loaders, plan.remainder.num_samples - 5)
    assert [served(other) for _ in range(300)] == [served(loaders[1]) for _ in range(300)]


def test_epochs_after_a_change_are_in_orders_not_seen_before(shards, tmp_path):
    """Back and forth between two geometries, one change in each epoch: every epoch's order is another."""
    seen, checkpoint = [], None
    for geometry in ((2, 8, 1), (1, 32, 1), (2, 8, 1), (1, 32, 1), (2, 8, 1)):
        (loader,) = shards.loaders(*geometry)
        if checkpoint:
            plan = go_on([loader], *checkpoint)
            batches([loader], plan.remainder.num_samples)
        seen.append([served(loader)[0] for _ in range(20)])
        checkpoint = saved([loader], tmp_path)
    assert len({tuple(order) for order in seen}) == 5


def test_token_order_is_of_the_batch_that_was_served(shards, tmp_path):
    """In a remainder too, and of the epoch's first batch after it."""
    old = shards.loaders(2, 8, 3)
    batches(old, 74)
    (loader,), plan = resumed(shards, (2, 13, 1), *saved(old, tmp_path))
    for _ in range(plan.remainder.num_samples + 1):
        inputs = served(loader)
        order = loader.token_order()
        assert np.array_equal(np.asarray(inputs)[order.positions], np.sort(inputs))


# ----------------------------------------------------------------------------
# other shards


def test_a_shard_that_is_gone_takes_its_rest_with_it_and_a_new_one_is_left_as_a_whole(shards, tmp_path):
    old = shards.loaders(2, 8, 2)
    done = {token for step in batches(old, 50) for batch in step for token in batch}
    states, extras = saved(old, tmp_path)
    gone = shards.remove("s_1.bin")
    shards.add("a_new.bin", 333)  # sorts before the others, so every shard has another place
    loaders, plan = resumed(shards, (2, 8, 2), states, extras)
    lost = len(gone - done) - 1
    first, *notes = plan.notes
    assert first.startswith("resuming with other training files: ") and notes == [
        "note: a_new.bin is new: its 332 tokens belong to what is left of this epoch",
        f"note: s_1.bin is gone: {lost} tokens of it were left and are not trained on",
    ]
    found = [token for step in batches(loaders, plan.remainder.num_samples) for batch in step for token in batch]
    assert len(set(found)) == len(found) and not done & set(found)
    missing = shards.inputs() - done - set(found)
    assert len(missing) == plan.remainder.num_dropped < 32
    # and again in the middle of that remainder
    loaders, plan = resumed(shards, (2, 8, 2), states, extras)
    done |= {token for step in batches(loaders, 20) for batch in step for token in batch}
    states, extras = saved(loaders, tmp_path)
    shards.remove("a_new.bin")
    shards.add("z_new.bin", 250)
    loaders, plan = resumed(shards, (3, 5, 1), states, extras)
    found = [token for step in batches(loaders, plan.remainder.num_samples) for batch in step for token in batch]
    assert len(set(found)) == len(found) and not done & set(found)
    assert len(shards.inputs() - done - set(found)) == plan.remainder.num_dropped < 15


def test_all_shards_may_be_others(shards, tmp_path):
    old = shards.loaders(2, 8, 1)
    batches(old, 50)
    checkpoint = saved(old, tmp_path)
    for name in list(shards.tokens):
        shards.remove(name)
    shards.add("t.bin", 500)
    (loader,), plan = resumed(shards, (2, 8, 1), *checkpoint)
    found = {token for step in batches([loader], 499 // 16) for batch in step for token in batch}
    assert len(found) == 496 and len(plan.notes) == 5


def test_the_shards_of_another_folder_are_the_same_by_name(shards, tmp_path):
    """A copied data set is no change."""
    old = shards.loaders(2, 8, 2)
    batches(old, 9)
    checkpoint = saved(old, tmp_path)
    shards.folder = Path(shutil.copytree(shards.folder, tmp_path / "moved"))
    loaders, plan = resumed(shards, (2, 8, 2), *checkpoint)
    assert plan.remainder is None and batches(loaders, 99) == batches(old, 99)


def test_shards_in_another_order_are_served_once_all_the_same(shards, tmp_path):
    """Paths are sorted, and names alone say which shard is which: one in another folder than before has another place."""

    def sort_into(folders):
        for name, folder in zip(sorted(shards.tokens), folders):
            path = tmp_path / "sorted" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            next(tmp_path.rglob(name)).rename(path)

    sort_into("abc")
    shards.folder = tmp_path / "sorted" / "?"
    old = shards.loaders(2, 8, 2)
    done = {token for step in batches(old, 50) for batch in step for token in batch}
    checkpoint = saved(old, tmp_path)
    sort_into("bca")
    loaders, plan = resumed(shards, (2, 8, 2), *checkpoint)
    found = [token for step in batches(loaders, plan.remainder.num_samples) for batch in step for token in batch]
    assert len(set(found)) == len(found) and not done & set(found)
    assert len(shards.inputs() - done - set(found)) == plan.remainder.num_dropped < 32


def test_a_shard_of_another_length_is_refused(shards, tmp_path):
    """Even where as many samples fit: its tokens need not be the ones of before."""
    old = shards.loaders(2, 8, 2)
    batches(old, 9)
    checkpoint = saved(old, tmp_path)
    shards.next = 0
    shards.add("s_1.bin", 701)
    with pytest.raises(UserError, match="s_1.bin held 700 tokens when the checkpoint was written and holds 701 now; put the old file back"):
        resumed(shards, (2, 8, 2), *checkpoint)


def test_two_shards_of_one_name_are_told_apart_by_nothing(tmp_path):
    """They are no matter while nothing changes."""
    for folder in ("a", "b"):
        Shards(tmp_path / folder, [400])
    loaders = [TokenLoader(str(tmp_path / "?" / "s_0.bin"), 2, T, shuffle=True) for T in (8, 8, 9)]
    checkpoint = saved(loaders[:1], tmp_path)
    go_on(loaders[1:2], *checkpoint)
    with pytest.raises(UserError, match="two files of the training data have the same name"):
        go_on(loaders[2:], *checkpoint)


@pytest.mark.parametrize("was, now", [(("s", "s"), ("s",)), (("s",), ("s", "s")), (("s", "s"), ("s", "s"))])
def test_shards_of_one_name_then_or_now_are_refused(was, now):
    with pytest.raises(UserError, match="two files of the training data have the same name"):
        on_other_shards(np.array([[3, 100]]), *([(name, 400) for name in names] for names in (was, now)))


# ----------------------------------------------------------------------------
# checkpoints of others, and damaged ones


def without_data(extras):
    return [replace(extra, data=None) for extra in extras]


def test_a_checkpoint_without_data_in_its_extra_is_taken_to_be_of_these_shards(shards, tmp_path):
    """As runs of before wrote them: other batches finish the epoch all the same."""
    old = shards.loaders(2, 8, 3)
    done = {token for step in batches(old, 30) for batch in step for token in batch}
    states, extras = saved(old, tmp_path)
    loaders, plan = resumed(shards, (1, 13, 2), states, without_data(extras))
    found = {token for step in batches(loaders, plan.remainder.num_samples) for batch in step for token in batch}
    assert not found & done and len(shards.inputs() - done - found) == plan.remainder.num_dropped
    loaders, plan = resumed(shards, (2, 8, 3), states, without_data(extras))
    assert plan.state is states[0] and batches(loaders, 99) == batches(old, 99)
    shards.add("t.bin", 500)
    with pytest.raises(UserError, match="has 3 shards, where 4 were expected.*does not say which files"):
        resumed(shards, (1, 13, 2), states, without_data(extras))


def test_llmc_s_checkpoint_goes_on_where_it_was_and_with_no_other_number_of_processes(shards, tmp_path):
    """It does not say -b and -t; the number of samples tells most other ones."""
    old = shards.loaders(2, 8, 3)
    batches(old, 30)
    states, _ = saved(old, tmp_path)
    loaders, plan = resumed(shards, (2, 8, 3), states, [NO_FILE] * 3)
    assert plan.state is states[0] and batches(loaders, 99) == batches(old, 99)
    with pytest.raises(UserError, match="is of 3 processes and does not say their -b and -t.* resume with 3 processes"):
        resumed(shards, (2, 8, 2), states, [NO_FILE] * 3)
    with pytest.raises(UserError, match="samples in the current shard"):
        resumed(shards, (4, 8, 3), states, [NO_FILE] * 3)


def test_without_shuffling_there_is_no_epoch_to_finish(shards, tmp_path):
    """-a 1, one batch again and again: the same geometry returns to its place, any other starts."""
    old = shards.loaders(2, 8, 2, shuffle=False)
    batches(old, 30)
    checkpoint = saved(old, tmp_path)
    same = shards.loaders(2, 8, 2, shuffle=False)
    go_on(same, *checkpoint)
    assert batches(same, 50) == batches(old, 50)
    for geometry in ((2, 8, 1), (1, 5, 2)):
        other = shards.loaders(*geometry, shuffle=False)
        assert go_on(other, *checkpoint).notes == ()
        assert batches(other, 20) == batches(shards.loaders(*geometry, shuffle=False), 20)
    for geometry in ((1, 5, 2), (2, 8, 1)):  # from a checkpoint of llm.c's too
        other = shards.loaders(*geometry, shuffle=False)
        go_on(other, checkpoint[0], [NO_FILE] * 2)
    for geometry in ((2, 8, 2), (1, 5, 2)):
        with pytest.raises(UserError, match="in order and this run reads it shuffled"):
            resumed(shards, geometry, *checkpoint)


def changed(extra, *path, to):
    """A copy of an Extra, or of what is in it, with one value another."""
    if not path:
        return to
    first, *rest = path
    if isinstance(extra, Extra):
        return replace(extra, **{first: changed(getattr(extra, first), *rest, to=to)})
    inner = changed(extra[first], *rest, to=to)
    return {**extra, first: inner} if isinstance(extra, dict) else [*extra[:first], inner, *extra[first + 1 :]]


@pytest.mark.parametrize(
    "path, to, words",
    [
        (["B"], "four", "says B 'four'"),
        (["T"], 0, "T 0"),
        (["T"], True, "T True"),
        (["B"], None, "says B None"),
        (["B"], 2**62, f"says B {2**62}"),  # of which numpy would make room for as many
        (["T"], 2**63, f"T {2**63}"),
        (["data"], [], "data cannot be read"),
        (["data", "shards"], 7, "data cannot be read"),
        (["data", "shards"], [], "makes no sense"),
        (["data", "shards", 0], ["s_0.bin", -1], "makes no sense"),
        (["data", "shards", 0], ["s_0.bin"], "data cannot be read"),
        (["data", "shards", 0], ["s_0.bin", 2**62], "makes no sense"),
        (["data", "shards", 0], ["s_0.bin", 10**400], "makes no sense"),
        (["data", "remainder"], [], "data cannot be read"),
        (["data", "remainder", "intervals"], "?", "data cannot be read"),
        (["data", "remainder", "intervals"], "aGVsbG8=", "data cannot be read"),
        (["data", "remainder", "intervals"], pack(np.array([[5, 3]])), "do not ascend"),
        (["data", "remainder", "intervals"], pack(np.array([[0, 1801]])), "not in its shards"),
        (["data", "remainder", "intervals"], pack(np.array([[1700, 1900]])), "not in its shards"),
        (["data", "remainder", "intervals"], pack(np.array([[0, 10**12]])), "not in its shards"),
        (["data", "remainder", "intervals"], pack(np.array([[1801 + 700 + 1213, 4000]])), "not in its shards"),
        (["data", "remainder", "served"], -1, "makes no sense"),
        (["data", "remainder", "served"], 10**6, "1000000 batches served of"),
        (["data", "remainder", "served"], 119, "119 batches served of 118"),
        (["data", "remainder", "served"], 1.5, "makes no sense"),
    ],
)
def test_damaged_facts_are_a_sentence(shards, tmp_path, path, to, words):
    old = shards.loaders(2, 8, 2)
    batches(old, 20)
    loaders, _ = resumed(shards, (1, 13, 2), *saved(old, tmp_path))
    batches(loaders, 3)
    states, extras = saved(loaders, tmp_path)
    for geometry in ((1, 13, 2), (2, 8, 1)):
        with pytest.raises(UserError, match="place in its training data is damaged") as raised:
            resumed(shards, geometry, states, [changed(extra, *path, to=to) for extra in extras])
        assert words in str(raised.value)
    with pytest.raises(UserError, match="ranks disagree"):
        resumed(shards, (1, 13, 2), states, [extras[0], changed(extras[1], *path, to=to)])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"shard_indices": np.array([0, 0, 1], np.int32)}, "not a permutation"),
        ({"current_shard_idx": 2**64 - 1}, "not a permutation"),
        ({"current_sample_idx": 2**63}, "not a permutation"),
        ({"shard_num_samples": 99}, "99 samples in the current shard"),
        ({"shard_indices": np.arange(4, dtype=np.int32)}, "4 shards, where 3"),
        ({"current_sample_idx": 0}, "stopped at different batches"),
        ({"shuffle_rng": b""}, "0 bytes, expected 2520"),
    ],
)
def test_a_damaged_state_is_a_sentence(shards, tmp_path, change, words):
    old = shards.loaders(2, 8, 2)
    batches(old, 9)
    states, extras = saved(old, tmp_path)
    with pytest.raises(UserError, match=words):
        resumed(shards, (1, 13, 2), [replace(states[0], **change), states[1]], extras)


def test_a_token_outside_the_vocabulary_is_named_in_a_remainder_too(shards, tmp_path):
    old = shards.loaders(2, 8, 2)
    batches(old, 9)
    states, extras = saved(old, tmp_path)
    loader = TokenLoader(str(shards.folder / "*.bin"), 1, 13, shuffle=True, vocab_size=2000)
    go_on([loader], states, extras)
    with pytest.raises(UserError, match=r"s_[12].bin: token \d+ at position \d+ is outside the model's vocabulary of 2000"):
        batches([loader], 300)


# ----------------------------------------------------------------------------
# intervals


def test_packed_intervals_come_back_and_are_short():
    draw = np.random.default_rng(1)
    for count in (0, 1, 1000):
        intervals = np.cumsum(draw.integers(1, 2**40, 2 * count)).reshape(-1, 2)
        assert np.array_equal(unpack(pack(intervals)), intervals) and unpack(pack(intervals)).shape == (count, 2)
    regular = np.arange(10**6).reshape(-1, 2) * 4096
    assert len(pack(regular)) < 50_000


@pytest.mark.parametrize("places", [[3, 9, 9, 12], [3, 3], [9, 3], [-1, 3], [3, 9, 12]])
def test_intervals_that_do_not_ascend_are_damaged(places):
    """Two that touch would have been one; in an empty one is nothing left."""
    text = base64.b64encode(zlib.compress(np.diff(np.array(places), prepend=0).astype("<i8").tobytes())).decode()
    with pytest.raises(ValueError, match="do not ascend"):
        unpack(text)


def test_merged_intervals_are_the_same_places():
    draw = np.random.default_rng(2)
    for _ in range(200):
        cuts = np.unique(draw.integers(0, 60, draw.integers(2, 30)))
        pieces = np.stack([cuts[:-1], cuts[1:]], axis=1)[draw.permutation(len(cuts) - 1)]
        pieces = np.concatenate([pieces[: len(pieces) // 2], [[7, 7]]])
        places = {place for start, end in pieces for place in range(start, end)}
        result = merged(pieces)
        assert [place for start, end in result for place in range(start, end)] == sorted(places)
        assert (result[1:, 0] > result[:-1, 1]).all() and count_inputs(result) == len(places)
