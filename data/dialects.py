"""How each kind of server is asked for a reply, and what it tells of one.

Prompts are sent as token ids everywhere, so that no server renders or tokenises them. Every option
that changes what is drawn is sent, also where it is off: servers have defaults of their own, some
from the model's folder. vLLM 0.32 and llama.cpp were run; SGLang's is written after its sources.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..configs.errors import UserError
from .gather import Request
from .warp import Law

Row = list[tuple[int, float]]
"""(token, log-probability) pairs told for one position."""


@dataclass(frozen=True)
class Told:
    """A reply as a server tells it.

    ids: its tokens, with the end token where the server gives that away; None where only `text` is
    told. finish: the server's own word. top: a row for each token, or None.
    """

    ids: list[int] | None
    text: str
    finish: str
    top: list[Row] | None = None


@dataclass(frozen=True)
class Query:
    """What a reply is asked with. top: log-probabilities of each position; 0 for none."""

    request: Request
    model: str
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    top: int

    @property
    def seed(self) -> int:
        """The request's seed in the bits that every server takes."""
        return self.request.seed % (1 << 31)


@dataclass(frozen=True)
class Dialect:
    """One kind of server. path: of completions, below the address if it has no leading slash."""

    name: str
    path: str
    body: Callable[[Query], dict[str, Any]]
    read: Callable[[dict[str, Any]], Told]
    truncations: tuple[str, ...]
    """Those it has."""
    apart: tuple[frozenset[str], ...] = ()
    """Those that it applies together in another order than transformers, to another effect."""
    coldest: float = 0.0
    """Lowest temperature above 0 that it leaves as it is."""

    def check(self, law: Law, address: str) -> None:
        """Raises `UserError` for a law that such a server does not draw from."""
        asked = {"top_k": law.top_k > 0, "top_p": law.top_p < 1, "min_p": law.min_p > 0}
        used = {name for name, on in asked.items() if on}
        used |= {"typical_p"} if law.typical_p < 1 else set()
        why = ""
        if missing := sorted(used - set(self.truncations)):
            why = f"has no {missing[0]} that is known to mean the same"
        elif together := [" with ".join(sorted(pair)) for pair in self.apart if pair <= used]:
            why = f"applies {together[0]} in another order, which is another law"
        elif 0 < law.temperature < self.coldest:
            why = f"knows no temperature between 0 and {self.coldest:g}"
        if why:
            raise UserError(
                f"the server at {address} ({self.name}) cannot answer under {law.label}: it {why}; "
                "take another law, or collect in process (collect.server: null)"
            )


def _openai_body(query: Query) -> dict[str, Any]:
    """What any server of the protocol takes, and vLLM's ways of asking for token ids."""
    law = query.request.law
    return {
        "model": query.model,
        "prompt": list(query.request.ids),
        "max_tokens": query.max_new_tokens,
        "temperature": law.temperature,
        "top_p": law.top_p,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": query.seed,
        "logprobs": query.top,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,  # what is told as text alone is tokenised again
    }


def _vllm_body(query: Query) -> dict[str, Any]:
    law = query.request.law
    own = {
        "top_k": law.top_k or -1,
        "min_p": law.min_p,
        "repetition_penalty": 1.0,
        # Together: the end tokens are the target's, not those of the server's configuration.
        "ignore_eos": True,
        "stop_token_ids": list(query.eos_ids),
    }
    # Where no distributions are wanted, none need be computed: the ids come without.
    return {**_openai_body(query), **own, "logprobs": query.top or None}


def _openai_read(reply: dict[str, Any]) -> Told:
    choice = reply["choices"][0]
    told = choice.get("logprobs") or {}
    ids = choice.get("token_ids")
    if ids is None:
        ids = [_named(token) for token in told.get("tokens") or [None]]
    rows = [_row(row) for row in told.get("top_logprobs") or []]
    named = None not in ids
    return Told(
        ids=ids if named else None,
        text=choice["text"],
        finish=str(choice["finish_reason"]),
        top=rows if named else None,
    )


def _row(row: dict[str, float] | None) -> Row:
    named = ((_named(token), float(log_p)) for token, log_p in (row or {}).items())
    return [(token, log_p) for token, log_p in named if token is not None]


def _named(token: str | None) -> int | None:
    """The id in "token_id:19556", None of any other text."""
    head, _, number = (token or "").partition(":")
    return int(number) if head == "token_id" and number.isdigit() else None


def _llama_body(query: Query) -> dict[str, Any]:
    law = query.request.law
    return {
        "prompt": list(query.request.ids),
        "n_predict": query.max_new_tokens,
        "temperature": law.temperature,
        "top_k": law.top_k,
        "top_p": law.top_p,
        "min_p": law.min_p,
        # Its own order divides by the temperature last, and some builds penalise repetition.
        "samplers": ["temperature", "top_k", "top_p", "min_p"],
        "seed": query.seed,
        "n_probs": query.top,
        "post_sampling_probs": False,  # of the model, at temperature 1, not of what is left to draw
        "return_tokens": True,
        "cache_prompt": True,
    }


def _llama_read(reply: dict[str, Any]) -> Told:
    rows = [
        [(int(best["id"]), float(best["logprob"])) for best in place["top_logprobs"]]
        for place in reply.get("completion_probabilities") or []
    ]
    finish = {"eos": "stop", "limit": "length"}.get(reply["stop_type"], reply["stop_type"])
    return Told(reply["tokens"], reply["content"], finish, rows)


def _sglang_body(query: Query) -> dict[str, Any]:
    law = query.request.law
    return {
        "input_ids": list(query.request.ids),
        "sampling_params": {
            "max_new_tokens": query.max_new_tokens,
            "temperature": law.temperature,
            "top_k": law.top_k or -1,
            "top_p": law.top_p,
            "min_p": law.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "sampling_seed": query.seed,
            "stop_token_ids": list(query.eos_ids),
        },
        "return_logprob": query.top > 0,
        "top_logprobs_num": query.top,
    }


def _sglang_read(reply: dict[str, Any]) -> Told:
    about = reply["meta_info"]
    rows = [
        [(int(token), float(log_p)) for log_p, token, *_ in place or []]
        for place in about.get("output_top_logprobs") or []
    ]
    finish = about["finish_reason"]
    return Told(reply["output_ids"], reply["text"], str(finish and finish["type"]), rows)


def _pairs(*pairs: Sequence[str]) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(pair) for pair in pairs)


ALL = ("top_k", "top_p", "min_p")
OTHER = Dialect("no known kind", "completions", _openai_body, _openai_read, ("top_p",))
DIALECTS = {
    "vllm": Dialect(
        "vLLM", "completions", _vllm_body, _openai_read, ALL, _pairs(("min_p", "top_p")), 0.01
    ),
    "llamacpp": Dialect("llama.cpp", "/completion", _llama_body, _llama_read, ALL),
    "sglang": Dialect(
        "SGLang", "/generate", _sglang_body, _sglang_read, ALL, _pairs(("top_k", "top_p"))
    ),
}
"""By what the server says it is owned by in its list of models."""
