"""Drafters of the embedded target, each trained once for all engines."""

from collections.abc import Callable

import pytest
from engine_serving import Trained, train_drafter


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    """`trained(family)`: a drafter of it."""
    made: dict[str, Trained] = {}

    def make(family: str) -> Trained:
        if family not in made:
            made[family] = train_drafter(family, tmp_path_factory.mktemp(family))
        return made[family]

    return make
