"""Requests whose prompts repeat themselves, for drafters that may copy."""

from collections.abc import Sequence

import torch

from draftsmith.data.gather import Request
from draftsmith.data.target import Target
from draftsmith.data.warp import Law


def echoing(target: Target, lengths: Sequence[int], law: Law = Law(0.0)) -> list[Request]:  # noqa: B008
    """Random prompts that say these many tokens twice, but the first, which says them once."""
    generator = torch.Generator().manual_seed(4)
    requests = []
    for i, n in enumerate(lengths):
        ids = torch.randint(3, target.vocab_size, (n,), generator=generator).tolist()
        said = (*ids, *(ids if i else []))
        requests.append(Request(f"p{i}", "x", "heldout", said, law, i))
    return requests
