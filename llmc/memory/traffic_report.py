"""What ranks send, in words: the columns of a level in --plan --json, and the block below the plan's table."""

from llmc.cards import Budget
from llmc.memory.cost import peak_flops
from llmc.memory.options import PlanOptions
from llmc.memory.traffic import Links, step_traffic
from llmc.text_table import in_columns
from llmc.units import MIB

BESIDE = {
    "gradients of layers": "gradients of layers are summed while backward goes on below them",
    "weights of layers": "weights of layers come while the layer before computes",
}
AFTER_UPDATE = "weights of layers come while the next step begins"  # at ZeRO stages 1 and 2
AMONG = {
    "data": "the ranks with the same part of the model and data of their own",
    "parts": "the ranks with the same data, which are neighbours",
    "all": "all of them",
}


def traffic_columns(o: PlanOptions, grad_accum_steps: int, links: Links | None) -> dict:
    """What a rank sends in a step, by purpose and collective, and in total; times are None where the link is unknown."""
    links = links or Links()
    sent = [
        {"purpose": one.purpose, "among": one.among, "kind": one.kind, "bytes": one.bytes, "mib": one.bytes / MIB,
         "gbit_s": links.gbit_s(o, one.among) or None, "ms": links.ms(o, one), "waits": one.waits}
        for one in step_traffic(o, grad_accum_steps)
    ]  # fmt: skip
    return {
        "sent": sent,
        "sent_mib": sum(row["mib"] for row in sent),
        "sending_ms": sum(row["ms"] for row in sent) if links.link else None,
        "waiting_ms": sum(row["ms"] for row in sent if row["waits"]) if links.link else None,
    }


def traffic_lines(o: PlanOptions, row: dict, budget: Budget | None, links: Links) -> list[str]:
    """What a rank sends at the level of a row of the plan, how long its links take, and how long computing does."""
    title = f"sent by each rank in a step at -r {row['recompute']}: MiB by the count of a ring"
    title += f", ms at so many Gbit/s each way, in machines of {links.machine} ranks" if links.inside else ""
    words = [f"{among.ljust(5)}  {AMONG[among]}" for among in AMONG if any(sent["among"] == among for sent in row["sent"])]
    if links.inside:
        words.append("a ring leaves a machine once, over the ports of all its ranks there")
    return [title, "", *_table(row), "", *words, "", _beside(o, row), _times(o, row, budget)]


def _table(row) -> list[str]:
    heads = ("sent", "among", "collective", "MiB", "Gbit/s", "ms", "computing")
    rows = [
        (sent["purpose"], sent["among"], sent["kind"], f"{sent['mib']:.1f}", f"{sent['gbit_s']:g}" if sent["gbit_s"] else "-",
         _in_ms(sent["ms"]), "waits" if sent["waits"] else "goes on")
        for sent in row["sent"]
    ]  # fmt: skip
    rows.append(("in all", "", "", f"{row['sent_mib']:.1f}", "", _in_ms(row["sending_ms"]), ""))
    return in_columns((heads, *rows), numbers=(3, 4, 5))


def _in_ms(ms: float | None) -> str:
    return "-" if ms is None else f"{ms:.1f}"


def _beside(o, row) -> str:
    """What computing need not wait for, and why."""
    words = BESIDE | ({"weights of layers": AFTER_UPDATE} if o.zero_stage < 3 else {})
    goes_on = [words[sent["purpose"]] for sent in row["sent"] if not sent["waits"]]
    return f"computing goes on beside some: {', '.join(dict.fromkeys(goes_on))}" if goes_on else "computing waits for all of it"


def _times(o, row, budget) -> str:
    """How long computing takes, and how long sending takes in comparison."""
    ms, sending = row["compute_ms"], row["sending_ms"]
    if ms is None:
        line = "computing: say --memory-budget and a card, such as h100-80, for how long it takes"
    else:
        rate = f"{peak_flops(o, budget) / 1e12:.0f} TFLOP/s, its dense peak" if row["bound"] == "compute" else "its memory's speed"
        line = f"computing takes {ms:.1f} ms on {budget.name} at {rate}; a real run reaches perhaps half of that"
    if sending is None:
        return f"{line}; say --link for how long sending takes, such as 400"
    if ms is None:
        return line
    waiting = row["waiting_ms"]
    return f"{line}; sending takes {sending / ms:.2f} times as long, so a step takes {max(ms, sending - waiting) + waiting:.1f} ms at best"
