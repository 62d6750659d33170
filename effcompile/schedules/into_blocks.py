"""A training step cut into blocks (cuts.py says where): what each makes and reads, in the planner's plain
numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence

from torch import fx

from effcompile.core.torch_compat_aot import draws, is_random
from effcompile.estimate.storages import Storage, Storages
from effcompile.ir.program import ancestors
from effcompile.ir.step import Step
from effcompile.ops.replay import CPU_STATE_BYTES
from effcompile.planner.remat.problem import BackwardStep, BlockProblem, BlockStage, Op
from effcompile.schedules.blocks import WHOLE, Block, Blocks, Seconds, base_bytes, reads_of, split
from effcompile.schedules.cuts import cut
from effcompile.schedules.in_place import as_they_lie, written_in_place


def cut_into_blocks(step: Step, held: Storages, seconds: Seconds) -> Blocks:
    """Cut a step. `seconds`: time of one node on the target; free nodes (views) are not asked for."""
    forward, backward = split(step)
    late = _made_late(forward, backward, step.forward_results)
    forward, backward = [n for n in forward if n not in late], _in_order(step, late.union(backward))
    names, stage_of = cut(forward, step.forward_results, held)
    later = _backward_stages([n for n in backward if n not in late], stage_of, held, len(names))
    for node in reversed(backward):
        if node in late:  # right before the first of its readers runs
            later[node] = max((later[user] for user in node.users if user in later), default=0)
    return _Cutter(
        step, held, seconds, names, _runs(forward, stage_of, len(names)), _runs(backward, later, len(names))
    ).result()


def in_one_block(step: Step, held: Storages, seconds: Seconds) -> Blocks:
    """The step as one block: forward and backward in the order in which autograd ran them, which no cut
    changes.
    """
    forward, backward = split(step)
    late = _made_late(forward, backward, step.forward_results)
    return _Cutter(
        step,
        held,
        seconds,
        [WHOLE],
        [[n for n in forward if n not in late]],
        [_in_order(step, late.union(backward))],
    ).result()


def _in_order(step: Step, nodes: Collection[fx.Node]) -> list[fx.Node]:
    return [node for node in step.graph.nodes if node in nodes]


def _made_late(
    forward: Sequence[fx.Node], backward: Sequence[fx.Node], results: Sequence[fx.Node]
) -> set[fx.Node]:
    """What the backward alone reads, and is made of nothing that the forward makes (zeros beside a gradient):
    it is made then.

    A draw is not: it would change places with others.
    """
    needed, there, bare = ancestors(results), {*backward}, set[fx.Node]()
    for node in forward:
        given = all(arg in bare or arg.op == "placeholder" for arg in node.all_input_nodes)
        if given and node not in needed and not is_random(node.target):
            bare.add(node)
    late: set[fx.Node] = set()
    for node in reversed(forward):
        if node in bare and all(user in late or user in there or user.op == "output" for user in node.users):
            late.add(node)
    return late


def _runs(nodes: Sequence[fx.Node], stage_of: Mapping[fx.Node, int], count: int) -> list[list[fx.Node]]:
    runs: list[list[fx.Node]] = [[] for _ in range(count)]
    for node in nodes:
        runs[stage_of[node]].append(node)
    return runs


def _backward_stages(
    backward: Sequence[fx.Node], forward: Mapping[fx.Node, int], held: Storages, count: int
) -> dict[fx.Node, int]:
    """Stage of every backward node: the latest whose forward values it waits for, but no later one than its
    inputs'.

    One that reads only what is kept in any case runs in the turn of the block that made it, one that reads
    nothing after the node before it, as autograd has it; both no later than they are needed. Gradients that
    ran ahead would stand beside values that their blocks have not yet read for the last time, and ones that
    waited would keep all later blocks waiting.
    """
    readers: dict[Storage, set[int]] = {}
    for node, stage in forward.items():
        for s in reads_of(node, held):
            readers.setdefault(s, set()).add(stage)
    read = {node: _read_stages(node, forward, readers, held) for node in backward}
    found: dict[fx.Node, int] = {}
    for node in backward:
        found[node] = min(
            [found[arg] for arg in node.all_input_nodes if arg in found] + read[node][0], default=count - 1
        )
    needed: dict[fx.Node, int] = {}
    for node in reversed(backward):
        needed[node] = max(
            (found[user] if read[user][0] else needed[user] for user in node.users if user in needed),
            default=0,
        )
    turn = count - 1
    for node in backward:
        waited, shared = read[node]
        if not waited:
            ready = min((found[arg] for arg in node.all_input_nodes if arg in found), default=count - 1)
            found[node] = min(ready, max(needed[node], *shared or [turn]))
        turn = found[node]
    return found


def _read_stages(
    node: fx.Node, forward: Mapping[fx.Node, int], readers: Mapping[Storage, set[int]], held: Storages
) -> tuple[list[int], list[int]]:
    """([the latest stage whose values a backward node reads], [the latest that made one that is kept in any
    case]); [] where there is none.

    A value's stage is the one later stage that reads it, too, else the one that makes it. What several later
    stages read is kept.
    """
    own, shared = [], []
    for arg in node.all_input_nodes:
        for s in held.of[arg] if arg in forward else ():
            later = {reader for reader in readers.get(s, ()) if reader > forward[arg]}
            if s in held.fixed:
                continue
            if len(later) > 1:
                shared.append(forward[arg])
            else:
                own.append(max({forward[arg], *later}))
    return sorted(own)[-1:], sorted(shared)[-1:]


class _Cutter:
    """Collects who makes and who reads each storage, and writes the blocks' problems."""

    def __init__(
        self,
        step: Step,
        held: Storages,
        seconds: Seconds,
        names: Sequence[str],
        forward: list[list[fx.Node]],
        backward: list[list[fx.Node]],
    ) -> None:
        self.written = written_in_place(step, held, [node for nodes in reversed(backward) for node in nodes])
        self.step, self.held, self.seconds, self.names = step, as_they_lie(held, self.written), seconds, names
        self.forward, self.backward = forward, backward
        self.maker = {s: i for i, nodes in enumerate(forward) for node in nodes for s in held.made[node]}
        self.results = {s for node in step.forward_results for s in held.of[node]}
        self.in_forward = self._readers(forward)
        self.in_backward = self._readers(backward)
        self.shared = frozenset(s for s in self.maker if s in self.results or self._is_shared(s))
        self.gradients = {s for node in step.all_gradients for s in held.of[node]}
        self.owner = {s: self._owner(s) for s in self.maker}

    def _readers(self, runs: list[list[fx.Node]]) -> dict[Storage, set[int]]:
        readers: dict[Storage, set[int]] = {}
        for i, nodes in enumerate(runs):
            for node in nodes:
                for s in reads_of(node, self.held):
                    readers.setdefault(s, set()).add(i)
        return readers

    def _is_shared(self, s: Storage) -> bool:
        made = self.maker[s]
        ahead = {i for i in self.in_forward.get(s, ()) if i > made}
        behind = self.in_backward.get(s, set())
        if any(i < made for i in behind):
            # a backward that waits for an earlier block's: no block can make it again for that
            return True
        if not ahead and behind <= {made}:
            return False
        return len(ahead | behind) > 1 and bool(behind or len(ahead) > 1)

    def _owner(self, s: Storage) -> int:
        """The block that decides about a storage: its only later reader, else its maker."""
        readers = {
            i for i in self.in_forward.get(s, set()) | self.in_backward.get(s, set()) if i > self.maker[s]
        }
        return next(iter(readers)) if len(readers) == 1 and s not in self.shared else self.maker[s]

    def _last(self, s: Storage) -> int:
        """The stage whose backward is the last to read a shared storage; −1 for what outlives the step."""
        if s in self.results or s in self.gradients:
            return -1
        return min(self.in_backward.get(s, {self.maker[s]}))

    def result(self) -> Blocks:
        live_backward = _backward_live(self.held, self.step, self.backward)
        live_forward = self._forward_live()
        built = tuple(self._block(i, live_backward[i], live_forward[i]) for i in range(len(self.names)))
        return Blocks(
            step=self.step, held=self.held, blocks=built, shared=self.shared,
            base_bytes=base_bytes(self.step, self.held), written=self.written,
        )  # fmt: skip

    def _block(self, i: int, live: tuple[int, list[int]], forward_live: int) -> Block:
        entering = tuple(s for s, owner in self.owner.items() if owner == i and self.maker[s] != i)
        names = {s: f"in{k}" for k, s in enumerate(entering)}
        ops, operators = self._operators(i, names)
        leaving = tuple(
            s for s in self.maker if self.maker[s] == i and any(r > i for r in self.in_forward.get(s, ()))
        )
        start, lives = live
        reads = [
            tuple(names[s] for s in reads_of(node, self.held) if s in names) for node in self.backward[i]
        ]
        steps = tuple(
            BackwardStep(name=f"b{k}", reads=what, live=at - start)
            for k, (what, at) in enumerate(zip(reads, lives, strict=True))
        )
        problem = BlockProblem(
            nbytes={name: self.held.nbytes[s] for s, name in names.items()},
            entering=tuple(names[s] for s in entering),
            leaving=tuple(names[s] for s in leaving if s in names),
            forced=frozenset(),
            forward=tuple(ops),
            backward=steps,
        )
        entering_bytes = sum(self.held.nbytes[s] for s in entering)
        stage = BlockStage(
            name=self.names[i],
            kind=hashlib.sha256(repr(problem).encode()).hexdigest()[:12],
            forward_base=forward_live
            - entering_bytes
            + sum(self.held.nbytes[s] for s in self.shared if self.maker[s] <= i),
            backward_base=start + sum(self.held.nbytes[s] for s in self.shared if self._last(s) <= i),
            rerun_seconds=sum(op.seconds for op in ops),
            entering_bytes=entering_bytes,
            rerun_peak=_rerun_peak(problem),
        )
        return Block(
            name=self.names[i], forward=tuple(self.forward[i]), backward=tuple(self.backward[i]),
            problem=problem, values={name: s for s, name in names.items()}, operators=operators,
            entering=entering, leaving=leaving, stage=stage,
        )  # fmt: skip

    def _operators(self, i: int, names: dict[Storage, str]) -> tuple[list[Op], dict[str, fx.Node]]:
        """The block's operators; gives its storages their names, by order of making, so that equal blocks
        have equal problems.
        """
        ops: list[Op] = []
        operators: dict[str, fx.Node] = {}
        for node in self.forward[i]:
            if not self.held.made[node]:
                continue
            name = f"{len(ops)}:{getattr(node.target, '__name__', node.target)}"
            own = [s for s in self.held.made[node] if s not in self.shared]
            names.update({s: f"{len(ops)}.{k}" for k, s in enumerate(own)})
            known = tuple(names[s] for s in reads_of(node, self.held) if s in names)
            made = tuple(names[s] for s in own)
            if not made:
                continue
            state = CPU_STATE_BYTES if draws(node) else 0
            seconds, workspace = self.seconds(node), self.held.workspace[node]
            ops.append(
                Op(name=name, reads=known, makes=made, seconds=seconds, workspace=workspace, state=state)
            )
            operators[name] = node
        return ops, operators

    def _forward_live(self) -> list[int]:
        """Per stage the bytes alive when its forward begins that will still be read in the forward, kept ones
        not counted.
        """
        last = {s: max([self.maker[s], *self.in_forward.get(s, ())]) for s in self.maker}
        counted = [s for s in self.maker if s not in self.shared]
        return [
            sum(self.held.nbytes[s] for s in counted if self.maker[s] < i <= last[s])
            for i in range(len(self.names))
        ]


def _backward_live(held: Storages, step: Step, runs: list[list[fx.Node]]) -> list[tuple[int, list[int]]]:
    """Per stage: bytes made by the backward that are alive when its backward begins, and while each of its
    nodes runs.
    """
    order = [(i, node) for i in reversed(range(len(runs))) for node in runs[i]]
    position = {node: at for at, (_, node) in enumerate(order)}
    made = {s for _, node in order for s in held.made[node]}
    last: dict[Storage, int] = {}
    for node, at in position.items():
        for s in (*held.of[node], *(s for arg in node.all_input_nodes for s in held.of[arg])):
            if s in made:
                last[s] = max(last.get(s, 0), at)
    for gradient in step.all_gradients:
        last.update({s: len(order) for s in held.of[gradient] if s in made})
    freed: dict[int, int] = {}
    for s, at in last.items():
        freed[at] = freed.get(at, 0) + held.nbytes[s]
    live = 0
    result: list[tuple[int, list[int]]] = [(0, []) for _ in runs]
    begun: set[int] = set()
    for at, (i, node) in enumerate(order):
        if i not in begun:
            begun.add(i)
            result[i] = (live, [])
        live += sum(held.nbytes[s] for s in held.made[node])
        result[i][1].append(live + held.workspace[node])
        live -= freed.get(at, 0)
    return _filled(result, begun)


def _filled(result: list[tuple[int, list[int]]], begun: set[int]) -> list[tuple[int, list[int]]]:
    """Stages without a backward of their own begin where the one after them began."""
    for i in reversed(range(len(result) - 1)):
        if i not in begun:
            result[i] = (result[i + 1][0], [])
    return result


def _rerun_peak(problem: BlockProblem) -> int:
    """Most bytes of the block's values and workspace alive while its forward runs and keeps only
    what leaves.
    """
    last = {value: i for i, op in enumerate(problem.forward) for value in (*op.reads, *op.makes)}
    last.update(dict.fromkeys(problem.leaving, len(problem.forward)))
    live = peak = sum(problem.nbytes[v] for v in problem.entering)
    for i, op in enumerate(problem.forward):
        live += sum(problem.nbytes[v] for v in op.makes)
        peak = max(peak, live + op.workspace)
        live -= sum(problem.nbytes[v] for v in {*op.reads, *op.makes} if last[v] == i)
    return peak
