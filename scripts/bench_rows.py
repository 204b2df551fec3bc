"""v(n): what a target pass over n rows costs, with plain `nn.Linear` and with the measured forms.

    python scripts/bench_rows.py [TARGET]

Both in one process, interleaved; medians and their ratios go to scripts/results/rows.json.
"""

import argparse
import time
from statistics import median
from typing import Any

import torch

from draftsmith.configs.recipe import TargetSection
from draftsmith.data.linear import FewRowsLinear, measured_forms, speed_up_few_rows
from draftsmith.data.target import Target, load_target
from draftsmith.eval.provenance import processor
from draftsmith.scripts.results import save_result

ROWS = (1, 2, 3, 4, 5, 6, 8)
CONTEXT = 128
REPEATS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?", default=TargetSection().name)
    name = parser.parse_args().target
    targets = {
        "nn.Linear": load_target(TargetSection(name=name), few_rows=False),
        "measured forms": load_target(TargetSection(name=name), few_rows=False),
    }
    speed_up_few_rows(targets["measured forms"].model)
    times = _measure(targets)
    table = {
        form: {
            "milliseconds": {n: round(1000 * t, 2) for n, t in by_rows.items()},
            "v": {n: round(t / by_rows[1], 3) for n, t in by_rows.items()},
        }
        for form, by_rows in times.items()
    }
    shapes = {
        (layer.out_features, layer.in_features)
        for layer in targets["measured forms"].model.modules()
        if isinstance(layer, FewRowsLinear)
    }
    result: dict[str, Any] = {
        "target": targets["nn.Linear"].provenance["name"],
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "context": CONTEXT,
        "passes": table,
        "forms": {f"{o}x{i}": measured_forms(o, i) for o, i in sorted(shapes)},
    }
    save_result("rows", result)


@torch.inference_mode()
def _measure(targets: dict[str, Target]) -> dict[str, dict[int, float]]:
    caches = {}
    ids = torch.arange(CONTEXT)[None] + 3
    for form, target in targets.items():
        caches[form] = target.new_cache(1, CONTEXT + max(ROWS))
        target.forward(ids, caches[form])
        caches[form].advance([CONTEXT])
    seconds: dict[str, dict[int, list[float]]] = {f: {n: [] for n in ROWS} for f in targets}
    for repeat in range(REPEATS + 1):
        for n in ROWS:
            for form, target in targets.items():
                start = time.perf_counter()
                target.logits(target.forward(ids[:, :n], caches[form]).hidden)
                if repeat:
                    seconds[form][n].append(time.perf_counter() - start)
    return {form: {n: median(t) for n, t in by.items()} for form, by in seconds.items()}


if __name__ == "__main__":
    main()
