"""The --plan command: what a run would need and cost, told without touching a device."""

import json
from contextlib import suppress

from llmc.cards import RESERVE, Budget, Device, parse_budget
from llmc.distributed.world import World
from llmc.errors import UserError
from llmc.flags import Settings, check_contradictions
from llmc.host import available_host_bytes
from llmc.kernels import OLDEST_CAPABILITY, too_old
from llmc.kernels_cpu import not_installed
from llmc.memory.plan import Plan
from llmc.memory.report import does_not_fit, plan_json, plan_table, tensor_rows, tensors_table, ways_text
from llmc.memory.traffic import Links
from llmc.processor import likely_device_kind
from llmc.request import settle_all, settle_kernels
from llmc.source import choose_precision, find_source, look_only
from llmc.units import MIB

RUN_ITSELF = 165 * MIB  # host memory of torch, numba and the program, which a run has when it counts what is free, and --plan has not


def plan_text(s: Settings) -> str:
    """What --plan prints. No device is touched, so auto means what this machine most likely has, or the card that was named."""
    check_contradictions(s)
    s, source = find_source(look_only(s))
    ranks = s.ranks or s.num_processes
    world = World(num_processes=ranks, num_local=min(ranks, s.gpus_per_node))
    budget = parse_budget(s.memory_budget) if s.memory_budget else None
    device_kind = "cuda" if s.device == "auto" and budget and budget.card else likely_device_kind(s.device)
    card = budget.card if budget and device_kind == "cuda" else None
    device = Device(device_kind, budget.name, card.capability, card.processors) if card else Device(device_kind)
    precision = choose_precision(s, source, device)
    # of a card that nobody named, and of one that has no Triton yet, the best is assumed
    why_not = too_old(device.capability or OLDEST_CAPABILITY) if device_kind == "cuda" else not_installed()
    s, kernel_notes = settle_kernels(s, device_kind, why_not)
    if budget is None and device_kind == "cpu":
        with suppress(UserError):  # elsewhere than on Linux nobody says how much memory is free
            share = f", for each of {world.num_local} processes" if world.num_local > 1 else ""
            free = max(0, available_host_bytes() // world.num_local - RUN_ITSELF)
            itself = f"less {RUN_ITSELF // MIB} MiB for the program itself"
            budget = Budget(free, f"free on this machine{share}, {itself}", reserve=RESERVE[device_kind])
    settled = settle_all(s, source, precision, world, device, budget)
    options, notes, links = settled.options, [*kernel_notes, *settled.notes], Links(s.link, s.node_link, s.gpus_per_node)
    if s.json:
        tensors = {"tensors": tensor_rows(Plan(options))} if s.tensors else {}
        return json.dumps({"reasons": notes} | plan_json(options, settled.grad_accum_steps, budget, links) | tensors, indent=1)
    plan = Plan(options)
    if s.tensors:
        return "\n".join([*notes, tensors_table(plan)])
    table = plan_table(options, settled.grad_accum_steps, budget, links)
    if budget and plan.total_bytes > budget.bytes:
        table += f"\n\n{does_not_fit(plan, budget)}\n{ways_text(options, budget.bytes, settled.grad_accum_steps)}"
    return "\n".join([*notes, table])
