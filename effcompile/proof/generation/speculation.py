"""What drafts gain: greedy text behind the calibration prompts, by each number of drafts and by none.

A step of n drafts gives 1 + a tokens, a of them accepted; its seconds grow little with n as long as weights
are what it reads. So both are of the text and of the machine, and are measured by generate() itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from transformers.generation.streamers import BaseStreamer

from effcompile.backends.torch import TorchLowered
from effcompile.core import torch_compat_memory
from effcompile.core.cost import Cost
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because, OverBudget, Reason, Unsupported
from effcompile.core.timing import faster_half_median, interleaved
from effcompile.ir.plan import Decision, Declined
from effcompile.passes.speculate import KIND, LOOK_UP, NONE, SITE, Speculate, option_of
from effcompile.runtime.generation.executable import GenerationExecutable

#: Prompts, new tokens of each at the most, and rounds in which the best is compared with none.
_PROMPTS, _NEW, _ROUNDS = 2, 64, 3
#: Drafts are taken only where they gain more than this share.
_WORTH = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculated:
    """What was decided, and what was not taken."""

    decision: Decision | None = None
    declined: tuple[Declined, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spoken:
    """Greedy text: seconds of a new token, new tokens of a step, and the tokens."""

    seconds: float
    per_step: float
    text: tuple[int, ...]


class _Steps(BaseStreamer):
    """Counts the steps that gave tokens; the prompt is what is put first."""

    def __init__(self) -> None:
        self.count = -1

    def put(self, value: torch.Tensor) -> None:
        """The prompt, or what a step gave."""
        self.count += 1

    def end(self) -> None:
        """Nothing is held back."""


def speculated(
    executable: GenerationExecutable,
    texts: Sequence[torch.Tensor],
    goal: Goal,
    drafts: Sequence[int],
    *,
    keep: bool,
) -> Speculated:
    """The fastest number of drafts, none among them.

    Args:
        executable: the plan carried out, without drafts.
        texts: token ids (rows, tokens); the first half of a row is a prompt.
        goal: its memory holds with drafts, too.
        drafts: the numbers that are tried.
        keep: one is taken however fast it is, as a saved plan says so.
    """
    if (reason := _cannot(executable, goal)) is not None:
        return Speculated(declined=(_declined(LOOK_UP, reason),))
    prompts = [text[at : at + 1, : text.shape[1] // 2] for text in texts for at in range(len(text))]
    prompts = prompts[:_PROMPTS]
    room = goal.tokens[0] - max(prompt.shape[1] for prompt in prompts)
    run = partial(_spoken, executable, prompts, max(1, min(goal.tokens[2], _NEW, room)))
    none, fit, declined = run(0), dict[int, _Spoken](), []
    for count in drafts:
        if (over := _over(executable, goal, count)) is not None:
            declined.append(_declined(option_of(count), over))
        elif (found := run(count)).text != none.text:
            reason = Because("its text is another one: a step of several tokens rounds otherwise")
            declined.append(_declined(option_of(count), reason))
        else:
            fit[count] = found
    if not fit:
        return Speculated(declined=tuple(declined))
    best = min(fit, key=lambda count: fit[count].seconds)
    times = interleaved({NONE: lambda: run(0), LOOK_UP: lambda: run(best)}, _ROUNDS, repeats=1)
    before, after = (faster_half_median(times[name]) / len(none.text) for name in (NONE, LOOK_UP))
    taken = best if keep or after * (1 + _WORTH) < before else 0
    for count, found in fit.items():
        if count != taken:
            share = (after if count == best else found.seconds) / before
            reason = Because("{} tokens a step; {share} of the time of one a step", (found.per_step, share))
            declined.append(_declined(option_of(count), reason))
    decision = _decision(taken, fit[taken], after / before) if taken else None
    return Speculated(decision=decision, declined=tuple(declined))


def _cannot(executable: GenerationExecutable, goal: Goal) -> Reason | None:
    """Why nothing is drafted."""
    if goal.batch > 1:
        return Unsupported("drafts are for one row, and batch = {}", (goal.batch,))
    if executable.config.is_encoder_decoder:
        return Unsupported("there is no text of a decoder behind an encoder to measure them on")
    if executable.lowered.layout.states:
        return Unsupported("a state that has seen a draft cannot be taken back to the token before it")
    if goal.memory is not None and not isinstance(executable.parts["step"], TorchLowered):
        return Unsupported("what a step of several tokens holds is not measured in this runtime")
    return None


def _decision(drafts: int, found: _Spoken, share: float) -> Decision:
    """No seconds: a plan's are of steps of one token."""
    text = (
        "by drafts {} tokens a step on {} tokens of greedy text: {share} of the time of one a step, measured"
    )
    return Decision(
        site=SITE, kind=KIND, option=option_of(drafts), baseline=NONE, by=Speculate.name, cost=Cost(),
        baseline_cost=Cost(), applied=option_of(drafts), settings={"drafts": drafts},
        why=Because(text, (found.per_step, len(found.text), share)),
    )  # fmt: skip


def _declined(option: str, reason: Reason) -> Declined:
    return Declined(site=SITE, kind=KIND, option=option, by=Speculate.name, reason=reason)


def _spoken(
    executable: GenerationExecutable, prompts: Sequence[torch.Tensor], new: int, drafts: int
) -> _Spoken:
    """What is generated behind the prompts by so many drafts a step."""
    text, steps, seconds = list[int](), 0, 0.0
    for prompt in prompts:
        counted, start = _Steps(), perf_counter()
        found = executable.spoken(prompt, drafts, max_new_tokens=new, streamer=counted)
        seconds += perf_counter() - start
        text += found[0, prompt.shape[1] :].tolist()
        steps += max(1, counted.count)
    return _Spoken(seconds=seconds / len(text), per_step=round(len(text) / steps, 2), text=tuple(text))


def _over(executable: GenerationExecutable, goal: Goal, drafts: int) -> Reason | None:
    """What the last steps of a whole context hold, where that is above the goal's memory.

    The prompt is of one token over and over, so that its drafts are found.
    """
    context = goal.tokens[0]
    if goal.memory is None or context < 2 * drafts + 4:
        return None
    prompt = torch.ones((1, context - drafts - 2), dtype=torch.int64, device=executable.original.device)
    run = partial(executable.spoken, prompt, drafts, max_new_tokens=drafts + 2)
    run()
    with torch_compat_memory.watched_memory(executable.original.device.type) as peak:
        run()
    held = peak() + sum(part.weight_bytes for name, part in executable.parts.items() if name != "encoder")
    return OverBudget(needed=held) if held > goal.memory else None
