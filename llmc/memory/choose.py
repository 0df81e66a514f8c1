"""What fits: the recompute level or micro-batch to take for a budget, and the cheapest ways out when a plan does not fit.

The plan says, to the byte, whether something fits. Costs are counted in FLOPs; where there are none, a guess serves only to put the ways
in order.
"""

from dataclasses import dataclass, replace
from itertools import product
from math import isqrt

from llmc.errors import NotEnoughMemory
from llmc.memory.cost import extra_flops_percent, optimizer_traffic, step_cost
from llmc.memory.ladder import NOT_KEPT, can_keep_gathered, can_offload
from llmc.memory.largest_batch import most_that_fit
from llmc.memory.options import PlanOptions
from llmc.memory.plan import Plan
from llmc.units import MIB, ceil_mib

# what a way to fit costs besides FLOPs, in percent of a step's time: rough, and only to put the ways in order
HALF_BATCH_COST = 1.0  # smaller matmuls, twice as many kernels
MASTER_BITS_COST = 0.5  # the update generates each piece's noise twice
WAITING_COST = 0.7  # training waits for the disk when a checkpoint is due
BUS_FLOPS = 10_000  # that a card does, by a guess, while a byte comes over the bus from host memory and another one goes there
BF16_STATE_COST = 20.0  # little time, but m and v are rounded: the only way here that changes the numbers


def levels_of(options: PlanOptions) -> tuple[int, ...]:
    """The recompute levels these options can run at. Where nothing is trained, there is nothing to choose."""
    if not options.trains:
        return (options.recompute,)
    return tuple(
        level
        for level in NOT_KEPT
        if (can_offload(level) or not options.offload_residual) and (can_keep_gathered(level) or not options.keeps_all_rows)
    )


def choose_recompute(options: PlanOptions, budget_bytes: int, grad_accum_steps=1) -> tuple[int, str]:
    """The lowest level that fits, and the reason in words. Raises NotEnoughMemory where none does."""
    below = None
    for level in levels_of(options):
        plan = Plan(replace(options, recompute=level))
        if plan.total_bytes <= budget_bytes:
            why = "the cheapest there is" if below is None else f"-r {below.options.recompute} needs {ceil_mib(below.total_bytes)} MiB"
            return level, f"-r {level}: its plan of {plan.total_bytes // MIB} MiB fits the {budget_bytes // MIB} MiB there are; {why}"
        below = plan
    raise NotEnoughMemory(
        f"no recompute level fits -b {options.B} -t {options.T} in {budget_bytes // MIB} MiB: "
        f"-r {level} still needs {ceil_mib(plan.total_bytes)} MiB",
        replace(options, recompute=level), budget_bytes, grad_accum_steps,
    )  # fmt: skip


def choose_batch(options: PlanOptions, budget_bytes: int, total_sequences: int | None, most: int | None = None) -> tuple[int, str]:
    """The largest B that fits, and the reason in words.

    total_sequences  sequences of a step, which B must divide; None for any number
    most             sequences that a shard of the data holds; None for no limit
    """

    def bytes_of(B):
        return Plan(replace(options, B=B)).total_bytes

    fits = most_that_fit(options, budget_bytes)
    limit = max(1, fits if most is None else min(fits, most))
    B, multiple = limit, options.batch_multiple
    while B > 1 and (total_sequences and total_sequences % B or B % multiple or bytes_of(B) > budget_bytes):
        B -= 1
    if B == 1 and bytes_of(1) > budget_bytes:
        raise NotEnoughMemory(
            f"not even -b 1 -t {options.T} fits {budget_bytes // MIB} MiB at -r {options.recompute}: it needs {ceil_mib(bytes_of(1))} MiB",
            replace(options, B=1), budget_bytes, total_sequences or 1,
        )  # fmt: skip
    reason = f"-b {B}: {fits} sequences are the most that fit {budget_bytes // MIB} MiB at -r {options.recompute}"
    if limit != fits:
        reason += f", {most} the most that a shard of the data holds"
    if B != limit:
        conditions = ["fits"]
        if multiple > 1:
            conditions.append(f"is a multiple of {multiple}")
        if total_sequences:
            conditions.append(f"divides the {total_sequences} of a step")
        reason += f", and {B} is the largest number up to that which {' and '.join(conditions)}"
    return B, reason


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most limit; both are 1 or more."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return max(d for d in (*small, *(n // d for d in small)) if d <= limit)


@dataclass(frozen=True, slots=True)
class Way:
    """Flags that make a plan fit, what it then needs, and what they cost."""

    flags: str
    total_bytes: int
    price: str
    cost: float


def ways_to_fit(options: PlanOptions, budget_bytes: int, total_sequences: int, *, count=3) -> list[Way]:
    """Up to `count` ways to make a plan fit that does not, cheapest first.

    A way that only adds flags to a cheaper one is listed only if there are too few others, and only if it saves more memory.
    """
    halves = [options.B]
    while halves[-1] > 1:
        halves.append(largest_divisor(total_sequences, halves[-1] // 2))
    masters = ["fp32", "bits16"] if options.keeps_master else [options.master]
    states = ["fp32", "bf16"] if options.optimizer_state == "fp32" else ["bf16"]
    levels = [level for level in levels_of(options) if level >= options.recompute]
    copies = [True, False] if options.async_checkpoint and options.device == "cpu" else [options.async_checkpoint]
    offloads = [False, True] if options.device == "cuda" and not options.offload_optimizer else [options.offload_optimizer]
    found = []
    batches = [(step, B) for step, B in enumerate(halves) if B % options.batch_multiple == 0]
    for (step, B), level, master, state, copy, offload in product(batches, levels, masters, states, copies, offloads):
        changed = replace(
            options, B=B, step_sequences=total_sequences, recompute=level, master=master, optimizer_state=state, async_checkpoint=copy,
            offload_optimizer=offload,
        )  # fmt: skip
        plan = Plan(changed)
        if plan.total_bytes <= budget_bytes:
            place = (step, level, masters.index(master), states.index(state), copies.index(copy), offloads.index(offload))
            found.append((_way(options, plan, total_sequences, step), place))
    found.sort(key=lambda pair: pair[0].cost)
    chosen, spare = [], []
    for way, place in found:
        adds_to = [other for other, at in (*chosen, *spare) if all(mine >= theirs for mine, theirs in zip(place, at))]
        if not adds_to:
            chosen.append((way, place))
        elif way.total_bytes < min(other.total_bytes for other in adds_to):
            spare.append((way, place))
    ways = [way for way, _ in (*chosen, *spare)][:count]
    return sorted(ways, key=lambda way: way.cost)


def _way(options: PlanOptions, plan: Plan, total_sequences: int, halvings: int) -> Way:
    """The Way from what these options say to a plan that fits, whose B was halved that often."""
    changed, flags, price, cost = plan.options, [], [], 0.0
    if changed.B != options.B:
        flags.append(f"-b {changed.B} -d {total_sequences * options.T * options.data_ranks}")
        price.append(f"{total_sequences // changed.B} micro-steps a step")
        cost += HALF_BATCH_COST * halvings
    if changed.recompute != options.recompute:
        extra = extra_flops_percent(changed) - extra_flops_percent(options)
        flags.append(f"-r {changed.recompute}")
        price.append(f"{extra:.0f}% more FLOPs, " + ("the same bits" if options.gelu_repeats else "the same bits but for GELU's last"))
        cost += extra + 0.1 * (changed.recompute - options.recompute)  # a level that adds no FLOPs still reads and writes more
    if changed.master != options.master:
        flags.append("--master bits16")
        price.append("the same weights, a slightly longer update")
        cost += MASTER_BITS_COST
    if changed.async_checkpoint != options.async_checkpoint:
        flags.append("--async-checkpoint 0")
        price.append("training waits while a checkpoint is written")
        cost += WAITING_COST
    if changed.offload_optimizer != options.offload_optimizer:
        flags.append("--offload-optimizer")
        price.append(f"{plan.optimizer_bytes // MIB} MiB of host memory for each process, which each update moves over the bus twice")
        cost += 100 * BUS_FLOPS * optimizer_traffic(options) / 2 / step_cost(options, total_sequences // options.B).flops
    if changed.optimizer_state != options.optimizer_state:
        flags.append("--optimizer-state bf16")
        price.append("m and v are rounded")
        cost += BF16_STATE_COST
    return Way(" ".join(flags), plan.total_bytes, "; ".join(price), cost)
