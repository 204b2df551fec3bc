"""The model card of a published draft: its measured numbers, and what they hold for.

A card is read far from the machine that wrote it. It names no local path, it says which target
weights were measured, and it says which draft sampling its acceptance belongs to, because serving
engines choose another one by default.
"""

import json
import re
from collections.abc import Callable
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from ..configs.errors import UserError, did_you_mean

Report = dict[str, Any]

TAGS = ("speculative-decoding", "draft")
UNNAMED = "OWNER/DRAFT"

# A path inside a sentence: "Q8_0 from /models/x.gguf", "(~/x)", "file:///x", "C:\\x".
_PATH = re.compile(
    r"(?:(?<=^)|(?<=[\s\"'(=,:]))(?:file:/+|~/|\.{1,2}/|/|[A-Za-z]:[\\/])[^\s\"'),]+"
)
_MISSING = "–"


def model_card(
    report: Report,
    layout: str,
    base_model: str,
    license: str,
    *,
    repo_id: str | None = None,
) -> str:
    """README.md of a published draft, YAML front matter included.

    `report` is a report.json of format 1, `layout` one of LAYOUTS, `base_model` the target's Hub
    name, `license` a Hub licence name such as "apache-2.0", `repo_id` where the draft will live.
    Raises UserError for an unknown layout.
    """
    if layout not in LAYOUTS:
        known = did_you_mean(layout, tuple(LAYOUTS))
        raise UserError(f"no model card for the layout '{layout}'{known}")
    library, commands = LAYOUTS[layout]
    base_model, repo_id = _public(base_model), repo_id or UNNAMED
    gamma = report["settings"]["num_draft_tokens"]
    sections = [
        _front_matter(report, library, base_model, license),
        _introduction(report, base_model, repo_id),
        _measured(report),
        _conditions(report),
        _engines(report),
        "## Serve\n\n" + commands(base_model, repo_id, gamma),
        _GLOSSARY,
    ]
    return "\n\n".join(section.strip() for section in sections) + "\n"


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
            f"**Measured against {_public(_format_of(target))} weights, dequantised to "
            f"{target['dtype']}**, not against the full-precision weights that the Hub keeps as "
            f"{base_model}. In front of other weights of the same model the draft stays lossless; "
            "its acceptance there was not measured.",
        ]
    return "\n".join(lines)


def _measured(report: Report) -> str:
    """One row per domain and law; no mean over either."""
    cells = report["cells"]
    gamma = max((len(cell["acceptance_by_position"]) for cell in cells), default=0)
    survivals = [f"S_{k}" for k in range(1, gamma + 1)]
    header = ["domain", "law", "prompts", "α overlap", *survivals, "τ", "accepted/drafted"]
    header += ["speedup measured", "predicted"]
    rows = []
    for cell in cells:
        speed = cell.get("speed") or {}
        survival = [place["survival"] for place in cell["acceptance_by_position"]]
        survival += [None] * (gamma - len(survival))
        rows.append(
            [
                *(_cell(cell["domain"]), _cell(cell["law"]), str(cell["prompts"])),
                _interval(cell["overlap"], 3),
                *(_number(value, 2) for value in survival),
                _interval(cell["tokens_per_round"], 2),
                _number(cell["draft_acceptance_rate"], 3),
                _interval(speed.get("speedup"), 2),
                _number(speed.get("predicted"), 2),
            ]
        )
    table = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
    doubts = [f"- **Alarm:** {_cell(alarm)}" for alarm in report.get("alarms") or []]
    text = "Held-out prompts; brackets hold bootstrap intervals over conversations."
    return "\n".join(["## Measured", "", text, "", *table, *([""] if doubts else []), *doubts])


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
    lines = [f"- {name}: {_cell(str(value))}" for name, value in facts.items() if value is not None]
    return "\n".join(["## These numbers hold for", "", *lines])


def _format_of(target: Report) -> str:
    """The format that the target's weights were stored in; empty if they were not quantised."""
    return (target.get("quantisation") or "").removesuffix(", dequantised")


def _engines(report: Report) -> str:
    reduced = any(cell.get("captured_mass") is not None for cell in report["cells"])
    lines = [
        "## Engines draft greedily by default",
        "",
        "At T > 0 the acceptance above belongs to a draft *sampled* from its own distribution. "
        "Engines take the draft's best token unless told otherwise: vLLM's `draft_sample_method` "
        "is `greedy` unless set to `probabilistic`. A greedy draft is accepted with probability "
        "p(argmax q) instead of Σ min(p, q): the output stays lossless, the numbers differ. At "
        "T = 0 both are the same.",
    ]
    if reduced:
        lines[-1] += (
            " This draft has a reduced vocabulary: SGLang's rejection sampling does not take one, "
            "so there it drafts greedily."
        )
    return "\n".join(lines)


# ----------------------------------------------------------------------------- commands


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```"


def _vllm(method: str, base_model: str, repo_id: str, gamma: int) -> str:
    speculative = {
        "method": method,
        "model": repo_id,
        "num_speculative_tokens": gamma,
        "draft_sample_method": "probabilistic",
    }
    command = f"vllm serve {base_model} --speculative-config '{json.dumps(speculative)}'"
    return "vLLM:\n\n" + _fenced("bash", command)


def _sglang(algorithm: str, base_model: str, repo_id: str, gamma: int) -> str:
    """A chain: one child a step, and the verified token besides the drafted ones."""
    command = " \\\n  ".join(
        [
            f"python -m sglang.launch_server --model-path {base_model}",
            f"--speculative-algorithm {algorithm} --speculative-draft-model-path {repo_id}",
            f"--speculative-num-steps {gamma} --speculative-eagle-topk 1",
            f"--speculative-num-draft-tokens {gamma + 1}",
        ]
    )
    return "SGLang:\n\n" + _fenced("bash", command)


def _serve_eagle3(base_model: str, repo_id: str, gamma: int) -> str:
    engines = (_vllm("eagle3", base_model, repo_id, gamma),)
    return "\n\n".join([*engines, _sglang("EAGLE3", base_model, repo_id, gamma)])


def _serve_transformers(base_model: str, repo_id: str, gamma: int) -> str:
    """The length and the stop rule of transformers' assistant live on the assistant's config."""
    text = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{base_model}")
target = AutoModelForCausalLM.from_pretrained("{base_model}")
draft = AutoModelForCausalLM.from_pretrained("{repo_id}")
draft.generation_config.num_assistant_tokens = {gamma}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0.0

messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
reply = target.generate(**inputs, assistant_model=draft, do_sample=True, max_new_tokens=128)
print(tokenizer.decode(reply[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""
    own = "transformers (samples the draft by the same law as the target):"
    return f"{own}\n\n{_fenced('python', text)}\n\n" + _vllm(
        "draft_model", base_model, repo_id, gamma
    )


LAYOUTS: dict[str, tuple[str, Callable[[str, str, int], str]]] = {
    "transformers": ("transformers", _serve_transformers),
    "eagle3": ("draftsmith", _serve_eagle3),
}
"""Layout -> (the Hub's library_name, the section that says how to serve it)."""

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

# ----------------------------------------------------------------------------- words


def _public(text: str) -> str:
    """`text` with every local path cut down to its last part; Hub names stay as they are."""
    whole = PureWindowsPath(text) if "\\" in text else PurePosixPath(text)
    local = whole.is_absolute() or whole.parts[:1] in (("~",), (".",), ("..",))
    if local or (len(whole.parts) > 2 and " " not in text):
        return whole.name
    return _PATH.sub(lambda found: re.split(r"[\\/]", found.group().rstrip("\\/"))[-1], text)


def _cell(text: str) -> str:
    """One line of Markdown that cannot break a table or bring its own HTML; no local path."""
    text = " ".join(_public(text).split())
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def _number(value: float | None, digits: int) -> str:
    return _MISSING if value is None else f"{value:.{digits}f}"


def _interval(estimate: Report | None, digits: int) -> str:
    low, high = ((estimate or {}).get(key) for key in ("low", "high"))
    value = _number((estimate or {}).get("value"), digits)
    return value if low is None or high is None else f"{value} [{low:.{digits}f}–{high:.{digits}f}]"
