"""Linear layers whose cost hardly grows from one row to eight, on CPUs.

Decoding multiplies every weight with 1 row, verification with γ+1. The weights' way from memory
is the floor of both, but BLAS libraries pick poor kernels for a handful of rows, and which form is
good differs between processors. So each (weight shape, row count) is timed once per machine over
the honest forms below - all float32, all exact up to rounding order - and the fastest is used by
the plain and the speculative loop alike.
"""

import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .files import cache_folder, write_json

MAX_ROWS = 8
_REPEATS = 9
_CLEARLY = 0.93  # another form must be this much faster than the usual one, or noise would choose
_TIMED_BYTES = 64 << 20  # weights cycled through while timing, so that they come from memory


def _plain(x: Tensor, weight: Tensor, packed: Tensor | None) -> Tensor:
    return F.linear(x, weight)


def _transposed(x: Tensor, weight: Tensor, packed: Tensor | None) -> Tensor:
    return (weight @ x.t()).t()


def _packed(x: Tensor, weight: Tensor, packed: Tensor | None) -> Tensor:
    return torch.ops.mkl._mkl_linear(x, packed, weight, None, x.shape[0])


FORMS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "x·Wᵀ": _plain,
    "W·xᵀ": _transposed,
    "packed": _packed,
}


class FewRowsLinear(nn.Linear):
    """`nn.Linear` for inference that uses the measured form for up to `MAX_ROWS` rows."""

    forms: tuple[str, ...]
    packed: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if rows > MAX_ROWS:
            return super().forward(input)
        form = FORMS[self.forms[rows]]
        out = form(input.reshape(rows, self.in_features), self.weight, self.packed)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*input.shape[:-1], self.out_features)


def speed_up_few_rows(*modules: nn.Module) -> None:
    """Let every float32 CPU `nn.Linear` below `modules` use its measured form, in place.

    For inference only. Does nothing for other devices and dtypes.
    """
    for module in modules:
        for layer in module.modules():
            if type(layer) is not nn.Linear or layer.weight.device.type != "cpu":
                continue
            if type(layer.weight) is not nn.Parameter:  # quantised
                continue
            if layer.weight.dtype == torch.float32:
                _convert(layer)


def _convert(layer: nn.Linear) -> None:
    forms = measured_forms(layer.out_features, layer.in_features)
    layer.__class__ = FewRowsLinear
    assert isinstance(layer, FewRowsLinear)
    layer.forms = ("x·Wᵀ", *forms)
    needs_packing = "packed" in forms
    layer.packed = _pack(layer.weight.detach()) if needs_packing else None


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), MAX_ROWS)


def _can_pack() -> bool:
    return torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")


_measured: dict[Path, dict[str, list[str]]] = {}


def measured_forms(out_features: int, in_features: int) -> list[str]:
    """The fastest form for 1..`MAX_ROWS` rows of an `[out, in]` weight on this machine.

    Measured once and kept in the cache folder, so that a machine always rounds the same way.
    """
    path = _table_path()
    key = f"{out_features}x{in_features}"
    if key not in _measured.get(path, {}):
        # Read anew: another process may have measured this shape, or others, in the meantime.
        table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if key not in table:
            table[key] = _measure(out_features, in_features)
            write_json(path, table)
        _measured[path] = table
    return _measured[path][key]


def _table_path() -> Path:
    words = (platform.processor() or platform.machine(), _cpu_model(), torch.__version__)
    name = "-".join("".join(c for c in w if c.isalnum() or c in ".") for w in words if w)
    return cache_folder() / f"linear-{name}-{torch.get_num_threads()}t.json"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1]
    return os.uname().machine if hasattr(os, "uname") else ""


@torch.no_grad()
def _measure(out_features: int, in_features: int) -> list[str]:
    copies = max(1, min(32, _TIMED_BYTES // (4 * out_features * in_features)))
    weights = [torch.randn(out_features, in_features) for _ in range(copies)]
    packed = [_pack(w) if _can_pack() else None for w in weights]
    names = [n for n in FORMS if n != "packed" or _can_pack()]
    chosen = []
    for rows in range(1, MAX_ROWS + 1):
        x = torch.randn(rows, in_features)
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(_REPEATS):  # interleaved, so that a slow moment hits every form
            for name in names:
                form = FORMS[name]
                start = time.perf_counter()
                for w, p in zip(weights, packed, strict=True):
                    form(x, w, p)
                times[name].append(time.perf_counter() - start)
        best = min(names, key=lambda n: median(times[n]))
        clear = median(times[best]) < _CLEARLY * median(times["x·Wᵀ"])
        chosen.append(best if clear else "x·Wᵀ")
    return chosen
