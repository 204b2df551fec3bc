"""Small stand-ins: no test needs a network or a downloaded model."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from draftsmith.configs.recipe import TargetSection
from draftsmith.data import linear
from draftsmith.data.gather import GatherSettings, Request, answer
from draftsmith.data.records import Record
from draftsmith.data.target import Target, load_target
from draftsmith.data.warp import Law

RECORD_LIMIT = 14  # reply tokens of the longest of `records`
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

# ChatML as SmolLM2 has it: every turn opens and closes, and a system turn is put first.
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CORPUS = [
    "You are a helpful assistant. system user assistant tool",
    "Write a Python function that returns the sum of a list of numbers.",
    "Maya has 24 stickers. How many stickers does Maya have left? Solve step by step.",
    "Read the invoice and return a JSON object with the keys number, customer and total.",
    "Give me five simple tips for falling asleep faster on a weeknight.",
]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of tiny operations: threads would only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 400 tokens with SmolLM2's special ids; copy it before changing it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    fast.chat_template = CHATML
    return fast


# ---- tiny targets

VOCAB = 400
WINDOW = 8
_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # far from uniform, so that greedy choices are no near-ties
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GATED = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {**_GATED, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
    "gpt2": (GPT2Config, {**_COMMON, "tie_word_embeddings": True}),
    "gpt_neox": (GPTNeoXConfig, {**_COMMON, "intermediate_size": 48}),
    "qwen3": (Qwen3Config, {**_GATED, "head_dim": 16}),  # 4 heads of 16, hidden size 32
    "mistral": (MistralConfig, {**_GATED, "sliding_window": WINDOW}),
    "gemma2": (
        Gemma2Config,
        {
            **_GATED,
            "sliding_window": WINDOW,  # every second layer
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
}

FolderFactory = Callable[..., Path]
TargetFactory = Callable[..., Target]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The embedded target is built once for all workers, and its products are timed in a hurry."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_CACHE", str(shared / "real"))
        patch.setattr(linear, "_REPEATS", 2)
        patch.setattr(linear, "_TIMED_BYTES", 4 << 20)
        yield


@pytest.fixture(scope="session")
def target_folder(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> FolderFactory:
    """`target_folder(family, **config)`: a saved random model of that family, with tokenizer.

    Every parameter is noisy, norms and biases too: a forgotten one changes the output.
    """

    def build(family: str = "llama", **changes: Any) -> Path:
        kind, options = FAMILIES[family]
        config = kind(**{**options, "vocab_size": VOCAB, **changes})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.data += 0.2 * torch.randn_like(parameter)
        folder = tmp_path_factory.mktemp(f"{family}-target")
        model.save_pretrained(folder)
        tiny_tokenizer.save_pretrained(folder)
        return folder

    return build


@pytest.fixture(scope="session")
def load_tiny(target_folder: FolderFactory) -> TargetFactory:
    """`load_tiny(family, **config)`: such a model through `load_target`, a new one each time."""

    def load(family: str = "llama", **changes: Any) -> Target:
        folder = target_folder(family, **changes)
        return load_target(TargetSection(name=str(folder), device="cpu"), few_rows=False)

    return load


@pytest.fixture(scope="session")
def tiny_target(load_tiny: TargetFactory) -> Target:
    """A random Llama of 4 layers; shared, so change it only through monkeypatch."""
    return load_tiny()


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def any_target(request: pytest.FixtureRequest, load_tiny: TargetFactory) -> Target:
    """One target of each family; shared like `tiny_target`."""
    return load_tiny(request.param)


@pytest.fixture(scope="session")
def records(tiny_target: Target) -> list[Record]:
    """40 conversations of two domains with states, replies of 1 to 14 tokens."""
    generator = torch.Generator().manual_seed(0)
    requests = []
    for i in range(40):
        ids = torch.randint(3, tiny_target.vocab_size, (3 + i % 9,), generator=generator)
        split = "heldout" if i % 4 == 3 else "train"
        law = Law((0.7, 1.0)[i % 2])
        requests.append(Request(f"p{i}", "ab"[i // 4 % 2], split, tuple(ids.tolist()), law, i))
    settings = GatherSettings(RECORD_LIMIT, batch_size=8, taps=(1, 1, 2), keep="hidden")
    full = answer(tiny_target, requests, settings)
    return [cut(r, 1 + (5 * i) % RECORD_LIMIT) for i, r in enumerate(full)]


def cut(record: Record, reply: int) -> Record:
    """The record as it would be had the limit been `reply` tokens."""
    reply = min(reply, len(record.reply))
    end = record.prompt_len + reply
    assert record.states is not None
    states = replace(
        record.states,
        hidden=record.states.hidden[:reply],
        log_z=record.states.log_z[:reply],
        taps=record.states.taps[: end - 1],
    )
    return replace(record, ids=record.ids[:end], states=states)
