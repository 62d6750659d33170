"""Keep or recompute: per storage that goes from the forward to the backward, decided by z3 (planner/remat).

Source: Chen et al. 2016 (arXiv 1604.06174) for the idea; Checkmate (arXiv 1910.02653) for optimal schedules;
Rockmate (ICML 2023) for solving each unique block once. What is new: bytes bound the true peak of the emitted
graphs, proven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from effcompile.core.torch_compat_aot import draws
from effcompile.core.units import format_bytes
from effcompile.estimate.storages import Storage
from effcompile.ir.program import ancestors
from effcompile.ir.step import Step
from effcompile.planner.remat import (
    BlockFront,
    BlockOption,
    ChainProblem,
    Group,
    in_order_of_need,
    joint_front,
    option,
)
from effcompile.schedules.away import Away
from effcompile.schedules.blocks import Block, Blocks
from effcompile.schedules.emit import Emitted, emit
from effcompile.schedules.simulate import Trace, simulate

#: Options of a block are searched for so long at the most; then the best found stand. With a third of it,
#: BERT's layers in 2.04 MB took 0.8 % longer (benchmarks/_step_models.py, modelled), and the whole plan no
#: less time to find.
SECONDS_PER_BLOCK = 1.5
#: Times as long where values may be held in other forms: there are many more options.
MORE_FOR_FORMS = 3
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Which options blocks have.

    Attributes:
        points: options of a block at the most.
        groups: also drop the inputs of runs of blocks and remake them.
        patience: times SECONDS_PER_BLOCK for a search among many forms; 0: MORE_FOR_FORMS.
    """

    points: int = 32
    groups: bool = True
    patience: int = 0

    name: ClassVar[str] = "checkpoint"
    exact: ClassVar[bool] = True

    def options(self, block: Block) -> tuple[BlockOption, ...]:
        """The Pareto front of a block, each option with a label in the user's words."""
        return self.front(block).options

    def front(self, block: Block) -> BlockFront:
        """The same, with how many options there were and whether they are all."""
        seconds = SECONDS_PER_BLOCK * ((self.patience or MORE_FOR_FORMS) if block.problem.forms else 1)
        found = joint_front(block.problem, timeout=seconds, points=self.points)
        return replace(
            found, options=tuple(replace(option, label=label(block, option)) for option in found.options)
        )

    def chain(
        self, cut: Blocks, options: Mapping[str, tuple[BlockOption, ...]], budget: int | None
    ) -> ChainProblem:
        """The whole step as the planner's problem.

        A limit of the host that no choice reaches is none: options were not kept for it.
        """
        most = sum(
            max((option.host_bytes for option in options[block.stage.kind]), default=0)
            for block in cut.blocks
        )
        limit = cut.host.limit
        return ChainProblem(
            base=cut.base_bytes,
            budget=budget,
            options={block.stage.kind: options[block.stage.kind] for block in cut.blocks},
            stages=tuple(block.stage for block in cut.blocks),
            groupable=_runs(cut) if self.groups else (),
            host=limit if limit is not None and most > limit else None,
        )


def keeping_all(block: Block) -> BlockOption:
    """The option of a block that keeps all that its backward reads."""
    made = option(block.problem, block.problem.nbytes)
    assert made is not None, "nothing has to be made again"
    return replace(made, label=label(block, made))


def as_autograd_keeps(block: Block, step: Step) -> BlockOption:
    """The option of a block that keeps what the forward makes for itself; what is made for the backward alone
    (2x of x²) is made there.
    """
    needed = ancestors(step.forward_results)
    apart = {name for name, op in block.operators.items() if op not in needed and not draws(op)}
    made = option(
        block.problem,
        block.problem.nbytes.keys()
        - {v for op in block.problem.forward if op.name in apart for v in op.makes},
    )
    return keeping_all(block) if made is None else replace(made, label=label(block, made))


def periodic(cut: Blocks, every: int) -> list[BlockOption] | None:
    """Per block to keep all, or, of the repeated ones every so many-th, to keep its input alone and to run it
    again as a whole.

    With 1 that is what HF's gradient_checkpointing_enable does. None where a block cannot run again.
    """
    kinds = Counter(block.stage.kind for block in cut.blocks)
    repeated = [block for block in cut.blocks if kinds[block.stage.kind] > 1]
    remade = {block.name for block in repeated[::every]}
    found = [
        option(b.problem, b.problem.entering if b.name in remade else b.problem.nbytes) for b in cut.blocks
    ]
    return [o for o in found if o is not None] if remade and all(found) else None


def kept_storages(
    cut: Blocks, chosen: Sequence[BlockOption], dropped: Iterable[int] = ()
) -> frozenset[Storage]:
    """Storages that a choice keeps. `dropped`: blocks whose entering values a group remakes."""
    gone = {s for i in dropped for s in cut.blocks[i].entering}
    kept = {
        block.values[name] for block, option in zip(cut.blocks, chosen, strict=True) for name in option.kept
    }
    return frozenset(kept - gone)


def carried_out(cut: Blocks, chosen: Sequence[BlockOption], groups: Sequence[Group]) -> tuple[Emitted, Trace]:
    """What a choice becomes: the emitted graphs, and the bytes at every instant of them."""
    dropped = [i for group in groups for i in range(group.first + 1, group.last + 1)]
    emitted = emit(cut, kept_storages(cut, chosen, dropped), groups, _away(cut, chosen))
    return emitted, simulate(cut, emitted)


def _away(cut: Blocks, chosen: Sequence[BlockOption]) -> Away:
    """What each block holds in another form."""
    return {
        i: {
            block.values[name]: cut.ways[option.forms[name]]
            for name in in_order_of_need(block.problem, option)
        }
        for i, (block, option) in enumerate(zip(cut.blocks, chosen, strict=True))
        if option.forms
    }


def label(block: Block, option: BlockOption) -> str:
    """What an option does, in words: "recompute gelu, layer_norm +2; offload 2 values, 6.0 MiB"."""
    moved = [_moved(block, option, form) for form in dict.fromkeys(option.forms.values())]
    plain = _recomputed(block, option)
    return "; ".join([plain, *moved] if option.recomputed or not moved else moved)


def _moved(block: Block, option: BlockOption, form: str) -> str:
    names = [name for name, other in option.forms.items() if other == form]
    size = sum(block.problem.nbytes[name] for name in names)
    return f"{form} {len(names)} value{'s' * (len(names) > 1)}, {format_bytes(size)}"


def _recomputed(block: Block, option: BlockOption) -> str:
    names = Counter(_word(str(block.operators[name].target)) for name in option.recomputed)
    if not names:
        return "keep everything"
    again, whole = set(option.recomputed), {op.name for op in block.problem.forward if op.seconds > 0}
    own = (option.kept | option.forms.keys()) - set(block.problem.entering) - block.problem.forced
    if whole <= again or not own:
        return "recompute all"
    shown = [name for name, _ in sorted(names.items(), key=lambda item: -_seconds(block, option, item[0]))]
    rest = f" +{len(shown) - _NAMED}" if len(shown) > _NAMED else ""
    return f"recompute {', '.join(shown[:_NAMED])}{rest}"


def _seconds(block: Block, option: BlockOption, word: str) -> float:
    seconds = {op.name: op.seconds for op in block.problem.forward}
    return sum(
        seconds[name] for name in option.recomputed if _word(str(block.operators[name].target)) == word
    )


def _word(target: str) -> str:
    """`gelu` of aten.gelu.default, `attention` of aten._scaled_dot_product_attention_math.default,
    `element-wise` of a fused chain.
    """
    if target.startswith("fused["):
        return "element-wise"
    parts = target.split(".")
    name = parts[1] if len(parts) > 1 else target
    return "attention" if "scaled_dot_product" in name else name.strip("_").removeprefix("native_")


def _runs(cut: Blocks) -> tuple[tuple[int, int], ...]:
    """Runs of blocks in which each one's leaving values are the next one's entering values, and no others."""
    joined = [
        bool(after.entering) and set(after.entering) == {s for s in before.leaving if s not in cut.shared}
        for before, after in zip(cut.blocks, cut.blocks[1:], strict=False)
    ]
    runs: list[tuple[int, int]] = []
    start = 0
    for i, together in enumerate([*joined, False]):
        if not together:
            if i > start:
                runs.append((start, i))
            start = i + 1
    return tuple(runs)
