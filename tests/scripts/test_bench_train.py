"""The training benchmark's arithmetic, and that the peer gets our weights and nothing of ours."""

import ast
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data.target import Target
from draftsmith.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.scripts import bench_train_peer as peer
from draftsmith.scripts import peer_speculators
from draftsmith.scripts.bench_train import ratios


def test_rates_are_of_whole_windows() -> None:
    times = [0.0] + [float(n) for n in range(1, 26)]
    times[11:] = [t + 10.0 for t in times[11:]]  # the eleventh step took 11 seconds
    tokens = [7] * 25
    assert peer.rates(tokens, times) == pytest.approx([7.0, 70 / 20])


def test_the_peer_s_own_batches_are_as_many_as_ours() -> None:
    sizes = [random.Random(n).randint(50, 200) for n in range(300)]
    for wanted in (20, 75, 150):
        width = peer.width_for(sizes, wanted)
        order, made, room = random.Random(0).sample(sizes, len(sizes)), 0, 0
        for size in order:
            made, room = (made + 1, width) if size > room else (made, room)
            room -= size
        assert made == pytest.approx(wanted, rel=0.1)
        assert width >= max(sizes), "no row is cut off"


def test_ratios_are_ours_over_theirs() -> None:
    rows: list[dict[str, Any]] = [
        {"objective": "nla", "side": "ours", "tokens_per_s": 30.0, "overlap": [0.4]},
        {"objective": "nla", "side": "peer", "tokens_per_s": 20.0, "overlap": [0.3]},
        {"objective": "kl_div", "side": "ours", "tokens_per_s": 1.0, "overlap": [0.1]},
    ]
    assert ratios(rows) == {"nla: ours against peer": {"speed": 1.5, "overlap": 0.1}}


def test_weights_survive_the_peer_s_names(tiny_target: Target) -> None:
    ids = torch.arange(0, 400, 4)
    ours = Eagle3Drafter.from_target(tiny_target, Eagle3Config(draft_vocab_size=len(ids)), ids)
    named = peer.peer_names(ours)
    assert {"layers.0.self_attn.q_proj.weight", "fc.weight", "norm.weight"} <= named.keys()
    assert {n for n, p in ours.named_parameters() if p.requires_grad} == {
        name.replace("layers.0.", "midlayer.") for name in named
    }
    extra = {"embed_tokens.weight": ours.embed_tokens.weight, "verifier_norm.weight": ids}
    bench: Any = type("Some", (), {"initial": ours})
    again = peer.from_peer(bench, named | extra)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


def test_the_peer_s_process_needs_nothing_of_ours() -> None:
    tree = ast.parse(Path(peer_speculators.__file__).read_text(encoding="utf-8"))
    imported = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
    names = {a.name for n in imported if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module) for n in imported if isinstance(n, ast.ImportFrom)}
    assert not any(name.startswith("draftsmith") for name in names)
    assert not any(isinstance(n, ast.ImportFrom) and n.level for n in imported)


def test_matmul_share_counts_products_and_attention() -> None:
    a = torch.randn(256, 256)
    with torch.profiler.profile() as profile:
        for _ in range(5):
            a @ a
    alone = peer_speculators.matmul_share(profile)
    with torch.profiler.profile() as profile:
        for _ in range(5):
            a @ a
            (a + a).exp().sum()
    assert 1 >= alone > peer_speculators.matmul_share(profile) > 0
