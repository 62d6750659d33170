"""The commands that run things here: `run` an artifact, `serve` a generation, `calibrate` this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from effcompile import console
from effcompile.cli.options import AsJson
from effcompile.core.errors import MissingPackageError, UsageError
from effcompile.core.files import TOKENIZERS, found_in
from effcompile.core.findings import TokenRates
from effcompile.core.folders import read_steadily
from effcompile.core.units import format_seconds
from effcompile.ir import saved
from effcompile.ir.plan import Plan


def run(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder that `effcompile optimize -o` wrote.")
    ],
    inputs: Annotated[
        str | None,
        typer.Option(metavar="MODEL.PY", help="Take `inputs` from this file; otherwise generated."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Generation: the text to go on from.")
    ] = None,
    new: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Generation: new tokens at the most.")
    ] = None,
    drafts: Annotated[
        int,
        typer.Option(
            min=0,
            max=32,
            metavar="N",
            help="Generation: tokens drafted from the text before, checked at once.",
        ),
    ] = 0,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Generation: an image of the prompt; may be given several times."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Generation: where tokenizer and image processor are, if not in DIR."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run and time a saved artifact; of a generation, stream the text that follows a prompt."""
    plan = read_steadily(directory, lambda place: Plan.load(place / saved.PLAN))
    if plan.goal.mode == "generation":
        _generate(directory, plan, prompt, (new, drafts), image or [], tokenizer or directory, as_json)
        return
    if prompt is not None or new is not None or drafts or image or tokenizer is not None:
        raise UsageError(
            "--prompt, --new, --drafts, --image and --tokenizer are for a generation, and "
            f"{str(directory)!r} holds a plan of {plan.goal.mode}."
        )
    if plan.goal.mode == "training":
        raise UsageError(
            f"{str(directory / saved.PLAN)!r} plans a training step: there is no artifact to run. Apply it "
            "to the model in your training script: model = effcompile.optimize(model, "
            f"plan={str(directory / saved.PLAN)!r})"
        )
    with console.steps(as_json) as steps:
        from effcompile import compiler
        from effcompile.loader.reading import load

        loaded = None if inputs is None else load(inputs)
        with steps.step("run"):
            ran = compiler.run_artifact(directory, None if loaded is None else (loaded.args, loaded.kwargs))
    planned = plan.measured.seconds if plan.measured else None
    if as_json:
        console.emit(
            {
                "backend": plan.backend,
                "seconds": ran.seconds,
                "planned_seconds": planned,
                "outputs": list(ran.outputs),
            }
        )
        return
    then = "" if planned is None else f" ({format_seconds(planned)} when it was made)"
    console.say(f"{plan.model} on {plan.backend}: {format_seconds(ran.seconds)} per call{then}")
    for output in ran.outputs:
        console.say(f"  {output}")


def _generate(
    directory: Path,
    plan: Plan,
    prompt: str | None,
    tokens: tuple[int | None, int],
    images: list[Path],
    tokenizer: Path,
    as_json: bool,
) -> None:
    """Stream the text that follows a prompt, then the rates of both regimes.

    `tokens`: new ones at the most, and drafted ones at a time.

    Raises:
        UsageError: no prompt, one that is too long, no tokenizer, or images that cannot be read.
    """
    if prompt is None:
        raise UsageError(
            f"{str(directory)!r} holds a plan of generation. Give the text to go on from: --prompt 'Once "
            "upon a time'."
        )
    _refuse_wordless(tokenizer)
    with console.steps(as_json) as steps, steps.step("open"):
        from effcompile.runtime.generation.spoken import speak

        told = speak(directory, tokenizer)
    spoken = told(prompt, *tokens, None if as_json else typer.echo, images)
    if as_json:
        console.emit(spoken)
        return
    rates = (
        "{prompt_tokens} tokens of prompt at {prefill_tokens_per_second:.1f} a second, {new_tokens} new "
        "ones at {decode_tokens_per_second:.1f}"
    )
    drafted = f", {spoken['tokens_per_step']:.2f} a step" if tokens[1] else ""
    console.say(f"\n\n{plan.model} on {plan.backend}: {rates.format(**spoken)}{drafted}")
    for note in plan.notes:
        if isinstance(note, TokenRates):
            console.say(f"  when it was made: {note}")


def _refuse_wordless(folder: Path) -> None:
    """Refuse a folder without any file of a tokenizer, before transformers and the model are opened.

    Raises:
        UsageError: it holds none, or there is none.
    """
    if not folder.is_dir():
        raise UsageError(
            f"--tokenizer {str(folder)!r} is no folder. Give that of the model, with its tokenizer."
        )
    if not found_in(folder, TOKENIZERS):
        raise UsageError(
            f"{str(folder)!r} holds no tokenizer: no tokenizer.json, tokenizer_config.json or vocabulary. "
            "Give the folder of the model that has one: --tokenizer DIR."
        )


def serve(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="A generation that `effcompile optimize -o` wrote.")
    ],
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="N", help="0 takes any that is free.")
    ] = 8000,
    queue: Annotated[
        int, typer.Option(min=0, metavar="N", help="Requests that may wait; more are told to come again.")
    ] = 64,
    prompts: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Last prompts whose caches are kept for those that begin alike."
        ),
    ] = 4,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the tokenizer is, if not in DIR.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a generation over HTTP, by the OpenAI completions protocol; as many requests at once as the
    plan's batch.
    """
    plan = read_steadily(directory, lambda place: Plan.load(place / saved.PLAN))
    if plan.goal.mode != "generation":
        raise UsageError(
            f"{str(directory)!r} holds a plan of {plan.goal.mode}; a plan of generation is served (--mode "
            "generation)."
        )
    _refuse_wordless(tokenizer or directory)
    with console.steps(as_json) as steps, steps.step("open"):
        try:
            from effcompile.serving import app, server
        except ModuleNotFoundError as error:
            if error.name not in ("starlette", "uvicorn"):
                raise
            raise MissingPackageError(
                error.name, "effcompile serve", "pip install 'effcompile[serve]'"
            ) from error

        service = app.opened(directory, tokenizer or directory, queue=queue, prompts=prompts)

    def listening(address: str) -> None:
        url = f"http://{address}/v1/completions"
        if as_json:
            console.emit({"url": url, "model": service.name, "at_once": plan.goal.batch, "queue": queue})
        else:
            typer.echo(
                f"{url}: {service.name}, {plan.goal.batch} requests at once, {queue} more wait. Ctrl+C stops."
            )

    server.run(service, host, port, listening)


def calibrate(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes: seconds instead of minutes.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure this machine once; `--target auto` reads the result."""
    with console.steps(as_json) as steps:
        from effcompile import compiler

        path = compiler.calibrate(quick=quick, progress=steps)
    if as_json:
        console.emit({"path": str(path)})
    else:
        typer.echo(f"Measured this machine; the figures are in {path}")
