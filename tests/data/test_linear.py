"""Few-row linear layers: every form computes `nn.Linear`, and what was measured is kept."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftsmith.data import linear
from draftsmith.data.linear import (
    COUNTS,
    FEW,
    FORMS,
    FewRowsLinear,
    Form,
    Packed,
    speed_up_few_rows,
)
from draftsmith.data.target import Target

AVAILABLE = list(FORMS)


@pytest.fixture
def measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """An empty cache folder, and a stand-in for measuring that notes what it was asked."""
    asked: list[tuple[int, int]] = []

    def measure(out_features: int, in_features: int) -> list[Form]:
        asked.append((out_features, in_features))
        return [(AVAILABLE[i % len(AVAILABLE)], max(rows, 4)) for i, rows in enumerate(COUNTS)]

    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(linear, "_measured", {})
    monkeypatch.setattr(linear, "_measure", measure)
    return asked


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.parametrize("rows", (*COUNTS, 9, 100))
def test_every_form_is_a_linear_layer(name: str, rows: int) -> None:
    x, weight = torch.randn(rows, 48), torch.randn(20, 48) / 7
    out = FORMS[name].multiply(x, weight, Packed.of(weight, [name])[name])
    assert out.shape == (rows, 20)
    assert torch.allclose(out, F.linear(x, weight), atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "shape",
    [(), (1,), (1, 1), (3,), (2, 3), (1, 8), (2, 2, 2), (9,), (3, 5), (65,), (0,), (2, 0), (130,)],
)
def test_any_leading_shape(
    measuring: list[tuple[int, int]], shape: tuple[int, ...], bias: bool
) -> None:
    layer = nn.Linear(24, 10, bias=bias)
    x = torch.randn(*shape, 24)
    with torch.no_grad():
        expected = layer(x)
        speed_up_few_rows(layer)
        out = layer(x)
    assert type(layer) is FewRowsLinear
    assert out.shape == expected.shape
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("name", AVAILABLE)
def test_every_form_serves_every_family(
    any_target: Target, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever was found fastest, the model code around the layers takes its output."""
    target = copy.deepcopy(any_target)
    monkeypatch.setattr(
        linear, "measured_forms", lambda out, into: [(name, rows) for rows in COUNTS]
    )
    ids = torch.tensor([[7, 8, 9], [10, 11, 12]])
    with torch.no_grad():
        expected = target.logits(target.forward(ids, target.new_cache(2, 3)).hidden)
        speed_up_few_rows(target.model)
        out = target.logits(target.forward(ids, target.new_cache(2, 3)).hidden)
    assert torch.allclose(out, expected, atol=1e-4)


def test_only_float32_linear_layers_change(measuring: list[tuple[int, int]]) -> None:
    model = nn.Sequential(nn.Linear(8, 8).bfloat16(), nn.LayerNorm(8))
    speed_up_few_rows(model)
    assert type(model[0]) is nn.Linear
    assert measuring == []


def test_weights_keep_their_names(measuring: list[tuple[int, int]]) -> None:
    layer = nn.Linear(8, 4)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    speed_up_few_rows(layer)
    assert before.keys() == layer.state_dict().keys()
    assert all(torch.equal(before[name], t) for name, t in layer.state_dict().items())


def test_a_shape_is_measured_once(
    measuring: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed_up_few_rows(nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8), nn.Linear(8, 4)))
    assert measuring == [(4, 8), (8, 4)]
    (table,) = tmp_path.glob("forms-*.json")
    assert shapes_in(table) == {"4x8", "8x4"}
    monkeypatch.setattr(linear, "_measured", {})  # another process
    assert linear.measured_forms(4, 8) == linear.measured_forms(8, 4)
    assert measuring == [(4, 8), (8, 4)]
    linear.measured_forms(3, 3)
    assert shapes_in(table) == {"4x8", "8x4", "3x3"}


def shapes_in(table: Path) -> set[str]:
    return set(json.loads(table.read_text(encoding="utf-8"))["fastest"])


def test_a_choice_among_other_forms_is_made_anew(
    measuring: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another torch may bring a faster form, and may lack the one that was chosen."""
    linear.measured_forms(4, 8)
    (table,) = tmp_path.glob("forms-*.json")
    found = json.loads(table.read_text(encoding="utf-8"))
    older = [{"of": found["of"][:-1], "fastest": found["fastest"]}, found["fastest"]]
    for times, before in enumerate(older, start=2):
        table.write_text(json.dumps(before), encoding="utf-8")
        monkeypatch.setattr(linear, "_measured", {})
        linear.measured_forms(4, 8)
        assert measuring == [(4, 8)] * times
        assert json.loads(table.read_text(encoding="utf-8")) == found


@pytest.mark.parametrize("name", AVAILABLE)
def test_a_copy_multiplies_by_its_own_weights(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Packed weights stand outside of the parameters that are copied, and changed."""
    monkeypatch.setattr(linear, "measured_forms", lambda out, into: [(name, n) for n in COUNTS])
    layer, x = nn.Linear(24, 10), torch.randn(3, 24)
    speed_up_few_rows(layer)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.mul_(2)
        assert torch.allclose(twin(x) - twin.bias, 2 * (layer(x) - layer.bias), atol=1e-5)
        assert torch.allclose(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-5)


def test_thread_counts_have_tables_of_their_own(
    measuring: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form that is fast on two threads says nothing about one."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    linear.measured_forms(4, 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    linear.measured_forms(4, 8)
    assert measuring == [(4, 8), (4, 8)]
    assert len(list(tmp_path.glob("forms-*.json"))) == 2


def test_measuring_chooses_known_forms() -> None:
    chosen = linear._measure(16, 16)
    assert len(chosen) == len(COUNTS)
    for (name, computed), rows in zip(chosen, COUNTS, strict=True):
        assert name in AVAILABLE
        assert rows <= computed <= FEW if rows <= FEW else computed == rows


def test_rows_are_added_where_more_take_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows are slow here, three are fast: two are then computed as three, one as it is."""
    slow = {1: 1.0, 2: 9.0}

    def seconds(bench: object, forms: list[Form], rows: int) -> dict[Form, float]:
        return {form: slow.get(form[1], 2.0) for form in forms}

    monkeypatch.setattr(linear._Bench, "seconds", seconds)
    chosen = dict(zip(COUNTS, linear._measure(8, 8), strict=True))
    assert chosen[1] == ("x·Wᵀ", 1)
    assert chosen[2] == ("x·Wᵀ", 3)
    assert all(computed == rows for rows, (_, computed) in chosen.items() if rows > 2)


def test_forms_get_their_rows_as_they_were_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """W·xᵀ leaves its output in columns; the layer behind it must not pay for that."""
    seen: list[bool] = []

    def multiply(x: Tensor, weight: Tensor, packed: None) -> Tensor:
        seen.append(x.is_contiguous())
        return (weight @ x.t()).t()

    monkeypatch.setitem(FORMS, "W·xᵀ", linear.Kind(multiply))
    monkeypatch.setattr(linear, "measured_forms", lambda *size: [("W·xᵀ", n) for n in COUNTS])
    layers = nn.Sequential(nn.Linear(8, 6, bias=False), nn.SiLU(), nn.Linear(6, 4))
    speed_up_few_rows(layers)
    with torch.no_grad():
        layers(torch.randn(2, 8))
    assert seen == [True, True]
