"""Accepted length and tokens per round, from target samples alone: no engine, no draft rollout.

Conventions. x_0 .. x_{N-1} are the reply tokens *after the first one* (the first comes from the
prompt's forward and belongs to no round); a start s in 0..N-1 means s of them are already out, so
that draft position k = 1..γ of a round at s is token x_{s+k-1}. For each start and position

    log_ratio[s, k-1] = log q_k(x_{s+k-1} | true prefix) - log p(x_{s+k-1} | true prefix)

with both laws as served and x ~ p. `m[s, k-1]` = P(A >= k | x, round at s) for k = 1..γ, where A is
the number of accepted draft tokens; m_0 = 1 and m_{γ+1} = 0 are implied. Entries that look past
the end of an output are ignored, but must be finite or -inf where gradients are wanted.

Everything is differentiable in log_ratio and exact for any drafter whose q_k is conditioned on the
true prefix. A plain mean over starts is not tokens per round: rounds start more often where
acceptance is low, which is what `start_weights` accounts for.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def _capped(log_ratio: Tensor) -> Tensor:
    """log min(1, r), with derivative 0 at r = 1 (as in the losses); NaN stays NaN."""
    return torch.where(log_ratio >= 0, torch.zeros_like(log_ratio), log_ratio)


def survival_token(log_ratio: Tensor) -> Tensor:
    """m_k of token verification, Π_{i<=k} min(1, r_i): `[..., γ] -> [..., γ]`.

    For a greedy draft r is 1/p(x) where the draft is x and 0 elsewhere: m_k is 1 while all match.
    """
    return _capped(log_ratio).cumsum(-1).exp()


def survival_block(log_ratio: Tensor) -> Tensor:
    """m_k of block verification, min_{0<=j<=k} R_j (R_j = r_1···r_j): `[..., γ] -> [..., γ]`."""
    products = log_ratio.cumsum(-1)  # log R_1 .. log R_γ
    return _capped(products.cummin(-1).values).exp()


def before_token(log_ratio: Tensor) -> Tensor:
    """Π_{i<k} min(1, r_i), the chance that position k is reached: `[..., γ] -> [..., γ]`."""
    return F.pad(survival_token(log_ratio)[..., :-1], (1, 0), value=1.0)


def before_block(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """(log min_{j<k} R_j, log R_{k-1}) before each position: `[..., γ]` -> 2 x `[..., γ]`."""
    products = F.pad(log_ratio.cumsum(-1)[..., :-1], (1, 0))  # log R_0 .. log R_{γ-1}
    return _capped(products.cummin(-1).values), products


def rao_blackwell_token(log_ratio: Tensor, overlap: Tensor) -> Tensor:
    """(Π_{i<k} min(1, r_i))·α_k, `[..., γ], [..., γ] -> [..., γ]`: the mean of m_k, less noise.

    The last factor is summed over the vocabulary, not sampled. For means of E[A] only: the
    recursion for rounds needs m on the tokens that were really drawn.
    """
    return before_token(log_ratio) * overlap


def rao_blackwell_block(log_ratio: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ_x min(m_{k-1}·p(x), R_{k-1}·q(x)): `[..., γ], 2 x [..., γ, V] -> [..., γ]`; as above."""
    scale_p, scale_q = before_block(log_ratio)
    scaled_p, scaled_q = scale_p[..., None] + log_p, scale_q[..., None] + log_q  # [..., γ, V]
    return torch.where(scaled_q >= scaled_p, scaled_p, scaled_q).exp().sum(-1)


def accepted_length(terms: Tensor, inside: Tensor) -> Tensor:
    """Σ of E[A] over all starts of a batch, scalar, from `rao_blackwell_*` terms [B, N, γ].

    Over the number of starts it is the mean E[A] of a round that begins anywhere. Real rounds
    begin more often where acceptance is low: `expected_rounds` knows where.
    """
    return terms.masked_fill(~inside, 0.0).sum()


def start_weights(m: Tensor, length: Tensor) -> Tensor:
    """u(s), the expected number of rounds that start at s: `[B, N, γ], [B] -> [B, N]`.

    u(0) = 1 and u(s + a + 1) += u(s)·(m_a(s) - m_{a+1}(s)). The end of an output needs no extra
    case. A round never emits more than the N - s tokens left, and where decoding drafts fewer
    than γ tokens, or drafts on beyond an end token it cannot foresee, only the split between ways
    of reaching N changes, and no round starts at N.
    """
    batch, steps, gamma = m.shape
    full = F.pad(F.pad(m, (1, 0), value=1.0), (0, 1))  # [B, N, γ+2]: m_0 .. m_{γ+1}
    advance = full[..., :-1] - full[..., 1:]  # [B, N, γ+1]: P(A = a)
    alive = torch.arange(steps, device=m.device) < length[:, None]  # [B, N]
    due = F.pad(m.new_ones(batch, 1), (0, gamma))  # [B, γ+1]: u owed to s, s+1, .., s+γ
    weights = []
    for s in range(steps):
        now = due[:, 0] * alive[:, s]
        weights.append(now)
        due = F.pad(due[:, 1:], (0, 1)) + now[:, None] * advance[:, s]
    return torch.stack(weights, 1) if weights else m.new_zeros(batch, 0)


def expected_rounds(m: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """(E[rounds] [B], u [B, N]) of outputs of `length` [B] tokens, given m [B, N, γ]."""
    weights = start_weights(m, length)
    return weights.sum(1), weights


def tokens_per_round(rounds: Tensor, length: Tensor) -> Tensor:
    """τ pooled over conversations, Σ N / Σ E[rounds]: `[B], [B] -> []`; NaN without any round."""
    return length.sum() / rounds.sum()


def drafted_tokens(length: Tensor, budget: Tensor, steps: int, num_draft_tokens: int) -> Tensor:
    """How many tokens decoding drafts at each start: `[B], [B] -> [B, N]` with N = `steps`.

    `budget` [B] is the number of tokens allowed after the first one: equal to `length` if the
    output was cut, more if it ended with an end token, which decoding cannot know in advance.
    A round drafts at most one token less than the budget has left, because its verification
    always yields one more. Starts at or beyond `length` draft nothing.
    """
    start = torch.arange(steps, device=length.device)  # [N]
    room = (budget[:, None] - start - 1).clamp(0, num_draft_tokens)  # [B, N]
    return room.masked_fill(start >= length[:, None], 0)


def survival(m: Tensor, weights: Tensor, length: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
    """Expected (accepted, attempts) by conversation and position, [B, γ] each.

    The ratio of their sums over conversations is S_k.

    `m` [B, N, γ], `weights` u [B, N], `length` [B], `drafted` [B, N] from `drafted_tokens`. An
    attempt of position k is a round that drafted k tokens or more. Tokens drafted beyond an end
    token are attempts that cannot be accepted.
    """
    steps, gamma = m.shape[1:]
    position = torch.arange(1, gamma + 1, device=m.device)
    left = length[:, None] - torch.arange(steps, device=m.device)  # [B, N]
    tried = position <= drafted[..., None]  # [B, N, γ]
    inside = position <= left[..., None]
    attempts = (weights[..., None] * tried).sum(1)  # [B, γ]
    kept = m.masked_fill(~(tried & inside), 0.0)
    return (weights[..., None] * kept).sum(1), attempts


def start_index(first: Tensor, length: Tensor, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
    """Where each start's draft positions stand among a batch's reply tokens, and which exist.

    `first` [B] is the index of each reply's first token, `length` [B] as everywhere the tokens
    after it. Returns (index [B, N, γ], inside [B, N, γ]); index 0 stands where nothing is inside.
    """
    steps = int(length.max()) if len(length) else 0
    s = torch.arange(steps, device=first.device)[:, None]  # [N, 1]
    k = torch.arange(num_draft_tokens, device=first.device)  # [γ]
    inside = s + k < length[:, None, None]  # [B, N, γ]
    index = first[:, None, None] + 1 + s + k
    return index.masked_fill(~inside, 0), inside


def by_position(steps: Tensor, num_draft_tokens: int, one_pass: bool) -> Tensor:
    """Values of unrolled steps `[K, R]` as those of draft positions, `[γ, R]`.

    A drafter that predicts in one pass says the same at every position.
    """
    return steps[:1].expand(num_draft_tokens, -1) if one_pass else steps[:num_draft_tokens]


def from_tokens(values: Tensor, index: Tensor, inside: Tensor, fill: float = 0.0) -> Tensor:
    """Values by position and token, `[γ, R]`, as each start sees them: `[B, N, γ]`."""
    k = torch.arange(values.shape[0], device=values.device)
    return values[k, index].masked_fill(~inside, fill)


def to_tokens(values: Tensor, index: Tensor, inside: Tensor, tokens: int) -> Tensor:
    """The inverse of `from_tokens`, `[B, N, γ] -> [γ, R]`; 0 where no start looks."""
    out = values.new_zeros(values.shape[-1], tokens)
    k = torch.arange(values.shape[-1], device=values.device).expand_as(index)
    return out.index_put((k[inside], index[inside]), values[inside])


def position_weights(log_q: Tensor, inside: Tensor, floor: float) -> Tensor:
    """Weights w_j = Σ_{m>=j} Π_{i<=m} q̃_i, q̃ = (1-a)·q(x) + a: `[B, N, γ]`, a = `floor`.

    `log_q` [B, N, γ] is the draft's log-probability of the sampled tokens: a position counts as
    much as what is expected to be reached through it. For the warm-up; no gradient flows.
    """
    smooth = (1.0 - floor) * log_q.detach().exp() + floor
    reached = smooth.masked_fill(~inside, 0.0).cumprod(-1)
    return reached.flip(-1).cumsum(-1).flip(-1)


def independent_length(overlap: Tensor) -> Tensor:
    """The surrogate Σ_k Π_{i<=k} α_i of E[A] that treats steps as independent: `[..., γ] -> [...]`.

    A baseline under its own name: acceptance of one step is correlated with that of the next, so
    it is biased even where every α_i is exact.
    """
    return overlap.cumprod(-1).sum(-1)
