"""Chat templates of several habits, and conversations to put through them."""

import copy
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from draftsmith.data.prompts import Prompt

# Descriptions and calls of tools are printed; the thoughts of the last reply alone are.
AGENT = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m.reasoning_content and loop.last %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% elif m['role'] == 'assistant' and loop.last and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}"
    "\n<tool_call>\n{\"name\": \"{{ call.function.name }}\", "
    "\"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)  # fmt: skip

# Thinks by default: its generation prompt opens a thought, which no reply without one does.
THINKER = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)

# A turn ends where the next one's header begins. Thoughts are forgotten when the user speaks again.
OPEN_ENDED = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{% if m.reasoning_content and loop.last %}"
    "<think>{{ m.reasoning_content }}</think>\n{% endif %}"
    "{{ m['content'] }}{% for call in m.tool_calls or [] %}{{ call.function.name }}(){% endfor %}"
    "{{ '\n' if m['role'] == 'assistant' else '' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# No generation prompt: what closes a question opens its reply. Contents are trimmed.
INSTRUCT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "[INST] {{ m['content'] | trim }} [/INST]{% else %} {{ m['content'] | trim }} {{ eos_token }}"
    "{% endif %}{% endfor %}"
)


def with_template(
    tokenizer: PreTrainedTokenizerFast, template: str, *special: str
) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer with another template and further special tokens."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    tokenizer.add_tokens(list(special), special_tokens=True)
    return tokenizer


def metaspace_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One that puts a mark of a word before every text, with <s> 0 and </s> 1, as Llama 2 has it.

    Newlines are words of their own.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator([*texts, "[INST] \n [/INST]"] * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = INSTRUCT
    return fast


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def reply(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return reply("", tool_calls=[{"id": "c1", "type": "function", "function": function}])


def given(*messages: dict[str, Any], **fields: Any) -> Prompt:
    """A training row whose replies are given."""
    return Prompt("id", "chat", messages, "file", 1, "train", "key", **{"given": True, **fields})


def asked(*messages: dict[str, Any], **fields: Any) -> Prompt:
    """A row that the target is to answer."""
    return given(*messages, given=False, **fields)


def text_of(text: str, **fields: Any) -> Prompt:
    """A row of rendered text whose replies are given."""
    return given(user(text), kind="rendered", **fields)
