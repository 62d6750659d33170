"""A torch that tests were not run with is told, never refused."""

from __future__ import annotations

from typing import Any

import pytest

from effcompile.core.torch_compat import NEWEST, OLDEST, export_guards, untested


@pytest.mark.parametrize(
    "version", ["2.11.0+cu130", "2.13.0", f"{NEWEST[0]}.{NEWEST[1]}.3", "2.14.0a0+git12", "nightly"]
)
def test_a_tested_torch_is_no_news(version: str) -> None:
    assert untested(version) is None


@pytest.mark.parametrize(
    "version", [f"{NEWEST[0]}.{NEWEST[1] + 1}.0", f"{OLDEST[0]}.{OLDEST[1] - 1}.1", "3.0.0"]
)
def test_an_untested_one_is_named_with_the_range_and_the_mend(version: str) -> None:
    said = untested(version)
    assert said is not None
    assert version in said
    assert f"'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'" in said


def test_guards_of_sizes_read_alike_in_every_torch() -> None:
    """2.15 writes `torch.sym_max` where earlier ones write `max`."""

    class Exported:
        _guards_code = ("L['x'].size()[1] == (16 + ((-1)*torch.sym_max(0, torch.sym_min(4, 2))))",)

    exported: Any = Exported()
    assert export_guards(exported) == ("L['x'].size()[1] == (16 + ((-1)*max(0, min(4, 2))))",)
    exported._guards_code = None
    assert export_guards(exported) == ()
