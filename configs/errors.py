"""What a user did wrong, in one sentence they can act on."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input from outside: what, where, and what would be accepted.

    The command line prints the message without a traceback and exits with 2.
    """


class Unfinished(UserError):
    """A time limit came first; the same command goes on."""


class NotSent(UserError):
    """What was to be sent is whole on this machine, and did not reach where it was sent to."""


class OptionError(ValueError):
    """One option is out of range. `configs.load.parse` adds the section and the file.

    Args:
        option: name of the dataclass field.
        value: what it was set to.
        accepted: what it may be, completing "must be ...".
    """

    def __init__(self, option: str, value: object, accepted: str) -> None:
        super().__init__(f"'{option}' must be {accepted}, not {value!r}")
        self.option = option
        self.value = value
        self.accepted = accepted


def require(ok: bool, option: str, value: object, accepted: str) -> None:
    """Raise `OptionError` unless `ok`. Write `ok` so that NaN makes it false."""
    if not ok:
        raise OptionError(option, value, accepted)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint to append to an error: the nearest of `choices`, or all of them.

    Dotted words are compared by their last part: the sections before it are common to all
    choices and would make every pair look alike.

    Returns:
        " (did you mean 'x'?)", or " (known: a, b)", or "" where there are no choices.
    """
    by_leaf = {choice.rpartition(".")[2]: choice for choice in choices}
    near = difflib.get_close_matches(word.rpartition(".")[2], by_leaf, n=1)
    if near:
        return f" (did you mean '{by_leaf[near[0]]}'?)"
    return f" (known: {', '.join(by_leaf.values())})" if by_leaf else ""
