"""What a runtime raises is an error of ours that names what failed and says what to do; ours are left as they
are.
"""

from __future__ import annotations

import pytest

from effcompile.core.errors import GuardError, LoweringError
from effcompile.runtime.carry import carried


def raising(error: Exception) -> None:
    raise error


def test_a_result_is_handed_on() -> None:
    assert carried("It", lambda: 3, "Mend it.") == 3


def test_a_runtimes_error_is_told_with_its_first_line_and_the_remedy() -> None:
    with pytest.raises(
        LoweringError, match=r"^It failed with these inputs: ValueError: no such shape\. Mend it\.$"
    ) as told:
        carried("It", lambda: raising(ValueError("no such shape\n  at node 7")), "Mend it.")
    assert isinstance(told.value.__cause__, ValueError)


def test_our_own_error_is_left_as_it_is() -> None:
    with pytest.raises(GuardError, match=r"^another mask$"):
        carried("It", lambda: raising(GuardError("another mask", place="mask")), "Mend it.")
