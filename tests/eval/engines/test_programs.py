"""How each engine is started: what it is told of the drafter, and what is refused beforehand."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.configs.errors import UserError
from draftsmith.drafters.layouts import LAYOUTS
from draftsmith.eval.engines import on_llama_cpp, vllm_plugin
from draftsmith.eval.engines.engine import OFFLINE, Serving, method_of, python_of
from draftsmith.eval.engines.on_vllm import speculation
from draftsmith.eval.engines.registry import ENGINES
from draftsmith.scripts.engines import check_served


@pytest.fixture
def serving(tmp_path: Path) -> Serving:
    return Serving(
        target="the/target", drafter=Path("the/drafter"), layout="eagle3", reduced=False,
        num_draft_tokens=3, sampled=True, dtype="float32", cpu=True, context=200, rows=4,
        work=tmp_path, limit=100.0, python="a-python",
    )  # fmt: skip


def after(words: tuple[str, ...], option: str) -> str:
    return words[words.index(option) + 1]


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_the_drafter_is_named_or_left_out(name: str, serving: Serving) -> None:
    engine = ENGINES[name].engine
    program = engine.program(serving)
    assert program.command[0] == "a-python" and "{port}" in program.command
    assert program.environment.items() >= OFFLINE.items()
    assert program.limit == program.timeout == 100.0
    assert any("the/drafter" in word for word in program.command)
    plain = engine.program(replace(serving, drafter=None))
    assert not any("spec" in word for word in plain.command)
    assert set(plain.command) < set(program.command)


@pytest.mark.parametrize(
    ("layout", "method"),
    [("eagle3", "eagle3"), ("transformers", "draft_model"), ("dflash", "dflash"),
     ("medusa", "medusa")],
)  # fmt: skip
def test_vllm_is_told_the_method_of_each_layout(layout: str, method: str, serving: Serving) -> None:
    words = ENGINES["vllm"].engine.program(replace(serving, layout=layout)).command
    told = json.loads(after(words, "--speculative-config"))
    assert told["method"] == method == method_of(ENGINES["vllm"].engine, layout, "a family")
    assert (told["model"], told["num_speculative_tokens"]) == ("the/drafter", 3)
    assert told.get("draft_sample_method") == (None if layout == "medusa" else "probabilistic")
    greedy = speculation(replace(serving, layout=layout, sampled=False))
    assert greedy.get("draft_sample_method") == (None if layout == "medusa" else "greedy")


def test_vllm_is_kept_from_missing_the_map_of_a_reduced_medusa(serving: Serving) -> None:
    engine, option = ENGINES["vllm"].engine, "--model-loader-extra-config"
    reduced = replace(serving, layout="medusa", reduced=True)
    assert json.loads(after(engine.program(reduced).command, option)) == {
        "enable_weights_track": False
    }
    for other in ({"layout": "eagle3"}, {"reduced": False}, {"drafter": None}):
        assert option not in engine.program(replace(reduced, **other)).command


def test_sglang_is_told_a_chain(serving: Serving) -> None:
    words = ENGINES["sglang"].engine.program(serving).command
    assert after(words, "--speculative-algorithm") == "EAGLE3"
    assert after(words, "--speculative-num-steps") == "3"
    assert after(words, "--speculative-num-draft-tokens") == "4"
    block = ENGINES["sglang"].engine.program(replace(serving, layout="dflash")).command
    assert after(block, "--speculative-num-draft-tokens") == "4"
    assert "--speculative-num-steps" not in block


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_reads_layouts_that_there_are(name: str) -> None:
    assert set(ENGINES[name].engine.methods) <= set(LAYOUTS)


@pytest.mark.parametrize("layout", ["draftsmith", None])
def test_layouts_that_an_engine_does_not_read_are_refused(layout: str | None) -> None:
    with pytest.raises(UserError, match=r"vLLM reads no drafter of family 'skip' in the layout"):
        method_of(ENGINES["vllm"].engine, layout, "skip")


# ---- llama.cpp


def fake_conversion(status: int) -> str:
    """A python whose module converts nothing, but says what it was asked."""
    return (
        '#!/bin/sh\nprintf \'%s\\n\' "$*" >> "$(dirname "$0")/asked"\n'
        f"echo 'no such architecture' >&2\nexit {status}\n"
    )


@pytest.mark.parametrize(("layout", "helped"), [("eagle3", True), ("transformers", False)])
def test_llama_cpp_serves_what_is_converted_first(
    layout: str, helped: bool, serving: Serving, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(fake_conversion(0))
    python.chmod(0o755)
    serving = replace(serving, python=str(python), layout=layout, dtype="bfloat16")
    words = on_llama_cpp.program(serving).command
    first, second = (tmp_path / "asked").read_text().splitlines()
    assert "the/target --outtype bf16" in first and "the/drafter" in second
    assert ("--target-model-dir the/target" in second) == helped
    assert after(words, "--method") == on_llama_cpp.METHODS[layout]
    assert after(words, "--tokens") == "3" and "--exact" not in words


def test_a_folder_that_cannot_be_converted_is_named(serving: Serving, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(fake_conversion(1))
    python.chmod(0o755)
    with pytest.raises(UserError, match="the/target cannot be converted to GGUF: no such arch"):
        on_llama_cpp.program(replace(serving, python=str(python)))


def test_a_conversion_that_hangs_is_given_up(serving: Serving, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    with pytest.raises(UserError, match=r"the/target was not converted to GGUF within 0\.2 s"):
        on_llama_cpp.program(replace(serving, python=str(python), limit=0.2))


def test_a_python_that_is_not_there_is_named(serving: Serving) -> None:
    with pytest.raises(
        UserError, match=r"llama\.cpp cannot be run: .*'/no/such/python'.* --python"
    ):
        on_llama_cpp.program(replace(serving, python="/no/such/python"))


@pytest.mark.parametrize("script", [on_llama_cpp.CONVERT, on_llama_cpp.SERVE])
def test_scripts_need_nothing_of_ours(script: tuple[str, str]) -> None:
    """They run in an environment that may lack the package."""
    assert script[0] == "-P"
    text = Path(script[1]).read_text(encoding="utf-8")
    assert "draftsmith" not in text and "from ." not in text


# ---- where engines are


def test_the_interpreter_is_the_one_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOME_PYTHON", raising=False)
    assert python_of("SOME_PYTHON", "torch", None) == sys.executable
    with pytest.raises(UserError, match=r"no no_engine: name .* --python or SOME_PYTHON"):
        python_of("SOME_PYTHON", "no_engine", None)
    monkeypatch.setenv("SOME_PYTHON", "/there/python")
    assert python_of("SOME_PYTHON", "no_engine", None) == "/there/python"
    assert python_of("SOME_PYTHON", "no_engine", "/here/python") == "/here/python"


# ---- the fault of vLLM on CPUs


def test_every_process_of_vllm_finds_the_plugin(serving: Serving, tmp_path: Path) -> None:
    """Where it runs on a CPU: by an entry point that lies on its path."""
    program = ENGINES["vllm"].engine.program(serving)
    code = (
        "from importlib.metadata import entry_points\n"
        "(found,) = entry_points(group='vllm.general_plugins')\n"
        "print(found.name, found.load().__module__)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **program.environment}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout == "draftsmith draftsmith_vllm\n"
    on_gpu = ENGINES["vllm"].engine.program(replace(serving, cpu=False))
    assert "PYTHONPATH" not in on_gpu.environment and "--enforce-eager" not in on_gpu.command


def expanded(values: list[float], ends: list[int]) -> list[float]:
    out = torch.full((ends[-1],), float("nan"))
    vllm_plugin.expand(out, torch.tensor(values), torch.tensor(ends, dtype=torch.int32), 0, 1)
    return out.tolist()


def test_values_are_repeated_and_replaced() -> None:
    assert expanded([0.5, 2.0, 0.25], [2, 5, 6]) == [0.5, 0.5, 2.0, 2.0, 2.0, 0.25]
    assert expanded([0.0, 0.5], [1, 3]) == [1.0, 0.5, 0.5]
    assert expanded([0.5, 2.0], [0, 2]) == [2.0, 2.0], "a row without drafts"


@pytest.mark.parametrize("faulty", [True, False])
def test_only_a_faulty_stand_in_is_replaced(faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def own(output: Any, values: Any, ends: Any, replace_from: int, replace_to: int) -> None:
        kept = output.clone() if faulty else output
        vllm_plugin.expand(kept, values, ends, replace_from, replace_to)

    for name in ("vllm", "vllm.platforms", "vllm.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))

    class Platform:
        def is_cpu(self) -> bool:
            return True

        def import_kernels(self) -> None:
            pass

    sys.modules["vllm.platforms"].current_platform = Platform()  # type: ignore[attr-defined]
    kernels: Any = ModuleType("cpu_triton_utils")
    kernels._expand_kernel_impl = own
    sys.modules["vllm.utils"].cpu_triton_utils = kernels  # type: ignore[attr-defined]
    assert vllm_plugin.mend() == faulty
    assert (kernels._expand_kernel_impl is vllm_plugin.expand) == faulty
    assert not vllm_plugin.mend(), "once mended, there is nothing to do"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed")
def test_without_vllm_there_is_nothing_to_mend() -> None:
    assert not vllm_plugin.mend()


# ---- what is refused before anything starts


@pytest.mark.parametrize(
    ("name", "layout", "drafted", "most", "sampled", "message"),
    [
        ("vllm", "dflash", 2, 3, False, r"family 'f' see as many places .*_tokens to 3, which"),
        ("sglang", "dflash", 2, 3, False, r"SGLang lets .*_tokens to 3, which"),
        ("vllm", "eagle3", 4, 3, False, r"drafts 3 tokens at most"),
        ("vllm", "medusa", 2, 3, True, r"vLLM draws no drafts of the layout 'medusa'"),
        ("sglang", "eagle3", 2, None, True, r"SGLang draws no drafts"),
        ("llama.cpp", "medusa", 2, 3, False, r"llama\.cpp reads no drafter of family 'f'"),
        ("vllm", "dflash", 3, 3, True, None),
        ("vllm", "eagle3", 7, None, True, None),
        ("llama.cpp", "transformers", 7, None, False, None),
    ],
)
def test_what_would_be_served_otherwise_is_refused(
    name: str, layout: str, drafted: int, most: int | None, sampled: bool, message: str | None
) -> None:
    drafter: Any = SimpleNamespace(family="f", max_draft_tokens=most)
    engine = ENGINES[name].engine
    if message is None:
        check_served(engine, drafter, layout, drafted, sampled)
        return
    with pytest.raises(UserError, match=message):
        check_served(engine, drafter, layout, drafted, sampled)


def test_a_head_that_an_engine_leaves_unread_is_refused() -> None:
    drafter: Any = SimpleNamespace(family="f", max_draft_tokens=3, draft_ids=torch.arange(7))
    with pytest.raises(UserError, match="target's head, not with this drafter's of 7 tokens"):
        check_served(ENGINES["sglang"].engine, drafter, "dflash", 3, False)
    check_served(ENGINES["vllm"].engine, drafter, "dflash", 3, False)
