"""Linear layers whose cost hardly grows from one row to eight, on CPUs.

Decoding multiplies every weight with 1 row, verification with γ+1, collection with a batch. The
weights' way from memory is the floor of the first two, but BLAS libraries pick poor kernels for a
handful of rows, and which form is good differs between processors. So each (weight shape, row
count) is timed once per machine over the honest forms below - all float32, all exact up to rounding
order - and the fastest is used by the plain and the speculative loop alike. Where even more rows
take less time, rows of zeros are added. Some forms read a copy of the weights in the order that
their library likes.
"""

import json
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .files import cache_folder, write_json

FEW = 8
"""Up to here each row count is timed by itself."""
COUNTS = (*range(1, FEW + 1), 16, 32, 64, 128)
"""Row counts that are timed; others take the form of the next one, beyond the last the usual."""
_REPEATS = 9
_CLEARLY = 0.93  # another form must be this much faster than the usual one, or noise would choose
_TIMED_BYTES = 64 << 20  # weights cycled through while timing, so that they come from memory

Form = tuple[str, int]
"""A name in FORMS and the rows it computes, those of zeros included."""


class Kind(NamedTuple):
    """How a form multiplies, `(x [n, in], weight [out, in], packed)` -> `[n, out]`."""

    multiply: Callable[[Tensor, Tensor, Any], Tensor]
    pack: Callable[[Tensor], Tensor] | None = None
    """Makes the copy of the weights that it reads, if any."""


def _plain(x: Tensor, weight: Tensor, packed: None) -> Tensor:
    return F.linear(x, weight)


def _transposed(x: Tensor, weight: Tensor, packed: None) -> Tensor:
    return (weight @ x.t()).t()


def _by_mkl(x: Tensor, weight: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkl._mkl_linear(x, packed, weight, None, x.shape[0])


def _pack_for_mkl(weight: Tensor) -> Tensor:
    return torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), COUNTS[-1])


def _by_onednn(x: Tensor, weight: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _pack_for_onednn(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), COUNTS[-1])


def _forms() -> dict[str, Kind]:
    found = {"x·Wᵀ": Kind(_plain), "W·xᵀ": Kind(_transposed)}
    if torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear"):
        found["packed by MKL"] = Kind(_by_mkl, _pack_for_mkl)
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found["packed by oneDNN"] = Kind(_by_onednn, _pack_for_onednn)
    return found


FORMS = _forms()
"""Those that this torch was built with."""


class Packed(dict[str, Tensor | None]):
    """The copies of one weight that forms read, by form. Copies of a layer make their own anew."""

    @classmethod
    def of(cls, weight: Tensor, names: Iterable[str]) -> "Packed":
        found = cls()
        for name in sorted(set(names)):
            found.make(name, weight)
        return found

    def make(self, name: str, weight: Tensor) -> Tensor | None:
        pack = FORMS[name].pack
        self[name] = None if pack is None else pack(weight.detach())
        return self[name]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Packed":
        return type(self)()  # packed tensors have no storage that could be copied


class FewRowsLinear(nn.Linear):
    """`nn.Linear` that uses the measured form for up to `COUNTS[-1]` rows.

    Its weight is for inference only; where its input wants a gradient it is as any other.
    """

    forms: dict[int, Form]
    packed: Packed

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if not 0 < rows <= COUNTS[-1] or (input.requires_grad and torch.is_grad_enabled()):
            return super().forward(input)  # not every form can be differentiated
        count = rows if rows <= FEW else COUNTS[bisect_left(COUNTS, rows)]
        name, computed = self.forms[count]
        packed = self.packed[name] if name in self.packed else self.packed.make(name, self.weight)
        x = input.reshape(rows, self.in_features).contiguous()  # W·xᵀ left its own rows apart
        if rows < computed and count <= FEW:
            out = FORMS[name].multiply(_padded(x, computed), self.weight, packed)[:rows]
        else:
            out = FORMS[name].multiply(x, self.weight, packed)
        if self.bias is not None:
            out = out + self.bias
        return out.view(*input.shape[:-1], self.out_features)


def _padded(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - len(x)))


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
    layer.forms = dict(zip(COUNTS, forms, strict=True))
    layer.packed = Packed.of(layer.weight, (name for name, _ in forms))


_measured: dict[Path, dict[str, list[Form]]] = {}


def measured_forms(out_features: int, in_features: int) -> list[Form]:
    """The fastest form of an `[out, in]` weight on this machine for each of `COUNTS` rows.

    Measured once and kept in the cache folder, so that a machine always rounds the same way.
    """
    path = _table_path()
    key = f"{out_features}x{in_features}"
    if key not in _measured.get(path, {}):
        # Read anew: another process may have measured this shape, or others, in the meantime.
        table = _read(path)
        if key not in table:
            table[key] = _measure(out_features, in_features)
            write_json(path, {"of": list(FORMS), "fastest": table})
        _measured[path] = {k: [(name, rows) for name, rows in v] for k, v in table.items()}
    return _measured[path][key]


def _read(path: Path) -> dict[str, Any]:
    """What was measured by shape; nothing where the choice was among other forms."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return dict(found["fastest"]) if found.get("of") == list(FORMS) else {}


def _table_path() -> Path:
    words = (platform.processor() or platform.machine(), _cpu_model(), torch.__version__)
    name = "-".join("".join(c for c in w if c.isalnum() or c in ".") for w in words if w)
    return cache_folder() / f"forms-{name}-{torch.get_num_threads()}t.json"


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1]
    return os.uname().machine if hasattr(os, "uname") else ""


@dataclass(frozen=True)
class _Bench:
    """Weights of one shape, enough of them to come from memory."""

    weights: list[Tensor]
    packed: list[Packed]

    def seconds(self, forms: Sequence[Form], rows: int) -> dict[Form, float]:
        """Shortest time of each form on `rows` rows, in turns: other work only ever adds."""
        x = torch.randn(rows, self.weights[0].shape[1])
        times: dict[Form, list[float]] = {form: [] for form in forms}
        for _ in range(_REPEATS):
            for form in forms:
                name, computed = form
                start = time.perf_counter()
                for w, p in zip(self.weights, self.packed, strict=True):
                    given = x if computed == rows else _padded(x, computed)
                    FORMS[name].multiply(given, w, p[name])[:rows]
                times[form].append(time.perf_counter() - start)
        return {form: min(own) for form, own in times.items()}


@torch.no_grad()
def _measure(out_features: int, in_features: int) -> list[Form]:
    copies = max(1, min(32, _TIMED_BYTES // (4 * out_features * in_features)))
    weights = [torch.randn(out_features, in_features) for _ in range(copies)]
    bench = _Bench(weights, [Packed.of(w, FORMS) for w in weights])
    best: dict[int, tuple[float, Form]] = {}
    chosen: dict[int, Form] = {}
    for rows in COUNTS:
        times = bench.seconds([(name, rows) for name in FORMS], rows)
        fastest, usual = min(times, key=lambda form: times[form]), ("x·Wᵀ", rows)
        chosen[rows] = fastest if times[fastest] < _CLEARLY * times[usual] else usual
        best[rows] = times[chosen[rows]], chosen[rows]
    for rows in range(1, FEW):
        seconds, form = min(best[more] for more in range(rows + 1, FEW + 1))
        if seconds < _CLEARLY * best[rows][0]:
            times = bench.seconds([chosen[rows], form], rows)  # with what adding rows costs
            if times[form] < _CLEARLY * times[chosen[rows]]:
                chosen[rows] = form
    return [chosen[rows] for rows in COUNTS]
