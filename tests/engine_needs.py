"""What tests of real engines need; `make test-engines` installs it all, and takes no test away."""

import os
from importlib.util import find_spec

import pytest

VLLM_PYTHON = os.environ.get("DRAFTSMITH_VLLM_PYTHON", "")
"""Of the environment that vLLM has for itself: it pins another transformers."""


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skips where this environment lacks one of `modules`; see `needed`."""
    missing = [name for name in modules if find_spec(name) is None]
    return needed(f"{' and '.join(missing)} of this environment", not missing)


def needs_vllm() -> pytest.MarkDecorator:
    """Skips where nobody says which python has vLLM; see `needed`."""
    return needed("DRAFTSMITH_VLLM_PYTHON, the python that has vLLM", bool(VLLM_PYTHON))


def needed(what: str, there: bool) -> pytest.MarkDecorator:
    """Skips tests, or breaks off the session where DRAFTSMITH_ENGINES says that all is there."""
    reason = f"without {what}: make test-engines sets it up"
    if os.environ.get("DRAFTSMITH_ENGINES") == "required" and not there:
        raise pytest.UsageError(reason)
    return pytest.mark.skipif(not there, reason=reason)
