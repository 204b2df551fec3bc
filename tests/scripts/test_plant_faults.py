"""The faults to plant fit the code as it is."""

from pathlib import Path

import pytest

from draftsmith.scripts.plant_faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.claim)
def test_the_place_of_every_fault_is_there_once(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.right) == 1
    changed = text.replace(fault.right, fault.wrong)
    assert changed != text
    compile(changed, fault.file, "exec")


def test_the_tests_that_should_see_them_are_there() -> None:
    named = {test for fault in FAULTS for test in fault.tests}
    assert all(Path(ROOT / test).exists() for test in named)
