"""The tables of batch sizes and of advice, for the terminal and the page."""

from typing import Any

from .advice import advice
from .machine import steps_of
from .page import Table
from .tables import MISSING, interval_text

Report = dict[str, Any]


def batch_costs_table(report: Report) -> Table:
    """What passes and steps cost at each batch size, in one unit."""
    entries = report.get("batches") or []
    sizes = sorted({n for entry in entries for n in steps_of(entry).v})
    rows = []
    for entry in entries:
        steps = steps_of(entry)
        passes = (f"{steps.v[n]:.2f}" if n in steps.v else MISSING for n in sizes)
        rest = (f"{x:.3f}" for x in (steps.c_first, steps.c, steps.o, steps.o_plain))
        rows.append((entry["law"], str(entry["batch"]), *passes, *rest))
    headers = ("law", "batch", *(f"v({n})" for n in sizes), "c_first", "c", "o", "o_plain")
    note = "For every conversation of the batch at once, in one-token target passes at batch 1."
    return Table("Costs by batch size", headers, tuple(rows), 2, note)


def batch_speed_table(report: Report) -> Table:
    """Predicted and measured speed at each batch size and the served draft length."""
    rows = tuple(
        (
            *(row["domain"], entry["law"], str(entry["batch"]), str(row["groups"])),
            *(
                MISSING if row.get(way) is None else f"{row[way]:.1f}"
                for way in ("plain_tokens_per_s", "speculative_tokens_per_s")
            ),
            interval_text(row["measured"], 2),
            f"{row['predicted']:.2f}",
        )
        for entry in report.get("batches") or []
        for row in entry["domains"]
    )
    speeds = ("plain tok/s", "speculative tok/s", "speedup measured", "speedup predicted")
    note = (
        "Chains of the served length, tokens of all conversations together; n: groups of that many "
        "conversations, timed until the first of them ended. – where there were too few prompts."
    )
    headers = ("domain", "law", "batch", "n", *speeds)
    return Table("Speed by batch size", headers, rows, 2, note)


def advice_table(report: Report) -> Table:
    """How much to draft by domain, law and batch size, and what it rests on."""
    found = advice(report)
    rows = () if found is None else tuple(_advised(row) for row in found["rows"])
    headers = (
        "domain", "law", "batch", "γ", "as good", "speedup predicted", "speedup measured",
        "drafting", "α", "α to break even", "adaptive at most",
    )  # fmt: skip
    note = (
        "γ: the static draft length, 0 where plain decoding is as fast. Drafting pays or not where "
        "the measured interval leaves out 1; it should where only the predicted one does, which "
        "knows how uncertain acceptance is, not costs. α to break even: if each token were "
        "accepted with the same chance (S_k = α^k). Adaptive at most: the speedup of knowing "
        "beforehand how many tokens will be accepted."
    )
    return Table("Advice", headers, rows, 2, note)


def _advised(row: Report) -> tuple[str, ...]:
    need = row["break_even"]
    others = [str(g) for g in row["alike"] if g != row["num_draft_tokens"]]
    return (
        *(row["domain"], row["law"], str(row["batch"]), str(row["num_draft_tokens"])),
        ", ".join(others) if row["num_draft_tokens"] else "",
        interval_text(row["predicted"], 2),
        interval_text(row["measured"], 2),
        row["verdict"],
        f"{row['overlap']['value']:.2f}",
        "never" if need is None else f"{need['overlap']:.2f}",
        f"{row['adaptive_at_most']:.2f}",
    )
