"""What is kept of a conversation: its tokens, the law they were drawn from, the target's states."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .warp import Law

Origin = Literal["target", "given", "drafted"]


@dataclass(frozen=True)
class States:
    """What the target computed along one conversation of T tokens, R of them the reply.

    hidden: `[R, h]` head inputs; row j is the state whose logits the j-th reply token was drawn
    from (position `prompt_len - 1 + j`). log_z: `[R]` logsumexp of those logits over the whole
    vocabulary at temperature 1, so that p on any subset of tokens is exact without the rest.
    taps: `[T-1, L*h]` outputs of the tapped layers; the last token was never fed to the target.
    """

    hidden: Tensor
    log_z: Tensor
    taps: Tensor


@dataclass(frozen=True)
class Top:
    """The K most probable tokens where each of R reply tokens was drawn, most probable first.

    ids: `[R, K]` int32, -1 where fewer were told; log_probs: `[R, K]` float32 of the whole
    vocabulary's distribution at `temperature`, never renormalised to the K, -inf where none.
    """

    ids: Tensor
    log_probs: Tensor
    temperature: float = 1.0


@dataclass(frozen=True)
class Record:
    """One reply in one conversation: everything before it is its prompt.

    turn: which reply of the conversation `prompt_id` it is, from 0. finish: "stop" (an end token)
    or "length" (cut by a limit; also a given reply without an end). origin: whether the target said
    it, drawn from `law`, or the data did, in which case no law holds and `law` is greedy by name
    only, or a drafter that was served under `law`, whose distribution is another one. exact:
    whether the tokens are the ones that were drawn, and not told as text and tokenised anew.
    """

    prompt_id: str
    domain: str
    split: str
    law: Law
    seed: int
    finish: str
    ids: Tensor
    prompt_len: int
    states: States | None
    turn: int = 0
    origin: Origin = "target"
    top: Top | None = None
    exact: bool = True

    @property
    def key(self) -> str:
        """Identity of the request this answers: what was asked, how it was sampled."""
        return request_key(self.prompt_id, self.law, self.seed, self.turn, self.origin)

    @property
    def name(self) -> str:
        """The prompt it answers, of which a conversation has one for each turn."""
        return _asked(self.prompt_id, self.turn)

    @property
    def reply(self) -> Tensor:
        return self.ids[self.prompt_len :]

    def drawn_from(self, law: Law) -> bool:
        """Whether the reply is a sample of `law`, as estimators and sampled objectives need."""
        return self.origin == "target" and self.exact and self.law == law


def held_out(records: Sequence[Record], law: Law, domain: str) -> list[Record]:
    """The records an evaluation of one cell may use."""
    return [r for r in records if r.split == "heldout" and r.drawn_from(law) and r.domain == domain]


def request_key(
    prompt_id: str, law: Law, seed: int, turn: int = 0, origin: Origin = "target"
) -> str:
    drawn = f"{law.label}|{seed}"
    how = {"target": drawn, "given": "given", "drafted": f"{drawn}|drafted"}[origin]
    return f"{_asked(prompt_id, turn)}|{how}"


def _asked(prompt_id: str, turn: int) -> str:
    return f"{prompt_id}.{turn}" if turn else prompt_id


def request_seed(seed: int, prompt_id: str, law: Law, turn: int = 0) -> int:
    """A seed of the request's own: equal whatever its neighbours, its order or its batch."""
    digest = hashlib.sha256(f"{seed}|{_asked(prompt_id, turn)}|{law.label}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def row_uniforms(seed: int, count: int) -> Tensor:
    """The row's own stream of `count` uniforms in [0, 1), float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)
