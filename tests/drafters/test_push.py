"""Sending to the Hub: what goes, what stays, and what is sent again."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hub_server
import huggingface_hub
import pytest
import yaml
from hub_server import TOKEN, Hub
from publishing import save, send
from safetensors.torch import load_file, save_file

from draftsmith.configs.errors import NotSent, UserError
from draftsmith.data.records import Record
from draftsmith.data.store import RecordStore
from draftsmith.data.target import Target
from draftsmith.drafters.checkpoint import load_drafter, weights_hash
from draftsmith.drafters.checksums import write_checksums
from draftsmith.drafters.push import check_name, pack
from draftsmith.drafters.push import send as post

NAME = "someone/draft"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def made(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published EAGLE-3 head in several files."""
    place = tmp_path_factory.mktemp("made")
    trained = save("eagle3", tiny_target, place / "trained")
    return send(tiny_target, trained, place / "out", max_shard_size="20KB")


@pytest.fixture
def published(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "published"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server.running() as hub:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---- there and back


def test_what_was_sent_is_what_is_read_back(
    hub: Hub, published: Path, tiny_target: Target, tmp_path: Path
) -> None:
    address = post(pack(published, NAME), NAME)
    assert address.startswith(hub.address)
    repository = hub.repositories[NAME]
    assert repository.private and repository.messages == ["Sent by draftsmith"]
    assert set(repository.branches["main"]) == names(published)
    back = Path(huggingface_hub.snapshot_download(NAME, local_dir=tmp_path / "back", token=TOKEN))
    assert weights_hash(back) == weights_hash(published)
    ours, theirs = (load_drafter(f, tiny_target) for f in (published, back))
    assert ours.options == theirs.options


def test_the_card_names_its_repository(hub: Hub, published: Path) -> None:
    before = (published / "README.md").read_text(encoding="utf-8")
    post(pack(published, NAME), NAME)
    card = hub.repositories[NAME].branches["main"]["README.md"].decode()
    assert f'"model": "{NAME}"' in card and "OWNER/DRAFT" not in card
    fields = yaml.safe_load(card.split("---\n")[1])
    assert fields["library_name"] == "draftsmith" and "base_model" in fields
    assert "speculative-decoding" in fields["tags"]
    assert (published / "README.md").read_text(encoding="utf-8") == before, "for other names"


def test_what_the_hub_has_is_not_sent_again(hub: Hub, published: Path) -> None:
    weights = len(list(published.glob("*.safetensors")))
    assert weights > 2
    post(pack(published, NAME), NAME)
    assert (hub.sent(), hub.commits()) == (weights, 1)
    post(pack(published, NAME), NAME)
    assert (hub.sent(), hub.commits()) == (weights, 1)
    (published / "LICENSE").write_text("As you like.\n")
    post(pack(published, NAME), NAME)
    assert (hub.sent(), hub.commits()) == (weights, 2)


def test_an_interrupted_push_goes_on(hub: Hub, published: Path) -> None:
    weights = len(list(published.glob("*.safetensors")))
    hub.faults["/large/"] = [507]
    with pytest.raises(NotSent, match="answered 507"):
        post(pack(published, NAME), NAME)
    assert hub.commits() == 0
    there = len(hub.large)
    assert there < weights
    before = hub.sent()
    post(pack(published, NAME), NAME)
    assert hub.sent() - before == weights - there
    assert set(hub.repositories[NAME].branches["main"]) == names(published)


def test_shards_of_an_earlier_push_are_taken_away(
    hub: Hub, published: Path, tiny_target: Target, tmp_path: Path
) -> None:
    post(pack(published, NAME), NAME)
    hub.repositories[NAME].branches["main"]["notes.md"] = b"added there"
    trained = save("eagle3", tiny_target, tmp_path / "trained")
    whole = send(tiny_target, trained, tmp_path / "whole")
    post(pack(whole, NAME), NAME)
    assert set(hub.repositories[NAME].branches["main"]) == {*names(whole), "notes.md"}


def test_a_branch_is_made(hub: Hub, published: Path) -> None:
    post(pack(published, NAME), NAME)
    for _ in range(2):
        post(pack(published, NAME), NAME, revision="trial")
    assert set(hub.repositories[NAME].branches) == {"main", "trial"}
    assert hub.commits() == 1, "nothing in it is new"


# ---- who may see it, and what it is put beside


def test_public_only_when_asked(hub: Hub, published: Path) -> None:
    post(pack(published, NAME), NAME, public=True)
    assert not hub.repositories[NAME].private
    with pytest.raises(NotSent, match=f"{NAME} exists and is public; say --public"):
        post(pack(published, NAME), NAME)
    hub.repositories[NAME].private = True
    with pytest.raises(NotSent, match=f"{NAME} exists and is private; leave out --public"):
        post(pack(published, NAME), NAME, public=True)


def test_other_models_are_not_overwritten(hub: Hub, published: Path) -> None:
    main = {".gitattributes": b"", "README.md": b"mine"}
    hub.repositories[NAME] = hub_server.Repository(True, {"main": main})
    post(pack(published, NAME), NAME)
    hub.repositories["someone/llm"] = hub_server.Repository(
        True, {"main": {**main, "model.safetensors": b"weights"}}
    )
    with pytest.raises(NotSent, match=r"someone/llm exists and holds other files \(model.safet"):
        post(pack(published, "someone/llm"), "someone/llm")
    assert hub.repositories["someone/llm"].messages == []


# ---- B134: what stays


def add(name: str, text: str = "{}") -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

    return change


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("optimizer.bin", r"no part of a published drafter: optimizer\.bin; remove it"),
        ("step-000010/optimizer.pt", r"drafter: step-000010/optimizer\.pt"),
        ("wandb/run-1/logs/debug.log", r"drafter: wandb/run-1/logs/debug\.log"),
        ("trainer_state.json", r"drafter: trainer_state\.json"),
        (".env", r"drafter: \.env"),
        ("records/shard-0.safetensors", r"drafter: records/shard-0\.safetensors"),
    ],
)
def test_b134_other_files_are_refused_by_name(name: str, said: str, published: Path) -> None:
    add(name)(published)
    with pytest.raises(UserError, match=said):
        pack(published, NAME)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("see /home/someone/runs/demo for more", "path '/home/someone/runs/demo'"),
        ("from `~/models/llm`", "path '~/models/llm'"),
        (r"C:\Users\someone\llm", r"path 'C:\\Users\\someone\\llm'"),
        ("token: hf_" + "a1" * 17, "key 'hf_a1…'"),
        ("-----BEGIN RSA PRIVATE KEY-----", "key '-----…'"),
        ("the key is swordfish-swordfish", "key 'sword…'"),
    ],
)
def test_b134_texts_are_searched(
    text: str, said: str, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "swordfish-swordfish")
    for name in ("README.md", "LICENSE"):
        place = published / name
        before = place.read_text() if place.exists() else None
        place.write_text((before or "") + f"\n{text}\n")
        with pytest.raises(UserError, match=rf"{name} names the ") as told:
            pack(published, NAME)
        assert said.replace("\\\\", "\\") in str(told.value) and "a1a1" not in str(told.value)
        place.write_text(before) if before is not None else place.unlink()
    pack(published, NAME)


def test_b134_weights_are_searched_for_notes(published: Path, tiny_target: Target) -> None:
    path = next(published.glob("model-00001*"))
    save_file(load_file(path), path, metadata={"from": "/home/someone/llm"})
    write_checksums(published)
    with pytest.raises(UserError, match=r"safetensors names the path '/home/someone/llm'"):
        pack(published, NAME)


def test_b134_nothing_published_tells_of_this_machine(made: Path, tmp_path: Path) -> None:
    """The target is a local folder."""
    local = str(tmp_path.parent.parent)
    for path in made.iterdir():
        assert local.encode() not in path.read_bytes(), path.name
    assert {path.name for path in made.iterdir() if path.suffix != ".safetensors"} == {
        "README.md", "SHA256SUMS", "chat_template.jinja", "config.json", "draftsmith.json",
        "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["SHA256SUMS", "README.md", "draftsmith.json"])
def test_only_published_folders_are_sent(name: str, published: Path) -> None:
    (published / name).unlink()
    with pytest.raises(UserError, match=f"has no {name}: only folders that `draftsmith publish`"):
        pack(published, NAME)


def test_what_changed_since_is_refused(published: Path) -> None:
    (published / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"'config\.json' is another file \(2 bytes\)"):
        pack(published, NAME)


# ---- B135: failures


@pytest.mark.parametrize(
    ("name", "ok"),
    [
        ("someone/my-draft.v2", True),
        ("someone/my draft", False),
        ("draft", False),
        ("a/b/c", False),
        ("someone/-draft", False),
        ("someone/", False),
        ("someone/a--b", False),
        ("someone/draft.git", False),
        ("someone/dräft", False),
        ("someone/" + "a" * 88, True),
        ("someone/" + "a" * 89, False),
    ],
)
def test_b135_names(name: str, ok: bool) -> None:
    if ok:
        check_name(name)
        return
    with pytest.raises(UserError, match=f"'{name}' is no name on the Hub, which is OWNER/NAME"):
        check_name(name)


def test_b135_no_token(hub: Hub, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(NotSent, match="no token for the Hub is known here; run `hf auth login`"):
        post(pack(published, NAME), NAME)
    assert hub.requests == []


def test_b135_wrong_token(hub: Hub, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = "hf_" + "wrong" * 7
    monkeypatch.setenv("HF_TOKEN", wrong)
    with pytest.raises(NotSent, match=r"does not accept the token \(401\)") as told:
        post(pack(published, NAME), NAME)
    assert wrong not in str(told.value)


def test_b135_a_token_that_may_not_write(hub: Hub, published: Path) -> None:
    hub.faults["/api/repos/create"] = [403]
    with pytest.raises(NotSent, match=rf"the token may not write to {NAME} \(403\)"):
        post(pack(published, NAME), NAME)


def test_b135_no_network(hub: Hub, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NotSent, match=r"sending to http://127\.0\.0\.1:9 failed: .*refused"):
        post(pack(published, NAME), NAME)


def test_b135_offline(hub: Hub, published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(NotSent, match="HF_HUB_OFFLINE is set"):
        post(pack(published, NAME), NAME)


def test_b135_an_answer_that_repeats_the_token(
    hub: Hub, published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError(f"header 'Bearer {TOKEN}' was not liked")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", fail)
    with pytest.raises(NotSent, match="header 'Bearer …' was not liked"):
        post(pack(published, NAME), NAME)


# ---- records


def stored(records: list[Record], folder: Path, **more: Any) -> RecordStore:
    settings = {
        "target": {
            "name": "tiny", "revision": None, "quantisation": None, "weights": "abc",
            "dtype": "float32", "tokenizer": "def", "template": "ghi",
        },
        "seed": 0, "taps": [1, 1, 2], "max_new_tokens": 14, "distributions": "hidden", "top": 0,
        "store_dtype": "float32", "torch": "2.13.0", "transformers": "5.24.0", **more,
    }  # fmt: skip
    cells = [
        {"split": "train", "domain": domain, "law": "T=1", "records": 20, "tokens": 1234}
        for domain in "ab"
    ]
    source = "/home/someone/prompts/a.jsonl"
    prompts = {"sections": [{"name": "a", "source": source}]}
    store = RecordStore.create(folder, settings)
    for i in range(0, 40, 20):
        store.add(str(i), records[i : i + 20])
    selection = {r.key: (r.split, r.domain) for r in records[:30]}
    done = store.finish({"cells": cells, "prompts": prompts}, selection)
    (folder / "plan.json").write_text("{}")
    return done


def test_records_go_as_a_data_set(hub: Hub, records: list[Record], tmp_path: Path) -> None:
    folder = tmp_path / "records"
    store = stored(records, folder)
    post(pack(folder, NAME), NAME)
    repository = hub.repositories[f"datasets/{NAME}"]
    assert repository.private
    assert set(repository.branches["main"]) == {
        "README.md", "manifest.json", "selection.json", "shard-0.safetensors",
        "shard-20.safetensors",
    }  # fmt: skip
    back = huggingface_hub.snapshot_download(
        NAME, repo_type="dataset", local_dir=tmp_path / "back", token=TOKEN
    )
    again = RecordStore.open(back)
    assert (again.identity, len(again.index())) == (store.identity, 30)
    assert "/home/someone" not in (Path(back) / "manifest.json").read_text(encoding="utf-8")
    card = (Path(back) / "README.md").read_text(encoding="utf-8")
    for words in ("Replies of tiny", "2 domains", "| train | a | T=1 | 20 | 1,234 |", "## Licence",
                  store.identity, store.fingerprint):  # fmt: skip
        assert words in card, words
    assert "license" not in yaml.safe_load(card.split("---\n")[1]), "not ours to give"


@pytest.mark.parametrize("harm", ["cut", "changed", "unfinished", "path"])
def test_records_that_are_not_sent(harm: str, records: list[Record], tmp_path: Path) -> None:
    folder = tmp_path / "records"
    stored(records, folder, **({"served_model": "/models/llm/x"} if harm == "path" else {}))
    shard = folder / "shard-20.safetensors"
    content = shard.read_bytes()
    said = {
        "cut": r"shard-20\.safetensors has \d+ of \d+ bytes",
        "changed": r"shard-20\.safetensors is damaged: its checksum",
        "unfinished": "is not finished",
        "path": "manifest.json names the path '/models/llm/x'",
    }[harm]
    if harm == "cut":
        shard.write_bytes(content[:-100])
    elif harm == "changed":
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "unfinished":
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        manifest["complete"] = False
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(UserError, match=said):
        pack(folder, NAME)
