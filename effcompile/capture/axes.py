"""Which axes of the inputs may be dynamic, what they are called, and which of them the model's code made
constant.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from effcompile.core import torch_compat
from effcompile.core.errors import CaptureError
from effcompile.core.reasons import Because, Reason
from effcompile.core.trees import leaves_with_path
from effcompile.core.types import Args, Kwargs, Outputs
from effcompile.ir.export import Domain
from effcompile.ir.program import Dim, Output, Size, TensorSpec

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLeaf:
    """One tensor among the inputs: its readable name, and torch.export's name for it ("['x'][0]")."""

    name: str
    source: str
    tensor: torch.Tensor


def tensor_leaves(model: nn.Module, args: Args, kwargs: Kwargs) -> list[InputLeaf]:
    """The tensors among the inputs, in the order of the graph's placeholders."""
    parameters = list(_positional_names(model, len(args)))
    leaves = []
    for path, leaf in leaves_with_path((args, dict(kwargs))):
        if isinstance(leaf, torch.Tensor):
            name, source = (
                parameters[int(_key(path[1]))]
                if _key(path[0]) == "0"
                else (_key(path[1]), f"['{_key(path[1])}']")
            )
            readable = "_".join([name, *(_key(key) for key in path[2:])])
            leaves.append(InputLeaf(name=readable, source=source + pytree.keystr(path[2:]), tensor=leaf))
    return leaves


def output_names(outputs: Outputs) -> list[str]:
    """A name per tensor in the output: its keys ("logits", "hidden_states_0"), else output_0,
    output_1, ...
    """
    names = []
    for path, leaf in leaves_with_path(outputs):
        if isinstance(leaf, torch.Tensor):
            keys = [_key(key) for key in path]
            named = bool(keys) and not keys[0].isdigit()
            names.append("_".join(keys if named else ["output", *(keys or ["0"])]))
    return names


def _positional_names(model: nn.Module, count: int) -> Iterator[tuple[str, str]]:
    """(readable name, torch.export's name) of each positional argument of `forward`."""
    rest: str | None = None
    given = iter(inspect.signature(model.forward).parameters.values())
    for position in range(count):
        parameter = None if rest else next(given, None)
        if parameter is not None and parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            rest, first = parameter.name, position
        if rest:
            yield f"{rest}_{position - first}", f"['{rest}'][{position - first}]"
        else:
            name = parameter.name if parameter else f"arg_{position}"
            yield name, f"['{name}']"


def _key(key: object) -> str:
    """The text of one pytree key."""
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


def candidates(leaves: Sequence[InputLeaf], still: Collection[str] = ()) -> list[dict[int, bool]]:
    """Axis → whether the user expects it to be dynamic, per leaf.

    Batch: axis 0, unless it is 1 where the batch is not (a broadcast input). Sequence: axis 1 of 2-D integers
    and masks and of 3-D floats; axis 2 of the keys and values of a cache (`past...`, 4-D). Axis 1 of 2-D
    floats (raw audio, or plain features) and square masks are tried and not missed. Of those that are `still`
    the batch alone.
    """
    batch = next((leaf.tensor.shape[0] for leaf in leaves if leaf.tensor.ndim), 1)
    wanted: list[dict[int, bool]] = []
    for leaf in leaves:
        shape, axes = leaf.tensor.shape, {}
        if len(shape) and (shape[0] == batch or shape[0] > 1):
            axes[0] = True
        if leaf.name in still:
            wanted.append(axes)
            continue
        integer, mask = leaf.tensor.dtype in _INTEGERS, "mask" in leaf.name
        if (len(shape) == 2 and (integer or mask)) or (len(shape) == 3 and not integer):
            axes[1] = True
        elif len(shape) == 2:
            axes[1] = False
        if len(shape) == 4 and _cached(leaf):
            axes[2] = True
        if mask and len(shape) in (3, 4):
            axes.update({axis: False for axis in range(len(shape) - 2, len(shape)) if shape[axis] > 1})
        wanted.append(axes)
    return wanted


def _cached(leaf: InputLeaf) -> bool:
    """Whether it holds keys or values of tokens that were seen before."""
    return leaf.name.startswith("past") and leaf.tensor.is_floating_point()


@dataclass(slots=True)
class Names:
    """Names dynamic axes by their symbols: "batch", "seq", "decoder_seq", else d0, d1, ...

    A batch axis, or an axis of a mask or of ids, whose symbol tracing did not tie to another one of the same
    role and size is the same axis to the user: broadcasting, or a loss over flattened tokens, merely hid it
    from torch.
    """

    symbols: dict[Any, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def dim(self, size: object, axis: int, leaf: InputLeaf | None) -> Dim:
        """The size of an axis if constant, else its name; derived axes keep their formula ("8*seq")."""
        expression = torch_compat.expression(size)
        if isinstance(expression, int) or expression.is_number:
            return int(expression)
        if expression.is_Symbol and expression not in self.symbols:
            self.symbols[expression] = self._fresh(axis, leaf)
        return self.formula(size)

    def add_symbols(self, leaf: InputLeaf, value: torch.Tensor) -> None:
        """Name the axes that are symbols of their own."""
        for axis, size in enumerate(value.shape):
            if getattr(torch_compat.expression(size), "is_Symbol", False):
                self.dim(size, axis, leaf)

    def formula(self, number: object) -> str:
        """A number that was computed from sizes, in the names of their axes."""
        expression = torch_compat.expression(number)
        text = {symbol: self.symbols.get(symbol, str(symbol)) for symbol in expression.free_symbols}
        return str(
            expression.xreplace({symbol: type(symbol)(name, integer=True) for symbol, name in text.items()})
        )

    def _fresh(self, axis: int, leaf: InputLeaf | None) -> str:
        if leaf is None:
            return self._numbered()
        role = (
            "batch"
            if axis == 0
            else "past"
            if _cached(leaf)
            else "decoder_seq"
            if leaf.name.startswith(("decoder_", "tgt"))
            else "seq"
        )
        size = int(leaf.tensor.shape[axis])
        same_kind = axis == 0 or "mask" in leaf.name or leaf.tensor.dtype in _INTEGERS
        if self.sizes.setdefault(role, size) == size and (same_kind or role not in self.symbols.values()):
            return role
        name = self._numbered()
        self.sizes[name] = size
        return name

    def _numbered(self) -> str:
        return next(name for name in (f"d{i}" for i in range(1000)) if name not in self.symbols.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphBoundary:
    """Inputs and outputs of a captured graph, the domain of its axes, and what was asked for and
    not given.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    returned: tuple[Any, ...]
    domain: Domain
    fixed: tuple[Reason, ...]


def read_boundary(
    exported: torch.export.ExportedProgram,
    graph: fx.Graph,
    leaves: Sequence[InputLeaf],
    wanted: Sequence[Mapping[int, bool]],
    named: Sequence[str],
) -> GraphBoundary:
    """Read back from the graph which axes stayed dynamic. `leaves` are the user's, not the grown copies.

    A grown axis that turned out constant keeps the size 2 of the copy here: the caller must not accept such a
    graph.

    Raises:
        CaptureError: the copy returns another number of tensors than the example, whose names are `named`.
    """
    values = [
        v for n in graph.nodes if n.op == "placeholder" and isinstance(v := n.meta.get("val"), torch.Tensor)
    ]
    places = torch_compat.specialised_at(values[0]) if values else {}
    names, inputs, fixed = Names(), [], []
    for leaf, value in zip(leaves, values, strict=True):  # all symbols before any formula of them
        names.add_symbols(leaf, value)
    for leaf, value, axes in zip(leaves, values, wanted, strict=True):
        shape = tuple(names.dim(size, axis, leaf) for axis, size in enumerate(value.shape))
        inputs.append(_spec(leaf.name, value, shape))
        stuck = [axis for axis, expected in axes.items() if expected and isinstance(shape[axis], int)]
        fixed += [_fixed(leaf, axis, places.get((f"L{leaf.source}", axis))) for axis in stuck]
    leaves_out = pytree.tree_leaves(_results(graph))
    results = [v for v in leaves_out if isinstance(v, torch.Tensor)]
    if len(results) != len(named):
        raise CaptureError(
            f"The model returns {len(named)} tensors at the example inputs and {len(results)} at larger "
            "ones: how many they are depends on a size, which a graph cannot follow."
        )
    outputs = [
        _spec(name, v, tuple(names.dim(s, a, None) for a, s in enumerate(v.shape)))
        for name, v in zip(named, results, strict=True)
    ]
    return GraphBoundary(
        inputs=tuple(inputs), outputs=tuple(outputs),
        returned=tuple(_returned(leaf, names) for leaf in leaves_out), domain=_domain(exported, names),
        fixed=tuple(dict.fromkeys(fixed)),
    )  # fmt: skip


def _returned(leaf: object, names: Names) -> Any:
    """What `Program.returned` says of one output.

    Raises:
        CaptureError: a number that depends on the data of the inputs.
    """
    if isinstance(leaf, torch.Tensor):
        return Output.TENSOR
    if not isinstance(leaf, torch_compat.SYMBOLIC):
        return leaf
    if torch_compat.unbacked(leaf):
        raise CaptureError(
            "The model returns a Python number that is read from a tensor (.item(), int(tensor), "
            "float(tensor)), which a graph cannot follow. Return the tensor itself."
        )
    return Size(names.formula(leaf))


def _results(graph: fx.Graph) -> Outputs:
    """The graph's outputs, nodes replaced by their values."""
    return pytree.tree_map(
        lambda leaf: leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf, graph.output_node().args[0]
    )


def _spec(name: str, value: torch.Tensor, shape: tuple[Dim, ...]) -> TensorSpec:
    return TensorSpec(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=shape)


def _fixed(leaf: InputLeaf, axis: int, place: str | None) -> Reason:
    role = "batch" if axis == 0 else "seq" if leaf.tensor.dtype in _INTEGERS else f"axis {axis}"
    text = "fixed: {} of {}: fixed at {} by the model's code" + " ({})" * bool(place)
    return Because.of(text, role, leaf.name, leaf.tensor.shape[axis], *filter(None, [place]))


def _domain(exported: torch.export.ExportedProgram, names: Names) -> Domain:
    """Bounds by axis name: where several symbols share a name, the tightest."""
    bounds: dict[str, tuple[int, int | None]] = {}
    for symbol, name in names.symbols.items():
        found = exported.range_constraints.get(symbol)
        low = int(found.lower) if found is not None else 0
        high = (
            int(found.upper) if found is not None and found.upper.is_finite and found.upper < 2**40 else None
        )
        other_low, other_high = bounds.get(name, (0, None))
        highs = [h for h in (high, other_high) if h is not None]
        bounds[name] = (max(low, other_low), min(highs, default=None))
    return Domain(bounds=bounds, guards=torch_compat.export_guards(exported))
