"""The card of records that are pushed as a data set: what was asked, of which target, how much."""

from typing import Any

import yaml

from ..data.store import RecordStore
from .card_notes import records_table
from .public import one_line

_TAGS = ("speculative-decoding", "draftsmith")


def records_card(store: RecordStore, repo_id: str) -> str:
    """README.md of a finished store that will live at `repo_id`."""
    sections = [
        _front_matter(),
        _introduction(store, repo_id),
        _counts(store),
        _settings(store),
        _LICENCE.format(target=one_line(store.settings["target"]["name"])),
    ]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def _front_matter() -> str:
    fields: dict[str, Any] = {"pretty_name": "Target records", "tags": list(_TAGS)}
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _introduction(store: RecordStore, repo_id: str) -> str:
    target = one_line(store.settings["target"]["name"])
    kept = {
        "hidden": "the final states behind every reply token, and those of the tapped layers",
        "top": f"the {store.settings['top']} most probable tokens wherever one was drawn",
        "none": "token ids alone",
    }[store.settings["distributions"]]
    return "\n".join(
        [
            f"# {repo_id}",
            "",
            f"Replies of {target} to prompts of {len(_domains(store))} domains, to train and "
            f"measure draft models for speculative decoding. Kept of each reply: {kept}.",
            "",
            "The files are safetensors shards with a manifest; `draftsmith train R.yaml --records "
            "FOLDER` reads them once they are downloaded.",
        ]
    )


def _cells(store: RecordStore) -> list[dict[str, Any]]:
    return list(store.summary().get("cells", []))


def _domains(store: RecordStore) -> list[str]:
    return sorted({str(cell["domain"]) for cell in _cells(store)})


def _counts(store: RecordStore) -> str:
    return "\n".join(["## Counts", "", *records_table(_cells(store))])


def _settings(store: RecordStore) -> str:
    """What the records hold for, and the hashes by which they are known again."""
    settings, target = store.settings, store.settings["target"]
    facts = {
        "target": target["name"],
        "target revision": target["revision"],
        "target weights": target["quantisation"] or "not quantised",
        "target weights (hash)": target["weights"],
        "dtype": target["dtype"],
        "tokenizer (hash)": target["tokenizer"],
        "chat template (hash)": target["template"],
        "laws": ", ".join(sorted({str(cell["law"]) for cell in _cells(store)})),
        "longest reply": f"{settings['max_new_tokens']} tokens",
        "tapped layers": ", ".join(map(str, settings["taps"])) or None,
        "seed": settings["seed"],
        "settings (hash)": store.fingerprint,
        "records (hash)": store.identity,
        "versions": f"torch {settings['torch']}, transformers {settings['transformers']}",
    }
    lines = [f"- {name}: {one_line(str(v))}" for name, v in facts.items() if v is not None]
    return "\n".join(["## These records hold for", "", *lines])


_LICENCE = """
## Licence

Two kinds of rights meet here. The prompts, which the records contain as token ids, stay under the
licences of the sources that they were taken from. The replies and states come from {target}, whose
licence says what may be made of its output. Name a licence here only if both allow it.
"""
