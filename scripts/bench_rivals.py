"""Our loops against transformers' `generate` and economize 0.3: the same models, prompts, lengths.

Prefill counts on both sides. Rivals run on our target itself, so with its measured linear forms,
and so do their drafters: what differs is the loop. `--stock` gives them plain `nn.Linear`s, which
is what their users have.

economize (`pip install --no-deps economize==0.3.0`) reads our EAGLE-3 folder as it is, but takes
the nested layer ids for outputs counted from 1, so they are raised by one; both then draft alike.
Not matched: at T = 1 the random numbers differ; its draft model keeps a full vocabulary; its
EAGLE-3 drafter makes chains only, so trees are not compared; its sampler sorts the vocabulary, and
`--lean` gives it one that does not. transformers' assisted generation takes one prompt at a time.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.configs.load import load_recipe
from draftsmith.data.gather import Request
from draftsmith.data.linear import speed_up_few_rows
from draftsmith.data.target import load_target
from draftsmith.data.warp import Law
from draftsmith.eval.decode import DecodeSettings
from draftsmith.scripts.bench_timing import (
    Loop,
    Sample,
    Setup,
    batches,
    interleaved,
    our_loop,
    per_round,
    rate,
    ratio,
    rounded,
    summary,
    under,
)

STOCK = "rivals run on plain nn.Linear, as their users do"
LEAN = "economize samples without sorting the vocabulary"
ASSISTED_LENGTHS = (1, 2, 3, 4)
LOOKUP_LENGTHS = (2, 4, 8)
COMPARED_LENGTHS = (1, 3)
COMPARED_BATCHES = (1, 8)


def saved_name(section: str, args: argparse.Namespace) -> str:
    """The section's key in the saved result: one for each way of treating the rivals."""
    ways = [section]
    if args.stock and section in ("assisted", "lookup", "economize"):
        ways.append("stock linears")
    if args.lean and section == "economize":
        ways.append("lean sampler")
    return ", ".join(ways)


def _model(setup: Setup, stock: bool) -> Any:
    if not stock:
        return setup.target.model
    return load_target(load_recipe("demo").target, few_rows=False).model


# ---- transformers


def generate_loop(setup: Setup, model: Any, law: Law, **options: Any) -> Loop:
    """`model.generate` on one prompt, its tokens counted as ours are."""
    if law.temperature:
        options |= {"do_sample": True, "temperature": law.temperature, "top_k": 0, "top_p": 1.0}
    else:
        options |= {"do_sample": False}
    eos = list(setup.target.eos_ids)

    def run(requests: Sequence[Request], tokens: int) -> Sample:
        (request,) = requests
        torch.manual_seed(request.seed)
        start = time.perf_counter()
        ids = torch.tensor([request.ids])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens,
            eos_token_id=eos or None, pad_token_id=(eos or [0])[0], **options,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        reply = out[0, ids.shape[1] :].tolist()
        return Sample(seconds, float(len(reply)), ids=[reply])

    return run


def plain(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Plain decoding against `generate`, on our linear forms and on plain ones."""
    stock = _model(setup, stock=True)
    work = batches(setup.timed, 1, args.prompts)
    found = []
    for law in setup.laws:
        loops = {
            "ours": our_loop(setup.target, DecodeSettings(1, 0), None, True),
            "generate": generate_loop(setup, setup.target.model, law),
            "generate, stock linears": generate_loop(setup, stock, law),
        }
        asked = [under(part, law) for part in work]
        samples = interleaved(loops, asked, setup.tokens, args.repeats)
        rates = {name: rate(s) for name, s in samples.items()}
        ratios = {name: ratio(s, samples["ours"]) for name, s in samples.items() if name != "ours"}
        same = _same(samples["ours"], samples["generate"]) if not law.temperature else None
        found.append({"law": law.label, "tokens_per_s": rates, "ours_over": ratios, "same": same})
        print(f"plain {law.label}: {rounded(rates)}", flush=True)
    return {"prompts": len(work), "repeats": args.repeats, "laws": found}


def _same(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    """Share of replies with the same tokens."""
    pairs = [
        a == b for s, t in zip(ours, theirs, strict=True) for a, b in zip(s.ids, t.ids, strict=True)
    ]
    return sum(pairs) / len(pairs)


def assisted(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Assisted generation with the same draft LM, each side at its best draft length."""
    model = _model(setup, args.stock)
    draft: Any = AutoModelForCausalLM.from_pretrained(setup.folders["causal"]).eval()
    if not args.stock:
        speed_up_few_rows(draft)
    own = {"num_assistant_tokens_schedule": draft.generation_config.num_assistant_tokens_schedule}
    own["num_assistant_tokens"] = draft.generation_config.num_assistant_tokens
    own["assistant_confidence_threshold"] = draft.generation_config.assistant_confidence_threshold

    def loop(law: Law, **options: Any) -> Loop:
        inner = generate_loop(setup, model, law, assistant_model=draft)

        def run(requests: Sequence[Request], tokens: int) -> Sample:
            for name, value in options.items():
                setattr(draft.generation_config, name, value)
            return inner(requests, tokens)

        return run

    def theirs(law: Law) -> dict[str, Loop]:
        constant = {
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }
        loops = {str(n): loop(law, **constant, num_assistant_tokens=n) for n in ASSISTED_LENGTHS}
        return {**loops, "their default": loop(law, **own)}

    return _best_of(setup, args, "causal", ASSISTED_LENGTHS, theirs)


def lookup(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """Prompt lookup, each side at its best draft length."""
    model = _model(setup, args.stock)

    def theirs(law: Law) -> dict[str, Loop]:
        return {
            str(n): generate_loop(setup, model, law, prompt_lookup_num_tokens=n)
            for n in LOOKUP_LENGTHS
        }

    return _best_of(setup, args, "lookup", LOOKUP_LENGTHS, theirs)


def _best_of(
    setup: Setup, args: argparse.Namespace, family: str, lengths: Sequence[int], theirs: Any
) -> dict[str, Any]:
    """Both sides at every length; the ratio is that of their best ones."""
    work = batches(setup.timed, 1, args.prompts)
    found = []
    for law in setup.laws:
        loops: dict[str, Loop] = {}
        for n in lengths:
            how = DecodeSettings(1, n, setup.verifier)
            loops[f"ours {n}"] = our_loop(setup.target, how, setup.drafters[family], True)
        loops |= {f"transformers {name}": loop for name, loop in theirs(law).items()}
        asked = [under(part, law) for part in work]
        samples = interleaved(loops, asked, setup.tokens, args.repeats)
        rates = {name: rate(s) for name, s in samples.items()}
        best = {
            side: max((name for name in rates if name.startswith(side)), key=rates.__getitem__)
            for side in ("ours", "transformers")
        }
        found.append(
            {
                "law": law.label,
                "tokens_per_s": rates,
                "best": best,
                "ratio": ratio(samples[best["transformers"]], samples[best["ours"]]),
                "same": _same(samples[best["ours"]], samples[best["transformers"]])
                if not law.temperature
                else None,
            }
        )
        print(f"{family} against transformers, {law.label}: {rounded(rates)}", flush=True)
    return {"prompts": len(work), "repeats": args.repeats, **summary(found), "laws": found}


# ---- economize


@dataclass
class Softmax:
    """A sampler for economize that draws from the softmax as it stands, without sorting it."""

    seed: int
    greedy: bool = False
    generators: dict[torch.device, torch.Generator] = field(default_factory=dict)

    def generator_for(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]

    def distributions(self, logits: Tensor) -> Tensor:
        return logits.float().softmax(-1)

    def distribution(self, logits: Tensor, history: Tensor) -> Tensor:
        return self.distributions(logits)

    def select_many(self, logits: Tensor) -> Tensor:
        generator = self.generator_for(logits.device)
        return torch.multinomial(self.distributions(logits), 1, generator=generator)[:, 0]

    def __call__(self, logits: Tensor, history: Tensor) -> int:
        return int(self.select_many(logits[None])[0])


def economize_model(setup: Setup, base: Any, family: str, stock: bool) -> Any:
    """`base` with our drafter attached by economize."""
    library: Any = import_module("economize")
    folder = setup.folders[family]
    if family == "causal":
        kind: Any = import_module("economize.techniques.draft_model").DraftModelConfig
        model = library.apply(base, kind(model=str(folder)))
        drafts = model.drafting_technique.draft_model
    else:
        checkpoint = library.read_checkpoint(folder, "eagle3")
        (config,) = checkpoint.configs
        layers = tuple(tap + 1 for tap in setup.drafters[family].taps)  # outputs counted from 1
        checkpoint.configs[:] = [replace(config, aux_layers=layers)]
        model = library.attach(base, checkpoint, check_teacher=False)
        drafts = model.drafting_technique
    if not stock:
        speed_up_few_rows(drafts)
    return model.eval()


def economize_loop(setup: Setup, model: Any, law: Law, length: int, lean: bool) -> Loop:
    """Its batch decoding: `length` drafts behind each exact token, lossless at any temperature."""
    library: Any = import_module("economize")
    rule = "rejection" if law.temperature and length else None
    how = library.DecodeConfig(cycle_length=length + 1, verifier=rule)
    stop = list(setup.target.eos_ids) or None

    def selector(seed: int) -> Any:
        if not law.temperature:
            return library.GreedySelector()
        return Softmax(seed) if lean else library.TopPSampler(law.temperature, seed=seed)

    def run(requests: Sequence[Request], tokens: int) -> Sample:
        start = time.perf_counter()
        prompts = [torch.tensor(r.ids) for r in requests]
        chosen = selector(requests[0].seed)
        results = model.decode_batch(prompts, tokens, decoding=how, selector=chosen, stop=stop)
        seconds = time.perf_counter() - start
        ids = [r.tokens.tolist() for r in results]
        rounds = [(int(d), int(a)) for r in results for d, a in r.acceptance]
        return Sample(seconds, float(sum(map(len, ids))), rounds=rounds, ids=ids)

    return run


def economize(setup: Setup, args: argparse.Namespace) -> dict[str, Any]:
    """The same drafters in both loops: every length, T = 0 and 1, batches of 1 and 8."""
    base = _model(setup, args.stock)
    rows: list[dict[str, Any]] = []
    for family in ("eagle3", "causal"):
        if family not in setup.drafters:
            continue
        model = economize_model(setup, base, family, args.stock)
        for law in setup.laws:
            for size in COMPARED_BATCHES:
                work = batches(under(setup.timed, law), size, max(2, args.prompts // size))
                cells = _side_by_side(setup, args, model, family, law, work)
                rows += [{"drafter": family, "law": law.label, "batch": size, **c} for c in cells]
    drafted = [row for row in rows if row["num_draft_tokens"]]
    return {
        "economize": version("economize"),
        "prompts": args.prompts,
        "repeats": args.repeats,
        **summary(drafted),
        "median_by_batch": {
            size: median(r["ratio"].value for r in drafted if r["batch"] == size)
            for size in COMPARED_BATCHES
        },
        "cells_in_full": rows,
    }


def _side_by_side(
    setup: Setup,
    args: argparse.Namespace,
    model: Any,
    family: str,
    law: Law,
    work: Sequence[Sequence[Request]],
) -> list[dict[str, Any]]:
    """One row for each draft length, plain decoding first."""
    loops: dict[str, Loop] = {}
    for n in (0, *COMPARED_LENGTHS):
        drafter = setup.drafters[family] if n else None
        how = DecodeSettings(1, n, setup.verifier)
        loops[f"ours {n}"] = our_loop(setup.target, how, drafter, True)
        loops[f"economize {n}"] = economize_loop(setup, model, law, n, args.lean)
    samples = interleaved(loops, work, setup.tokens, args.repeats)
    rows = []
    for n in (0, *COMPARED_LENGTHS):
        ours, theirs = samples[f"ours {n}"], samples[f"economize {n}"]
        row = {
            "num_draft_tokens": n,
            "ours_tokens_per_s": rate(ours),
            "economize_tokens_per_s": rate(theirs),
            "ratio": ratio(theirs, ours),
            "tokens_per_round": [per_round(ours), per_round(theirs)] if n else None,
            "same": _same(ours, theirs) if not law.temperature else None,
        }
        rows.append(row)
        print(f"economize {family} {law.label} {len(work[0])} {rounded(row)}", flush=True)
    return rows
