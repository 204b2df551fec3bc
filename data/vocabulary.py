"""Whether two tokenizers mean the same by their ids, whatever their sizes (B104, B105)."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..configs.errors import UserError
from .chat import tokenizer_name

_SHOWN = 3  # extra tokens that a note names


@dataclass(frozen=True)
class SharedTokens:
    """Two vocabularies of which one begins with the other.

    shared: ids 0 to `shared - 1` mean the same to both, and no other id can be drafted; note: which
    tokens only one of the two knows, "" where both know the same.
    """

    shared: int
    note: str


def same_tokens(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> SharedTokens:
    """Compare what the ids of a draft mean with what they mean to its target, token by token.

    Padding rows of a head or an embedding belong to no tokenizer and play no part. Either side may
    know more tokens at its end: the target's are never proposed, the draft's have to be masked.

    Raises:
        UserError: an id that both should know means something else, or nothing, to one of them;
            names the first such id and both tokens.
    """
    theirs, ours = _tokens(target), _tokens(draft)
    shared = min(_size(theirs), _size(ours))
    for token_id in range(shared):
        a, b = theirs.get(token_id), ours.get(token_id)
        if a != b:
            raise UserError(
                f"the tokenizer of the draft ({tokenizer_name(draft)}) is another than that of the "
                f"target ({tokenizer_name(target)}): id {token_id} is {_said(a)} to the target "
                f"and {_said(b)} to the draft; a draft must have been made for the target's "
                "tokenizer"
            )
    notes = [_extra("target", theirs, shared), _extra("draft", ours, shared)]
    return SharedTokens(shared, "".join(notes))


def _tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Token strings by id, those of added and special tokens included."""
    return {token_id: token for token, token_id in tokenizer.get_vocab().items()}


def _size(tokens: dict[int, str]) -> int:
    return max(tokens, default=-1) + 1


def _said(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def _extra(side: str, tokens: dict[int, str], shared: int) -> str:
    """What a side knows beyond the shared ids; only one side can."""
    more = [tokens[i] for i in sorted(tokens) if i >= shared]
    if not more:
        return ""
    names = ", ".join(repr(token) for token in more[:_SHOWN])
    names += ", ..." if len(more) > _SHOWN else ""
    count = f"{len(more)} token{'s' if len(more) > 1 else ''}"
    return f"only the {side} knows the last {count} ({names}): never drafted"
