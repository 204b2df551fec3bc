"""Where the drafter that an engine reads is another than the one that was trained."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...data.target import Target
from ...drafters.base import Drafter
from ...drafters.dflash_begin import target_words

PROBE_ROWS = 16
CLOSE = 1e-4
"""Of the largest logit: what two ways of computing the same may differ by."""
_LAYER = (
    *("rope_parameters", "rms_norm_eps", "hidden_act", "attention_bias", "head_dim"),
    *("num_attention_heads", "num_key_value_heads", "num_hidden_layers"),
)


def as_published(trained: Drafter, dtype: torch.dtype, target: Target) -> Any:
    """A copy of the drafter with weights rounded as the folder's are, to be computed in float32.

    What it shares with the target is the target's.
    """
    drafter: Any = copy.deepcopy(trained)
    for parameter in drafter.parameters():  # buffers are computed anew by whoever loads it
        parameter.data = parameter.data.to(dtype).float()
    words = target_words(target, drafter.draft_ids) if drafter.shared else {}
    for name in drafter.shared:
        drafter.get_parameter(name).data = words[name].float().clone()
    return drafter.to(target.device).eval()


def differences(engine: str, trained: Any, served: Any, target: Target) -> list[str]:
    """A sentence for each way in which `served`, as `engine` reads it, is not `trained`."""
    found = [*_layers(engine, trained, served), *_tokens(engine, trained, served, target)]
    found += _options(engine, trained, served)
    same = trained.taps == served.taps and _ids(trained, target) == _ids(served, target)
    if same:
        with _capped(served, soft_cap(trained)):
            apart = logits_apart(trained, served, target)
        if not apart <= CLOSE:
            found.append(
                f"on a fixed batch of ids its logits are off by {apart:.2g} of the largest"
            )
    return found


def _layers(engine: str, trained: Any, served: Any) -> list[str]:
    if trained.taps == served.taps:
        return []
    apart = {b - a for a, b in zip(trained.taps, served.taps, strict=False)}
    known = len(apart) == 1 and len(trained.taps) == len(served.taps)
    by = f", each off by {next(iter(apart)):+d}" if known else ""
    return [
        f"{engine} reads the outputs of the target's layers {list(served.taps)}, the drafter was "
        f"trained on those of {list(trained.taps)}{by}"
    ]


def _tokens(engine: str, trained: Any, served: Any, target: Target) -> list[str]:
    mine, theirs = _ids(trained, target), _ids(served, target)
    if mine == theirs:
        return []
    same = len(set(mine) & set(theirs))
    return [
        f"{engine} takes the {len(theirs)} draft tokens for others of the target's than were "
        f"trained: {same} of {len(mine)} are among them"
    ]


def _ids(drafter: Any, target: Target) -> list[int]:
    """The target ids that a drafter can propose."""
    ids = drafter.draft_ids
    return list(range(target.vocab_size)) if ids is None else ids.tolist()


def _options(engine: str, trained: Any, served: Any) -> list[str]:
    if getattr(trained, "model", None) is not None:
        pairs = {n: (_text(d) for d in (trained, served)) for n in _LAYER}
    elif hasattr(trained, "config"):
        pairs = {n: (d.config for d in (trained, served)) for n in _LAYER}
    else:
        pairs = {}
    read = {n: [getattr(config, n, None) for config in two] for n, two in pairs.items()}
    if hasattr(trained, "norms"):
        read |= {n: [v, getattr(served.norms, n)] for n, v in vars(trained.norms).items()}
    return [
        f"{engine} runs it with {name} {two[1]}, it was trained with {two[0]}"
        for name, two in read.items()
        if two[0] != two[1]
    ]


def _text(drafter: Any) -> Any:
    return drafter.model.config.get_text_config(decoder=True)


def soft_cap(drafter: Any) -> float | None:
    """Of what the head of a block-parallel drafter says."""
    return getattr(getattr(drafter, "config", None), "final_logit_softcapping", None)


@contextmanager
def _capped(drafter: Any, cap: float | None) -> Iterator[None]:
    """With that soft cap, which an engine may leave out: it is told of by itself."""
    before = soft_cap(drafter)
    if cap is not None:
        drafter.config.final_logit_softcapping = cap
    yield
    if cap is not None:
        drafter.config.final_logit_softcapping = before


def logits_apart(one: Any, two: Any, target: Target) -> float:
    """How far the logits of two drafters with the same tokens are apart, relative to the largest.

    On states of noise, which passes through every weight.
    """
    first, second = (on_noise(drafter, target) for drafter in (one, two))
    if first.shape != second.shape:
        return float("inf")
    return (first - second).abs().max().item() / first.abs().max().item()


@torch.inference_mode()
def on_noise(drafter: Any, target: Target) -> Tensor:
    """Draft logits of a round on fixed ids and states: `[steps, V_d]`."""
    ids = torch.randint(
        target.vocab_size, (1, PROBE_ROWS), generator=torch.Generator().manual_seed(0)
    )
    width = len(drafter.taps) * target.hidden_size
    taps = torch.randn(1, PROBE_ROWS, width, generator=torch.Generator().manual_seed(1))
    device = next(drafter.parameters()).device
    state = drafter.start(1, 2 * PROBE_ROWS)
    drafter.prefill(state, ids.to(device), [PROBE_ROWS], taps.to(device))
    drafter.commit(state, ids[:, -1:].to(device), [1], taps[:, -1:].to(device))
    said = [drafter.first(state)]  # [1, V_d]
    for k in range(1, drafter.max_draft_tokens or 2):  # each step may have its own weights
        said.append(drafter.extend(state, ids[:, k : k + 1].to(device))[:, 0])
    return torch.cat(said)
