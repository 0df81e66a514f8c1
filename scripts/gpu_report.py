"""The report of gpu_check.py in words and tables: markdown for the file, a summary for the screen."""

import re

PERCENT = (
    "spread", "our spread", "of copy", "of step", "gain of a step", "of matmul", "forward of matmul", "backward of matmul", "MFU",
    "llm.c MFU", "share",
)  # fmt: skip
TENTHS = ("of step", "gain of a step", "spread", "our spread", "share", "MFU", "llm.c MFU")  # shown to a tenth of a percent
WHOLE = (
    "tokens/s", "ours tokens/s", "llm.c tokens/s", "GB/s", "MB", "planned MiB", "measured MiB", "reserved MiB", "launches", "set-up s",
)  # fmt: skip
DRY_NOTICE = "**This was a dry run on a CPU, at tiny sizes: none of its numbers mean anything about a GPU.**"


def cell(column, value) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value).replace("|", "\\|").replace("\n", " ")
    if column in PERCENT:
        return format(value, ".1%" if column in TENTHS else ".0%")
    if column in WHOLE:
        return format(value, ",.0f")
    return format(value, ".1e" if 0 < abs(value) < 5e-4 else ".6f" if "loss" in column else ".3f")


def table_lines(rows) -> list[str]:
    """A markdown table with the columns of all rows, and an empty line after it; nothing if there are no rows."""
    if not rows:
        return []
    columns = list(dict.fromkeys(key for row in rows for key in row))
    numeric = {c for c in columns if any(isinstance(row.get(c), (int, float)) for row in rows)}
    head = ["| " + " | ".join(columns) + " |", "|" + "|".join("---:" if c in numeric else "---" for c in columns) + "|"]
    return [*head, *("| " + " | ".join(cell(c, row.get(c)) for c in columns) + " |" for row in rows), ""]


def summary_rows(report) -> list[dict]:
    """One row per entry of the summary; the figures of a step are in columns."""
    return [{"": name} | (value if isinstance(value, dict) else {"value": ", ".join(value) or "none" if isinstance(value, list) else value})
            for name, value in report["summary"].items()]  # fmt: skip


def what_did_not_run(sections) -> list[str]:
    lines = [f"- {s['title']}: {s['status']}, {cell('', s['reason'])}" for s in sections if s["status"] != "ran"]
    lines += [f"- {s['title']}: {cell('', what)}" for s in sections for what in s["not_run"]]
    failed = [(s["title"], e["what"]) for s in sections if s["status"] == "ran" for e in s["errors"]]
    return lines + [f"- {title}: {cell('', what)} failed, see there" for title, what in failed]


def markdown(report) -> str:
    sections, figures = [*report["sections"].values()], summary_rows(report)
    lines = [f"# GPU check: {report['card']}", "", *[DRY_NOTICE, ""] * report["dry_run"]]
    lines += [f"Written by `scripts/gpu_check.py`, which was allowed {report['minutes']} minutes. "
              "Times are medians, on the device's own clock; spread is that of the middle half, relative.", ""]  # fmt: skip
    lines += table_lines([row for row in figures if "value" in row]) + table_lines([row for row in figures if "value" not in row])
    lines += ["## What did not run", "", *(what_did_not_run(sections) or ["Everything ran."])]
    for s in sections:
        lines += ["", f"## {s['title']}", ""]
        lines += [f"{s['status'].capitalize()}: {cell('', s['reason'])}", ""] if s["status"] != "ran" else []
        lines += [line for note in s["notes"] for line in (note, "")]
        for title, rows in s["tables"].items():
            lines += [f"{title}:", ""] * bool(title) + table_lines(rows)
        for error in s["errors"]:
            lines += [f"{error['what']} failed:", "", "```", error["lines"], "```", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def print_summary(run):
    print("\ndry run on a CPU: none of these numbers mean anything about a GPU" if run.dry else "")
    for row in summary_rows(run.report):
        print(f"{row.pop(''):44}", "  ".join(cell(k, v) if k == "value" else f"{k} {cell(k, v)}" for k, v in row.items()))
    for name, s in run.report["sections"].items():
        print(f"{name:14} {s['status']:8} {s['seconds']:6.1f} s  {s['reason'].splitlines()[-1] if s['reason'] else ''}")
    print(f"report: {run.prefix}.json and {run.prefix}.md")
