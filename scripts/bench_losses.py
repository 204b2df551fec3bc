"""The lean objectives against the eager ones: time, gradients and peak memory on this machine.

    python scripts/bench_losses.py [--tokens 2048] [--vocabulary 49152 131072]

Times are interleaved in one process; peak memory is that of a child process per form, beyond what
its inputs take. Results go to scripts/results/losses-VOCABULARY.json.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.provenance import processor
from draftsmith.scripts.results import save_result
from draftsmith.train import accepted_length as al
from draftsmith.train import fused, losses
from draftsmith.train.chunks import CHUNK_BYTES, Head, Unrolled
from draftsmith.train.fused import Rounds

HIDDEN, REPLY, GAMMA = 576, 128, 3
PER_TOKEN = ("fkl", "tv", "nla", "lk_hybrid")
ON_LENGTH = ("rounds block", "accepted_length token", "accepted_length block")


class Case:
    """A draft LM's batch: head inputs of draft and target, replies of `REPLY` tokens each."""

    def __init__(self, tokens: int, vocabulary: int, frozen: bool):
        torch.manual_seed(0)
        replies = max(1, tokens // REPLY)
        length = torch.full((replies,), tokens // replies)
        first = torch.arange(replies) * (tokens // replies + 1)
        total = int((length + 1).sum())
        self.hidden = torch.randn(int(length.sum()), HIDDEN, requires_grad=True)
        self.weight = (0.05 * torch.randn(vocabulary, HIDDEN)).requires_grad_(not frozen)
        self.target_hidden = torch.randn(total, HIDDEN)
        self.target_weight = 0.05 * torch.randn(vocabulary, HIDDEN)
        column = torch.randint(vocabulary, (total,))
        index, inside = al.start_index(first, length, GAMMA)
        self.index, self.inside, self.length = index, inside, length
        at = torch.ones(total, dtype=torch.bool)
        at[first] = False
        self.token = torch.where(at)[0]
        self.x = Unrolled([self.hidden], [self.token], self.log_p, column, vocabulary)
        self.head = Head(self.weight, None, lambda z: z)

    def log_p(self, at: Tensor) -> Tensor:
        return (self.target_hidden[at] @ self.target_weight.t()).log_softmax(-1)

    def rounds(self, block: bool) -> Rounds:
        return Rounds(self.index, self.inside, self.length, True, block)


def lean(case: Case, name: str) -> None:
    if name in losses.OBJECTIVES:
        function = losses.OBJECTIVES[name]
        weight = [torch.full_like(case.token, 1.0, dtype=torch.float32) / len(case.token)]
        value, _ = fused.weighted_loss(case.x, case.head, lambda p, z, c: function(p, z), weight)
    else:
        kind, rule = name.split()
        form = fused.rounds_loss if kind == "rounds" else fused.accepted_loss
        value = form(case.x, case.head, case.rounds(rule == "block"))[0] / len(case.token)
    value.backward()


def eager(case: Case, name: str) -> None:
    """The same loss and the α that is logged beside it, with every [tokens, V] in memory."""
    logits = case.hidden @ case.weight.t()  # [N, V]
    with torch.no_grad():
        log_p = case.log_p(case.token)  # [N, V]
        losses.overlap(log_p, logits)
    if name in losses.OBJECTIVES:
        (losses.OBJECTIVES[name](log_p, logits).sum() / len(case.token)).backward()
        return
    kind, rule = name.split()
    log_q = logits.log_softmax(-1)
    said = case.x.column[case.token][:, None]
    ratio = (log_q.gather(1, said) - log_p.gather(1, said))[:, 0].double()
    by_start = partial(al.from_tokens, index=case.index, inside=case.inside)
    spread = torch.zeros(len(case.x.column), dtype=torch.float64)
    ratio = by_start(spread.index_put((case.token,), ratio).expand(GAMMA, -1))
    if kind == "rounds":
        survive = al.survival_block if rule == "block" else al.survival_token
        value = al.expected_rounds(survive(ratio), case.length)[0].sum()
    elif rule == "token":
        shared = losses.overlap(log_p, logits).double()
        terms = by_start(spread.index_put((case.token,), shared).expand(GAMMA, -1))
        value = -al.accepted_length(al.rao_blackwell_token(ratio, terms), case.inside)
    else:
        place = torch.zeros(len(case.x.column), dtype=torch.long)
        place[case.token] = torch.arange(len(case.token))
        value = ratio.new_zeros(())
        scale_p, scale_q = al.before_block(ratio)
        for k in range(GAMMA):  # one position's [N, V] at a time
            at, own = place[case.index[..., k]][case.inside[..., k]], case.inside[..., k]
            left = scale_p[..., k][own][:, None].float() + log_p[at]
            right = scale_q[..., k][own][:, None].float() + log_q[at]
            value = value - torch.where(right >= left, left, right).exp().sum()
    (value / len(case.token)).backward()


FORMS: dict[str, Callable[[Case, str], None]] = {"eager": eager, "lean": lean}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[49152, 131072])
    parser.add_argument("--objectives", nargs="+", default=[*PER_TOKEN, *ON_LENGTH])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        form, name, frozen = args.child
        print(json.dumps(peak(args.tokens, args.vocabulary[0], form, name, frozen == "frozen")))
        return
    for vocabulary in args.vocabulary:
        rows = []
        for name in args.objectives:
            for head in ("trained", "frozen") if name in ("nla", "rounds block") else ("trained",):
                row = compare(args.tokens, vocabulary, name, head, args.repeats)
                print(row, flush=True)
                rows.append(row)
        save_result(f"losses-{vocabulary}", {
            "machine": processor(), "threads": torch.get_num_threads(), "tokens": args.tokens,
            "hidden": HIDDEN, "num_draft_tokens": GAMMA, "chunk_megabytes": CHUNK_BYTES >> 20,
            "rows": rows,
        }, quiet=True)  # fmt: skip


def compare(tokens: int, vocabulary: int, name: str, head: str, repeats: int) -> dict[str, Any]:
    """Times, memory, the largest difference of gradients, and the floor."""
    case = Case(tokens, vocabulary, head == "frozen")
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    gradients: dict[str, list[Tensor]] = {}
    for _ in range(repeats):
        for form, run in FORMS.items():
            case.hidden.grad = case.weight.grad = None
            start = time.perf_counter()
            run(case, name)
            seconds[form].append(time.perf_counter() - start)
            gradients[form] = [t.grad for t in (case.hidden, case.weight) if t.grad is not None]
    off = max(
        float((a - b).abs().max() / b.abs().max())
        for a, b in zip(gradients["lean"], gradients["eager"], strict=True)
    )
    case.hidden.grad = case.weight.grad = None
    floor = matmul_seconds(case, 4 if head == "trained" else 3)
    del case, gradients
    memory = {form: child(tokens, vocabulary, form, name, head) for form in FORMS}
    times = {form: median(s) for form, s in seconds.items()}
    return {
        "objective": name,
        "vocabulary": vocabulary,
        "head": head,
        "seconds": {form: round(t, 3) for form, t in times.items()},
        "time_ratio": round(times["lean"] / times["eager"], 3),
        "megabytes": memory,
        "memory_ratio": round(memory["lean"] / memory["eager"], 3),
        "gradient_difference": f"{off:.1e}",
        "floor_seconds": round(floor, 3),
        "floor_megabytes": round(vocabulary * HIDDEN * 4 * (head == "trained") / 1e6),
    }


def matmul_seconds(case: Case, products: int) -> float:
    """The least any form needs: logits of p and of q, and the gradients' products."""
    start = time.perf_counter()
    with torch.no_grad():
        for low in range(0, len(case.token), 256):
            hidden = case.hidden[low : low + 256]
            logits = hidden @ case.weight.t()
            _ = hidden @ case.target_weight.t()
            _ = logits @ case.weight
            if products == 4:
                _ = logits.t() @ hidden
    return time.perf_counter() - start


def child(tokens: int, vocabulary: int, form: str, name: str, head: str) -> float:
    command = [sys.executable, __file__, "--tokens", str(tokens), "--vocabulary", str(vocabulary)]
    command += ["--child", form, name, head]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))


def peak(tokens: int, vocabulary: int, form: str, name: str, frozen: bool) -> float:
    """Megabytes beyond the inputs at the highest."""
    case = Case(tokens, vocabulary, frozen)
    FORMS[form](Case(64, 1024, frozen), name)  # libraries and their buffers load
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
    before = resident("VmRSS")
    FORMS[form](case, name)
    return round((resident("VmHWM") - before) / 1e6, 1)


def resident(field: str) -> int:
    """Bytes of this process's memory, now ("VmRSS") or at most since the mark ("VmHWM")."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux only")


if __name__ == "__main__":
    main()
