"""Random cases as long as one likes: `python tests/fuzz/soak.py training --seed 7 --models 100 --failures
FOLDER`.

Prints what was done with its counts, and the processor's seconds of a case. A failing model is written into
the folder as an expression that makes it again (`--again FILE`), and the next ones are run. What inference
refused in words is written beside.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import tempfile
import time
import traceback
import unittest
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("EFFCOMPILE_FUZZ_CASES", "1")  # as many settings of a model as `make fuzz` has

import inference_models
import test_inference_fuzz
import test_training_fuzz
import torch
import training_models
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

Check = Callable[[Any, Any, Counter[str]], None]


@dataclass(frozen=True)
class Fuzzer:
    """What is drawn, and what is done with it, within a context that is entered once."""

    drawn: st.SearchStrategy[tuple[Any, Any]]
    check: Check
    quick: Callable[[Path], contextlib.AbstractContextManager[None]]


FUZZERS = {
    "training": Fuzzer(
        st.tuples(training_models.MODELS, st.lists(training_models.LEVERS, min_size=2, max_size=4)),
        test_training_fuzz.check,
        test_training_fuzz.quick,
    ),
    **{
        backend: Fuzzer(
            inference_models.drawn((backend,), 10, least=4),
            test_inference_fuzz.check,
            lambda folder: test_inference_fuzz.quick(),
        )
        for backend in ("torch-eager", *test_inference_fuzz.OTHERS)
    },
}


def main() -> None:
    arguments = parsed()
    arguments.failures.mkdir(parents=True, exist_ok=True)
    test_inference_fuzz.REFUSED.addHandler(
        logging.FileHandler(arguments.failures / f"refused-{arguments.kind}.txt", delay=True)
    )
    test_inference_fuzz.REFUSED.setLevel(logging.INFO)
    test_inference_fuzz.REFUSED.propagate = False
    fuzzer, tally = FUZZERS[arguments.kind], Counter[str]()
    with tempfile.TemporaryDirectory() as cache, fuzzer.quick(Path(cache)):
        if arguments.again is not None:
            again(evaluated(arguments.again.read_text().splitlines()[0]), fuzzer, tally)
        else:
            many(arguments, fuzzer, tally)


def many(arguments: argparse.Namespace, fuzzer: Fuzzer, tally: Counter[str]) -> None:
    """So many models of one seed, none of them twice; prints one line of JSON."""
    start, seen = time.process_time(), set[str]()

    @seed(arguments.seed)
    @settings(
        max_examples=arguments.models,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=fuzzer.drawn)
    def run(drawn: tuple[Any, Any]) -> None:
        if arguments.seconds is not None and time.process_time() - start > arguments.seconds:
            raise unittest.SkipTest  # the one thing that ends hypothesis without a failure
        if repr(drawn) in seen:
            return
        seen.add(repr(drawn))
        try:
            fuzzer.check(*drawn, tally)
        except Exception:
            tally["failures"] += 1
            name = f"{arguments.kind}-{arguments.seed}-{tally['failures']}.txt"
            (arguments.failures / name).write_text(f"{drawn!r}\n{traceback.format_exc()}")

    with contextlib.suppress(unittest.SkipTest):
        run()
    cases = sum(count for name, count in tally.items() if name.endswith(": cases"))
    spent = time.process_time() - start
    print(
        json.dumps(
            {
                "kind": arguments.kind,
                "seed": arguments.seed,
                "seconds_per_case": round(spent / max(1, cases), 3),
                **tally,
            }
        )
    )


def again(case: tuple[Any, Any], fuzzer: Fuzzer, tally: Counter[str]) -> None:
    """One model once more; within hypothesis, for the fuzzers note what they do."""

    @settings(
        max_examples=1,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn=st.just(case))
    def run(drawn: tuple[Any, Any]) -> None:
        fuzzer.check(*drawn, tally)

    run()
    print(json.dumps(tally))


def evaluated(text: str) -> tuple[Any, Any]:
    """A model and its settings, from how they were printed."""
    known = {"torch": torch, **vars(training_models), **vars(inference_models)}
    found: tuple[Any, Any] = eval(text, known)
    return found


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=sorted(FUZZERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument(
        "--seconds", type=float, help="of the processor, after which no further model is begun"
    )
    parser.add_argument("--failures", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--again", type=Path, help="a file of a failure: its model is run again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
