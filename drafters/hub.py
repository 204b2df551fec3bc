"""The model card of a published draft: its measured numbers, and what they hold for.

A card is read far from the machine that wrote it. It names no local path, it says which target
weights were measured, and it says which draft sampling its acceptance belongs to, because serving
engines choose another one by default.
"""

from collections.abc import Mapping
from typing import Any

import yaml

from ..configs.errors import UserError, did_you_mean
from .card_commands import SERVING, Served
from .card_notes import data_summary, licence_note, reproduction
from .card_table import measured_table
from .public import one_line, public

Report = dict[str, Any]

TAGS = ("speculative-decoding", "draft")
UNNAMED = "OWNER/DRAFT"


def model_card(
    report: Report,
    layout: str,
    base_model: str,
    license: str,
    *,
    repo_id: str | None = None,
    recipe: Mapping[str, Any] | None = None,
    note: str | None = None,
    without: Mapping[str, str] | None = None,
    speculators: bool = False,
) -> str:
    """README.md of a published draft, YAML front matter included.

    `report` is a report.json of format 1, `layout` one of SERVING, `base_model` the target's Hub
    name, `license` a Hub licence name such as "apache-2.0", `repo_id` where the draft will live,
    `recipe` that of the run, as `configs.load.to_dict` has it, `note` what engines do other than
    was measured, `without` what of the draft they do not read, by their names, `speculators`
    whether that library's layout lies beside. Raises UserError for an unknown layout.
    """
    if layout not in SERVING:
        known = did_you_mean(layout, tuple(SERVING))
        raise UserError(f"no model card for the layout '{layout}'{known}")
    serving = SERVING[layout]
    base_model, repo_id = public(base_model), repo_id or UNNAMED
    reduced = any(cell.get("captured_mass") is not None for cell in report["cells"])
    gamma = report["settings"]["num_draft_tokens"]
    served = Served(base_model, repo_id, gamma, reduced, without or {}, speculators)
    sections = [
        _front_matter(report, serving.library, base_model, license),
        _introduction(report, base_model, repo_id),
        _measured(report),
        _conditions(report),
        _engines(reduced and layout == "eagle3") if serving.sampled else "",
        "## Serve\n\n" + serving.section(served),
        note,
        data_summary(report),
        reproduction(report, recipe),
        licence_note(report, base_model, license),
        _GLOSSARY,
    ]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


def _front_matter(report: Report, library: str, base_model: str, license: str) -> str:
    fields = {
        "base_model": base_model,
        "library_name": library,
        "pipeline_tag": "text-generation",
        "license": license,
        "tags": [*TAGS, report["provenance"]["drafter"]["family"]],
    }
    return f"---\n{yaml.safe_dump(fields, sort_keys=False, allow_unicode=True)}---"


def _introduction(report: Report, base_model: str, repo_id: str) -> str:
    draft, target = report["provenance"]["drafter"], report["provenance"]["target"]
    heading = f"Draft for {base_model}" if repo_id == UNNAMED else repo_id
    lines = [
        f"# {heading}",
        "",
        f"A draft model ({draft['family']}, {draft['parameters']:,} parameters) for lossless "
        f"speculative decoding with {base_model}: the target verifies every drafted token, so its "
        "output law does not change, only its speed.",
    ]
    verdict = (report.get("lossless") or {}).get("verdict", "not checked")
    if verdict == "different":
        lines += ["", "**The check of losslessness FAILED in this run: see below.**"]
    if target.get("quantisation"):
        lines += [
            "",
            f"**Measured against {public(_format_of(target))} weights, dequantised to "
            f"{target['dtype']}**, not against the full-precision weights that the Hub keeps as "
            f"{base_model}. In front of other weights of the same model the draft stays lossless; "
            "its acceptance there was not measured.",
        ]
    return "\n".join(lines)


def _measured(report: Report) -> str:
    doubts = [f"- **Alarm:** {one_line(alarm)}" for alarm in report.get("alarms") or []]
    text = "Held-out prompts; brackets hold bootstrap intervals over conversations."
    lines = ["## Measured", "", text, "", measured_table(report)]
    return "\n".join([*lines, *([""] if doubts else []), *doubts])


def _conditions(report: Report) -> str:
    """The settings outside of which the table says nothing."""
    settings, stand = report["settings"], report["provenance"]
    target, draft, machine = stand["target"], stand["drafter"], stand.get("machine") or {}
    lossless = report.get("lossless") or {"verdict": "not checked"}
    weights = _format_of(target)
    vocabulary = draft.get("draft_vocab_size")
    versions = ", ".join(f"{name} {value}" for name, value in (stand.get("versions") or {}).items())
    facts = {
        "draft length": f"γ = {settings['num_draft_tokens']}",
        "verifier": settings["verifier"],
        "draft sampling": settings["draft_sampling"],
        "target": f"{target['name']}, {target['parameters']:,} parameters",
        "target source": target.get("source"),
        "target revision": target.get("revision"),
        "target weights": f"{weights}, dequantised" if weights else "not quantised",
        "dtype": target["dtype"],
        "draft vocabulary": f"{vocabulary:,} tokens" if vocabulary else "the target's",
        "reply length": f"at most {settings['max_new_tokens']} tokens",
        "machine": f"{machine.get('processor')}, {machine.get('threads')} threads, "
        f"device {machine.get('device')}; one row at a time, prefill excluded",
        "losslessness": f"greedy outputs {lossless['verdict']} "
        f"({lossless.get('prompts', 0)} prompts)",
        "software": f"draftsmith {stand['draftsmith']}, {versions}",
        "recipe": f"{stand.get('recipe')} ({stand.get('recipe_hash')})",
        "prompts (sha256)": stand.get("prompts_sha256"),
        "draft weights (sha256)": draft.get("weights_sha256"),
    }
    lines = [
        f"- {name}: {one_line(str(value))}" for name, value in facts.items() if value is not None
    ]
    return "\n".join(["## These numbers hold for", "", *lines])


def _format_of(target: Report) -> str:
    """The format that the target's weights were stored in; empty if they were not quantised."""
    return (target.get("quantisation") or "").removesuffix(", dequantised")


def _engines(greedy_in_sglang: bool) -> str:
    lines = [
        "## Engines draft greedily by default",
        "",
        "At T > 0 the acceptance above belongs to a draft *sampled* from its own distribution. "
        "Engines take the draft's best token unless told otherwise: vLLM's `draft_sample_method` "
        "is `greedy` unless set to `probabilistic`. A greedy draft is accepted with probability "
        "p(argmax q) instead of Σ min(p, q): the output stays lossless, the numbers differ. At "
        "T = 0 both are the same.",
    ]
    if greedy_in_sglang:
        lines[-1] += (
            " This draft has a reduced vocabulary: SGLang's rejection sampling does not take one, "
            "so there it drafts greedily."
        )
    return "\n".join(lines)


_GLOSSARY = """
## Glossary

- α (overlap): Σ min(p, q) over the vocabulary, p the target's and q the draft's distribution under
  the serving law; the chance that a drafted token is accepted.
- S_k: P(A ≥ k), the share of rounds that accept at least the first k draft tokens.
- τ: tokens per target pass, the bonus token included.
- accepted/drafted: what serving engines call the acceptance rate; falls with γ, unlike α.
- speedup: speculative ÷ plain tokens per second on the machine named above; predicted from S_k and
  measured costs.
"""
