"""The commands about effcompile itself: `passes`, `cache` and `doctor`."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from effcompile import console, report
from effcompile.cli.options import AsJson, Verbose
from effcompile.core.errors import UsageError
from effcompile.core.files import cache_folder
from effcompile.core.names import BACKENDS, INFERENCE_PASSES, OPTIONAL, TRAINING_PASSES
from effcompile.core.units import format_bytes


class CacheAction(StrEnum):
    """What to do about the cache."""

    DIR = "dir"
    SIZE = "size"
    CLEAN = "clean"


def passes(verbose: Verbose = False, as_json: AsJson = False) -> None:
    """The passes of --pass and the backends of --backend, and what each does; with -v the options of the
    passes.
    """
    options = _options() if verbose or as_json else {}
    tables = {"inference": INFERENCE_PASSES, "training": TRAINING_PASSES}
    if as_json:
        listed = {
            mode: [
                {"name": n, "does": does, "optional": n in OPTIONAL, "options": options[mode].get(n, {})}
                for n, does in known.items()
            ]
            for mode, known in tables.items()
        }
        console.emit({**listed, "backends": dict(BACKENDS)})
        return
    report.print_passes(tables, BACKENDS, OPTIONAL, options)


def cache(
    action: Annotated[CacheAction, typer.Argument(help="Where it is, how large it is, or remove it.")],
    as_json: AsJson = False,
) -> None:
    """What effcompile measured and compiled here; it is made again where it is missing."""
    folder = cache_folder()
    files = (
        [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        if folder.is_dir()
        else []
    )
    size = sum(path.stat().st_size for path in files)
    if action is CacheAction.CLEAN:
        _clean(folder)
    if as_json:
        console.emit(
            {"dir": str(folder), "files": len(files), "bytes": size, "removed": action is CacheAction.CLEAN}
        )
    elif action is CacheAction.DIR:
        typer.echo(str(folder))
    elif action is CacheAction.SIZE:
        typer.echo(f"{format_bytes(size)} in {len(files)} files: {folder}")
    else:
        typer.echo(f"Removed {format_bytes(size)} in {len(files)} files: {folder}")


def doctor(as_json: AsJson = False) -> None:
    """Run every part on something small and compare it with what is known: what is right here, what is
    missing, what to do.

    Exit status 1 where a part is wrong.
    """
    from dataclasses import asdict

    from effcompile.doctor import examine

    with console.steps(as_json) as steps:
        found = []
        for each in examine():
            found.append(each)
            steps.update("parts", len(found), len(found) + 1)
    if as_json:
        console.emit({"parts": [asdict(each) for each in found]})
    else:
        report.print_findings([(f.part, f.status, f.seen, f.remedy) for f in found])
    if any(each.status == "wrong" for each in found):
        raise typer.Exit(1)


def _clean(folder: Path) -> None:
    """Remove what stands in the cache, and no folder that is something else.

    Raises:
        UsageError: it cannot be removed, or holds what effcompile does not write.
    """
    if not folder.is_dir():
        return
    ours = (
        "calibration-",
        "operators-",
        "fronts-",
        "tiles-",
        "proof-",
        "sensitivity",
        "native",
        "rates-",
        "races",
        "steps",
        "agreements",
        "plans",
        "rehearsed",
        "ranges",
        "sessions",
    )
    strangers = sorted(path.name for path in folder.iterdir() if not path.name.lstrip(".").startswith(ours))
    if strangers:
        named = ", ".join(strangers[:3])
        raise UsageError(
            f"{str(folder)!r} holds what effcompile did not write: {named}. Remove what you want removed "
            "by hand."
        )
    try:
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    except OSError as error:
        raise UsageError(
            f"Cannot remove {str(error.filename or folder)!r}: {error.strerror or error}."
        ) from error


def _options() -> dict[str, dict[str, dict[str, str]]]:
    """Mode → pass → option → default. Loads torch, which the passes are built on."""
    from dataclasses import MISSING, fields

    from effcompile.passes import registered, registered_for_training

    return {
        mode: {
            name: {f.name: str(f.default) for f in fields(kind) if f.default is not MISSING}
            for name, kind in known.items()
        }
        for mode, known in (("inference", registered()), ("training", registered_for_training()))
    }
