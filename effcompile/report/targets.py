"""Print the machines that we have figures of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from effcompile.core.units import format_bytes
from effcompile.machine.target import Target
from effcompile.report.figures import NONE
from effcompile.report.page import STRONG, Column, Page, Row

_DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "int4")


def targets_table(targets: Iterable[Target], console: Console | None = None, verbose: bool = False) -> None:
    """One row per target; peaks in TFLOP/s (TOP/s for integers), bandwidth in GB/s.

    Verbose: each figure's source.
    """
    page, listed = Page(console), list(targets)
    dtypes = _dtypes(listed)
    columns = [Column(header="target", style=STRONG, fit="cut"), Column(header="memory", right=True)]
    columns.append(Column(header="GB/s", right=True))
    columns += [Column(header=name, group="peak, TFLOP/s", right=True) for name in dtypes]
    page.table(columns, [_row(page, target, dtypes, verbose) for target in listed])


def _dtypes(targets: Sequence[Target]) -> list[str]:
    """dtypes that any target has, the usual ones first."""
    found = dict.fromkeys(name for target in targets for name in target.peak_flops)
    return [*(d for d in _DTYPES if d in found), *(d for d in found if d not in _DTYPES)]


def _row(page: Page, target: Target, dtypes: Sequence[str], verbose: bool) -> Row:
    peaks = [_tera(target.peak_flops.get(dtype)) for dtype in dtypes]
    below = []
    if verbose:
        wrapped = [target.describe(), *(f"{name}: {source}" for name, source in target.sources.items())]
        below = [
            line.plain if i == 0 else f"  {line.plain}"
            for text in wrapped
            for i, line in enumerate(page.wrap(text, page.width - 8))
        ]
    memory = format_bytes(target.memory_bytes)
    return Row(cells=[target.name, memory, f"{target.memory_bandwidth / 1e9:.0f}", *peaks], below=below)


def _tera(flops: float | None) -> str:
    if flops is None:
        return NONE
    tera = flops / 1e12
    return f"{tera:.0f}" if tera >= 100 else f"{tera:.1f}" if tera >= 10 else f"{tera:.2f}"
