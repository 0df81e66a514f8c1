"""The search for the largest batch whose plan fits: there is no formula, as a plan's memory does not only grow with the batch."""

from dataclasses import replace
from functools import cache
from itertools import product

from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan

DIPS = 16  # how many dips of memory the search passes; in a tiny model every fourth B can be one, without end


def largest_batch(options: PlanOptions, budget_bytes: int) -> int:
    """The largest B that these options take and whose whole plan fits in `budget_bytes`; 0 if there is none."""
    most, multiple = most_that_fit(options, budget_bytes), options.batch_multiple
    B = most // multiple * multiple
    while B not in (0, most) and Plan(replace(options, B=B)).total_bytes > budget_bytes:
        B -= multiple
    return B


def most_that_fit(options: PlanOptions, budget_bytes: int) -> int:
    """The B whose whole plan fits in `budget_bytes`, while B + 1 does not, whatever the B of the options; 0 if not even one sequence fits.

    There may be several, as memory grows with B except for dips: placement is greedy and takes large tensors first, so it may do better
    where one tensor becomes larger than another; the fewer heads a batch has, the more copies of dq flash attention makes; and ranks keep
    sums of gradients from one micro-step to the next only where a step has several. So some B beyond the first that does not fit are tried
    too, and if one fits, the search goes on from there, a few times: it finds the largest but for dips that these do not explain.
    """

    @cache
    def planned(B):
        return Plan(replace(options, B=B))

    def bytes_of(B):
        return planned(B).total_bytes

    def fits(B):
        return bytes_of(B) <= budget_bytes

    def meets_budget(low, other):
        """Where the line through the bytes of both comes to the budget, after `low`."""
        each = max(1, (bytes_of(other) - bytes_of(low)) // (other - low))
        return low + max(1, (budget_bytes - bytes_of(low)) // each)

    def reached_from(low):
        """From `low`, which fits: a B of `low` or more that fits while B + 1 does not. Where memory grows in a line that takes four plans,
        elsewhere no more than doubling steps and halving what is left would take, twice over."""
        step, high = 1, low + 1
        while fits(high):
            step *= 2
            low, high = high, max(high + step, meets_budget(high, low))
        halved = True
        while (left := high - low) > 1:
            tried = min(meets_budget(low, high), high - 1) if halved else (low + high) // 2
            low, high = (tried, high) if fits(tried) else (low, tried)
            halved = 2 * (high - low) <= left
        return low

    low, heads, whole_step = 0, options.heads, max(1, options.step_sequences)
    further = next(filter(fits, (1, whole_step)), 0)
    for _ in range(1 + DIPS):
        if not further:
            break
        low = reached_from(further)
        # eight at least, as greedy placement may do better for no reason that _overtaken sees; dq has one copy from processors / heads on
        tried = {*range(low + 1, max(low + 9, options.processors // heads + 2)), *_overtaken(planned(low), planned(low + 1))}
        further = max(filter(fits, tried | {max(whole_step, low + 1)}), default=0)
    return low


def _overtaken(plan: Plan, one_more: Plan) -> set[int]:
    """Each B, at most an eighth beyond the plan's, from which on a tensor is larger than another that is larger now; and the B before,
    where both may be equally large. one_more is the plan for one sequence more."""
    low, sizes, next_sizes = plan.options.B, *({name: t.nbytes for name, t in each.tensors.items()} for each in (plan, one_more))
    lines = {(nbytes, next_sizes[name] - nbytes) for name, nbytes in sizes.items()}  # bytes, bytes a sequence adds
    overtaken = set()
    for (larger, slope), (smaller, steeper) in product(lines, lines):
        if smaller < larger and slope < steeper:
            ahead = (larger - smaller) // (steeper - slope) + 1
            if ahead <= low // 8:
                overtaken |= {low + ahead - 1, low + ahead} - {low}
    return overtaken
