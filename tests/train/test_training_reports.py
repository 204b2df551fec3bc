"""What went wrong for others in training, as tests on whole runs: B046 to B057, B068, B144.

Numbers are those of the known faults; more of them are in test_field_reports, which says where the
others are, and in test_resume_reports.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.nn.functional import pad
from watching import LIMIT, answered, lines, quiet, watch

from draftsmith.configs.recipe import LawSection, ObjectiveSection, Recipe, ServingSection
from draftsmith.data.gather import Request, recompute_states, request_of
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
from draftsmith.train.loop import train
from draftsmith.train.objective import bind_objective
from draftsmith.train.score import score
from draftsmith.train.step import Scorer, scored_tokens

RecipeFactory = Callable[..., Recipe]
Trainer = Callable[..., dict[str, Tensor]]
FAMILIES = ("eagle3", "causal")


def drafter_of(family: str, target: Target) -> Drafter:
    torch.manual_seed(1)
    if family == "causal":
        return CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), None)
    ids = torch.arange(target.vocab_size)
    return Eagle3Drafter.from_target(target, Eagle3Config(draft_vocab_size=len(ids)), ids)


def scorer_of(drafter: Drafter, target: Target, **objective: Any) -> Scorer:
    section = ObjectiveSection(**objective)
    bound = bind_objective(section, ServingSection((LawSection(1.0),)))
    return Scorer(drafter, section, bound, DraftVocabularyP(target, drafter.draft_ids, Law(1.0)))


def gradient(scorer: Scorer) -> Tensor:
    return torch.cat([p.grad.flatten() for p in scorer.drafter.trainable() if p.grad is not None])


# ---- B046: which positions are supervised


def test_b046_a_separate_draft_is_supervised_where_it_drafts(
    tiny_target: Target, load_tiny: Callable[..., Target]
) -> None:
    """Ten tokens with the reply at 5 to 8, which goes on to a second reply at 12 to 14.

    Position t predicts token t + 1. A reply's first token comes with the prompt, from prefill.
    """
    torch.manual_seed(0)
    ids = torch.randint(3, tiny_target.vocab_size, (15,))
    bare = [
        Record("p", "a", "train", Law(1.0), 0, "stop", ids[:9], 5, None),
        Record("p", "a", "train", Law(1.0), 0, "stop", ids, 12, None, turn=1),
    ]
    turns = list(recompute_states(tiny_target, bare, ()))
    drafter = drafter_of("causal", tiny_target)
    assert isinstance(drafter, CausalDrafter)
    kept: list[Tensor] = []

    def keep(module: Any, given: Any, out: Any) -> None:
        out.last_hidden_state.retain_grad()
        kept.append(out.last_hidden_state)

    drafter.body.register_forward_hook(keep)
    scorer = scorer_of(drafter, tiny_target)
    batch = collate(turns, ("a",))
    scorer(batch, 1, scored_tokens(batch, 1).float()).loss.backward()
    (states,) = kept
    assert states.grad is not None
    alive = [row.abs().sum(-1).nonzero().flatten().tolist() for row in states.grad]
    assert alive == [[5, 6, 7], [12, 13]]


# ---- B047: the mean is over supervised tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_b047_loss_and_gradient_do_not_know_the_padding(
    family: str, tiny_target: Target, records: list[Record]
) -> None:
    rows = [r for r in records if len(r.reply) > 3][:4]
    scorer = scorer_of(drafter_of(family, tiny_target), tiny_target)
    found = []
    for width in (0, 64, 512):
        batch = collate(rows, ("a", "b"))
        more = max(0, width - batch.ids.shape[1])
        batch = replace(batch, ids=pad(batch.ids, (0, more)), taps=pad(batch.taps, (0, 0, 0, more)))
        scorer.zero_grad()
        scored = scorer(batch, 2, scored_tokens(batch, 2).float())
        scored.loss.backward()
        found.append((scored.loss.item(), gradient(scorer)))
    for loss, grad in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        assert float((grad - found[0][1]).abs().max()) < 1e-6
    assert float(found[0][1].abs().max()) > 1e-3


def test_b047_b050_loss_and_gradient_are_the_hand_computed_ones(
    fit: Trainer,
    make_recipe: RecipeFactory,
    store: RecordStore,
    tiny_target: Target,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """KL in nats a token, from logits of transformers' own forward over each row by itself."""
    begun: list[Any] = []

    def keep(number: int, drafter: Any, batch: Any) -> None:
        if number == 0:
            begun.append(copy.deepcopy(drafter).eval())

    seen = watch(monkeypatch, keep)
    recipe = make_recipe("causal", steps=1, accumulation=2)
    fit(replace(recipe, objective=ObjectiveSection(loss="fkl")), run_folder)
    by_key = {r.key: r for r in store.records()}
    drafter, count = begun[0], 0
    total = torch.zeros((), dtype=torch.float64)
    for record in (by_key[key] for keys in seen.keys for key in keys):
        ids = record.ids[None, :-1]
        log_p = tiny_target.model(input_ids=ids).logits[0].double().log_softmax(-1).detach()
        log_q = drafter.model(input_ids=ids).logits[0].double().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)[record.prompt_len :]
        total, count = total + kl.sum(), count + len(kl)
    (total / count).backward()
    norm = torch.cat([p.grad.flatten() for p in drafter.parameters()]).norm()
    (row,) = lines(run_folder, "train")
    assert row["loss"] == pytest.approx(total.item() / count, rel=1e-6)
    assert row["gradient_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert 0 < row["loss"] < math.log(tiny_target.vocab_size)


# ---- B048: what an epoch that windows do not divide leaves over


@pytest.mark.parametrize("family", FAMILIES)
def test_b048_no_row_of_a_partial_window_is_lost(
    family: str,
    make_recipe: RecipeFactory,
    tiny_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ten batches of one row, four a step: the third window goes on into the next epoch."""
    store = answered(tiny_target, tmp_path / "records", 10)
    training = {r.key for r in store.index() if r.split == "train"}
    assert len(training) == 10
    seen = watch(monkeypatch)
    recipe = make_recipe(family, steps=None, epochs=1.0, accumulation=4, tokens_per_batch=1)
    train(recipe, tiny_target, store, tmp_path / "run", quiet())
    assert [len(keys) for keys in seen.keys] == [1] * 12
    assert set().union(*seen.keys[:10]) == training
    assert [row["step"] for row in lines(tmp_path / "run", "train")] == [1, 2, 3]


# ---- B053: sizes of vocabularies


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loss", ["nla", "fkl"])
def test_b053_b043_a_padded_head_trains_on_tokens_that_exist(
    loss: str,
    family: str,
    load_tiny: Callable[..., Target],
    make_recipe: RecipeFactory,
    tmp_path: Path,
) -> None:
    target = load_tiny(vocab_size=416)
    store = answered(target, tmp_path / "records", 12)
    recipe = replace(make_recipe(family, steps=4), objective=ObjectiveSection(loss=loss))
    saved = train(recipe, target, store, tmp_path / "run", quiet())
    rows = lines(tmp_path / "run", "train")
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert rows[0]["captured_mass"] <= 1 + 1e-6
    drafter = load_drafter(saved, target)
    (record,) = list(store.records("heldout"))[:1]
    (out,) = decode(target, [request_of(record)], DecodeSettings(LIMIT, 3), drafter)
    assert max(out.ids) < 400


# ---- B056: rows that a step scores nothing of


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("then", [None, "rounds", "accepted_length"])
def test_b056_steps_that_no_reply_reaches_stay_finite(
    then: str | None,
    family: str,
    make_recipe: RecipeFactory,
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """Replies of three tokens, the first from prefill: the third unrolled step predicts nothing."""
    store = answered(tiny_target, tmp_path / "records", 12, limit=3)
    recipe = replace(
        make_recipe(family, steps=3, unroll=3),
        objective=ObjectiveSection(then=then, switch_at=0.0),
    )
    train(recipe, tiny_target, store, tmp_path / "run", quiet())
    for row in lines(tmp_path / "run", "train") + lines(tmp_path / "run", "heldout"):
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float)), row


# ---- B057: depth and low precision


@pytest.fixture
def other_precision() -> Iterator[None]:
    """Precision is a process's own: the next run may have another."""
    AcceleratorState._reset_state()
    yield
    AcceleratorState._reset_state()


@pytest.mark.usefixtures("other_precision")
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_b057_every_depth_trains_in_every_precision(
    depth: int, precision: Any, fit: Trainer, make_recipe: RecipeFactory, run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    begun: list[Any] = []

    def keep(number: int, drafter: Any, batch: Any) -> None:
        if number == 0:
            begun.append(copy.deepcopy(drafter))

    seen = watch(monkeypatch, keep)
    recipe = make_recipe(steps=5, mixed_precision=precision, warmup_steps=0)
    recipe = replace(recipe, drafter={"family": "causal", "layers": list(range(depth))})
    fit(recipe, run_folder)
    assert all(math.isfinite(row["loss"]) for row in lines(run_folder, "train"))
    before = dict(begun[0].named_parameters())
    assert sum("layers." in name for name in before) == 9 * depth
    for name, parameter in seen.drafter.named_parameters():
        assert torch.isfinite(parameter).all() and parameter.dtype == torch.float32, name
        assert not torch.equal(parameter, before[name]), f"{name} was not reached"


# ---- B068: acceptance as the objective


@pytest.mark.parametrize("loss", ["tv", "fkl", {"fkl": 0.5, "tv": 0.5}], ids=str)
def test_b068_the_logged_distance_is_what_is_not_accepted(
    loss: Any,
    make_recipe: RecipeFactory,
    tiny_target: Target,
    store: RecordStore,
    tmp_path: Path,
) -> None:
    """α = 1 - TV in every line of the log, and decoding accepts first drafts as often."""
    recipe = replace(
        make_recipe("causal", steps=40, eval_every=40), objective=ObjectiveSection(loss=loss)
    )
    saved = train(recipe, tiny_target, store, tmp_path / "run", quiet())
    rows = lines(tmp_path / "run", "train")
    if loss == "tv":
        for row in rows:
            assert row["overlap"] == pytest.approx(1 - row["loss"], abs=1e-6)
    assert rows[-1]["overlap"] > rows[0]["overlap"] + 0.05

    drafter, law = load_drafter(saved, tiny_target), Law(1.0)
    (held_out,) = lines(tmp_path / "run", "heldout")
    own = [r for r in store.records("heldout") if r.drawn_from(law)]
    scores = score(tiny_target, drafter, own, law, 1, LIMIT)
    alpha = sum(c.overlap[0][0] for c in scores) / sum(c.tokens for c in scores)
    assert held_out["overlap_step_1"] == pytest.approx(alpha, abs=1e-5)

    prompts = [
        Request(f"{r.key}{i}", "a", "heldout", tuple(r.ids[:5].tolist()), law, i)
        for r in own
        for i in range(60)
    ]
    outputs = decode(tiny_target, prompts, DecodeSettings(3, 1, "token"), drafter)
    first = [o.rounds[0][1] for o in outputs if o.rounds and o.rounds[0][0]]
    exact = overlap_at(tiny_target, drafter, prompts)
    spread = (sum(a * (1 - a) for a in exact)) ** 0.5 / len(exact)
    assert abs(sum(first) / len(first) - sum(exact) / len(exact)) < 4 * spread + 0.02


@torch.no_grad()
def overlap_at(target: Target, drafter: Drafter, prompts: list[Request]) -> list[float]:
    """Σ min(p, q) behind prompt and first token, averaged over the first token's law."""
    found, known = [], {}
    for ids in (r.ids for r in prompts):
        if ids not in known:
            row = torch.tensor([ids])
            first = target.model(input_ids=row).logits[0, -1].softmax(-1)
            likely = first.topk(40)
            texts = torch.cat([row.expand(40, -1), likely.indices[:, None]], 1)
            p = target.model(input_ids=texts).logits[:, -1].softmax(-1)
            q = drafter.model(input_ids=texts).logits[:, -1].softmax(-1)  # type: ignore[attr-defined]
            shared = torch.minimum(p, q).sum(-1)
            known[ids] = float((likely.values * shared).sum() / likely.values.sum())
        found.append(known[ids])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_b068_training_on_tv_from_noise_is_not_stuck(
    family: str, fit: Trainer, make_recipe: RecipeFactory, run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A draft that knows nothing: TV alone still has a gradient, and α rises, if slowly.

    Where it would vanish (a draft that is sure of other tokens), nla and mixes with fkl are alive:
    see test_losses.
    """

    def forget(number: int, drafter: Any, batch: Any) -> None:
        if number == 0:
            generator = torch.Generator().manual_seed(0)
            for parameter in drafter.trainable():
                if parameter.dim() == 2:
                    parameter.data = 0.02 * torch.randn(parameter.shape, generator=generator)

    watch(monkeypatch, forget)
    recipe = make_recipe(family, steps=80, eval_every=80)
    fit(replace(recipe, objective=ObjectiveSection(loss="tv")), run_folder)
    rows = lines(run_folder, "train")
    assert rows[0]["gradient_norm"] > 1e-2
    begin, end = (sum(row["overlap"] for row in part) / 20 for part in (rows[:20], rows[-20:]))
    assert end > begin + 0.02
