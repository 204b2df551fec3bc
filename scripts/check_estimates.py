"""Does decoding do what the estimator expects? Both families, every law and verifier.

    python scripts/check_estimates.py --records DIR [DIR ...] --drafter DIR [DIR ...]

Records are stores whose held-out replies are scored, and whose prompts are decoded with fresh
randomness: those of a demo, and of `draftsmith eval --prompts ...` for more of them. The result
goes to scripts/results/estimates.json: τ estimated and decoded with intervals over conversations,
and how far they are apart in standard errors of their paired difference.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.configs.load import load_recipe
from draftsmith.data.records import Record, held_out
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import records_with_states
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.eval.provenance import processor
from draftsmith.scripts.results import save_result
from draftsmith.scripts.study_objectives import (
    GAMMA,
    LAWS,
    VERIFIERS,
    decode_all,
    estimated,
    pooled,
    z_score,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, nargs="+", required=True)
    parser.add_argument("--drafter", type=Path, nargs="+", required=True)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    args = parser.parse_args()
    console = Console()
    target = load_target(load_recipe("demo").target)
    stores = [RecordStore.open(folder) for folder in args.records]
    (limit,) = {int(store.settings["max_new_tokens"]) for store in stores}
    rows = []
    for folder in args.drafter:
        drafter = load_drafter(folder, target)
        for law in (law for law in LAWS if law.temperature in args.temperatures):
            records = replies(stores, target, drafter, law)
            expected = estimated(target, drafter, records, law, limit)
            for rule in VERIFIERS if law.temperature else VERIFIERS[:1]:
                console.print(f"{drafter.family} {law.label} {rule}: {len(records)} prompts")
                decoded = decode_all(target, drafter, records, limit, rule)
                rows.append(row_of(drafter, law, rule, expected, decoded))
                console.print(rows[-1])
    save_result("estimates", {
        "target": target.provenance["name"],
        "quantisation": target.provenance["quantisation"],
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "num_draft_tokens": GAMMA,
        "rows": rows,
    }, quiet=True)  # fmt: skip


def replies(stores: list[RecordStore], target: Target, drafter: Drafter, law: Law) -> list[Record]:
    """Held-out replies under `law` with something to draft, of all stores."""
    found = []
    for store in stores:
        records = records_with_states(store, target, drafter.taps, "heldout")
        for domain in sorted({r.domain for r in records}):
            found += [r for r in held_out(records, law, domain) if len(r.reply) > 1]
    return found


def row_of(
    drafter: Drafter, law: Law, rule: str, expected: dict[str, Any], decoded: dict[str, list[int]]
) -> dict[str, Any]:
    key = f"rounds {rule}"
    apart = z_score([expected], [decoded], key)
    same = sum(
        m == n and abs(s - r) < 1e-3
        for m, s, n, r in zip(
            decoded["tokens"], decoded["rounds"], expected["tokens"], expected[key], strict=True
        )
    )
    return {
        "family": drafter.family,
        "law": law.label,
        "verifier": rule,
        "prompts": len(expected["tokens"]),
        "tokens": sum(expected["tokens"]),
        "τ estimated": pooled([expected], "tokens", key),
        "τ decoded": pooled([decoded], "tokens", "rounds"),
        **apart,
        "replies with the very rounds expected": same,
    }


if __name__ == "__main__":
    main()
