"""The MLP speculator: a recurrent draft of one small layer a token (arXiv 2404.19124).

Its state begins as the target's head input where the last emitted token was decided. Each step
mixes the state with the embedding of the token before, and what comes out is both the next state
and what the step's head reads:

    s_(i+1) = GELU(LN_i(P_i s_i + c E_i[token])),  logits_i = H_i s_(i+1)

The constant c keeps the share of the first state in the last one at a half: with w = 0.5^(1/2n) for
n steps, c = sqrt((1 - w^2) d / 2) / w over a width of d. LN divides by the root mean square (eps
1e-6), then scales and shifts. Constants and norm are those of vLLM's `mlp_speculator.py`.

Heads learn from the start on, so a soft cap on the target's own logits is not repeated; a factor on
them goes into the rows that heads begin with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..configs.errors import UserError
from ..data.dense import dense_weight
from ..data.target import Target, logit_factor
from .base import Step, TrainBatch
from .rounds import Depths, Rounds, begins, by_level
from .vocab import check_floor, check_init

EPS = 1e-6


@dataclass(frozen=True)
class MLPConfig:
    """What a recipe's `drafter:` section may say for `family: mlp`."""

    n_predict: int | None = None
    """Steps, which is how many tokens a round drafts at most; train.unroll is the same. null takes
    3."""
    inner_dim: int | None = None
    """Width of the states; null takes the target's hidden size."""
    tie_weights: bool | None = None
    """One embedding, norm and head for all steps, and one projection behind the first; null ties
    them where there is more than one step."""
    scale_input: bool | None = None
    """Divides the target's state by its root mean square, and by the root of 2; null does not."""
    draft_vocab_size: int | None = None
    """Tokens the heads can propose; null keeps all. Reduced heads serve in draftsmith's own loop
    only."""
    domain_floor: float = 0.5
    """Share of a reduced draft vocabulary dealt out equally to the domains' most likely tokens."""
    init: str | None = None
    """`target` starts from the target's embedding and head where inner_dim is its width, as null
    does; `random` from noise."""
    start: str | None = None
    """Goes on from a published speculator, its folder or Hub id, which decides what is left unset
    here; null begins anew."""

    reads_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("n_predict", "inner_dim", "draft_vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"drafter.{name} is {value}, must be above 0, or null")
        check_floor(self.domain_floor)
        if self.tie_weights and self.n_predict == 1:
            raise UserError("drafter.tie_weights true needs drafter.n_predict 2 or more")
        check_init(self.init, self.start)

    @property
    def vocab_size(self) -> int | None:
        """Tokens of a reduced draft vocabulary; None for all."""
        return self.draft_vocab_size

    @property
    def most(self) -> int | None:
        """Tokens a round, where no start decides."""
        return None if self.n_predict is None and self.start else self.resolved_n_predict

    @property
    def resolved_n_predict(self) -> int:
        """Steps of a speculator that begins anew."""
        return self.n_predict or 3

    @property
    def resolved_tie_weights(self) -> bool:
        """Whether one that begins anew ties its steps."""
        return self.resolved_n_predict > 1 if self.tie_weights is None else self.tie_weights

    def resolved_taps(self, num_layers: int) -> tuple[int, ...]:
        """What the target's head reads."""
        return (num_layers,)


class Norm(nn.Module):
    """x over its root mean square, scaled and shifted: `[..., d] -> [..., d]`."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, EPS) + self.bias


@dataclass
class _State:
    """What a round begins from: last token `[B]` and the target's state behind it `[B, h]`.

    hidden: `[B, 1 + fed, d]` states of the round, of the committed text and then of the drafted
    tokens fed (of a chain only the last).
    """

    token: Tensor
    tapped: Tensor
    hidden: Tensor
    depths: Depths = field(default_factory=Depths)

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(list(rows), dtype=torch.long, device=self.token.device)
        self.token, self.tapped = self.token[index], self.tapped[index]


class MLPDrafter(nn.Module):
    """See the module's docstring; tensor names are those of the public layout.

    Weights that are tied are held once: step i takes the last ones there are up to i.
    """

    family = "mlp"
    one_pass = False
    may_abstain = False
    shared: tuple[str, ...] = ()
    max_positions: int | None = None

    def __init__(
        self,
        width: int,
        rows: int,
        taps: tuple[int, ...],
        n_predict: int,
        inner_dim: int,
        draft_ids: Tensor | None = None,
        *,
        tied: bool,
        scaled: bool = False,
    ):
        """Over states of `width` of a target with `rows` output rows; tied and scaled as the
        configuration's `tie_weights` and `scale_input`."""
        super().__init__()
        self.width, self.rows, self.taps = width, rows, taps
        self.n_predict, self.inner_dim, self.tied, self.scaled = n_predict, inner_dim, tied, scaled
        size = rows if draft_ids is None else len(draft_ids)
        own = range(1 if tied else n_predict)
        self.emb = nn.ModuleList(nn.Embedding(rows, inner_dim) for _ in own)
        self.proj = nn.ModuleList(
            nn.Linear(inner_dim if i else width, inner_dim, bias=False)
            for i in range(2 if tied else n_predict)
        )
        self.ln = nn.ModuleList(Norm(inner_dim) for _ in own)
        self.heads = nn.ModuleList(nn.Linear(inner_dim, size, bias=False) for _ in own)
        weight = 0.5 ** (0.5 / n_predict)
        self.mix = math.sqrt((1 - weight**2) * inner_dim / 2) / weight
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self._checkpointed = False

    @classmethod
    def from_target(
        cls, target: Target, config: MLPConfig, draft_ids: Tensor | None = None
    ) -> "MLPDrafter":
        """A speculator for `target`, from noise or with its embedding and head, see `init`.

        Raises `UserError` where the recipe asks for these at another width.
        """
        drafter = cls(
            target.hidden_size,
            target.head.out_features,
            config.resolved_taps(target.num_layers),
            config.resolved_n_predict,
            config.inner_dim or target.hidden_size,
            draft_ids,
            tied=config.resolved_tie_weights,
            scaled=bool(config.scale_input),
        )
        std = drafter.inner_dim**-0.5
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                nn.init.trunc_normal_(parameter, std=std)
        fits = drafter.inner_dim == target.hidden_size
        if config.init == "target" and not fits:
            raise UserError(
                f"drafter.init 'target' takes over embedding and head, {target.hidden_size} wide, "
                f"and drafter.inner_dim is {drafter.inner_dim}; leave one of them out"
            )
        if config.init != "random" and fits:
            _copy_words(drafter, target, std)
        return drafter

    @property
    def layout(self) -> str | None:
        return "mlp_speculator" if self.draft_ids is None else "draftsmith"

    @property
    def unserved(self) -> str | None:
        return None if self.draft_ids is None else "a reduced draft vocabulary"

    @property
    def options(self) -> dict[str, Any]:
        return {
            "n_predict": self.n_predict,
            "inner_dim": self.inner_dim,
            "tie_weights": self.tied,
            "scale_input": self.scaled,
            "draft_vocab_size": None if self.draft_ids is None else len(self.draft_ids),
        }

    @property
    def max_draft_tokens(self) -> int | None:
        return self.n_predict

    def trainable(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def checkpoint(self, on: bool) -> None:
        self._checkpointed = on

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        return _of(self.heads, which)(hidden)

    def head_inputs(self, hidden: Tensor, which: int = 0) -> Tensor:
        return hidden

    def head_rows(self, which: int = 0) -> tuple[Tensor, Tensor | None]:
        return _of(self.heads, which).weight, None

    def finish_logits(self, logits: Tensor) -> Tensor:
        return logits

    def _begin(self, tapped: Tensor) -> Tensor:
        """The first step's state from the target's: `[..., h] -> [..., h]`."""
        states = tapped.to(_of(self.proj, 0).weight.dtype)
        if self.scaled:
            states = F.rms_norm(states, states.shape[-1:], None, EPS) / math.sqrt(2)
        return states

    def _next(self, step: int, states: Tensor, tokens: Tensor) -> Tensor:
        """Step i over states `[..., h]` or `[..., d]` and the tokens `[...]` they go on with:
        `[..., d]`."""
        mixed = _of(self.proj, step)(states) + self.mix * _of(self.emb, step)(tokens)
        return F.gelu(_of(self.ln, step)(mixed))

    # ---- training

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        """Step k goes on from its own state of step k-1, with the true token."""
        rounds = Rounds.of(batch)
        states = self._begin(rounds.states)  # [N, h]
        again = self._checkpointed and self.training and torch.is_grad_enabled()
        found = []
        for k in range(steps):
            told = (k, states, rounds.last(k))
            states = (
                checkpoint(self._next, *told, use_reentrant=False) if again else self._next(*told)
            )
            mask, token = rounds.scored(k)
            found.append(Step(states[mask], token, k))
        return found

    # ---- decoding

    def start(self, rows: int, capacity: int) -> _State:
        nothing = _of(self.proj, 0).weight.new_zeros(rows, self.width)
        token = torch.zeros(rows, dtype=torch.long, device=nothing.device)
        return _State(token, nothing, nothing[:, None])

    def prefill(self, state: _State, ids: Tensor, lengths: Sequence[int], taps: Tensor) -> None:
        """The state that is read comes with the first emitted token."""

    def commit(
        self,
        state: _State,
        tokens: Tensor,
        counts: Sequence[int],
        taps: Tensor,
        path: Tensor | None = None,
    ) -> None:
        state.token, state.tapped = begins(tokens, counts, taps)
        state.depths = Depths()

    def first(self, state: _State) -> Tensor:
        state.hidden = self._next(0, self._begin(state.tapped), state.token)[:, None]  # [B, 1, d]
        return self.head(state.hidden[:, 0])

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        levels = state.depths.feed(parents)
        before = state.hidden[:, -1:]  # [B, 1, d]
        if parents is not None:
            index = (parents + 1)[..., None].expand(-1, -1, self.inner_dim)
            before = state.hidden.gather(1, index)  # [B, w, d]
        out = by_level(levels, lambda depth: self._next(depth, before, tokens))  # [B, w, d]
        state.hidden = out if parents is None else torch.cat([state.hidden, out], 1)
        return by_level(levels, lambda depth: self.head(out, depth))


def _of(modules: nn.ModuleList, step: int) -> Any:
    """The one of step i, which is the last one where further ones are tied to it."""
    return modules[min(step, len(modules) - 1)]


def _copy_words(drafter: MLPDrafter, target: Target, std: float) -> None:
    """Start from the target's embedding, in size as noise would be, and from its head.

    The first projection passes its state on.
    """
    weight = target.embedding.detach()[: drafter.rows].float()  # [V, h]
    weight = weight * (std / weight.std())
    for parameter in drafter.emb.parameters():
        parameter.data[: len(weight)].copy_(weight)
    head, ids = dense_weight(target.head, target.dtype).float(), drafter.draft_ids  # [V, h]
    head = head * logit_factor(target.text_config)
    for parameter in drafter.heads.parameters():
        parameter.data.copy_(head if ids is None else head[ids])
    nn.init.eye_(_of(drafter.proj, 0).weight)
