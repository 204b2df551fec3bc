"""Medusa: heads beside the target's own, each for a token further ahead (arXiv 2401.10774).

Head k reads the target's head input through residual blocks x + SiLU(W x + b) and predicts the
token k + 1 places behind the last emitted one, whatever lies between: all of a round's
distributions depend on where it began alone. So drafts are cheap, and their tokens do not know each
other.

A new head is the target's: its blocks are zero, its rows the target's. What the target does to its
logits afterwards is kept as far as the engine keeps it: a factor (Cohere, Granite) goes into the
rows, a soft cap (Gemma) is left out, and the logits of large size that it held back are learnt
anew.
"""

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
from .vocab import check_floor


@dataclass(frozen=True)
class MedusaConfig:
    """What a recipe's `drafter:` section may say for `family: medusa`."""

    num_heads: int | None = None
    """Heads, which is how many tokens a round drafts at most; train.unroll is the same. null takes
    3."""
    num_layers: int | None = None
    """Residual blocks of each head; null takes 1."""
    draft_vocab_size: int | None = None
    """Tokens the heads can propose, chosen by captured target mass; null keeps all."""
    shared_head: bool | None = None
    """One output matrix for all heads, behind blocks of their own; null gives each its own."""
    train_head: bool | None = None
    """Whether output matrices learn; false leaves a shared one as the target has it, or all as
    `start` has them. null does, or goes on as it was."""
    domain_floor: float = 0.5
    """Share of a reduced draft vocabulary dealt out equally to the domains' most likely tokens."""
    start: str | None = None
    """Goes on from published heads, their folder or Hub id, which decide what is left unset here;
    null begins anew."""

    reads_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers", "draft_vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"drafter.{name} is {value}, must be above 0, or null")
        check_floor(self.domain_floor)
        if self.train_head is False and not self.shared_head and self.start is None:
            raise UserError(
                "drafter.train_head false leaves every head's output matrix as the target has it: "
                "say drafter.shared_head true, and it is held once"
            )

    @property
    def vocab_size(self) -> int | None:
        """Tokens of a reduced draft vocabulary; None for all."""
        return self.draft_vocab_size

    @property
    def most(self) -> int | None:
        """Tokens a round, where no start decides."""
        return None if self.num_heads is None and self.start else self.resolved_num_heads

    @property
    def resolved_num_heads(self) -> int:
        """Of heads that begin anew."""
        return self.num_heads or 3

    @property
    def resolved_num_layers(self) -> int:
        """Residual blocks of heads that begin anew."""
        return self.num_layers or 1

    def resolved_taps(self, num_layers: int) -> tuple[int, ...]:
        """What the target's head reads."""
        return (num_layers,)


class Blocks(nn.Module):
    """Residual blocks x + SiLU(W x + b), one behind the other: `[..., h] -> [..., h]`."""

    def __init__(self, width: int, count: int, bias: bool):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


@dataclass
class _State:
    """hidden: `[B, h]` what the round begins from; logits: `[B, V_d]` of the heads asked so far."""

    hidden: Tensor
    logits: dict[int, Tensor] = field(default_factory=dict)
    depths: Depths = field(default_factory=Depths)

    def select(self, rows: Sequence[int]) -> None:
        index = torch.tensor(list(rows), dtype=torch.long, device=self.hidden.device)
        self.hidden = self.hidden[index]


class MedusaDrafter(nn.Module):
    """See the module's docstring; tensor names are those that vLLM reads."""

    family = "medusa"
    one_pass = False
    may_abstain = False
    layout: str | None = "medusa"
    shared: tuple[str, ...] = ()
    unserved: str | None = None
    max_positions: int | None = None

    def __init__(
        self,
        width: int,
        rows: int,
        taps: tuple[int, ...],
        num_heads: int,
        num_layers: int,
        draft_ids: Tensor | None = None,
        *,
        bias: bool = True,
        shared_head: bool = False,
        train_head: bool = True,
    ):
        """Heads over states of `width`, of a target with `rows` output rows.

        bias: whether blocks have one, which checkpoints for vLLM may lack; shared_head: whether one
        output matrix serves all heads; train_head: whether output matrices learn.
        """
        super().__init__()
        self.width, self.rows, self.taps, self.num_layers = width, rows, taps, num_layers
        self.blocks = nn.ModuleList(Blocks(width, num_layers, bias) for _ in range(num_heads))
        size = rows if draft_ids is None else len(draft_ids)
        self.shared_head = shared_head
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, size, bias=False) for _ in range(1 if shared_head else num_heads)
        )
        self.learn(train_head)
        self.draft_ids: Tensor | None
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self._checkpointed = False

    @classmethod
    def from_target(
        cls, target: Target, config: MedusaConfig, draft_ids: Tensor | None = None
    ) -> "MedusaDrafter":
        """Heads that say what the target's own says; a bias that this has is not among them."""
        taps = config.resolved_taps(target.num_layers)
        drafter = cls(
            target.hidden_size,
            target.head.out_features,
            taps,
            config.resolved_num_heads,
            config.resolved_num_layers,
            draft_ids,
            shared_head=bool(config.shared_head),
            train_head=config.train_head is not False,
        )
        for parameter in drafter.blocks.parameters():
            nn.init.zeros_(parameter)
        weight = dense_weight(target.head, target.dtype)  # [V, h]
        own = (weight if draft_ids is None else weight[draft_ids]).float()
        own = own * logit_factor(target.text_config)
        for parameter in drafter.lm_heads.parameters():
            parameter.data.copy_(own)
        return drafter

    @property
    def options(self) -> dict[str, Any]:
        return {
            "num_heads": len(self.blocks),
            "num_layers": self.num_layers,
            "draft_vocab_size": None if self.draft_ids is None else len(self.draft_ids),
            "shared_head": self.shared_head,
            "train_head": self._output(0).weight.requires_grad,
        }

    @property
    def max_draft_tokens(self) -> int | None:
        return len(self.blocks)

    def trainable(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.requires_grad]

    def learn(self, head: bool) -> None:
        """Whether output matrices are trained."""
        self.lm_heads.requires_grad_(head)

    def checkpoint(self, on: bool) -> None:
        self._checkpointed = on

    def head(self, hidden: Tensor, which: int = 0) -> Tensor:
        return self._output(which)(hidden)

    def head_inputs(self, hidden: Tensor, which: int = 0) -> Tensor:
        return hidden

    def head_rows(self, which: int = 0) -> tuple[Tensor, Tensor | None]:
        return self._output(which).weight, None

    def finish_logits(self, logits: Tensor) -> Tensor:
        return logits

    def _output(self, which: int) -> nn.Linear:
        head = self.lm_heads[0 if self.shared_head else which]
        assert isinstance(head, nn.Linear)
        return head

    # ---- training

    def unroll(self, batch: TrainBatch, steps: int) -> list[Step]:
        """Head k on the state where each round began; tokens between are not looked at."""
        rounds = Rounds.of(batch)
        states = rounds.states.to(self._dtype)  # [N, h]
        found = []
        for k in range(steps):
            mask, token = rounds.scored(k)
            found.append(Step(self._block(k, states[mask]), token, k))
        return found

    def _block(self, which: int, states: Tensor) -> Tensor:
        block = self.blocks[which]
        if self._checkpointed and self.training and torch.is_grad_enabled():
            return checkpoint(block, states, use_reentrant=False)
        return block(states)

    @property
    def _dtype(self) -> torch.dtype:
        return self._output(0).weight.dtype

    # ---- decoding

    def start(self, rows: int, capacity: int) -> _State:
        return _State(self._output(0).weight.new_zeros(rows, self.width))

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
        _, hidden = begins(tokens, counts, taps)
        state.hidden, state.logits, state.depths = hidden.to(self._dtype), {}, Depths()

    def first(self, state: _State) -> Tensor:
        return self._logits(state, 0)

    def extend(self, state: _State, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Behind a token at depth d, head d: whichever token it is."""
        width = tokens.shape[1]
        return by_level(
            state.depths.feed(parents),
            lambda depth: self._logits(state, depth)[:, None].expand(-1, width, -1),
        )

    def _logits(self, state: _State, which: int) -> Tensor:
        """Of one head, `[B, V_d]`; asked once a round."""
        if which not in state.logits:
            state.logits[which] = self.head(self.blocks[which](state.hidden), which)
        return state.logits[which]
