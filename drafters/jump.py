"""Jump drafting: what an early layer will say of the next token is guessed, the rest is run.

From a late layer's state at token n - 1 and the embedding of token n, a small predictor makes the
state that layer m would have at token n; the target's own layers behind m turn it into a late state
there, which drafts token n + 1 and goes on to the next guess. Those layers stay as they are: only
the predictor and the head's norm learn, by gradients that pass through them. Their keys and values
of the text so far are made from the target's true states behind layer m.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..configs.errors import UserError
from ..data.cache import Branch, SlabCache
from ..data.dense import dense_weight
from ..data.target import Target
from .base import Step, TrainBatch, supervised_at, token_index
from .cached_states import CachedStates
from .eagle3_layer import Window
from .span import Span, final_norm
from .vocab import check_floor

_BEHIND = 5  # layers that are run, if the recipe names none


@dataclass(frozen=True)
class JumpConfig:
    """What a recipe's `drafter:` section may say for `family: jump`."""

    begin: int | None = None
    """Target layer whose output is guessed; null takes the sixth from the end, or the first."""
    end: int | None = None
    """Last target layer that is run, whose output is the late state; null takes the very last."""
    layers: int | None = None
    """Gated blocks of the predictor; null takes one."""
    hidden: int | None = None
    """Their inner width; null takes the target's own."""
    draft_vocab_size: int | None = None
    """Tokens the head can propose, chosen by captured target mass; special tokens always in. null
    takes 8192."""
    domain_floor: float = 0.5
    """Share of the draft vocabulary dealt out equally to the domains' own most likely tokens."""
    train_head: bool | None = None
    """Trains a copy of the target head's rows; null leaves them the target's, or goes on with those
    of `start` as it was."""
    start: str | None = None
    """Goes on from a drafter of this family, its folder or Hub id, which decides what is left unset
    here; null begins anew."""

    reads_target: ClassVar[bool] = True
    most: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        for name, least in (("layers", 0), ("hidden", 1), ("draft_vocab_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"drafter.{name} is {value}, must be {least} or more")
        check_floor(self.domain_floor)

    @property
    def vocab_size(self) -> int:
        """Tokens of the draft vocabulary of a drafter that begins anew."""
        return 8192 if self.draft_vocab_size is None else self.draft_vocab_size

    def resolved_taps(self, num_layers: int) -> tuple[int, int]:
        """The layer whose output is guessed and the last one that is run, of `num_layers`."""
        last = num_layers - 1
        end = last if self.end is None else self.end
        begin = max(0, last - _BEHIND) if self.begin is None else self.begin
        if not 0 <= begin < end <= last:
            raise UserError(
                f"drafter.begin {begin} and drafter.end {end} must be layers of the target, 0 to "
                f"{last}, begin below end"
            )
        return begin, end


class Block(nn.Module):
    """A gated MLP with a norm before it, to be added to what it reads."""

    def __init__(self, h: int, hidden: int):
        super().__init__()
        self.norm = nn.RMSNorm(h, eps=1e-5)
        self.gate_proj = nn.Linear(h, hidden, bias=False)
        self.up_proj = nn.Linear(h, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class JumpDrafter(nn.Module):
    """See the module's docstring. The target's layers are run where they lie: they are no part of
    this module, and neither is its embedding."""

    family = "jump"
    may_abstain = False
    one_pass = False
    layout: str | None = "draftsmith"
    unserved: str | None = "layers that are the target's own (drafter.family jump)"
    max_draft_tokens: int | None = None

    def __init__(self, span: Span, norm: nn.Module, layers: int, hidden: int, draft_ids: Tensor):
        super().__init__()
        self.span = span
        self.taps: tuple[int, ...] = (span.begin, span.end)
        h = span.target.hidden_size
        self.late_norm = nn.RMSNorm(h, eps=1e-5)
        self.token_norm = nn.RMSNorm(h, eps=1e-5)
        self.fc = nn.Linear(2 * h, h, bias=False)
        self.blocks = nn.ModuleList(Block(h, hidden) for _ in range(layers))
        self.hidden = hidden
        self.norm = norm
        biased = getattr(span.target.head, "bias", None) is not None
        self.lm_head = nn.Linear(h, len(draft_ids), bias=biased)
        self.own_head = False
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self._checkpointed = False

    @classmethod
    def from_target(cls, target: Target, config: JumpConfig, draft_ids: Tensor) -> "JumpDrafter":
        """A drafter whose predictor is noise; norm and head behind the layers are the target's.

        The guess has no residual from the late state, which is much about the token that has been
        drawn since: with one, SmolLM2-135M's drafter learned slower. Raises `UserError` for a
        kind of model whose layers cannot be run apart.
        """
        span = Span(target, *config.resolved_taps(target.num_layers))
        text, h = target.text_config, target.hidden_size
        hidden = config.hidden or getattr(text, "intermediate_size", None) or 4 * h
        layers = 1 if config.layers is None else config.layers
        norm = copy.deepcopy(final_norm(target)).float().requires_grad_(True)
        drafter = cls(span, norm, layers, hidden, draft_ids)
        std = float(getattr(text, "initializer_range", 0.02))
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2 and not name.startswith("lm_head"):
                nn.init.normal_(parameter, std=std)
        for block in drafter.blocks:
            assert isinstance(block, Block)
            nn.init.zeros_(block.down_proj.weight)
        head = drafter.lm_head
        head.weight.data.copy_(dense_weight(target.head, target.dtype)[draft_ids])
        if head.bias is not None:
            head.bias.data.copy_(target.head.bias.detach()[draft_ids])
        drafter.learn(bool(config.train_head))
        return drafter

    @property
    def shared(self) -> tuple[str, ...]:
        head = self.lm_head.named_parameters(prefix="lm_head")
        return () if self.own_head else tuple(name for name, _ in head)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "begin": self.span.begin,
            "end": self.span.end,
            "layers": len(self.blocks),
            "hidden": self.hidden,
            "draft_vocab_size": len(self.draft_ids),
            "train_head": self.own_head,
        }

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def learn(self, head: bool) -> None:
        """Whether the head's rows are trained, which are the drafter's own once they were."""
        self.own_head = self.own_head or head
        self.lm_head.requires_grad_(head)

    def checkpoint(self, on: bool) -> None:
        self._checkpointed = on

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        return self.finish_logits(self.lm_head(self.head_inputs(hidden)))

    def head_inputs(self, hidden: Tensor, which: int = 0) -> Tensor:
        normed: Tensor = self.norm(hidden)
        return normed

    def head_rows(self, which: int = 0) -> tuple[Tensor, Tensor | None]:
        return self.lm_head.weight, self.lm_head.bias

    def finish_logits(self, logits: Tensor) -> Tensor:
        return self.span.target.finish_logits(logits)

    def _guess(self, late: Tensor, tokens: Tensor) -> Tensor:
        """States of layer `begin` at `tokens [.., n]`, by late ones `[.., n, h]` just before."""
        embedded = self.token_norm(self.span.embed(tokens).to(late.dtype))
        x: Tensor = self.fc(torch.cat([self.late_norm(late), embedded], -1))
        for block in self.blocks:
            x = x + block(x)
        return x

    def _split(self, taps: Tensor) -> tuple[Tensor, Tensor]:
        """True states `[B, n, h]` of layers `begin` and `end`; the target may run in another
        dtype."""
        begin, end = taps.to(self.fc.weight.dtype).chunk(2, -1)
        return begin, end

    # ---- training

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        """Step 0 guesses from true late states, step k from step k-1's own at the token before.

        Pair t stands for the guess at token t + 1, which predicts token t + 2.
        """
        window = Window.of(batch)
        begin, late = self._split(batch.taps)  # [B, T-1, h]
        position = batch.position[:, :-1]  # [B, T-1]
        known = self._known(batch, begin, position)
        late, tokens = window.take(late, 1), window.take(batch.ids[:, 1:], 1)
        at = window.take(position, 1) + 1  # [B, W]
        token = token_index(batch, window.column + 2)  # [B, W]
        place = position  # [B, S] of all keys
        steps_out = []
        for k in range(steps):
            if k:
                late = F.pad(late[:, :-1], (0, 0, 1, 0))  # own state of the pair before
            place = torch.cat([place, at], 1)
            visible = window.visible(k, since=0)
            visible = visible.view(-1, 1, *visible.shape[-2:])  # [1|B, 1, W, S]
            run = partial(self._unrolled, tokens=tokens, at=at, visible=visible, place=place)
            if self._checkpointed and self.training and torch.is_grad_enabled():
                late, *own = checkpoint(run, late, *known, use_reentrant=False)
            else:
                late, *own = run(late, *known)
            known += own
            scored = supervised_at(batch, window.column + 2, k)  # [B, W]
            steps_out.append(Step(late[scored], token[scored]))
        return steps_out

    @torch.no_grad()
    def _known(self, batch: TrainBatch, states: Tensor, position: Tensor) -> list[Tensor]:
        """Keys and values of the true text in those layers, as `Span.joined` has them."""
        column = torch.arange(states.shape[1], device=states.device)
        own = batch.conversation[:, :-1]  # [B, T-1]
        visible = (column[:, None] >= column) & (own[:, :, None] == own[:, None])
        return self.span.joined(states, position, visible[:, None], position, ())[1]

    def _unrolled(
        self, late: Tensor, *known: Tensor, tokens: Tensor, at: Tensor, visible: Tensor,
        place: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """One step over the window: own late states `[B, W, h]`, and its keys and values."""
        out, own = self.span.joined(self._guess(late, tokens), at, visible, place, known)
        return out.to(late.dtype), *own

    # ---- decoding

    def start(self, rows: int, capacity: int) -> CachedStates:
        taps = self.fc.weight.new_empty(rows, 0, self.fc.in_features)
        return CachedStates.empty(self._drafted, self.span.new_cache(rows, capacity), taps)

    @property
    def max_positions(self) -> int | None:
        return self.span.target.max_positions

    def prefill(
        self, state: CachedStates, ids: Tensor, lengths: Sequence[int], taps: Tensor
    ) -> None:
        """Tokens up to the last but one; the last state waits for the first reply token."""
        if ids.shape[1] > 1:
            self._run(state.cache, self._split(taps[:, :-1])[0])
            state.prefilled(lengths)

    def commit(
        self,
        state: CachedStates,
        tokens: Tensor,
        counts: Sequence[int],
        taps: Tensor,
        path: Tensor | None = None,
    ) -> None:
        state.commit(tokens, counts, taps)

    def first(self, state: CachedStates) -> Tensor:
        """Takes in true states, and the guess at the last emitted token behind, in one pass."""
        counts = torch.tensor(state.counts, device=state.tokens.device)
        rows, last = torch.arange(len(counts), device=counts.device), counts - 1
        begin, late = self._split(state.taps)  # [B, m, h]
        states = F.pad(begin, (0, 0, 0, 1))  # [B, m + 1, h]
        states[rows, counts] = self._guess(late[rows, last], state.tokens[rows, last])
        return self.head(state.begin(self._run(state.cache, states), guessed=1))

    def extend(self, state: CachedStates, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        return self.head(state.extend(tokens, parents))

    def _drafted(
        self, cache: SlabCache, before: Tensor, tokens: Tensor, branch: Branch | None
    ) -> Tensor:
        """Own late states at drafted tokens `[B, w]`, by those before them."""
        return self._run(cache, self._guess(before, tokens), branch)

    def _run(self, cache: SlabCache, states: Tensor, branch: Branch | None = None) -> Tensor:
        """The target's layers over new states `[B, n, h]` behind the cache: late ones."""
        cache.begin(states.shape[1], branch)
        return self.span.behind(cache, states).to(states.dtype)
