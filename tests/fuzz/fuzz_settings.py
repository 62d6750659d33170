"""How many cases a fuzzer runs, and with which settings of hypothesis.

In the suite a fuzzer runs the few cases that it names, the same ones every time. `make fuzz` sets
EFFCOMPILE_FUZZ_CASES, the number of cases of each fuzzer: these are drawn anew at every run, and a failing
one is printed so that it can be repeated.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, settings

#: Cases of each fuzzer, as asked for from outside; None in the suite.
ASKED = int(os.environ["EFFCOMPILE_FUZZ_CASES"]) if os.environ.get("EFFCOMPILE_FUZZ_CASES") else None


def cases(default: int, *, most: int | None = None, share: float = 1.0) -> int:
    """The number of cases of one test: `default` in the suite, else its `share` of what was asked for, of
    which `most` are sensible.
    """
    if ASKED is None:
        return default
    return max(1, round(share * (ASKED if most is None else min(ASKED, most))))


def fuzzed(default: int, *, most: int | None = None, share: float = 1.0, **others: Any) -> settings:
    """A decorator beside `@given`: the number of cases, no deadline, and every health check off, for no case
    fails for being slow.

    In the suite a failing case is printed as it is: to make it smaller takes as long as hundreds of cases.
    """
    return settings(
        max_examples=cases(default, most=most, share=share),
        derandomize=ASKED is None,
        deadline=None,
        print_blob=True,
        phases=(Phase.explicit, Phase.generate) if ASKED is None else tuple(Phase),
        suppress_health_check=list(HealthCheck),
        **others,
    )
