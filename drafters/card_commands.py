"""What a model card says about serving: the engines that read a layout, and the commands."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .formats.eagle3_speculators import FOLDER

UNTRACKED = {"enable_weights_track": False}
"""What the loader of vLLM is told of Medusa heads with a reduced vocabulary."""


class Served(NamedTuple):
    """A draft to be served: the Hub names of its target and of its own folder, tokens of a round,
    whether it drafts some tokens of the vocabulary alone, what of it engines do not read, by their
    names, and whether it lies in the layout of the speculators library, too."""

    base_model: str
    repo_id: str
    gamma: int
    reduced: bool
    without: Mapping[str, str]
    speculators: bool = False


class Serving(NamedTuple):
    """library: the Hub's library_name; section: how it is served; sampled: whether vLLM draws
    drafts when it is told to; engines: those that are named, as preflight calls them."""

    library: str
    section: Callable[[Served], str]
    sampled: bool
    engines: tuple[str, ...]


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.strip()}\n```"


def _vllm(method: str, served: Served, *options: str, **more: Any) -> str:
    speculative = {
        "method": method,
        "model": served.repo_id,
        "num_speculative_tokens": served.gamma,
        **more,
    }
    told = (f"--speculative-config '{json.dumps(speculative)}'", *options)
    return _fenced("bash", f"vllm serve {served.base_model} {' '.join(told)}")


def _sampled_by_vllm(method: str, served: Served) -> str:
    text = _vllm(method, served, draft_sample_method="probabilistic")
    return _unless("vLLM", served, text)


def _unless(engine: str, served: Served, text: str) -> str:
    """How the engine serves it, or why it does not."""
    what = served.without.get(engine)
    return f"{engine}:\n\n{text}" if what is None else f"Not {engine}, which does not read {what}."


def _sglang(algorithm: str, served: Served, *options: str) -> str:
    lines = [
        f"python -m sglang.launch_server --model-path {served.base_model}",
        f"--speculative-algorithm {algorithm} --speculative-draft-model-path {served.repo_id}",
        *options,
    ]
    return _unless("SGLang", served, _fenced("bash", " \\\n  ".join(lines)))


def _eagle3(served: Served) -> str:
    """In SGLang a chain: one child a step, and the verified token besides the drafted ones."""
    chain = (
        f"--speculative-num-steps {served.gamma} --speculative-eagle-topk 1",
        f"--speculative-num-draft-tokens {served.gamma + 1}",
    )
    parts = [_sampled_by_vllm("eagle3", served), _sglang("EAGLE3", served, *chain)]
    if served.speculators and "vLLM" not in served.without:
        parts.append(_speculators(served))
    return "\n\n".join(parts)


def _speculators(served: Served) -> str:
    """vLLM takes no folder within a repository of the Hub."""
    lines = (
        f"hf download {served.repo_id} --include '{FOLDER}/*' --local-dir draft",
        f"vllm serve draft/{FOLDER}",
    )
    return (
        f"vLLM by the folder `{FOLDER}` alone, which names the target and γ = {served.gamma}, and "
        "drafts greedily:\n\n" + _fenced("bash", "\n".join(lines))
    )


def _dflash(served: Served) -> str:
    """SGLang takes the length of a block from the drafter; vLLM makes it one longer than a round,
    so that a round of another length would be another draft."""
    vllm = _sampled_by_vllm("dflash", served)
    if served.reduced:
        return f"{vllm}\n\nNot SGLang, which would draft with the target's head."
    return f"{vllm}\n\n{_sglang('DFLASH', served)}"


def _transformers(served: Served) -> str:
    """The length and the stop rule of transformers' assistant live on the assistant's config."""
    text = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{served.base_model}")
target = AutoModelForCausalLM.from_pretrained("{served.base_model}")
draft = AutoModelForCausalLM.from_pretrained("{served.repo_id}")
draft.generation_config.num_assistant_tokens = {served.gamma}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0.0

messages = [{{"role": "user", "content": "Why is the sky blue?"}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)
reply = target.generate(**inputs, assistant_model=draft, do_sample=True, max_new_tokens=128)
print(tokenizer.decode(reply[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""
    own = "transformers (samples the draft by the same law as the target):"
    vllm = _sampled_by_vllm("draft_model", served)
    return f"{own}\n\n{_fenced('python', text)}\n\n{vllm}"


def _medusa(served: Served) -> str:
    """vLLM 0.32 makes a weight of the map of a reduced vocabulary, and misses it among those that
    it loaded."""
    untracked = f"--model-loader-extra-config '{json.dumps(UNTRACKED)}'"
    options = (untracked,) if served.reduced else ()
    return (
        "vLLM up to 0.32, which always takes the best token of each head: at T > 0 a draft is "
        "accepted with probability p(argmax q), and the acceptance above belongs to drafts that "
        "are *sampled*. No later version reads it, nor do SGLang, llama.cpp or transformers.\n\n"
        + _vllm("medusa", served, *options)
    )


def _mlp_speculator(served: Served) -> str:
    return (
        "vLLM's V0 engine alone, up to 0.9: speculative decoding was removed from it with 0.10, "
        "and no later version reads this layout, nor do SGLang, llama.cpp or transformers. For "
        "that engine:\n\n" + _vllm("mlp_speculator", served)
    )


SERVING: dict[str, Serving] = {
    "transformers": Serving("transformers", _transformers, True, ("transformers", "vllm")),
    "eagle3": Serving("draftsmith", _eagle3, True, ("vllm", "sglang")),
    "dflash": Serving("draftsmith", _dflash, True, ("vllm", "sglang")),
    "medusa": Serving("draftsmith", _medusa, False, ("vllm",)),
    "mlp_speculator": Serving("draftsmith", _mlp_speculator, False, ()),
}
"""By layout: those that an engine reads."""
