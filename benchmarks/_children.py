"""One process for each architecture, and what each answers: HF registers pytree classes globally, so a warm
process proves nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from _architectures import ARCHITECTURES


def arguments_of(doc: str | None, timeout: float) -> argparse.ArgumentParser:
    """The options that such a benchmark has; it adds its own."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated names")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds per architecture")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--answer", default="", help=argparse.SUPPRESS)
    return parser


def names_in(parser: argparse.ArgumentParser, only: str) -> list[str]:
    """The architectures that are asked for; ends the process for a name that is none."""
    names = [name for name in only.split(",") if name] or list(ARCHITECTURES)
    unknown = [name for name in names if name not in ARCHITECTURES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}. Known: {', '.join(ARCHITECTURES)}")
    return names


def answer(arguments: argparse.Namespace, row: dict[str, Any]) -> None:
    """Tell the parent what this process found."""
    with open(arguments.answer, "w") as file:
        json.dump(row, file)


def answers(
    script: str, names: Sequence[str], arguments: argparse.Namespace, options: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """What `script` answers for each name, `--jobs` at a time, in the given order; where it does not, its
    `failure`.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}

    def one(name: str) -> dict[str, Any]:
        told = {"name": name, "family": ARCHITECTURES[name].family}
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            command = [sys.executable, script, "--child", name, "--answer", file.name, *options]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=arguments.timeout,
                    check=False,
                    env=environment,
                )
            except subprocess.TimeoutExpired:
                return told | {"failure": f"no result within {arguments.timeout:.0f} s"}
            with contextlib.suppress(json.JSONDecodeError):
                return told | json.load(file)
        last = [line for line in done.stderr.strip().splitlines() if line.strip()][-1:] or ["no output"]
        return told | {"failure": f"not an effcompile error (exit {done.returncode}): {last[0]}"}

    with ThreadPoolExecutor(arguments.jobs) as pool:
        yield from pool.map(one, names)
