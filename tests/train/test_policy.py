"""Records made anew while training: which ones, what is kept of them, when they are the same."""

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TargetFactory
from renewing import DRAFTERS, drafter_of, serving
from stored import assert_same
from torch import nn

from draftsmith.configs.errors import UserError
from draftsmith.configs.recipe import LawSection, ObjectiveSection, ServingSection
from draftsmith.configs.training import OnPolicySection
from draftsmith.data.gather import recompute_states
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.data.warp import Law
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import StateReader, collate
from draftsmith.drafters.causal import CausalConfig, CausalDrafter
from draftsmith.train import policy
from draftsmith.train.drafted import draft_replies
from draftsmith.train.objective import Objective, bind_objective
from draftsmith.train.policy import check, chosen, is_made, keep_renewals, renew

TAPS = (1, 1, 2)  # as in the records of tests/conftest.py
SEED = 5
HALVES = OnPolicySection(drafted=0.5, resampled=0.5, max_new_tokens=11)
DRAFTED = OnPolicySection(drafted=1.0, max_new_tokens=11)

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Alone:
    """What `renew` needs of an accelerator, for one of several processes."""

    process_index: int = 0
    num_processes: int = 1
    wait_for_everyone: Callable[[], Any] = lambda: None

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0


@pytest.fixture
def training(store: RecordStore, tiny_target: Target) -> StateReader:
    rows = [row for row in store.index() if row.split == "train"]
    return StateReader(store, tiny_target, TAPS, rows)


@pytest.fixture
def causal(tiny_target: Target, records: list[Record]) -> Drafter:
    return drafter_of("causal", tiny_target, records)


def run(
    folder: Path,
    drafter: Drafter,
    training: StateReader,
    number: int = 1,
    section: OnPolicySection = HALVES,
    objective: Objective | None = None,
    process: Any = Alone(),
) -> dict[int, Record]:
    bound = objective or serving(LawSection(1.0))
    return renew(
        folder, number, section, SEED, training.target, drafter, training, bound, process
    )  # fmt: skip


@pytest.mark.parametrize("family", DRAFTERS)
def test_states_are_those_of_a_pass_over_the_whole_text(
    family: str, tiny_target: Target, records: list[Record], training: StateReader, tmp_path: Path
) -> None:
    drafter = drafter_of(family, tiny_target, records)
    training = replace(training, taps=drafter.taps)
    made = run(tmp_path, drafter, training)
    assert len(made) > 20 and {r.origin for r in made.values()} == {"target", "drafted"}
    for record in made.values():
        (again,) = recompute_states(tiny_target, [record], drafter.taps)
        assert record.states is not None and again.states is not None
        for name in ("hidden", "log_z", "taps"):
            one, other = getattr(record.states, name), getattr(again.states, name)
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
        if drafter.draft_ids is not None and record.origin == "drafted":
            assert set(record.reply[1:].tolist()) <= set(drafter.draft_ids.tolist())


def test_neighbours_change_nothing(
    causal: Drafter, training: StateReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = run(tmp_path / "many", causal, training)
    monkeypatch.setattr(policy, "_ROWS", 3)
    few = run(tmp_path / "few", causal, training)
    assert many.keys() == few.keys()
    for i, record in many.items():
        assert record.key == few[i].key and torch.equal(record.ids, few[i].ids)


def test_each_renewal_has_other_texts(
    causal: Drafter, training: StateReader, tmp_path: Path
) -> None:
    for section in (DRAFTED, replace(DRAFTED, drafted=0.0, resampled=1.0)):
        first, second = (run(tmp_path, causal, training, n, section) for n in (1, 2))
        common = first.keys() & second.keys()
        assert len(common) > 20
        assert not any(torch.equal(first[i].ids, second[i].ids) for i in common)


# ---- which records


@pytest.mark.parametrize(("drafted", "resampled"), [(0.25, 0.5), (0.5, 0.5), (1.0, 0.0), (0, 0.1)])
def test_shares_are_kept(drafted: float, resampled: float, training: StateReader) -> None:
    section = OnPolicySection(drafted=drafted, resampled=resampled)
    useful = {i for i, row in enumerate(training.rows) if len(row.reply) > 1}
    renewals = [chosen(training.rows, section, SEED, number) for number in (1, 1, 2)]
    assert renewals[0] == renewals[1]
    assert sorted(map(sorted, renewals[0])) != sorted(map(sorted, renewals[2])) or drafted == 1
    for own, again in renewals:
        assert abs(len(own) - drafted * len(useful)) <= 0.5 + (drafted + resampled == 1)
        assert len(again) == round(resampled * len(useful))
        assert len({*own, *again}) == len(own) + len(again) and {*own, *again} <= useful


def test_greedy_replies_are_not_asked_for_again(training: StateReader) -> None:
    rows = [replace(r, law=Law(0.0)) if i % 3 else r for i, r in enumerate(training.rows)]
    rows[1] = replace(rows[1], origin="given")
    section = OnPolicySection(drafted=0.5, resampled=0.5)
    own, again = chosen(rows, section, SEED, 1)
    varied = {i for i, r in enumerate(rows) if len(r.reply) > 1 and (r.law.temperature or i == 1)}
    assert set(again) == varied
    assert len(own) == round(0.5 * sum(len(row.reply) > 1 for row in rows))


def test_only_resampled_replies_count_as_samples(
    causal: Drafter, training: StateReader, tmp_path: Path
) -> None:
    """Estimators and sampled objectives look at nothing else."""
    objective = serving(LawSection(1.0))
    made = run(tmp_path, causal, training, objective=objective)
    own, again = chosen(training.rows, HALVES, SEED, 1)
    infos = {row.key: row for row in RecordStore.open(tmp_path / "renewed-000001").index()}
    for i, record in made.items():
        source = training.rows[i]
        assert record.drawn_from(source.law) == (i in again)
        assert record.law == (source.law if i in again else objective.law)
        assert infos[record.key].drawn_from(source.law) == (i in again)
        assert record.name == training[i].name and record.domain == source.domain
        assert torch.equal(record.ids[: record.prompt_len], training[i].ids[: source.prompt_len])
    assert len({record.key for record in made.values()}) == len(made) and {*own} & made.keys()


def test_prompts_of_given_replies_are_asked_under_the_objectives_law(
    causal: Drafter, training: StateReader, records: list[Record], tmp_path: Path
) -> None:
    given = [replace(r, law=Law(0.0), origin="given") for r in records if r.split == "train"]
    store = RecordStore.create(tmp_path / "given", training.store.settings)
    store.add("0", given)
    training = replace(training, store=store, rows=store.index())
    section = OnPolicySection(resampled=1.0, max_new_tokens=6)
    objective = serving(LawSection(0.7))
    made = run(tmp_path, causal, training, section=section, objective=objective)
    assert made and all(record.drawn_from(Law(0.7)) for record in made.values())


# ---- on disk


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_renewal_that_was_broken_off_is_made_anew_to_the_same_bytes(
    causal: Drafter, training: StateReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "_ROWS", 4)
    run(tmp_path / "whole", causal, training)
    calls = 0

    def fail(*arguments: Any) -> list[Record]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return draft_replies(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(policy, "draft_replies", fail)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "broken", causal, training)
    assert not is_made(tmp_path / "broken", 1)
    run(tmp_path / "broken", causal, training)
    assert is_made(tmp_path / "broken", 1)
    assert contents(tmp_path / "whole") == contents(tmp_path / "broken")
    assert len(contents(tmp_path / "whole")) > 4


def test_a_renewal_that_is_there_is_read_back(
    causal: Drafter, training: StateReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights have moved since, and the text is what they wrote then."""
    made = run(tmp_path, causal, training)
    with monkeypatch.context() as patch:
        patch.setattr(policy, "draft_replies", None)
        patch.setattr(policy, "answer", None)
        back = run(tmp_path, causal, training)
    assert back.keys() == made.keys()
    for i, record in made.items():
        assert_same(record, back[i])
    shorter = replace(HALVES, max_new_tokens=3)
    anew = run(tmp_path, causal, training, section=shorter)  # of other settings: not this run's
    assert max(len(record.reply) for record in anew.values()) == 3


def test_renewals_are_kept_for_as_long_as_checkpoints_need_them(
    causal: Drafter, training: StateReader, tmp_path: Path
) -> None:
    section = OnPolicySection(drafted=0.1, max_new_tokens=4)
    for number in (1, 2, 3):
        run(tmp_path, causal, training, number, section)
    (tmp_path / "step-7").mkdir()
    keep_renewals(tmp_path, {2, 3})
    assert [is_made(tmp_path, n) for n in (1, 2, 3)] == [False, True, True]
    assert (tmp_path / "step-7").exists()


def test_training_goes_on_as_if_nothing_had_been_made(
    load_tiny: TargetFactory, records: list[Record], training: StateReader, tmp_path: Path
) -> None:
    """A renewal that is read back must leave the same random state as one that was made."""
    reader = replace(training, target=load_tiny("gpt2"))
    drafter = drafter_of("causal", reader.target, records)  # with dropout
    assert isinstance(drafter, nn.Module)
    drafter.train()
    before = torch.get_rng_state()
    made = run(tmp_path, drafter, reader)
    assert torch.equal(torch.get_rng_state(), before) and drafter.training
    batch = collate([r for r in made.values() if r.origin == "drafted"], ["a", "b"])
    (step,) = drafter.unroll(batch, 1)
    drafter.head(step.hidden).sum().backward()  # nothing is left of inference
    assert not torch.equal(torch.get_rng_state(), before)


def test_processes_share_the_work(
    load_tiny: TargetFactory,
    records: list[Record],
    training: StateReader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "_ROWS", 4)
    readers = [replace(training, target=load_tiny()) for _ in range(2)]
    drafters = [drafter_of("causal", reader.target, records) for reader in readers]
    alone = run(tmp_path / "one", drafters[0], readers[0])
    barrier, found, asked = threading.Barrier(2, timeout=60), {}, Counter[int]()

    def counted(target: Target, *rest: Any) -> list[Record]:
        asked[[r.target is target for r in readers].index(True)] += 1
        return draft_replies(target, *rest)

    monkeypatch.setattr(policy, "draft_replies", counted)

    def process(rank: int) -> None:
        here = Alone(rank, 2, barrier.wait)
        found[rank] = run(tmp_path / "two", drafters[rank], readers[rank], process=here)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked[0] == asked[1] > 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    for rank in range(2):
        assert found[rank].keys() == alone.keys()
        for i, record in alone.items():
            assert_same(record, found[rank][i])


# ---- limits


def test_replies_end_with_the_first_end_token(
    causal: Drafter, training: StateReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of all tokens end a reply: many replies are of one token, and left out."""
    ends = set(range(0, training.target.vocab_size, 2))
    monkeypatch.setattr(training.target, "eos_ids", tuple(ends))
    made = run(tmp_path, causal, training)
    infos = RecordStore.open(tmp_path / "renewed-000001").index()
    single = [row for row in infos if len(row.reply) == 1]
    assert single and len(made) == len(infos) - len(single) > 5
    assert {r.origin for r in made.values()} == {"target", "drafted"}
    for record in made.values():
        *before, last = record.reply.tolist()
        assert not ends & {*before} and (last in ends) == (record.finish == "stop")
        assert record.states is not None and len(record.states.taps) == len(record.ids) - 1
    monkeypatch.setattr(training.target, "eos_ids", tuple(range(training.target.vocab_size)))
    assert run(tmp_path, causal, training, number=2) == {}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_text_is_longer_than_the_context(
    family: str, load_tiny: TargetFactory, training: StateReader, tmp_path: Path
) -> None:
    target, positions = load_tiny(family, max_position_embeddings=32), 32
    drafter = CausalDrafter.from_target(target, CausalConfig(layers=(0, 3)), None).eval()
    generator = torch.Generator().manual_seed(1)
    records = []
    for i, prompt in enumerate([3, 20, 25, 28, 29, 30, 30, 29, 8, 8]):
        ids = torch.randint(3, 400, (prompt + 2,), generator=generator)
        law = Law(1.0)
        record = Record(f"p{i}", "a", "train", law, i, "length", ids, prompt, None)
        records.append(record)
    settings = training.store.settings | {"distributions": "none", "taps": []}
    store = RecordStore.create(tmp_path / "near", settings)
    store.add("0", records)
    reader = StateReader(store, target, (), store.index())
    made = run(tmp_path, drafter, reader)
    assert len(made) == 10
    for i, record in made.items():
        room = min(HALVES.max_new_tokens, positions - record.prompt_len)
        assert len(record.reply) == room or record.finish == "stop"
        (again,) = recompute_states(target, [record], ())
        assert record.states is not None and again.states is not None
        torch.testing.assert_close(record.states.log_z, again.states.log_z, atol=1e-4, rtol=1e-4)
        assert records[i].prompt_id == record.prompt_id


def test_contexts_of_the_drafter_and_of_the_collection_count_too(
    causal: Drafter, training: StateReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(CausalDrafter, "max_positions", 8)  # prompts of 3 to 11 tokens
        made = run(tmp_path / "a", causal, training)
    assert 0 < len(made) < 25 and max(len(r.ids) for r in made.values()) == 8
    shorter = RecordStore.create(tmp_path / "c", training.store.settings | {"max_length": 9})
    shorter.add("0", list(training))
    made = run(tmp_path / "b", causal, replace(training, store=shorter, rows=shorter.index()))
    assert max(len(r.ids) for r in made.values()) == 9


# ---- refusals


def test_what_cannot_be_renewed_is_refused(training: StateReader) -> None:
    any_text = bind_objective(ObjectiveSection(), ServingSection())
    check(HALVES, training, True, any_text)
    with pytest.raises(UserError, match=r"take train\.target replicated"):
        check(HALVES, training, False, any_text)
    samples = bind_objective(ObjectiveSection({"tv": 0.9, "ce": 0.1}), ServingSection())
    with pytest.raises(UserError, match=r"are no samples of the target, and this objective \(ce\)"):
        check(HALVES, training, True, samples)
    check(OnPolicySection(resampled=0.5), training, True, samples)
    top = replace(training.store, settings={**training.store.settings, "distributions": "top"})
    with pytest.raises(UserError, match=r"most probable tokens alone.*collect\.distributions"):
        check(HALVES, replace(training, store=top), True, any_text)
    greedy = replace(training, rows=[replace(r, law=Law(0.0)) for r in training.rows])
    with pytest.raises(UserError, match=r"resampled would change nothing"):
        check(HALVES, greedy, True, any_text)
    check(DRAFTED, greedy, True, any_text)
