"""What is kept of a conversation: its tokens, the law they were drawn from, the target's states."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .warp import Law


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
class Record:
    """One answered prompt. `finish` is "stop" (an end token) or "length" (cut by the limit)."""

    prompt_id: str
    domain: str
    split: str
    law: Law
    seed: int
    finish: str
    ids: Tensor
    prompt_len: int
    states: States | None

    @property
    def key(self) -> str:
        """Identity of the request this answers: what was asked, how it was sampled."""
        return request_key(self.prompt_id, self.law, self.seed)

    @property
    def reply(self) -> Tensor:
        return self.ids[self.prompt_len :]


def request_key(prompt_id: str, law: Law, seed: int) -> str:
    return f"{prompt_id}|{law.label}|{seed}"


def request_seed(seed: int, prompt_id: str, law: Law) -> int:
    """A seed of the request's own: equal whatever its neighbours, its order or its batch."""
    digest = hashlib.sha256(f"{seed}|{prompt_id}|{law.label}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def row_uniforms(seed: int, count: int) -> Tensor:
    """The row's own stream of `count` uniforms in [0, 1), float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, generator=generator, dtype=torch.float64)
