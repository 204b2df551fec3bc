"""Tiny drafters, and the folders that publishing makes of them."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from draftsmith.configs.load import load_recipe, to_dict
from draftsmith.configs.recipe import PublishSection
from draftsmith.data.target import Target
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import save_drafter, weights_hash
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.drafters.medusa import MedusaConfig, MedusaDrafter
from draftsmith.drafters.mlp import MLPConfig, MLPDrafter
from draftsmith.scripts.publish import publish

SAMPLE = Path(__file__).resolve().parent / "fixtures" / "report.json"


def save(family: str, target: Target, folder: Path, reduced: bool = False) -> Path:
    torch.manual_seed(2)
    ids = torch.arange(0, target.vocab_size, 2)
    if family == "eagle3":
        config = Eagle3Config((0, 1, 2), len(ids), init="random")
        drafter: Any = Eagle3Drafter.from_target(target, config, ids)
    elif family == "medusa":
        drafter = MedusaDrafter.from_target(target, MedusaConfig(), ids if reduced else None)
    elif family == "mlp":
        drafter = MLPDrafter.from_target(target, MLPConfig(), ids if reduced else None)
    else:
        drafter = CausalDrafter.from_target(target, CausalConfig(), ids if reduced else None)
    return save_drafter(drafter, folder, target, {"steps": 3})


def report_on(folder: Path) -> dict[str, Any]:
    report = json.loads(SAMPLE.read_text(encoding="utf-8"))
    report["provenance"]["drafter"]["weights_sha256"] = weights_hash(folder)
    return report


def send(target: Target, drafter: Path, out: Path, dtype: Any = "float32", **options: Any) -> Path:
    """Publish with a report of these weights and the demo's recipe, into `out`."""
    console, recipe = Console(file=io.StringIO()), to_dict(load_recipe("demo"))
    section = PublishSection(dtype=dtype, **options)
    return publish(section, target, drafter, report_on(drafter), out, console, recipe)
