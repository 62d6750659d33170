"""How what is data becomes words: the report layer, which stands above, is put here by name in
`effcompile/__init__.py`.

That file runs before any other of the package, and so loads neither the report nor what it words: `import
effcompile` is instant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def _nobody(*what: object) -> NoReturn:
    raise AssertionError("effcompile/__init__.py says who words this")


#: The words of an InfeasibleError, and of a Reason.
of_infeasible: Callable[[Any], str] = _nobody
of_reason: Callable[[Any], str] = _nobody
#: Print a Plan (to a console, verbose or not), and SparsityFigures (to a console).
print_plan: Callable[..., None] = _nobody
print_sparsity: Callable[..., None] = _nobody
