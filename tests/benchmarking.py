"""A benchmark of two drafters and two servings on a tiny target, to be written somewhere."""

import json
from pathlib import Path

import torch

from draftsmith.configs.recipe import TargetSection
from draftsmith.data.target import Target, load_target
from draftsmith.drafters.checkpoint import save_drafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter

WORDS = ("quagga", "zorilla")
"""Of which prompts are made, and nothing else is."""

SPEC = """\
name: contest
target: {{name: {target}, device: cpu}}
domains:
  - {{name: beasts, source: {folder}/beasts.jsonl}}
  - {{name: a/b, source: {folder}/other.jsonl}}
drafters:
  - {{name: head, folder: {folder}/head}}
  - {{name: lookup, options: {{family: lookup}}}}
servings:
  - {{name: block, num_draft_tokens: 2}}
  - {{name: greedy drafts, num_draft_tokens: 1, verifier: token, drafting: greedy}}
seeds: [0, 5]
collect: {{max_new_tokens: 8, batch_size: 16}}
eval:
  sweep: [1, 2]
  timing_prompts: 1
  timing_tokens: 5
  bootstrap: 50
  calibration_prompts: 1
  parity_replies: 0
"""


def loaded(saved_target: Path) -> Target:
    return load_target(TargetSection(str(saved_target), device="cpu"), few_rows=False)


def write_head(folder: Path, target: Target, seed: int) -> Path:
    """An untrained head, another one for each seed."""
    ids = torch.arange(0, target.vocab_size, 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Drafter.from_target(target, Eagle3Config(draft_vocab_size=len(ids)), ids)
        torch.nn.init.normal_(head.fc.weight, std=0.1)
    return save_drafter(head, folder, target, {})


def write_spec(folder: Path, saved_target: Path) -> Path:
    """`SPEC` in `folder`, with its prompts and its head."""
    for name, word, count in (("beasts", WORDS[0], 5), ("other", WORDS[1], 4)):
        rows = [json.dumps({"prompt": f"{word} {i}?"}) for i in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    write_head(folder / "head", loaded(saved_target), 0)
    path = folder / "spec.yaml"
    path.write_text(SPEC.format(target=saved_target, folder=folder), encoding="utf-8")
    return path
