"""What went wrong for others between a drafter's settings and its folder, by their numbers."""

import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

from draftsmith.configs.collection import CollectSection, DomainSection
from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, Recipe, ServingSection
from draftsmith.configs.training import TrainSection
from draftsmith.data.collection import collect_settings
from draftsmith.data.gather import GatherSettings, Request, answer, request_of
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.checkpoint import load_drafter, read_own, save_drafter
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.eval.decode import DecodeSettings, decode
from draftsmith.scripts.pipeline import Run
from draftsmith.train.loop import train
from draftsmith.train.score import score

# ---- B022: draft vocabularies of several sizes in one run folder

SIZES = (80, 120)


@pytest.fixture
def run(tiny_target: Target, tmp_path: Path) -> Run:
    source = tmp_path / "prompts.jsonl"
    rows = [json.dumps({"prompt": f"Solve step {n} of {n * n}."}) for n in range(8)]
    source.write_text("\n".join(rows), encoding="utf-8")
    recipe = Recipe(
        "tiny",
        serving=ServingSection((LawSection(1.0),)),
        domains=(DomainSection("math", str(source), holdout=0.25),),
        collect=CollectSection(temperatures=(1.0,), max_new_tokens=8),
        drafter={"family": "eagle3", "draft_vocab_size": SIZES[0]},
        train=TrainSection(steps=2, unroll=2, tokens_per_batch=40, mixed_precision="no"),
    )
    made = Run(recipe, tmp_path / "run", Console(file=io.StringIO()))
    made._target = tiny_target
    return made


def with_drafter(run: Run, **options: Any) -> Run:
    """The same run folder, records and target, with another drafter."""
    other = Run(replace(run.recipe, drafter=options), run.root, run.console)
    other._target = run.target
    return other


def trained(run: Run, store: RecordStore, **options: Any) -> Path:
    again = with_drafter(run, **options)
    assert again.collect().identity == store.identity, "the same records"
    return again.train(store)


def test_b022_every_run_has_a_mapping_of_its_own_size(run: Run) -> None:
    """80, 120, then all 400 tokens, and 80 once more: the third leaves out nothing."""
    store, folders = run.collect(), {}
    for size in (*SIZES, 400):
        folder = folders[size] = trained(run, store, family="eagle3", draft_vocab_size=size)
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        assert tensors["d2t"].shape == (size,) and int(tensors["t2d"].sum()) == size
        assert tensors["lm_head.weight"].shape[0] == config["draft_vocab_size"] == size
        drafter = load_drafter(folder, run.target)
        assert drafter.draft_ids is not None and len(drafter.draft_ids) == size
        ids = tensors["d2t"] + torch.arange(size)
        assert drafter.draft_ids.tolist() == ids.tolist()
        assert drafter.head(torch.zeros(1, run.target.hidden_size)).shape == (1, size)
    assert not load_file(folders[400] / "model.safetensors")["d2t"].any()
    assert len(set(folders.values())) == 3
    again = trained(run, store, family="eagle3", draft_vocab_size=SIZES[0])
    assert again == folders[SIZES[0]]
    assert len(load_drafter(again, run.target).draft_ids) == SIZES[0]  # type: ignore[arg-type]


def test_b022_a_language_model_has_its_own_or_none(run: Run) -> None:
    store = run.collect()
    for size in (*SIZES, None):
        options: dict[str, Any] = {"family": "causal", "layers": [0, 3], "draft_vocab_size": size}
        # Its records hold no layers, those of the head hold three: it takes either.
        folder = with_drafter(run, **options).train(store)
        ids, drafter = read_own(folder)["draft_ids"], load_drafter(folder, run.target)
        if size is None:
            assert ids is None and drafter.draft_ids is None
        else:
            assert len(ids) == size and drafter.draft_ids is not None
            assert drafter.draft_ids.tolist() == ids
        width = 400 if size is None else size
        assert drafter.head(torch.zeros(1, run.target.hidden_size)).shape == (1, width)


def test_b022_a_mapping_of_another_size_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    """Another run's weights beside this one's config, and another run's folder of training."""
    store = run.collect()
    small, large = (trained(run, store, family="eagle3", draft_vocab_size=n) for n in SIZES)
    mixed = tmp_path / "mixed"
    shutil.copytree(large, mixed)
    shutil.copy(small / "model.safetensors", mixed / "model.safetensors")
    with pytest.raises(
        UserError, match=rf"{mixed}.*'d2t' is \[80\], must be \[120\].*draft_vocab_size"
    ):
        load_drafter(mixed, run.target)
    other = with_drafter(run, family="eagle3", draft_vocab_size=SIZES[1])
    with pytest.raises(UserError, match=r"other settings \(drafter differ\)"):
        train(other.recipe, run.target, store, small.parent, run.console)


# ---- B038: which layer is meant

TAPS = (0, 2, 3)  # the last is the final boundary: the last layer's output, not yet normed
NORMS = {"llama": "norm", "gemma2": "norm", "gpt2": "ln_f", "gpt_neox": "final_layer_norm"}


@pytest.fixture(scope="module", params=sorted(NORMS))
def tapped(request: pytest.FixtureRequest, load_tiny: Callable[..., Target]) -> Target:
    return load_tiny(request.param)


def captured(target: Target, taps: tuple[int, ...]) -> Tensor:
    """The features of a text of 40 tokens, `[T, L*h]`."""
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        return target.forward(ids, target.new_cache(1, 40), taps).taps[0]


def consumed(target: Target, places: list[nn.Module], read: bool) -> Tensor:
    """What an engine's hooks see there in the same pass: what is read (or given) by modules."""
    seen: dict[int, Tensor] = {}

    def before(n: int) -> Any:
        return lambda module, args, named: seen.update({n: (*args, *named.values())[0]})

    def after(n: int) -> Any:
        return lambda module, args, out: seen.update({n: out[0] if isinstance(out, tuple) else out})

    hooks = [
        place.register_forward_pre_hook(before(n), with_kwargs=True)
        if read
        else place.register_forward_hook(after(n))
        for n, place in enumerate(places)
    ]
    captured(target, ())
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[n][0] for n in range(len(places))], -1)


def test_b038_exported_ids_capture_the_same_features(tapped: Target, tmp_path: Path) -> None:
    """Bit for bit: here, after loading again, and as either engine counts layers."""
    ids = torch.arange(0, 400, 4)
    drafter = Eagle3Drafter.from_target(tapped, Eagle3Config((0, 1, 2), len(ids)), ids)
    drafter.taps = TAPS
    before = captured(tapped, drafter.taps)
    save_drafter(drafter, tmp_path / "head", tapped, {})
    loaded = load_drafter(tmp_path / "head", tapped)
    assert loaded.taps == TAPS
    assert torch.equal(captured(tapped, loaded.taps), before)
    config = json.loads((tmp_path / "head" / "config.json").read_text(encoding="utf-8"))
    outputs = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]  # SGLang's
    given = consumed(tapped, [tapped.layers[i] for i in outputs], read=False)
    assert torch.equal(given, before)
    inputs = config["eagle_aux_hidden_state_layer_ids"]  # vLLM's; the norm reads the last output
    readers = [*tapped.layers, tapped.body.get_submodule(NORMS[tapped.model.config.model_type])]
    assert inputs == [1, 3, 4] and len(readers) == 5
    assert torch.equal(consumed(tapped, [readers[i] for i in inputs], read=True), before)


def test_b038_the_final_boundary_is_before_the_norm(tapped: Target) -> None:
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        out = tapped.forward(ids, tapped.new_cache(1, 40), (3,))
        norm = tapped.body.get_submodule(NORMS[tapped.model.config.model_type])
        assert torch.equal(norm(out.taps), out.hidden)
    assert not torch.allclose(out.taps, out.hidden, atol=1e-2)


def test_b038_a_recipe_with_a_layer_out_of_reach_is_refused() -> None:
    """Engines read a layer's output where the next one does, so the last one's is no option."""
    assert Eagle3Config((0, 1, 2)).resolved_taps(4) == (0, 1, 2)
    with pytest.raises(UserError, match=r"drafter\.taps \[0, 2, 3\] must lie between 0 and 2"):
        Eagle3Config(TAPS).resolved_taps(4)


# ---- B012: the end of a reply

SHORT = 14


@pytest.fixture
def ending(load_tiny: Callable[..., Target]) -> tuple[Target, list[Record]]:
    """A target that ends most of its replies, and its greedy ones of two tokens and more."""
    target = load_tiny()
    rng = torch.Generator().manual_seed(12)
    prompts = torch.randint(3, 400, (48, 6), generator=rng).tolist()
    asked = [Request(f"p{n}", "a", "train", tuple(p), Law(0.0), 0) for n, p in enumerate(prompts)]
    settings = GatherSettings(SHORT, batch_size=16, taps=(1, 1, 2), keep="hidden")
    words = [r.reply.tolist() for r in answer(target, asked, settings)]
    late = Counter(t for reply in words for t in set(reply[4:]) - set(reply[:2]))
    target.eos_ids = tuple(token for token, _ in late.most_common(3))
    return target, [r for r in answer(target, asked, settings) if len(r.reply) > 1]


def test_b012_the_end_is_proposed_where_the_target_says_it(
    ending: tuple[Target, list[Record]], run: Run, tmp_path: Path
) -> None:
    """Overfitted on those replies, a head drafts their ends as well as their other words."""
    target, records = ending
    ended = [r for r in records if r.finish == "stop"]
    assert len(ended) >= 12
    recipe = replace(
        run.recipe,
        serving=ServingSection((LawSection(0.0),), num_draft_tokens=3),
        collect=CollectSection(max_new_tokens=SHORT),
        train=replace(run.recipe.train, steps=150, unroll=3, lr=5e-3, eval_every=150),
    )
    store = RecordStore.create(tmp_path / "few", collect_settings(recipe, target, (1, 1, 2)))
    store.add("a", records)
    drafter = load_drafter(train(recipe, target, store, tmp_path / "head", run.console), target)
    assert set(target.eos_ids) <= set(drafter.draft_ids.tolist())  # type: ignore[union-attr]
    scores = score(target, drafter, ended, Law(0.0), 1, SHORT)
    first = [c.log_ratio[:, 0].exp() for c in scores]  # 1 where the head's best is the target's
    last = [float(own[len(r.reply) - 2]) for own, r in zip(first, ended, strict=True)]
    elsewhere = torch.cat([own[: len(r.reply) - 2] for own, r in zip(first, ended, strict=True)])
    assert sum(last) / len(last) > max(0.6, float(elsewhere.mean()))
    outputs = decode(target, [request_of(r) for r in ended], DecodeSettings(SHORT, 3), drafter)
    drafted = 0
    for record, output in zip(ended, outputs, strict=True):
        assert output.ids == record.reply.tolist() and output.finish == "stop"
        # The first token comes from prefill; a round adds one more unless its draft ended it.
        drafted += len(output.ids) == sum(a for _, a in output.rounds) + len(output.rounds)
    assert drafted > len(ended) / 2
