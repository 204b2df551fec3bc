"""Where every token of a reply came from: the pieces that the page colours."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

Kind = Literal["first", "accepted", "corrected", "bonus", "undrafted"]
Piece = tuple[str, Kind, int]

KINDS: dict[Kind, str] = {
    "accepted": "drafted, and accepted by the target",
    "corrected": "the target's own, where the draft was rejected",
    "bonus": "the target's own, after a draft that was accepted whole",
    "undrafted": "the target's own, in a round without a draft",
    "first": "from prefill, before the first round",
}
"""What can be said of a token, in the order of the page's legend."""


def heatmap(
    output_ids: Sequence[int], rounds: Sequence[tuple[int, int]], tokenizer: Any
) -> list[Piece]:
    """(text, kind, place) of each of a reply's R tokens.

    `rounds` are (drafted, accepted) of every round after prefill, as `eval.rows.Output` has them;
    the last one may end before the target's own token. place: 1, 2... in its round, 0 for the
    token of prefill. The texts joined are the decoded reply: a token that only begins a character
    has an empty text, and the token that completes it has the character. Raises ValueError where
    rounds and tokens do not fit together.
    """
    origins = list(_origins(len(output_ids), rounds))
    if len(origins) != len(output_ids):
        raise ValueError(
            f"a reply of {len(output_ids)} tokens has rounds for {len(origins)}: they are not of "
            "one decoding"
        )
    texts = _texts(list(output_ids), tokenizer)
    return [(text, *origin) for text, origin in zip(texts, origins, strict=True)]


def _origins(tokens: int, rounds: Sequence[tuple[int, int]]) -> Iterator[tuple[Kind, int]]:
    if tokens:
        yield "first", 0
    left = tokens - 1
    for drafted, accepted in rounds:
        yield from (("accepted", place) for place in range(1, accepted + 1))
        left -= accepted
        if left > 0:  # cut by its end token or limit, a reply may end on a drafted token
            own: Kind = "undrafted" if not drafted else "bonus"
            yield "corrected" if accepted < drafted else own, accepted + 1
            left -= 1


def _texts(ids: list[int], tokenizer: Any) -> list[str]:
    """Each token's share of the decoded text: what it adds to what is settled before it."""

    def decoded(count: int) -> str:
        return tokenizer.decode(ids[:count], clean_up_tokenization_spaces=False)

    whole, settled, texts = decoded(len(ids)), 0, []
    for count in range(1, len(ids)):
        # Half a character decodes as a replacement mark, which the whole text does not have there.
        part, start = decoded(count), settled
        while settled < min(len(part), len(whole)) and part[settled] == whole[settled]:
            settled += 1
        texts.append(whole[start:settled])
    return [*texts, whole[settled:]] if ids else []
