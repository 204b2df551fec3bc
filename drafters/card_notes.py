"""What a model card says besides numbers: data, how the draft was made, licences."""

from collections.abc import Mapping
from typing import Any

import yaml

from .card_table import markdown_table
from .dflash import DFlashDrafter
from .public import one_line, public_values


def engine_note(drafter: Any) -> str | None:
    """What engines are known to do otherwise with a drafter than this package; None if nothing."""
    if not isinstance(drafter, DFlashDrafter):
        return None
    cap = getattr(drafter.config, "final_logit_softcapping", None)
    if not cap:
        return None
    return (
        f"vLLM leaves out the soft cap of the target's logits ({cap:g}), which was measured with: "
        "at T > 0 its drafts are drawn from another distribution, and their acceptance differs."
    )


def data_summary(report: Mapping[str, Any]) -> str:
    """What the target answered, by domain and law; empty for reports that do not tell."""
    cells = report["provenance"].get("collected") or []
    if not cells:
        return ""
    return "\n".join(
        [
            "## Data",
            "",
            "Conversations of the run's records. The draft imitates those of the split `train` "
            "(unless it was trained elsewhere); it is measured on `heldout` alone.",
            "",
            *records_table(cells),
        ]
    )


def records_table(cells: list[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table of a collection's summary, one row for each of its cells."""
    header = ["split", "domain", "law", "conversations", "reply tokens"]
    rows = [
        [
            *(one_line(cell[name]) for name in ("split", "domain", "law")),
            *(f"{cell[name]:,}" for name in ("records", "tokens")),
        ]
        for cell in cells
    ]
    return markdown_table(header, rows).splitlines()


def reproduction(report: Mapping[str, Any], recipe: Mapping[str, Any] | None) -> str:
    """The commands, and the recipe they take."""
    made = report["provenance"].get("draftsmith")
    lines = ["## Make it again", ""]
    if recipe is None:
        return "\n".join([*lines, f"Made by draftsmith {made}; its recipe was not kept here."])
    known = public_values(dict(recipe))
    known["collect"] = {k: v for k, v in known["collect"].items() if k != "server"}
    written = yaml.safe_dump(known, sort_keys=False, allow_unicode=True, width=100)
    return "\n".join(
        [
            *lines,
            f"Made by draftsmith {made}. With the recipe below as `recipe.yaml`: `draftsmith "
            "collect recipe.yaml`, then `train`, `eval` and `publish`. Files are named without "
            "their folders.",
            "",
            "<details><summary>recipe.yaml</summary>",
            "",
            f"```yaml\n{written.strip()}\n```",
            "",
            "</details>",
        ]
    )


def licence_note(report: Mapping[str, Any], base_model: str, licence: str) -> str:
    """Two licences: of what is published, and of the model that it was made from."""
    theirs = report["provenance"]["target"].get("license")
    of = f" ({theirs})" if theirs else ""
    return "\n".join(
        [
            "## Licence",
            "",
            f"These weights: {licence}. They were made from {base_model} and what it says, so the "
            f"licence of {base_model}{of} holds for their use, too.",
        ]
    )
