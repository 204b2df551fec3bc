"""Does a test fail when a sign, a mask or a denominator is wrong? Plant such faults and see.

    python scripts/plant_faults.py

Each fault is one edit in a copy of the package; the tests named with it then run against the copy.
A fault that no test catches is a hole in the tests. Results go to scripts/results/faults.json.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftsmith.scripts.results import save_result

ROOT = Path(__file__).resolve().parent.parent
LOSSES, LENGTH, FUSED, STEP = (
    f"tests/train/test_{name}.py" for name in ("losses", "accepted_length", "fused", "step")
)
ESTIMATE, LOOP, REPORTS = (
    "tests/eval/test_estimate.py", "tests/train/test_loop.py", "tests/train/test_field_reports.py",
)  # fmt: skip
LOAD, RUN, SCHEDULES = (f"tests/train/test_{name}.py" for name in ("load_data", "run", "schedules"))
DISTRIBUTION, VOCAB, EAGLE, SHAPES = (
    f"tests/drafters/test_{name}.py"
    for name in ("distribution", "vocab", "eagle3", "eagle3_shapes")
)


@dataclass(frozen=True)
class Fault:
    """What is wrong, the edit that makes it so, and the tests that should see it."""

    claim: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]


FAULTS = (
    Fault("α is the sum of minima", "train/losses.py",
          "return torch.where(q >= p, p, q).sum(-1)", "return torch.where(q >= p, q, p).sum(-1)",
          (LOSSES,)),
    Fault("forward KL has the target first", "train/losses.py",
          "return (p * gap).sum(-1)", "return (log_q.exp() * gap).sum(-1)", (LOSSES,)),
    Fault("KL on V_d is P(V_d)·KL(p̃‖q)", "train/losses.py",
          "+ torch.special.entr(mass)", "", (LOSSES,)),
    Fault("reverse KL has the draft first", "train/losses.py",
          "(q * (log_q - log_p)", "(q * (log_p - log_q)", (LOSSES,)),
    Fault("jsd/β → fkl: the mixture's weights", "train/losses.py",
          "mix = beta * p + (1.0 - beta) * q", "mix = (1.0 - beta) * p + beta * q", (LOSSES,)),
    Fault("TV counts what cannot be drafted", "train/losses.py",
          "missing = torch.relu(1.0 - mass)", "missing = torch.zeros_like(mass)", (LOSSES,)),
    Fault("-log α in log space, not clamped", "train/losses.py",
          "return -_log_sum_exp(log_min)", "return -_log_sum_exp(log_min.clamp_min(-20.0))",
          (LOSSES,)),
    Fault("ties belong to p", "train/losses.py",
          "log_min = torch.where(log_q >= log_p, log_p, log_q)",
          "log_min = torch.where(log_q > log_p, log_p, log_q)", (LOSSES,)),
    Fault("λ is detached", "train/losses.py",
          "variation.detach()", "variation", (LOSSES,)),
    Fault("λ is per token", "train/losses.py",
          "(1.0 - variation.detach()))", "(1.0 - variation.detach().mean()))", (LOSSES,)),
    Fault("ce is 0 outside of the draft vocabulary", "train/losses.py",
          "return -chosen.masked_fill(token < 0, 0.0)", "return -chosen", (LOSSES,)),
    Fault("no loss where P(V_d) = 0", "train/losses.py",
          "return -_log_sum_exp(log_p + log_s).masked_fill(mass == 0, 0.0)",
          "return -_log_sum_exp(log_p + log_s)", (LOSSES,)),
    Fault("p on V_d is not renormalised", "drafters/distribution.py",
          "return log_p if self.draft_ids is None else log_p[:, self.draft_ids]",
          "return log_p if self.draft_ids is None else log_p[:, self.draft_ids].log_softmax(-1)",
          (DISTRIBUTION,)),
    Fault("warp p over V first, then gather", "drafters/distribution.py",
          "log_p = log_probs(self.target.logits(hidden), self.law)  # [R, V]\n"
          "            return log_p if self.draft_ids is None else log_p[:, self.draft_ids]",
          "logits = self.target.logits(hidden)\n"
          "            own = logits if self.draft_ids is None else logits[:, self.draft_ids]\n"
          "            return log_probs(own, self.law)", (DISTRIBUTION,)),
    Fault("m of token verification is capped at each step", "train/accepted_length.py",
          "return _capped(log_ratio).cumsum(-1).exp()",
          "return _capped(log_ratio.cumsum(-1)).exp()", (LENGTH,)),
    Fault("m of block verification is a running minimum", "train/accepted_length.py",
          "return _capped(products.cummin(-1).values).exp()", "return _capped(products).exp()",
          (LENGTH,)),
    Fault("the first position is always reached", "train/accepted_length.py",
          "return F.pad(survival_token(log_ratio)[..., :-1], (1, 0), value=1.0)",
          "return survival_token(log_ratio)", (LENGTH,)),
    Fault("R before a position leaves that position out", "train/accepted_length.py",
          "products = F.pad(log_ratio.cumsum(-1)[..., :-1], (1, 0))",
          "products = log_ratio.cumsum(-1)", (LENGTH,)),
    Fault("u(s + a + 1) += u(s)·P(A = a)", "train/accepted_length.py",
          "advance = full[..., :-1] - full[..., 1:]", "advance = full[..., :-1]", (LENGTH,)),
    Fault("no round starts beyond the end", "train/accepted_length.py",
          "now = due[:, 0] * alive[:, s]", "now = due[:, 0]", (LENGTH,)),
    Fault("the last token of a budget is not drafted", "train/accepted_length.py",
          "(budget[:, None] - start - 1)", "(budget[:, None] - start)", (LENGTH,)),
    Fault("τ is Σ N over Σ rounds", "train/accepted_length.py",
          "return length.sum() / rounds.sum()", "return (length / rounds).mean()",
          (LENGTH, ESTIMATE)),
    Fault("starts see nothing beyond a reply's end", "train/accepted_length.py",
          "inside = s + k < length[:, None, None]", "inside = s + k <= length[:, None, None]",
          (LENGTH, STEP)),
    Fault("weights of what is reached through a position", "train/accepted_length.py",
          "return reached.flip(-1).cumsum(-1).flip(-1)", "return reached.cumsum(-1)", (LENGTH,)),
    Fault("head k's ratio belongs to the round k tokens back", "train/fused.py",
          "at = (token - back).clamp_min(0)", "at = (token - back + 1).clamp_min(0)", (FUSED,)),
    Fault("the softmax couples all tokens", "train/fused.py",
          "grad -= q * (grad.sum(-1, keepdim=True) + own[:, None])",
          "grad -= q * own[:, None]", (FUSED,)),
    Fault("q(x) is 0 outside of V_d", "train/fused.py",
          "said = said.masked_fill(column < 0, -torch.inf)", "pass", (FUSED,)),
    Fault("the head's gradient sums over blocks", "train/chunks.py",
          "self.weight.addmm_(raw.t(), hidden)", "self.weight.copy_(raw.t() @ hidden)", (FUSED,)),
    Fault("losses are means over the global batch", "train/step.py",
          "return Scored(total / totals[0].clamp_min(1), measured, list(x.token))",
          "return Scored(total / len(x.token[0]), measured, list(x.token))", (STEP,)),
    Fault("each unrolled step has its own denominator", "train/step.py",
          "share = decay / decay.sum() / totals.clamp_min(1)",
          "share = decay / decay.sum() / totals[0].clamp_min(1)", (STEP,)),
    Fault("the first reply token is never drafted", "drafters/base.py",
          "return reply_index(batch, column) >= 1 + step",
          "return reply_index(batch, column) >= step", (STEP, REPORTS)),
    Fault("a step reads the true tokens before it", "drafters/pairs.py",
          "state = F.pad(state[:, :-1], (0, 0, 1, 0))", "state = state", (EAGLE, REPORTS)),
    Fault("the state fed back is not normed", "drafters/pairs.py",
          "self.fed(before), tokens",
          "F.rms_norm(self.fed(before), before.shape[-1:]), tokens", (EAGLE, REPORTS)),
    Fault("a later layer has keys of every pair", "drafters/pairs.py",
          "if step == 0 and i + 1 < len(self.layers):", "if False:", (SHAPES,)),
    Fault("later layers see no pair behind", "drafters/pairs.py",
          "mask = window.context()", "mask = torch.ones_like(window.context())", (SHAPES,)),
    Fault("accumulated batches share one denominator", "train/run.py",
          "for b in window]).sum(0)", "for b in window])[0]", (LOOP,)),
    Fault("a step's gradient is the sum over its batches", "train/run.py",
          "accelerator.backward(scored.loss * self.window)", "accelerator.backward(scored.loss)",
          (LOOP,)),
    Fault("dropout follows from the number of a batch", "train/run.py",
          "self._seed(at.batches + place *", "self._seed(0 * at.batches + place *", (RUN,)),
    Fault("a segment goes on behind its last batch", "train/run.py",
          "endless(plan, at.seen, load, rank, world)", "endless(plan, 0, load, rank, world)",
          (LOOP,)),
    Fault("only samples of the law train the second objective", "train/corpus.py",
          "lawful = tuple(r.drawn_from(objective.law) for r in training)",
          "lawful = tuple(True for r in training)", (SCHEDULES,)),
    Fault("stored top-K is not renormalised", "eval/estimate.py",
          "low = p.minimum(q).sum(-1)",
          "low = (p / p.sum(-1, keepdim=True)).minimum(q / q.sum(-1, keepdim=True)).sum(-1)",
          (ESTIMATE,)),
    Fault("the rest beyond the stored ids is the smaller one", "eval/estimate.py",
          "rest = (1.0 - p.sum(-1)).minimum(1.0 - q.sum(-1))", "rest = (1.0 - q.sum(-1)) * 0.5",
          (ESTIMATE,)),
    Fault("the last factor of block verification is a minimum", "train/accepted_length.py",
          "return torch.where(scaled_q >= scaled_p, scaled_p, scaled_q).exp().sum(-1)",
          "return torch.where(scaled_q >= scaled_p, scaled_q, scaled_p).exp().sum(-1)", (LENGTH,)),
    Fault("q is warped by the law's temperature", "train/objective.py",
          "else logits / self.law.temperature", "else logits", (STEP,)),
    Fault("greedy drafts are one-hot", "train/score.py",
          'return Law(0.0) if drafting == "greedy" else law', "return law", (ESTIMATE,)),
    Fault("a minimum of 0 stands outside of V_d", "train/fused.py",
          "total = from_p + from_q", "total = from_p", (FUSED,)),
    Fault("product weights fall on the steps they belong to", "train/step.py",
          "return [by_token[k, token] / count", "return [by_token[0, token] / count", (STEP,)),
    Fault("held-out figures are of the objective's law", "train/corpus.py",
          'r.split == "heldout" and r.drawn_from(objective.law)', 'r.split == "heldout"', (LOAD,)),
    Fault("the moving average is what is saved", "train/judge.py",
          "return self.average.module", "return self._whole.gather(self.scorer)", (SCHEDULES,)),
    Fault("every domain has its share of V_d", "drafters/vocab.py",
          "ranked[best.indices[best.values > 0]] = torch.inf", "pass", (VOCAB,)),
)  # fmt: skip


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "draftsmith"
        left_out = shutil.ignore_patterns(".git", ".venv", "runs", ".*cache")
        shutil.copytree(ROOT, copy, ignore=left_out, symlinks=True)
        if fails(sorted({test for fault in FAULTS for test in fault.tests}), copy):
            sys.exit("the tests fail before any fault is planted")
        for fault in FAULTS:
            seen = caught(fault, copy)
            print(f"{'caught' if seen else 'MISSED':7} {fault.claim}", flush=True)
            rows.append({"claim": fault.claim, "file": fault.file, "caught": seen})
    missed = [row["claim"] for row in rows if not row["caught"]]
    save_result("faults", {"planted": len(rows), "missed": missed, "faults": rows}, quiet=True)
    if missed:
        sys.exit(f"{len(missed)} of {len(rows)} faults were caught by no test")


def caught(fault: Fault, copy: Path) -> bool:
    """Whether the named tests fail with the fault in place.

    Raises ValueError if the edit does not fit the file, or the tests could not run.
    """
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        raise ValueError(f"'{fault.right}' stands {text.count(fault.right)} times in {fault.file}")
    path.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")
    try:
        return fails(fault.tests, copy)
    finally:
        path.write_text(text, encoding="utf-8")


def fails(tests: Sequence[str], copy: Path) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    # The copy goes first: an editable install of the package must not be found instead.
    environment = {**os.environ, "PYTHONPATH": str(copy.parent)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, check=False)
    if done.returncode not in (0, 1):
        raise ValueError(done.stdout.decode()[-2000:])
    return done.returncode == 1


if __name__ == "__main__":
    main()
