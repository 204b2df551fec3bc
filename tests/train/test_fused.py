"""The lean objectives against the eager ones: values, gradients, memory, and planted faults."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.nn import functional as F

from draftsmith.train import accepted_length as al
from draftsmith.train import chunks, fused, losses
from draftsmith.train.chunks import Head, Heads, Unrolled, of_steps
from draftsmith.train.fused import Rounds

LENGTHS = (5, 0, 1, 9, 3)  # reply tokens after the first one
WIDTH, HIDDEN, GAMMA = 22, 6, 3
OUTSIDE = 4  # the last target tokens cannot be drafted


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks even in these small batches, with borders inside of replies."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 0)
    monkeypatch.setattr(chunks, "_FEWEST_ROWS", 4)


@dataclass
class Case:
    """K unrolled steps over a few replies, float64, with everything an eager form needs."""

    x: Unrolled
    head: Heads
    rounds: Rounds
    log_p: Tensor  # [R, V_d]

    @property
    def leaves(self) -> list[Tensor]:
        heads = {id(head): head for head in of_steps(self.x, self.head)}.values()
        found = [*self.x.hidden, *(t for head in heads for t in (head.weight, head.bias))]
        return [t for t in found if t is not None and t.requires_grad]

    def logits(self, step: int) -> Tensor:
        head = of_steps(self.x, self.head)[step]
        return head.logits(F.linear(self.x.hidden[step], head.weight, head.bias))


def make(one_pass: bool = False, block: bool = False, cap: bool = False, frozen: bool = False,
         steps: int = GAMMA, dtype: torch.dtype = torch.float64,
         several: bool = False) -> Case:  # fmt: skip
    torch.manual_seed(3)
    length = torch.tensor(LENGTHS)
    replies = length + 1
    first = replies.cumsum(0) - replies
    total = int(replies.sum())
    depth = torch.arange(total) - first.repeat_interleave(replies)
    full = (2.0 * torch.randn(total, WIDTH + OUTSIDE)).log_softmax(-1).to(dtype)
    said = full.exp().multinomial(1)[:, 0]
    column = said.masked_fill(said >= WIDTH, -1)
    assert (column[1:] < 0).any(), "some sampled tokens must be out of reach"
    token = [torch.where(depth >= 1 + k)[0] for k in range(1 if one_pass else steps)]
    hidden = [torch.randn(len(t), HIDDEN, dtype=dtype, requires_grad=True) for t in token]
    log_p = full[:, :WIDTH]
    weight = torch.randn(WIDTH, HIDDEN, dtype=dtype, requires_grad=not frozen)
    bias = torch.randn(WIDTH, dtype=dtype, requires_grad=not frozen)
    finish = (lambda z: 2.0 * torch.tanh(z / 2.0) / 0.7) if cap else (lambda z: z)
    index, inside = al.start_index(first, length, GAMMA)
    head: Heads = Head(weight, bias, finish)
    if several:  # the last one reads two steps
        other = Head(torch.randn(WIDTH, HIDDEN, dtype=dtype, requires_grad=True), None, finish)
        head = [head, *[other] * (len(token) - 1)]
    return Case(
        Unrolled(hidden, token, lambda at: log_p[at], column, WIDTH),
        head,
        Rounds(index, inside, length, one_pass, block),
        log_p,
    )


def gradients(value: Tensor, case: Case) -> list[Tensor]:
    found = torch.autograd.grad(value, case.leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf) if g is None else g
        for g, leaf in zip(found, case.leaves, strict=True)
    ]


def same(case: Case, lean: Tensor, eager: Tensor, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(lean.double(), eager.detach().double(), rtol=rtol, atol=1e-10)
    wanted = gradients(eager, case)
    assert any(float(g.abs().max()) > 1e-3 for g in wanted)
    for mine, theirs in zip(gradients(lean, case), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol)


def eager_ratio(case: Case) -> tuple[Tensor, Tensor]:
    """log q and log q/p of the sampled tokens by unrolled step, `[K, R]` each."""
    total = len(case.x.column)
    log_q = torch.zeros(len(case.x.token), total, dtype=torch.float64)
    ratio = log_q.clone()
    for k, token in enumerate(case.x.token):
        column = case.x.column[token]
        at = column.clamp_min(0)[:, None]
        q = case.logits(k).log_softmax(-1).gather(1, at)[:, 0].double()
        q = q.masked_fill(column < 0, -torch.inf)
        p = case.log_p[token].gather(1, at)[:, 0].double()
        log_q = log_q.index_put((torch.tensor(k), token), q)
        ratio = ratio.index_put((torch.tensor(k), token), q - p.masked_fill(column < 0, 0.0))
    return log_q, ratio


def by_start(case: Case, values: Tensor) -> Tensor:
    if case.rounds.one_pass:
        values = values[:1].expand(GAMMA, *values.shape[1:])
    return al.from_tokens(values[:GAMMA], case.rounds.index, case.rounds.inside)


def eager_rounds(case: Case) -> Tensor:
    survive = al.survival_block if case.rounds.block else al.survival_token
    count, _ = al.expected_rounds(survive(by_start(case, eager_ratio(case)[1])), case.rounds.length)
    return count.sum()


def eager_accepted(case: Case) -> Tensor:
    ratio = by_start(case, eager_ratio(case)[1])
    if not case.rounds.block:
        shared = torch.zeros(len(case.x.token), len(case.x.column), dtype=torch.float64)
        for k, token in enumerate(case.x.token):
            alpha = losses.overlap(case.log_p[token], case.logits(k)).double()
            shared = shared.index_put((torch.tensor(k), token), alpha)
        terms = al.rao_blackwell_token(ratio, by_start(case, shared))
        return -al.accepted_length(terms, case.rounds.inside)
    index, inside = case.rounds.index, case.rounds.inside
    log_q = torch.zeros(len(case.x.token), len(case.x.column), WIDTH, dtype=torch.float64)
    for k, token in enumerate(case.x.token):
        log_q = log_q.index_put((torch.tensor(k), token), case.logits(k).log_softmax(-1).double())
    k = torch.zeros(GAMMA, dtype=torch.long) if case.rounds.one_pass else torch.arange(GAMMA)
    terms = al.rao_blackwell_block(ratio, case.log_p.double()[index], log_q[k, index])
    return -al.accepted_length(terms, inside)


# ---- equality


@pytest.mark.parametrize("name", sorted(losses.OBJECTIVES))
@pytest.mark.parametrize("heads", ["trained", "frozen", "several"])
def test_per_token_objectives_equal_the_eager_ones(name: str, heads: str) -> None:
    case = make(frozen=heads == "frozen", several=heads == "several")
    function = losses.OBJECTIVES[name]

    def loss(log_p: Tensor, logits: Tensor, column: Tensor) -> Tensor:
        return losses.ce(logits, column) if name == "ce" else function(log_p, logits)

    weight = [torch.rand(len(t), dtype=torch.float64) for t in case.x.token]
    lean, measured = fused.weighted_loss(case.x, case.head, loss, weight)
    eager = torch.zeros((), dtype=torch.float64)
    for k, token in enumerate(case.x.token):
        each = loss(case.log_p[token], case.logits(k), case.x.column[token])
        eager = eager + (weight[k] * each).sum()
        shared = losses.overlap(case.log_p[token], case.logits(k))
        torch.testing.assert_close(measured.overlap[k], shared.detach())
    same(case, lean, eager)
    torch.testing.assert_close(measured.mass, case.log_p.exp().sum(-1)[case.x.token[0]])


@pytest.mark.parametrize("cap", [False, True], ids=["plain", "soft cap and temperature"])
@pytest.mark.parametrize("family", ["head", "several heads", "draft LM"])
@pytest.mark.parametrize("block", [False, True], ids=["token", "block"])
@pytest.mark.parametrize("kind", ["rounds", "accepted_length"])
def test_objectives_on_accepted_length_equal_the_eager_ones(
    kind: str, block: bool, family: str, cap: bool
) -> None:
    case = make(family == "draft LM", block, cap, several=family == "several heads")
    lean_of, eager_of = {
        "rounds": (fused.rounds_loss, eager_rounds),
        "accepted_length": (fused.accepted_loss, eager_accepted),
    }[kind]
    lean, measured = lean_of(case.x, case.head, case.rounds)
    same(case, lean, eager_of(case))
    log_q, ratio = eager_ratio(case)
    torch.testing.assert_close(measured.log_q, log_q.detach())
    torch.testing.assert_close(measured.log_ratio, ratio.detach())


def test_more_unrolled_steps_than_draft_tokens_change_nothing() -> None:
    short, long = make(), make(steps=GAMMA + 2)
    for one, two in zip(short.x.hidden, long.x.hidden, strict=False):
        two.data.copy_(one.data)
    for name in ("weight", "bias"):
        getattr(long.head, name).data.copy_(getattr(short.head, name).data)
    values = [fused.rounds_loss(c.x, c.head, c.rounds)[0] for c in (short, long)]
    assert values[0].item() == pytest.approx(values[1].item(), rel=1e-12)
    assert not gradients(values[1], long)[GAMMA].any()


@pytest.mark.parametrize("kind", ["rounds", "accepted_length", "nla"])
def test_float32_gradients_agree_within_rounding(kind: str) -> None:
    """The relative 1e-5 that training needs, at the precision it runs in."""
    exact, rough = make(), make(dtype=torch.float32)
    for mine, theirs in zip(rough.leaves, exact.leaves, strict=True):
        mine.data.copy_(theirs.data)
    exact = replace(exact, x=replace(exact.x, log_p=rough.x.log_p), log_p=rough.log_p.double())
    found = []
    for case in (rough, exact):
        if kind == "nla":
            weight = [torch.ones(len(t)) for t in case.x.token]
            value, _ = fused.weighted_loss(
                case.x, case.head, lambda p, z, c: losses.nla(p, z), weight
            )
        else:
            lean = fused.rounds_loss if kind == "rounds" else fused.accepted_loss
            value, _ = lean(case.x, case.head, case.rounds)
        found.append((value.double(), gradients(value, case)))
    assert found[0][0].item() == pytest.approx(found[1][0].item(), rel=1e-5)
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        scale = float(theirs.abs().max())
        assert float((mine.double() - theirs).abs().max()) <= 1e-5 * scale


def test_gradients_flow_on_through_what_made_the_inputs() -> None:
    """Gradient checkpointing recomputes the layers below; they get the same gradient."""
    case = make()
    layer = torch.nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64)
    below = [h.detach() for h in case.x.hidden]

    def value(checkpointed: bool) -> Tensor:
        run = (
            (lambda h: torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=False))
            if checkpointed
            else layer
        )
        x = replace(case.x, hidden=[run(h) for h in below])
        return fused.rounds_loss(x, case.head, case.rounds)[0]

    plain = torch.autograd.grad(value(False), layer.weight)[0]
    again = torch.autograd.grad(value(True), layer.weight)[0]
    assert float(plain.abs().max()) > 1e-3
    torch.testing.assert_close(again, plain)


def test_autocast_runs_in_low_precision_and_stays_close() -> None:
    case = make(dtype=torch.float32)
    exact, _ = fused.rounds_loss(case.x, case.head, case.rounds)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough, _ = fused.rounds_loss(case.x, case.head, case.rounds)
    assert 0 < abs(rough.item() - exact.item()) < 0.05 * exact.item()
    for mine, theirs in zip(gradients(rough, case), gradients(exact, case), strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine - theirs).abs().max()) < 0.1 * float(theirs.abs().max())


def test_without_gradient_only_the_value_is_formed() -> None:
    case = make(block=True)
    for lean in (fused.rounds_loss, fused.accepted_loss):
        with torch.no_grad():
            value, _ = lean(case.x, case.head, case.rounds)
        assert not value.requires_grad
        assert value.item() == pytest.approx(lean(case.x, case.head, case.rounds)[0].item())


def test_a_batch_with_nothing_to_draft_costs_nothing() -> None:
    length = torch.tensor([0, 0])
    index, inside = al.start_index(torch.tensor([0, 1]), length, GAMMA)
    hidden = torch.zeros(0, HIDDEN, requires_grad=True)
    none = torch.zeros(0, dtype=torch.long)
    x = Unrolled(
        [hidden] * GAMMA,
        [none] * GAMMA,
        lambda at: torch.zeros(len(at), WIDTH),
        torch.tensor([1, 2]),
        WIDTH,
    )
    head = Head(torch.randn(WIDTH, HIDDEN, requires_grad=True), None, lambda z: z)
    for lean in (fused.rounds_loss, fused.accepted_loss):
        value, measured = lean(x, head, Rounds(index, inside, length, False, True))
        assert float(value) == 0.0 and len(measured.mass) == 0
        value.backward()
        assert not head.weight.grad.any()  # type: ignore[union-attr]


def test_no_block_of_all_tokens_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every [n, V] tensor that any operation makes stays within a chunk."""
    monkeypatch.setattr(chunks, "_FEWEST_ROWS", 2)
    case = make(block=True)
    largest = 0

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.dim() == 2 and out.shape[-1] == WIDTH:
                largest = max(largest, out.shape[0])
            return out

    with Watch():
        value, _ = fused.accepted_loss(case.x, case.head, case.rounds)
        value.backward()
    assert largest == 2


def test_the_means_by_start_count_each_start_once() -> None:
    case = make()
    found = by_start(case, torch.ones(GAMMA, len(case.x.column)))
    expected = sum(min(GAMMA, n - s) for n in LENGTHS for s in range(n))
    assert float(found.sum()) == expected
    back = al.to_tokens(found, case.rounds.index, case.rounds.inside, len(case.x.column))
    for k, token in enumerate(case.x.token):
        assert torch.where(back[k] > 0)[0].tolist() == token.tolist()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        # the draft position's weight taken from the position after it
        ("_scales_at", lambda r, rounds, token, k: (r.new_zeros(len(token)),) * 2),
        # the gradient of min(p, q) on the wrong side of the tie
        (
            "_last_factor_gradient",
            lambda p, q, reach, scales, k, token: (q * reach[k, token][:, None]).masked_fill(
                q < p, 0.0
            ),
        ),
    ],
)
def test_planted_faults_are_seen(
    name: str, wrong: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(block=True)
    monkeypatch.setattr(fused, name, wrong)
    with pytest.raises(AssertionError):
        same(case, fused.accepted_loss(case.x, case.head, case.rounds)[0], eager_accepted(case))


def test_a_sampled_token_that_rounding_excludes_stays_finite() -> None:
    """p is rebuilt with other kernels than sampled it: at a tie the token may have p = 0."""
    case = make(block=True)
    token = int(case.x.token[0][3])
    column = int(case.x.column[token]) if case.x.column[token] >= 0 else 0
    case.x.column[token] = column
    case.log_p[token, column] = -torch.inf
    for lean in (fused.rounds_loss, fused.accepted_loss):
        value, measured = lean(case.x, case.head, case.rounds)
        assert torch.isfinite(value)
        assert all(torch.isfinite(g).all() for g in gradients(value, case))
        assert torch.where(measured.excluded)[0].tolist() == [token]
        assert measured.log_ratio[0, token] == measured.log_q[0, token], "its p counts as 1"


def test_a_fused_objective_is_differentiated_once() -> None:
    """Its gradients are scaled in place, so a second time would be wrong without a word."""
    case = make()
    value, _ = fused.rounds_loss(case.x, case.head, case.rounds)
    (3.0 * value).backward(retain_graph=True)
    assert case.x.hidden[0].grad is not None
    tripled = case.x.hidden[0].grad.clone()
    (once,) = torch.autograd.grad(
        fused.rounds_loss(case.x, case.head, case.rounds)[0], case.x.hidden[0]
    )
    torch.testing.assert_close(tripled, 3.0 * once)
    with pytest.raises(RuntimeError, match="once"):
        value.backward()


def test_chunks_are_sized_by_the_widest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A law that needs all logits forms wider rows of p than the draft vocabulary has."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 8 * WIDTH)
    case = make()
    for width, rows in ((WIDTH, 8), (2 * WIDTH, 4)):
        asked: list[int] = []

        def watched(at: Tensor, asked: list[int] = asked) -> Tensor:
            asked.append(len(at))
            return case.log_p[at]

        fused.measure(replace(case.x, width=width, log_p=watched), case.head)
        assert max(asked) == rows


@pytest.mark.parametrize("kind", ["nla", "rounds", "accepted_length"])
def test_the_sums_do_not_record_how_they_came_about(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or they would hold the gradient of every block until the backward pass."""
    case = make(block=True)
    found: list[chunks.Gradients] = []
    carry = chunks.Gradients.carry
    monkeypatch.setattr(
        chunks.Gradients, "carry", lambda self, value: (found.append(self), carry(self, value))[1]
    )
    if kind == "nla":
        weight = [torch.ones(len(t)) for t in case.x.token]
        fused.weighted_loss(case.x, case.head, lambda p, z, c: losses.nla(p, z), weight)
    else:
        lean = fused.rounds_loss if kind == "rounds" else fused.accepted_loss
        lean(case.x, case.head, case.rounds)
    (grads,) = found
    (own,) = grads.of_heads.values()
    assert own.weight is not None and own.bias is not None
    assert not any(t.requires_grad for t in (own.weight, own.bias, *grads.hidden))
