"""What is cut out of texts before they leave, and what is found where it should not be."""

import pytest

from draftsmith.drafters.public import local_paths, one_line, public, public_values, secrets


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/srv/models/llm.gguf", "llm.gguf"),
        ("~/runs/demo", "demo"),
        (r"C:\runs\demo", "demo"),
        ("Q8_0 from /models/x.gguf, dequantised", "Q8_0 from x.gguf, dequantised"),
        ("owner/llm", "owner/llm"),
        ("runs/demo/train-1/drafter", "drafter"),
        ("tokens / s", "tokens / s"),
    ],
)
def test_paths_are_cut_to_their_last_part(text: str, said: str) -> None:
    assert public(text) == said
    assert public_values({"/a/b": [text, 1, None, {"x": (text,)}]}) == {
        "/a/b": [said, 1, None, {"x": [said]}]
    }


def test_one_line_of_a_table() -> None:
    assert one_line("a|b\n<i>&") == "a\\|b &lt;i>&amp;"


@pytest.mark.parametrize(
    "text",
    [
        "{% if x == '/no_think' %}</think>\n\n</tool_call>{{ a // b }}{% endif %}",
        "{{ content.split('</think>')[-1].lstrip('\\n') }} {{- '/think' }}",
        "Q:\\nA:\\n answer",
        "http://127.0.0.1:8000/v1 and https://huggingface.co/owner/llm",
        "accepted/drafted, owner/llm, and/or, 24/7, n/a",
        "python -m sglang.launch_server --model-path owner/llm",
        '{"a": "x/y/z", "b": "/"}',
    ],
)
def test_what_is_no_local_path(text: str) -> None:
    assert local_paths(text) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"source": "/home/me/llm"}', "/home/me/llm"),
        ("--model-path /data/llm\nnext", "/data/llm"),
        ("at file:///data/llm.", "file:///data/llm."),
        ("`~/llm`", "~/llm"),
        ("[/data/llm", "/data/llm"),
        ('"C:\\\\Users\\\\me"', "C:\\\\Users\\\\me"),
    ],
)
def test_local_paths_are_found(text: str, found: str) -> None:
    assert local_paths(text) == [found]


def test_keys_are_found_and_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("A_TOKEN", "A_KEY", "SOME_PASSWORD"):
        monkeypatch.setenv(name, f"correct-horse-{name}")
    monkeypatch.setenv("SHORT_KEY", "token")
    monkeypatch.setenv("PLACE", "a very ordinary sentence")
    text = "a token, a very ordinary sentence, correct-horse-A_KEY, and ghp_" + "a" * 36
    assert secrets(text) == ["ghp_a…", "corre…"]
    assert secrets("hf_transfer, task-specific-and-somewhat-long-word, sk-learn") == []
