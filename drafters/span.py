"""Layers of a target that a drafter runs and does not own.

They are the target's own modules in a body that lists fewer layers: nothing is held twice, and what
is done to a drafter (`train`, `double`, `to`, a deep copy) does not touch them.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..configs.errors import UserError
from ..data.cache import JoinedCache, Sight, SlabCache
from ..data.parts import with_replaced
from ..data.target import Target

_TOKENS = 8
_TOLERANCE = 1e-3  # of the largest state, in float32
_ROUNDINGS = 8  # in low precision: so many units of the dtype's own rounding
_RAISED = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError)

Mask = Tensor | dict[str, Tensor] | None
"""What `Sight.mask` makes."""


def shorter_body(target: Target, layers: Sequence[int]) -> nn.Module:
    """The target's body with these layers only; all modules below it are the target's own."""
    kept = nn.ModuleList([target.layers[i] for i in layers])
    body = with_replaced(target.body, target.layers, kept)
    config = copy.copy(target.text_config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):  # bodies ask for the kind of their i-th layer
        config.layer_types = [config.layer_types[i] for i in layers]
    body.config = config
    return body


def final_norm(target: Target) -> nn.Module:
    """What stands between the target's last layer and its head.

    Raises `UserError` naming the kind of model if there is no such norm, or more than one.
    """
    norms = [m for m in target.body.children() if "norm" in type(m).__name__.lower()]
    if len(norms) != 1:
        raise _unfit(target, f"it has {len(norms)} norms behind its layers")
    return norms[0]


def _unfit(target: Target, reason: str) -> UserError:
    return UserError(
        f"layers of target '{target.provenance['name']}' ({target.model.config.model_type}) cannot "
        f"be run apart from the others ({reason}); take a family of drafters that runs none of them"
    )


class Span:
    """The target's layers `begin + 1` to `end`, over states that layer `begin` might have given."""

    def __init__(self, target: Target, begin: int, end: int):
        """Raises `UserError` for a kind of model whose layers need more than such states.

        Tried on a short text, unless there are no weights.
        """
        self.target, self.begin, self.end = target, begin, end
        self.layers = tuple(range(begin + 1, end + 1))
        body = shorter_body(target, self.layers)
        self.body = with_replaced(body, final_norm(target), nn.Identity())
        self._sight = Sight.of(target.model.config)
        eager = target.model.config._attn_implementation == "eager"
        self._mask_dtype = target.dtype if eager else None
        if "meta" not in (target.device.type, torch.empty(0).device.type):
            self._check()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Span":
        return self

    def embed(self, ids: Tensor) -> Tensor:
        """The target's embeddings `[.., h]` of ids."""
        embedded: Tensor = self.target.model.get_input_embeddings()(ids)
        return embedded

    # ---- behind a cache

    def new_cache(self, rows: int, capacity: int) -> SlabCache:
        """With the whole target's layers: attention writes where it stands among them."""
        return self.target.new_cache(rows, capacity)

    def behind(self, cache: SlabCache, states: Tensor) -> Tensor:
        """Over the tokens that `cache.begin` made place for: `[B, n, h] -> [B, n, h]`."""
        return self._run(states, cache.mask(self._mask_dtype), cache.position_ids(), cache)

    # ---- with gradients

    def joined(
        self, states: Tensor, at: Tensor, visible: Tensor, place: Tensor, known: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Over tokens at positions `at [B, n]` whose keys come behind `known`, S in all.

        `visible` (bool, `[., 1, n, S]`) is what each sees, `place [B, S]` where the keys' tokens
        stand. Outputs `[B, n, h]`, and this pass's own keys and values by layer, in turns, as
        `known` has those of all passes before.
        """
        where = at[:, None, :, None], place[:, None, None]
        mask = self._sight.mask(visible, *where, self._mask_dtype)
        cache = JoinedCache(self.layers, known)
        return self._run(states, mask, at, cache), cache.own

    def _run(self, states: Tensor, mask: Mask, at: Tensor, cache: Any) -> Tensor:
        out: Any = self.body(
            inputs_embeds=states.to(self.target.dtype),
            attention_mask=mask,
            position_ids=at,
            cache=cache,
            use_cache=True,
        )
        return out.last_hidden_state

    @torch.no_grad()
    def _check(self) -> None:
        target = self.target
        ids = torch.arange(2 * _TOKENS, device=target.device).view(2, -1) % target.vocab_size
        try:
            taps = target.forward(ids, self.new_cache(2, _TOKENS), (self.begin, self.end)).taps
            given, expected = taps.chunk(2, -1)  # [2, n, h] each
            cache = self.new_cache(2, _TOKENS)
            cache.begin(_TOKENS)
            found = self.behind(cache, given)
        except (*_RAISED, ValueError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise _unfit(target, reason[0]) from error
        worst = (found - expected).abs().max().item()
        allowed = max(_TOLERANCE, _ROUNDINGS * torch.finfo(target.dtype).eps)
        if not worst <= allowed * expected.abs().max().item():
            raise _unfit(target, f"their states differ by {worst:.3g}")
