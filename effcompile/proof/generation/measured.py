"""What a generation really costs: each regime's seconds beside the model's own, and the allocator's peak over
a whole context.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from effcompile.backends.base import Lowered
from effcompile.backends.torch import TorchLowered
from effcompile.backends.torch.lowered import artifact_bytes
from effcompile.capture.caches import HFCache, as_now, cache_name, new_cache
from effcompile.capture.generation import encoder_output
from effcompile.capture.mends import evaluating
from effcompile.core import torch_compat_memory
from effcompile.core.findings import TokenRates
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because
from effcompile.core.timing import faster_half_median, interleaved
from effcompile.core.types import Forward, HFModel, Kwargs, Outputs
from effcompile.ir.cache import CacheLayout, Growth
from effcompile.ir.figures import Totals
from effcompile.ir.formats import FP32
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.proof.generation.ends import at_the_ends
from effcompile.proof.generation.prompts import LONG, of_two_parts, seconds_of, undecided
from effcompile.runtime.generation.executable import LoweredEncoder
from effcompile.runtime.generation.eye import Eye
from effcompile.runtime.generation.stepper import Stepper
from effcompile.runtime.generation.steps import LoweredStep
from effcompile.search.generation.held import forms_of
from effcompile.search.generation.sight import Sight
from effcompile.sites.parts import embeddings, linears

ORIGINAL = "original"
_ROUNDS = 5
#: What is read beside the tokens, and its bytes: more than caches hold.
_READ, _STREAM = "read", 1 << 27


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of a prefill of the prompt, and of one token behind it; of an encoder before them."""

    prefill: float
    decode: float
    encoder: float = 0.0

    def total(self, goal: Goal) -> float:
        """Of a prompt and all its new tokens."""
        return self.encoder + self.prefill + goal.tokens[2] * self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Interleaved:
    """Seconds of the model itself and of each lowered step, by name; bytes a second of a plain read beside
    their tokens, 0 on a GPU. `read`: tokens of the prompt that the model itself was given.
    """

    each: Mapping[str, Seconds]
    stream: float
    read: int


def compared(
    model: HFModel,
    steps: Mapping[str, LoweredStep],
    goal: Goal,
    source: Mapping[str, torch.Tensor],
    sight: Sight | None = None,
) -> Interleaved:
    """All of them in turn, again and again: on a busy machine their ratios hold.

    `source`: what an encoder is given. `sight`: images of the prompt, where the model takes any.
    """
    _, prompt, _ = goal.tokens
    extra = _extra(model, goal.batch, source)
    runs: dict[str, Any] = {ORIGINAL: partial(_original, model)}
    runs |= {name: Stepper(step, type(model).forward, model.config) for name, step in steps.items()}
    ids = _ids(model, goal, prompt)
    key = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    with evaluating(model), torch.no_grad():
        ready: dict[str, HFCache] = {}
        prefills = {
            name: partial(_prefill, model, run, {key: ids, **extra}, ready, name)
            for name, run in runs.items()
        }
        timers = {name: partial(seconds_of, prefill) for name, prefill in prefills.items()}
        parts = None if extra or sight else of_two_parts(partial(_read, model), model, _layout(steps), ids)
        if parts is not None:
            ready[ORIGINAL] = parts.cache
            timers[ORIGINAL] = partial(getattr, parts, "seconds")
        called = {name: [timer()] for name, timer in timers.items()}
        for name in undecided({name: seconds for name, (seconds,) in called.items()}):
            called[name].append(timers[name]())
        if max(map(max, called.values())) < LONG:
            called, parts = interleaved(prefills, 2, repeats=1), None
        first = {name: min(times) for name, times in called.items()}
        encoders: dict[str, Callable[[], object]] = {ORIGINAL: _encoder(model)} if source else {}
        encoders |= {name: LoweredEncoder(step, tuple(source)) for name, step in steps.items() if source}
        given = _rows(source, goal.batch)
        encoding = {name: partial(encoder, **given) for name, encoder in encoders.items()}
        if sight and sight.given:
            eyes = {name: Eye(model.base_model, step) for name, step in steps.items()}
            eyes[ORIGINAL] = sight.eye
            encoding = {name: partial(eye, sight.given) for name, eye in eyes.items()}
        before = {name: min(times) for name, times in interleaved(encoding, 2, repeats=1).items()}
        decodes: dict[str, Callable[[], object]] = {
            name: partial(
                _decode,
                run,
                {key: ids[:, :1], **extra, cache_name(model): ready[name]},
                as_now(ready[name]),
                itertools.cycle(range(goal.tokens[2])),
            )
            for name, run in runs.items()
        }
        buffer = torch.ones(_STREAM // 4 if model.device.type == "cpu" else 0)
        decodes[_READ] = buffer.sum
        each = {
            name: faster_half_median(times)
            for name, times in interleaved(decodes, _ROUNDS, repeats=1).items()
        }
    return Interleaved(
        each={
            name: Seconds(prefill=first[name], decode=each[name], encoder=before.get(name, 0.0))
            for name in runs
        },
        stream=buffer.nbytes / each[_READ],
        read=parts.tokens if parts else prompt,
    )


def _original(model: HFModel, **given: Any) -> Outputs:
    return model(**given, use_cache=True, return_dict=True)


def _read(model: HFModel, ids: torch.Tensor, cache: HFCache) -> None:
    """The model itself reads a text, behind what the cache holds."""
    _prefill(model, partial(_original, model), {"input_ids": ids}, {}, "", cache)


def _layout(steps: Mapping[str, LoweredStep]) -> CacheLayout:
    """Of a cache as the model has it, which all of them share but for how rows are held."""
    return next(iter(steps.values())).layout


def _prefill(
    model: HFModel, run: Forward, given: Kwargs, ready: dict[str, HFCache], name: str, behind: HFCache = None
) -> None:
    """`ready`: the cache that it leaves, by name, for the tokens behind it. `behind`: what it begins with."""
    cache = new_cache(model) if behind is None else behind
    keep = {"logits_to_keep": 1} if _keeps(model) else {}
    run(**given, **keep, **{cache_name(model): cache})
    _awaited(model.device)
    ready[name] = cache


def _awaited(device: torch.device) -> None:
    """What was asked of a GPU is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ids(model: HFModel, goal: Goal, tokens: int) -> torch.Tensor:
    """A text of so many tokens, where the model is."""
    return torch.ones((goal.batch, tokens), dtype=torch.int64, device=model.device)


def _keeps(model: HFModel) -> bool:
    return "logits_to_keep" in type(model).forward.__code__.co_varnames


def _decode(run: Forward, given: Kwargs, before: Callable[[], None], at: Iterator[int]) -> None:
    """One token more; after as many as are planned the cache is as long as it was at first, which a runtime
    that keeps it takes its time for.
    """
    if next(at) == 0:
        before()
    run(**given)
    _awaited(next(iter(given.values())).device)


def _encoder(model: HFModel) -> Callable[..., Outputs]:
    return partial(model.get_encoder(), return_dict=True)


def _rows(source: Mapping[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
    """The first row of what an encoder is given, so many times."""
    return {name: value[:1].expand(batch, *value.shape[1:]).contiguous() for name, value in source.items()}


def _extra(model: HFModel, batch: int, source: Mapping[str, torch.Tensor]) -> Kwargs:
    """The encoder's output, which a decoder reads."""
    if not source:
        return {}
    with torch.no_grad():
        hidden = _encoder(model)(**_rows(source, batch)).last_hidden_state
    return {"encoder_outputs": encoder_output(hidden)}


def weight_bytes(parts: Mapping[str, Lowered]) -> int:
    """Of all graphs; those of torch share what they hold alike."""
    ours = [part.program for part in parts.values() if isinstance(part, TorchLowered)]
    others = (part.weight_bytes for part in parts.values() if not isinstance(part, TorchLowered))
    return artifact_bytes(*ours) + sum(others)


def peak_bytes(
    stepper: Stepper,
    parts: Mapping[str, Lowered],
    model: HFModel,
    goal: Goal,
    source: Mapping[str, torch.Tensor],
    sight: Sight | None = None,
) -> int:
    """Most bytes of weights, cache and workspace: of a prompt of the whole context (see ends.py), with its
    images encoded and held, and of its last token alone, or of a first one where the cache cannot be cut.

    torch's allocator is read; of another runtime, which has none to read, its own process's peak in a call at
    the end of the context.
    """
    weights = weight_bytes(parts) + (sight.weight_bytes if sight else 0)
    context = goal.tokens[0]
    key, name = stepper.step.boundary.tokens, stepper.step.boundary.cache
    keep = {"logits_to_keep": 1} if stepper.step.boundary.rows else {}
    given = _rows(source, goal.batch)

    def whole() -> None:
        extra = {"encoder_outputs": LoweredEncoder(stepper.step, tuple(source))(**given)} if source else {}
        cache, ids = new_cache(model), _ids(model, goal, context)
        if sight and sight.given:
            pictures = sight.pictures()  # held to the end
            made = Eye(model.base_model, stepper.step)(pictures)
            ids, seen = sight.beside(ids, made, stepper.step.boundary.axes)
            extra |= seen
        reader = stepper if sight or source else at_the_ends(stepper, model, context)
        reader(**{key: ids, name: cache}, **extra, **keep)
        extra = {} if sight else extra
        if all(leaf.growth in (Growth.FULL, Growth.SOURCE) for leaf in stepper.step.layout):
            cache.crop(-1)
        else:
            cache = new_cache(model)
        stepper(**{key: _ids(model, goal, 1), name: cache}, **extra, **keep)

    if isinstance(parts["step"], TorchLowered):  # it has run: what a first call makes and keeps is there
        with torch_compat_memory.watched_memory(model.device.type) as peak:
            whole()
        return weights + peak()
    found = _of_runtime(stepper, parts["step"], model, goal, _extra(model, goal.batch, source))
    held = sight.kept_bytes if sight else 0
    return weights + held + (0 if found is None else found - parts["step"].weight_bytes)


def _of_runtime(stepper: Stepper, lowered: Lowered, model: HFModel, goal: Goal, extra: Kwargs) -> int | None:
    """A call at the end of the context, in a process of its own; with the cache that enters it."""
    context, cache = goal.tokens[0], new_cache(model)
    chunk = min(stepper.step.room.chunk, context)
    key, keep = stepper.step.boundary.tokens, {"logits_to_keep": 1} if stepper.step.boundary.rows else {}
    name = stepper.step.boundary.cache
    if context > chunk:
        stepper(**{key: _ids(model, goal, context - chunk), name: cache}, **extra, **keep)
    flat = stepper.flat(_ids(model, goal, chunk), cache, extra)
    found = lowered.peak_bytes(flat)
    return None if found is None else found + sum(tensor.nbytes for tensor in flat)


def told(
    plan: Plan,
    found: Interleaved,
    name: str,
    goal: Goal,
    lowered: LoweredStep,
    parts: Mapping[str, Lowered],
    program: Program,
    sight: Sight | None = None,
) -> Plan:
    """The plan with what was measured under this name, in figures and in words.

    `program`: the step as captured. `sight`: images of the prompt.

    What an earlier run measured, of a plan that was saved, goes: its rates, and what was said behind them.
    """
    mine, theirs = found.each[name], found.each[ORIGINAL]
    context, prompt, new = goal.tokens
    peak = plan.measured.peak_bytes if plan.measured else None
    error = max((check.error for check in plan.checks), default=0.0)
    weights = weight_bytes(parts) + (sight.weight_bytes if sight else 0)
    totals = Totals(seconds=mine.total(goal), weight_bytes=weights, peak_bytes=peak, error=error)
    cache = lowered.layout.nbytes(context, goal.batch)
    held = lambda tokens: lowered.layout.nbytes(tokens, goal.batch)  # noqa: E731
    read = parts["step"].weight_bytes - _looked_up(program, plan) + held(min(context, prompt + new // 2))
    share = read / mine.decode / found.stream if found.stream else 0.0
    beside = (
        Because(
            "that is {share} of a plain read of memory measured beside it: {bytes} a second",
            (share, int(found.stream)),
        ),
    )
    at = [max(1, context * quarter // 4) for quarter in (1, 2, 4)]
    notes = (
        TokenRates(
            prefill=goal.batch * prompt / mine.prefill,
            prefill_before=goal.batch * prompt / theirs.prefill,
            decode=goal.batch / mine.decode,
            decode_before=goal.batch / theirs.decode,
        ),
        *(
            [
                Because(
                    "the model itself read {} of the prompt's {} tokens, at its beginning and its end; its "
                    "time for the rest follows from these",
                    (found.read, prompt),
                )
            ]
            if found.read < prompt
            else []
        ),
        Because(
            "a token reads {bytes} of weights and cache: {bytes} a second",
            (int(read), int(read / mine.decode)),
        ),
        *(beside if found.stream else ()),
        *(
            [
                Because(
                    "encoding the images of a prompt takes {seconds}; the model itself {seconds}"
                    if sight
                    else "the encoder takes {seconds} of the time; that of the model itself {seconds}",
                    (mine.encoder, theirs.encoder),
                )
            ]
            if mine.encoder
            else []
        ),
        Because("cache of {} tokens: {} bytes", (context, cache)),
        *_held(lowered.layout),
        *(
            [Because("of the cache {} bytes are states, of one size whatever the context", (states,))]
            if (states := lowered.layout.state_bytes(goal.batch))
            else []
        ),
        Because(
            "weights and cache at {} tokens of context {bytes}, at {} {bytes}, at {} {bytes}",
            tuple(figure for tokens in at for figure in (tokens, weights + held(tokens))),
        ),
    )
    baseline = replace(plan.baseline, seconds=theirs.total(goal), peak_bytes=None)
    planned = itertools.takewhile(lambda note: not isinstance(note, TokenRates), plan.notes)
    return replace(plan, measured=totals, measured_baseline=baseline, notes=(*planned, *notes))


def _held(layout: CacheLayout) -> Iterator[Because]:
    """In how many layers what is held in which form, where some of it is not as the model has it."""
    forms = forms_of(layout)
    rows = [leaf for leaf in layout if leaf.growth in (Growth.FULL, Growth.WINDOW)]
    of_layers: dict[tuple[str, str], list[str]] = {}  # (layer, form) → what of it
    for leaf in rows:
        layer, _, side = leaf.name.rpartition(".")
        of_layers.setdefault((layer, forms[leaf.site].name), []).append(side)
    counts = Counter((" and ".join(sides), form) for (_, form), sides in of_layers.items())
    for (sides, form), count in counts.items() if any(leaf.held for leaf in rows) else ():
        yield Because("cache: {name} of {} layers in {name}", (sides, count, form))


def _looked_up(program: Program, plan: Plan) -> int:
    """Bytes of tables that a token reads a row of, and no product all."""
    forms = plan.forms()
    held = lambda site: (forms[site].weights if site in forms else None) or FP32  # noqa: E731
    multiplied = {_storage(program, site.weight) for site in linears(program) if held(site.site) == FP32}
    total = 0
    for site in embeddings(program):
        own = held(site.site) != FP32
        if own or _storage(program, site.weight) not in multiplied:
            table = program.tensor(site.weight)
            total += (
                held(site.site).stored_bytes(site.count, site.width) if own or table is None else table.nbytes
            )
    return total


def _storage(program: Program, weight: fx.Node) -> int:
    value = program.tensor(weight)
    return -1 if value is None else value.untyped_storage()._cdata
