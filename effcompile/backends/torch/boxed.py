"""Runs a torch.fx graph and frees every value after its last reader: arguments are handed over in a list that
it empties.

torch.fx's own code keeps the caller's arguments alive. Here one straight Python function is written per
graph: an argument is dropped from the list and, like every other value, set to None after the operator that
reads it last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from effcompile.core.types import Args
from effcompile.ir.export import LENIENT

Boxed = Callable[[list[Any]], tuple[Any, ...]]


def boxed(graph: fx.Graph) -> Boxed:
    """A function of the list of the placeholders' values (in graph order; it empties the list) → the graph's
    flat outputs.
    """
    return _Writer(graph).compile()


class _Writer:
    """Writes the function's source; what has no literal becomes a constant of its globals."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.names = {node: f"v{i}" for i, node in enumerate(graph.nodes)}
        self.globals: dict[str, Any] = {}
        self.known: dict[int, str] = {}

    def compile(self) -> Boxed:
        freed = self._freed()
        holders = [node for node in self.graph.nodes if node.op == "placeholder"]
        lines = ["def run(values):"]
        if holders:
            lines.append(f"    {''.join(f'{self.names[n]}, ' for n in holders)} = values")
        lines.append("    values.clear()")
        lines += [f"    {self.names[node]} = None" for node in holders if not node.users]
        for node in self.graph.nodes:
            if node.op == "call_function":
                lines.append(f"    {self.names[node]} = {self._call(node)}")
                lines += [f"    {self.names[value]} = None" for value in freed.get(node, ())]
            elif node.op == "output":
                lines.append(f"    return {self._text(tuple(node.args[0]))}")
        exec(compile("\n".join(lines), "<effcompile schedule>", "exec"), self.globals)
        run: Boxed = self.globals["run"]
        return run

    def _freed(self) -> dict[fx.Node, list[fx.Node]]:
        """Node → values that nobody reads after it."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            for used in (node, *node.all_input_nodes):
                last[used] = node
        freed: dict[fx.Node, list[fx.Node]] = {}
        for value, reader in last.items():
            if reader.op == "call_function":
                freed.setdefault(reader, []).append(value)
        return freed

    def _call(self, node: fx.Node) -> str:
        arguments = [self._text(arg) for arg in node.args]
        if node.kwargs:  # as a dict: `from`, which aten's random operators have, is no name in Python
            arguments.append(f"**{self._text(dict(node.kwargs))}")
        return f"{self._constant(LENIENT.get(node.target, node.target))}({', '.join(arguments)})"

    def _text(self, value: object) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if isinstance(value, tuple):
            return f"({''.join(self._text(v) + ', ' for v in value)})"
        if isinstance(value, list):
            return f"[{', '.join(self._text(v) for v in value)}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self._text(k)}: {self._text(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({self._text(value.start)}, {self._text(value.stop)}, {self._text(value.step)})"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: object) -> str:
        if id(value) not in self.known:
            self.known[id(value)] = f"c{len(self.known)}"
            self.globals[self.known[id(value)]] = value
        return self.known[id(value)]


def run_graph(graph: fx.Graph, values: list[torch.Tensor]) -> Args:
    """Run a graph once, without gradients."""
    with torch.no_grad():
        return boxed(graph)(list(values))
