"""Bytes live at every step of a graph, storage by storage, when each value is freed after its last reader.

That is what torch.fx's generated code does (it sets a name to None after the last use), and what an
interpreter with garbage collection does. Counted: weights, buffers and constants throughout; inputs
throughout, as the caller holds them; every storage the graph makes, from the step that makes it to the last
step that reads any view of it; outputs to the end; and while an op runs, what the ops it is made of allocate
and free again (see `storages`). Not counted: what a single kernel allocates for itself, oneDNN's convolutions
above all.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from effcompile.estimate.storages import Storage, Storages, storages
from effcompile.ir.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Live bytes over one call.

    Attributes:
        peak_bytes: the largest of `steps`; peak_node: the first node where it is reached ("" in an empty
            graph).
        steps: (node name, bytes live while it runs: its operands, its result and all that is still to be
            read).
        weight_bytes: parameters, buffers and constants; input_bytes: example inputs. Both are in every step.
    """

    peak_bytes: int
    peak_node: str
    steps: tuple[tuple[str, int], ...]
    weight_bytes: int
    input_bytes: int

    @property
    def activation_bytes(self) -> int:
        """The peak without weights and inputs."""
        return self.peak_bytes - self.weight_bytes - self.input_bytes


def timeline(program: Program) -> Timeline:
    """The activation memory timeline of a program at its example inputs, in the graph's order."""
    held = storages(program)
    nodes = list(program.graph.nodes)
    weight_bytes = program.weight_bytes() + _constant_bytes(program)
    input_bytes = given_bytes(nodes, held)
    freed_after = last_reads(nodes, held)
    live, steps = weight_bytes + input_bytes, []
    for step, node in enumerate(nodes):
        live += sum(held.nbytes[s] for s in held.made[node] if s not in held.fixed)
        if node.op == "call_function":
            steps.append((node.name, live + held.workspace[node]))
        live -= sum(held.nbytes[s] for s in freed_after.get(step, ()))
    peak_node, peak = max(steps, key=lambda s: s[1], default=("", live))
    return Timeline(
        peak_bytes=peak,
        peak_node=peak_node,
        steps=tuple(steps),
        weight_bytes=weight_bytes,
        input_bytes=input_bytes,
    )


def given_bytes(nodes: list[fx.Node], held: Storages) -> int:
    """Bytes of the inputs, each storage once."""
    return sum(held.nbytes[s] for s in {s for n in nodes if n.op == "placeholder" for s in held.of[n]})


def last_reads(nodes: list[fx.Node], held: Storages) -> dict[int, list[Storage]]:
    """Step → storages that no later step reads; storages of the output and fixed ones are in none."""
    position = {node: step for step, node in enumerate(nodes)}
    last: dict[Storage, int] = {}
    for step, node in enumerate(nodes):
        until = max((position[user] for user in node.users), default=step)
        for storage in held.of[node]:
            last[storage] = max(last.get(storage, 0), until)
    returned = {s for node in nodes if node.op == "output" for s in held.of[node]}
    freed: dict[int, list[Storage]] = {}
    for storage, step in last.items():
        if storage not in held.fixed and storage not in returned:
            freed.setdefault(step, []).append(storage)
    return freed


def _constant_bytes(program: Program) -> int:
    """Bytes of tensors that the graph reads and that are neither parameters nor buffers, each
    storage once.
    """
    known = {t.untyped_storage()._cdata for t in [*program.module.parameters(), *program.module.buffers()]}
    constants = [program.tensor(node) for node in program.graph.nodes if node.op == "get_attr"]
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in constants if t is not None}
    return sum(size for storage, size in sizes.items() if storage not in known)
