"""What went wrong for others from prompts to the report, by the numbers of the known faults."""

import copy
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, save_tiny
from preparing import reasons
from rich.console import Console
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from draftsmith.configs.collection import CollectSection, DomainSection
from draftsmith.configs.recipe import EvalSection, LawSection, Recipe, ServingSection, TargetSection
from draftsmith.configs.training import TrainSection
from draftsmith.data.gather import Request
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.checkpoint import load_drafter, save_drafter
from draftsmith.eval import measuring, speed, timing
from draftsmith.eval.decode import RULES, DecodeSettings, decode
from draftsmith.eval.estimate import overlap_interval
from draftsmith.eval.report import print_report, read_report
from draftsmith.eval.tables import TOGETHER, summary_tables
from draftsmith.eval.tree import TreeShape
from draftsmith.scripts.pipeline import Run
from draftsmith.train import corpus
from draftsmith.train.score import score

LIMIT = 8
GREEDY, HOT = LawSection(0.0), LawSection(1.0)
Row = dict[str, Any]
MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_run(target, rows, name, domain options, **sections)`: a run of a few seconds."""

    def make(
        target: Target,
        rows: Sequence[Row],
        name: str = "run",
        domain: dict[str, Any] | None = None,
        **sections: Any,
    ) -> Run:
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        options = {"name": "rest", "source": str(source), "holdout": 0.5, **(domain or {})}
        standard: dict[str, Any] = {
            "serving": ServingSection((GREEDY, HOT)),
            "collect": CollectSection(temperatures=(0.0, 1.0), max_new_tokens=LIMIT),
            "drafter": {"family": "eagle3", "draft_vocab_size": 100},
            "train": TrainSection(steps=2, unroll=2, tokens_per_batch=60, mixed_precision="no"),
            "eval": EvalSection(
                sweep=(1, 2), timing_prompts=0, timing_tokens=6, bootstrap=50, calibration_prompts=1
            ),
        }
        recipe = Recipe("tiny", domains=(DomainSection(**options),), **{**standard, **sections})
        console = Console(file=io.StringIO(), width=200)
        run = Run(recipe, tmp_path / name, console)
        run._target = target
        return run

    return make


def said(run: Run) -> str:
    return str(run.console.file.getvalue())  # type: ignore[attr-defined]


def measured(run: Run, store: RecordStore) -> dict[str, Any]:
    """The report of the drafter that the run trains on these records."""
    return read_report(run.evaluate(store, run.train(store)))


def questions(count: int) -> list[Row]:
    return [{"prompt": f"Solve step {n} of {n * n}."} for n in range(count)]


# ---- B116: domains on the way to the report

LABELS: list[str | None] = ["code"] * 10 + ["chat"] * 3 + [None] * 2 + ["Code", "a/b"]
COUNTS = {"code": 10, "chat": 3, "rest": 2, "Code": 1, "a/b": 1}


@pytest.fixture
def labelled(
    make_run: MakeRun, tiny_target: Target, make_drafter: Callable[[str, Target], Drafter]
) -> tuple[Run, RecordStore, Path]:
    """A run on one file of all those labels, its records, and the folder of a drafter."""
    content = [{**row, "category": n} for row, n in zip(questions(17), LABELS, strict=True)]
    run = make_run(
        tiny_target, content, domain={"by": "category", "holdout": 1.0},
        serving=ServingSection((GREEDY,)),
    )  # fmt: skip
    drafter = make_drafter("eagle3", tiny_target)
    return run, run.collect(), save_drafter(drafter, run.root / "head", tiny_target, {})


def test_b116_every_domain_is_a_row_of_the_report(
    labelled: tuple[Run, RecordStore, Path], tiny_target: Target
) -> None:
    """n, tokens, overlap and interval of each, and their sum."""
    run, store, folder = labelled
    report = read_report(run.evaluate(store, folder))
    cells = {c["domain"]: c for c in report["cells"]}
    assert {name: cell["prompts"] for name, cell in cells.items()} == COUNTS
    records = list(store.records("heldout"))
    for name, cell in cells.items():
        assert cell["tokens"] == sum(len(r.reply) - 1 for r in records if r.domain == name) > 0
        overlap = cell["overlap"]
        if COUNTS[name] == 1:
            assert overlap["low"] is overlap["high"] is None
        else:
            assert 0 <= overlap["low"] <= overlap["value"] <= overlap["high"] <= 1
    total = sum(cell["tokens"] for cell in cells.values())
    assert total == sum(len(r.reply) - 1 for r in records)
    scores = score(tiny_target, load_drafter(folder, tiny_target), records, Law(0.0), 2, LIMIT)
    pooled = sum(cell["overlap"]["value"] * cell["tokens"] for cell in cells.values()) / total
    assert pooled == pytest.approx(overlap_interval(scores, 10).value)
    (together,) = report["totals"]
    assert (together["prompts"], together["tokens"]) == (17, total)
    assert together["rounds"] == sum(cell["rounds"] for cell in cells.values())
    assert together["overlap"]["value"] == pytest.approx(pooled)
    assert together["tokens_per_round"]["value"] == pytest.approx(total / together["rounds"])


def test_b116_few_conversations_are_flagged(labelled: tuple[Run, RecordStore, Path]) -> None:
    """Beside every n below 8, with what it means, in the terminal and on the page."""
    run, store, folder = labelled
    found = run.evaluate(store, folder)
    report = read_report(found)
    (table,) = (t for t in summary_tables(report) if t.title == "Acceptance")
    flagged = {name: str(n) if n >= 8 else f"{n}*" for name, n in COUNTS.items()}
    assert {row[0]: row[2] for row in table.rows} == {**flagged, TOGETHER: "17"}
    print_report(report, run.console)
    page = (found / "report.html").read_text(encoding="utf-8")
    for text in (said(run), page):
        assert "* fewer than 8 conversations" in text and "3*" in text


# ---- B044: replies of the data, or the target's own


def test_b044_given_and_own_replies_are_one_setting(make_run: MakeRun, tiny_target: Target) -> None:
    """50 prompts with human replies: trained on either, measured on the target's own words."""
    content = [
        {"prompt": f"Solve step {n} of {n * n}.", "response": f"Read the numbers: {n}."}
        for n in range(50)
    ]
    held_out, reports, trained = {}, {}, {}
    for kind in ("given", "target"):
        section = CollectSection(temperatures=(0.0,), max_new_tokens=LIMIT, replies=kind)  # type: ignore[arg-type]
        run = make_run(tiny_target, content, kind, collect=section)
        store = run.collect()
        own = list(store.records("train"))
        trained[kind] = len(own)
        assert {r.origin for r in own} == {kind}
        laws = {c["law"] for c in store.summary()["cells"] if c["split"] == "train"}
        assert laws == {"given" if kind == "given" else "T=0"}
        for record in own:
            text = tiny_target.tokenizer.decode(record.reply.tolist(), skip_special_tokens=True)
            assert text.startswith("Read the numbers: ") == (kind == "given")
        assert {r.origin for r in store.records("heldout")} == {"target"}
        held_out[kind] = {r.key: r.ids.tolist() for r in store.records("heldout")}
        reports[kind] = measured(run, store)
        known = reports[kind]["provenance"]["collected"]
        assert {c["law"] for c in known if c["split"] == "train"} == laws
    assert held_out["given"] == held_out["target"] and len(held_out["given"]) > 20
    for report in reports.values():
        assert sum(c["replies"] for c in report["cells"]) == len(held_out["given"])
        assert report["lossless"]["verdict"].startswith("equal")
    (alarm,) = (a for a in reports["given"]["alarms"] if "training replies" in a)
    assert f"{trained['given']} training replies are the data's, not the target's own" in alarm
    assert not any("training replies" in a for a in reports["target"]["alarms"])


# ---- B042: families with other names of modules

WHOLE: dict[str, Callable[[], Any]] = {
    name: FAMILIES[name]
    for name in ("gpt2", "gpt_neox", "opt", "phi", "gemma2", "qwen3", "mistral")
}


def load_family(config: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Target:
    save_tiny(config, tokenizer, folder)
    return load_target(TargetSection(name=str(folder), device="cpu"), few_rows=False)


@pytest.mark.parametrize("family", sorted(WHOLE))
def test_b042_a_family_runs_from_prompts_to_report(
    family: str, make_run: MakeRun, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Collect, train 2 steps and evaluate, with a head and with a language model of its layers."""
    target = load_family(WHOLE[family](), tiny_tokenizer, tmp_path / family)
    run = make_run(target, questions(6))
    store = run.collect()
    assert target.embedding.shape == (400, 32) and target.head.weight.shape == (400, 32)
    for options in ({"family": "eagle3", "draft_vocab_size": 100}, {"family": "causal"}):
        other = make_run(target, questions(6), drafter=options)
        report = measured(other, store)
        assert report["provenance"]["drafter"]["family"] == options["family"]
        assert {c["law"] for c in report["cells"]} == {"T=0", "T=1"}
        assert all(c["tokens"] > 0 and c["rounds"] > 0 for c in report["cells"])
        assert report["lossless"]["verdict"].startswith("equal")


# ---- B026: a tokenizer that reports no longest text


def test_b026_without_a_longest_text_every_stage_runs(
    make_run: MakeRun, load_tiny: Callable[..., Target]
) -> None:
    target = load_tiny()
    assert target.tokenizer.model_max_length > 1e29
    run = make_run(target, [*questions(8), {"prompt": "Maya has stickers. " * 200}])
    report = measured(run, run.collect())
    assert "conversations of at most 256 tokens (the target's limit)" in said(run)
    ((line, reason),) = reasons(run.prepared)
    assert line == 9 and reason.startswith("too long: ") and reason.endswith("at most 256 fit")
    assert all(c["tokens"] > 0 for c in report["cells"])


# ---- B017, B041: the same prompt in every stage

START = 0  # of the tokenizer below: <|endoftext|>


@pytest.fixture
def starting(target_folder: Callable[..., Path], tiny_tokenizer: PreTrainedTokenizerFast) -> Target:
    """A tokenizer that puts a start token first, and a template that prints one as well."""
    folder, tokenizer = target_folder(), copy.deepcopy(tiny_tokenizer)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.chat_template = "{{ bos_token }}" + str(tokenizer.chat_template)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", START)]
    )
    tokenizer.save_pretrained(folder)
    target = load_target(TargetSection(name=str(folder), device="cpu"), few_rows=False)
    assert target.tokenizer("Maya")["input_ids"][0] == START
    return target


def test_b017_b041_one_start_token_and_one_prompt_in_every_stage(
    starting: Target, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Collection, training, plain and speculative evaluation; half of the rows have a system."""
    content: list[Row] = []
    for row in questions(12):
        messages = [{"role": "user", "content": row["prompt"]}]
        if len(content) % 2:
            messages.insert(0, {"role": "system", "content": f"Return a list. {len(content)}"})
        content.append({"messages": messages})
    expected = {
        tuple(
            starting.tokenizer.apply_chat_template(
                row["messages"], add_generation_prompt=True, return_dict=False
            )
        )
        for row in content
    }
    seen: dict[str, set[tuple[int, ...]]] = {"trained": set(), "plain": set(), "drafted": set()}

    def spied_collate(records: Sequence[Record], *rest: Any) -> Any:
        batch = collate(records, *rest)
        for ids, length in zip(batch.ids.tolist(), batch.prompt_lens.tolist(), strict=True):
            seen["trained"].add(tuple(ids[:length]))
        return batch

    def spied_decode(
        target: Target, requests: Any, how: DecodeSettings, *rest: Any, **more: Any
    ) -> Any:
        drafted = how.num_draft_tokens > 0 and bool(rest or more)
        seen["drafted" if drafted else "plain"].update(r.ids for r in requests)
        return decode(target, requests, how, *rest, **more)

    collate = corpus.collate
    monkeypatch.setattr(corpus, "collate", spied_collate)
    for module in (measuring, timing, speed):
        monkeypatch.setattr(module, "decode", spied_decode)
    run = make_run(starting, content)
    run.recipe = replace(run.recipe, eval=replace(run.recipe.eval, timing_prompts=20))
    store = run.collect()
    measured(run, store)
    prompts = {split: {tuple(r.ids[: r.prompt_len].tolist()) for r in store.records(split)}
               for split in ("train", "heldout")}  # fmt: skip
    assert prompts["train"] | prompts["heldout"] == expected and len(expected) == len(content)
    assert seen["trained"] == prompts["train"] and prompts["heldout"]
    for path in ("plain", "drafted"):
        assert prompts["heldout"] <= seen[path] <= expected
    for ids in expected:
        assert ids[0] == START and ids.count(START) == 1
        assert ids.count(1) == 3, "system, user and assistant are opened"


# ---- B043: a head with rows that no token has


@pytest.fixture(scope="module")
def wide(load_tiny: Callable[..., Target]) -> Target:
    """A head of 416 rows over 400 tokens, whose further rows would win often."""
    target = load_tiny("llama", vocab_size=416, tie_word_embeddings=False)
    target.model.lm_head.weight.data[400:] *= 20
    return target


@pytest.mark.parametrize("kind", ["eagle3", "eagle3 reduced", "causal", "causal reduced", "self"])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_b043_drafts_and_targets_know_the_same_tokens(
    kind: str,
    rule: str,
    wide: Target,
    make_drafter: Callable[[str, Target], Drafter],
    make_requests: Callable[..., list[Request]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """200 tokens at T=1.5; a copy of the target has the further rows too."""
    seen = 0

    def watched(draft: Tensor, log_q: Tensor, log_p: Tensor, drafted: Tensor, draws: Any) -> Any:
        nonlocal seen
        assert log_q.shape[-1] == log_p.shape[-1] == 400
        assert bool((log_p > -torch.inf).all())
        for b, count in enumerate(drafted.tolist()):
            law = log_q[b, :count]
            assert all(token < 400 for token in draft[b, :count].tolist())
            assert torch.allclose(law.exp().sum(-1), torch.ones(count), atol=1e-4)
            if "reduced" not in kind:
                assert bool((law > -torch.inf).all()), "the support is that of the target"
            seen += count
        return known(draft, log_q, log_p, drafted, draws)

    known = RULES[rule]
    monkeypatch.setitem(RULES, rule, watched)
    requests = make_requests(wide, [5, 20, 9, 3, 14, 30, 2, 8, 11, 6], Law(1.5))
    drafter = make_drafter(kind, wide)
    plain = decode(wide, requests, DecodeSettings(20, 0))
    fast = decode(wide, requests, DecodeSettings(20, 3, rule), drafter)
    tree = decode(wide, requests, DecodeSettings(20, 3, tree=TreeShape(2, 3, 6)), drafter)
    for outputs in (plain, fast, tree):
        assert max(max(o.ids) for o in outputs) < 400
        assert sum(len(o.ids) for o in outputs) > 100
        wide.tokenizer.batch_decode([o.ids for o in outputs])
    assert seen > 50
