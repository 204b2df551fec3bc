"""What went wrong for others, as tests here. Numbers are those of the known faults.

B047, B048 and B053: test_step (padding, parts, padded heads) and test_loop (accumulation). B051:
test_losses (directions and end points). B125: test_vocab (a share for every domain).
"""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, ObjectiveSection, Recipe, ServingSection
from draftsmith.data.gather import GatherSettings, Request, answer
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.drafters.checkpoint import load_drafter
from draftsmith.drafters.distribution import DraftVocabularyP
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.train import losses
from draftsmith.train.loop import train
from draftsmith.train.objective import bind_objective
from draftsmith.train.score import score
from draftsmith.train.step import Scorer, scored_tokens

DOMAINS = ("a", "b")
LIMIT = 14
RecipeFactory = Callable[..., Recipe]


def scorer_of(drafter: Drafter, target: Target, steps: int, **objective: Any) -> Scorer:
    section = ObjectiveSection(**objective)
    bound = bind_objective(section, ServingSection((LawSection(1.0),), num_draft_tokens=steps))
    return Scorer(drafter, section, bound, DraftVocabularyP(target, drafter.draft_ids, Law(1.0)))


def head_of(target: Target) -> Eagle3Drafter:
    torch.manual_seed(1)
    ids = torch.arange(target.vocab_size)
    return Eagle3Drafter.from_target(target, Eagle3Config(draft_vocab_size=len(ids)), ids)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("objective", [{}, {"then": "rounds"}, {"then": "accepted_length"}])
def test_b046_supervised_are_exactly_the_predictions_of_drafted_tokens(
    objective: dict[str, Any], steps: int, tiny_target: Target, records: list[Record]
) -> None:
    """Two rows of other prompt and reply lengths; no other position has any gradient."""
    chosen = [next(r for r in records if len(r.reply) == n) for n in (6, 9)]
    batch = collate(chosen, DOMAINS)
    drafter = head_of(tiny_target)
    seen: list[Tensor] = []
    inner = drafter.unroll

    def watched(batch: Any, count: int) -> Any:
        found = inner(batch, count)
        seen.extend(step.hidden for step in found)
        for hidden in seen:
            hidden.retain_grad()
        return found

    drafter.unroll = watched  # type: ignore[method-assign]
    scorer = scorer_of(drafter, tiny_target, steps, **objective)
    totals = scored_tokens(batch, steps).float()
    scored = scorer(batch, steps, totals, second="then" in objective)
    scored.loss.backward()
    for k, (hidden, token) in enumerate(zip(seen, scored.token, strict=True)):
        wanted = [
            int(first) + j
            for first, r in zip(batch.first, chosen, strict=True)
            for j in range(1 + k, len(r.reply))
        ]
        assert token.tolist() == wanted
        assert hidden.grad is not None
        alive = hidden.grad.abs().sum(-1) > 0  # [N_k]
        # A sampled token that the draft likes better than the target pulls at no rounds.
        least = 0.3 if objective.get("then") == "rounds" else 0.9
        assert float(alive.double().mean()) > least, "a loss that leaves positions out"


def test_b050_a_divergence_does_not_depend_on_the_size_of_the_vocabulary() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.1, 0.6, 0.3])
    for name in ("fkl", "tv", "nla", "lk_hybrid", "jsd", "greedy_mass"):
        values = []
        for size in (3, 49_152):
            log_p, logits = torch.full((2, size), -torch.inf)
            log_p[:3], logits[:3] = p.log(), q.log()
            values.append(float(losses.objective(name)(log_p, logits)))
        assert values[0] == pytest.approx(values[1], rel=1e-6), name
    assert float(losses.fkl(p.log(), q.log())) == pytest.approx(
        float((p * (p / q).log()).sum()), rel=1e-5
    )


def test_b056_rows_without_a_draftable_token_add_nothing(
    tiny_target: Target, records: list[Record]
) -> None:
    bare = [r for r in records if len(r.reply) == 1][:1] * 4
    full = [r for r in records if len(r.reply) > 4][:3]
    drafter = head_of(tiny_target)
    for objective in ({}, {"then": "rounds"}, {"then": "accepted_length"}):
        scorer = scorer_of(drafter, tiny_target, 3, **objective)  # type: ignore[arg-type]
        totals = scored_tokens(collate(full, DOMAINS), 3).float()
        options = {"second": "then" in objective}
        alone = scorer(collate(full, DOMAINS), 3, totals, **options).loss
        mixed = scorer(collate([bare[0], *full], DOMAINS), 3, totals, **options).loss
        assert mixed.item() == pytest.approx(alone.item(), rel=1e-6)
        empty = scorer(collate(bare, DOMAINS), 3, torch.zeros(3), **options)
        assert empty.loss.item() == 0.0
        empty.loss.backward()
        assert all(p.grad is None or not p.grad.any() for p in drafter.trainable())


def test_b056_records_without_labels_stop_with_the_reason(
    tiny_target: Target,
    records: list[Record],
    store: RecordStore,
    make_recipe: RecipeFactory,
    tmp_path: Path,
) -> None:
    bare = RecordStore.create(tmp_path / "records", store.settings)
    bare.add("a", [r for r in records if len(r.reply) == 1])
    with pytest.raises(UserError, match="nothing to train on"):
        train(make_recipe(), tiny_target, bare, tmp_path / "run", Console(file=io.StringIO()))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_b057_every_depth_starts_near_the_logarithm_of_the_vocabulary(
    depth: int, tiny_target: Target, records: list[Record]
) -> None:
    torch.manual_seed(0)
    layers = tuple(range(depth))
    drafter = CausalDrafter.from_target(tiny_target, CausalConfig(layers=layers), None)
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    rows = [r for r in records if len(r.reply) > 4][:4]
    scorer = scorer_of(drafter, tiny_target, 1, loss="ce")
    batch = collate(rows, DOMAINS)
    scored = scorer(batch, 1, scored_tokens(batch, 1).float())
    assert scored.loss.item() == pytest.approx(
        torch.tensor(float(tiny_target.vocab_size)).log().item(), rel=0.05
    )
    scored.loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        assert bool(parameter.grad.any()), name


def test_b068_training_on_overlap_gains_overlap(
    tiny_target: Target, store: RecordStore, make_recipe: RecipeFactory, tmp_path: Path
) -> None:
    """The same head and data: overlap itself ends higher than a likelihood of single samples."""
    found = {}
    for loss in ("ce", "fkl", "nla"):
        recipe = replace(
            make_recipe(steps=60, eval_every=60, lr=5e-3), objective=ObjectiveSection(loss=loss)
        )
        saved = train(recipe, tiny_target, store, tmp_path / loss, Console(file=io.StringIO()))
        drafter = load_drafter(saved, tiny_target)
        own = [r for r in store.records("train") if r.law == Law(1.0)]
        scores = score(tiny_target, drafter, own, Law(1.0), 1, LIMIT)
        found[loss] = sum(c.overlap[0][0] for c in scores) / sum(c.tokens for c in scores)
    assert found["nla"] > found["ce"] and found["fkl"] > found["ce"]
    assert 0 < found["ce"] < found["nla"] < 1


def test_b069_b070_what_training_sees_is_what_decoding_accepts(
    tiny_target: Target,
    records: list[Record],
    store: RecordStore,
    make_recipe: RecipeFactory,
    tmp_path: Path,
) -> None:
    """Overfitted on a few rows: greedy decoding of them accepts exactly what teacher forcing says.

    A head that fed its normed state back, lost a tensor on saving or read another layer would not.
    """
    recipe = replace(
        make_recipe(steps=80, unroll=3, lr=5e-3, eval_every=80),
        serving=ServingSection((LawSection(0.0),), num_draft_tokens=3),
    )
    requests = [
        Request(r.prompt_id, r.domain, "train", tuple(r.ids[: r.prompt_len].tolist()), Law(0.0), 0)
        for r in records[:12]
    ]
    settings = GatherSettings(LIMIT, batch_size=8, taps=(1, 1, 2), keep="hidden")
    greedy = [r for r in answer(tiny_target, requests, settings) if len(r.reply) > 1]
    few = RecordStore.create(tmp_path / "records", store.settings)
    few.add("a", greedy)
    saved = train(recipe, tiny_target, few, tmp_path / "run", Console(file=io.StringIO()))
    drafter = load_drafter(saved, tiny_target)
    scores = score(tiny_target, drafter, greedy, Law(0.0), 3, LIMIT)
    answered = {r.prompt_id for r in greedy}
    requests = [r for r in requests if r.prompt_id in answered]
    outputs = decode(tiny_target, requests, DecodeSettings(LIMIT, 3), drafter)
    agreed = forced = 0.0
    for record, conversation, output in zip(greedy, scores, outputs, strict=True):
        assert output.ids == record.reply.tolist()
        position = 0
        for drafted, accepted in output.rounds:
            expected = conversation.log_ratio[position, :drafted].exp().cumprod(-1)
            assert accepted == int(expected.sum().round())
            agreed += accepted
            forced += drafted
            position += accepted + 1
    assert agreed / forced > 0.3, "overfitted rows must be accepted"
