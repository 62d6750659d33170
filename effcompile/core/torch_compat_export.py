"""What torch.export and torch.onnx do at every export, done once, or left out where it changes nothing.

Private APIs, found by feature.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterable, Iterator
from threading import RLock
from types import ModuleType
from typing import Any

import torch
from torch import fx

from effcompile.core.types import Args

aten = torch.ops.aten

_REGISTRIES: dict[tuple[Any, ...], Any] = {}
#: Held while a name of torch's is replaced: threads that put it back in another order would leave one's in
#: place for good.
_TURN = RLock()


def graphs_of(exported: torch.export.ExportedProgram) -> list[fx.Graph]:
    """Its graph, and those that its operators on graphs call."""
    return [part.graph for part in exported.graph_module.modules() if isinstance(part, fx.GraphModule)]


@contextlib.contextmanager
def outside_of_tracing() -> Iterator[None]:
    """Within, tensors with values are computed on as if nothing were traced around it."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def fakes_made_anew(always: bool) -> Iterator[None]:
    """Within, where `always`, torch does not keep what an operator made of fake tensors for its next call
    with alike ones.

    Of symbolic sizes a result that is kept is made twice, which its next use has to win back.
    """
    import torch._dynamo.config as config

    with config.patch(fake_tensor_cache_enabled=False) if always else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def unchecked_values() -> Iterator[None]:
    """Within, checks that all values of a tensor are true (torch._check_tensor_all) are left out, which would
    read them.
    """
    was = getattr(torch, "_check_tensor_all", None)
    if was is None:
        yield
        return
    with _TURN:
        vars(torch)["_check_tensor_all"] = lambda condition, message=None: None
        try:
            yield
        finally:
            vars(torch)["_check_tensor_all"] = was


@contextlib.contextmanager
def swift_onnx() -> Iterator[None]:
    """Within, torch.onnx.export and onnxscript's optimiser leave out what changes nothing, two thirds of an
    export of BERT-base.

    A graph is not traced again to take apart what can be translated as it is; nodes whose types stay as they
    are do not run again on fake tensors; a rewrite rule is matched where the operator is the one that it
    looks for. The table of translations is built once a process.
    """
    with kept_onnx_registry(), _only_promoted_nodes_rerun(), _rules_of_the_operator():
        module = private_module("torch.onnx._internal.exporter._fx_passes", "decompose_with_registry")
        if module is None:
            yield
            return
        decompose = vars(module)["decompose_with_registry"]

        def unless_needless(
            exported: torch.export.ExportedProgram, registry: Any
        ) -> torch.export.ExportedProgram:
            return exported if _translated(exported, registry) else decompose(exported, registry)

        with replaced(module, "decompose_with_registry", unless_needless):
            yield


@contextlib.contextmanager
def _only_promoted_nodes_rerun() -> Iterator[None]:
    """Within, the pass that writes type promotions out runs a node only where it, or what it reads, was
    changed by one.
    """
    module = private_module(
        "torch.onnx._internal.fx.passes.type_promotion",
        "_TypePromotionInterpreter",
        "get_type_promotion_rule",
    )
    interpreter: Any = vars(module)["_TypePromotionInterpreter"] if module is not None else None
    if not {"run_node", "_set_current_node", "_maybe_promote_node"} <= set(dir(interpreter)):
        yield
        return
    rule_of = vars(module)["get_type_promotion_rule"]

    def run_node(self: Any, node: fx.Node) -> object:
        target, read, named = node.target, node.args, node.kwargs
        with self._set_current_node(node):
            if rule := rule_of(node, self.type_promotion_table):
                self._maybe_promote_node(node, rule)
        untouched = (
            node.op == "call_function"
            and node.target is target
            and node.args is read
            and node.kwargs is named
        )
        if (
            untouched
            and "val" in node.meta
            and all(self.env[source] is source.meta.get("val") for source in node.all_input_nodes)
        ):
            return node.meta["val"]
        return fx.Interpreter.run_node(self, node)

    with replaced(interpreter, "run_node", run_node):
        yield


@contextlib.contextmanager
def _rules_of_the_operator() -> Iterator[None]:
    """Within, onnxscript's matcher looks first at the operator: it goes through the whole graph, for some
    rules, before it does.
    """
    module = private_module("onnxscript.rewriter._matcher", "SimplePatternMatcher", "_basics")
    matcher: Any = vars(module)["SimplePatternMatcher"] if module is not None else None
    if "match" not in vars(matcher or object) or not hasattr(vars(module)["_basics"], "MatchResult"):
        yield
        return
    match, none = matcher.match, vars(module)["_basics"].MatchResult().fail("Another operator.")

    def match_if_the_operator(self: Any, model: object, graph: object, node: Any, **how: Any) -> object:
        wanted = self.pattern.output_nodes[0].op_identifier() if self.pattern.output_nodes else None
        return (
            none
            if wanted is not None and wanted[:2] != (node.domain, node.op_type)
            else match(self, model, graph, node, **how)
        )

    with replaced(matcher, "match", match_if_the_operator):
        yield


def _translated(exported: torch.export.ExportedProgram, registry: Any) -> bool:
    """Whether every operator of the graph writes nothing and has a translation to ONNX of its own."""
    known = {found[0].fx_target for found in registry.functions.values() if found}
    called = [
        node.target for part in graphs_of(exported) for node in part.nodes if node.op == "call_function"
    ]
    operators = [
        target
        for target in called
        if isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator))
    ]
    return all(
        isinstance(target, torch._ops.OpOverload) and target in known and not target._schema.is_mutable
        for target in operators
    )


@contextlib.contextmanager
def kept_onnx_registry() -> Iterator[None]:
    """Within, torch.onnx.export builds its table of ONNX functions once a process and opset."""
    module = private_module("torch.onnx._internal.exporter._registration", "ONNXRegistry")
    registry: Any = vars(module)["ONNXRegistry"] if module is not None else None
    if "from_torchlib" not in vars(registry or object):
        yield
        return
    build = registry.from_torchlib
    kept = staticmethod(lambda *args, **kwargs: _copied_registry(build, args, tuple(kwargs.items())))
    with replaced(registry, "from_torchlib", kept):
        yield


def _copied_registry(build: Callable[..., object], args: Args, kwargs: tuple[tuple[str, Any], ...]) -> Any:
    """A registry of the caller's own: it may add to it."""
    if (args, kwargs) not in _REGISTRIES:
        _REGISTRIES[args, kwargs] = build(*args, **dict(kwargs))
    kept = _REGISTRIES[args, kwargs]
    own = copy.copy(kept)
    vars(own).update(
        {
            name: {k: list(v) for k, v in value.items()}
            for name, value in vars(kept).items()
            if isinstance(value, dict)
        }
    )
    return own


@contextlib.contextmanager
def recurrent_dropout() -> Iterator[None]:
    """Within, a traced nn.LSTM, nn.GRU or nn.RNN drops out between its layers as an eager one does.

    torch's own trace of them leaves that dropout out: `_rnn_helper` compares the number of layers with the
    wrong side (torch 2.13). So it is asked for one layer after the other, and the dropout is put between.
    """
    module = private_module("torch._decomp.decompositions", "_rnn_helper")
    if module is None:
        yield
        return
    whole = vars(module)["_rnn_helper"]

    def layer_by_layer(
        x: Any,
        hidden: Any,
        weights: Any,
        biases: bool,
        layers: int,
        p: float,
        train: bool,
        both_ways: bool,
        batch_first: bool,
        layer: Any,
    ) -> tuple[Any, list[Any]]:
        x = x.transpose(0, 1) if batch_first else x
        directions, last = 2 if both_ways else 1, list[Any]()
        for i in range(layers):
            x = torch.dropout(x, p, True) if i and train and p else x
            these = slice(i * directions, (i + 1) * directions)
            x, ended = whole(x, hidden[these], weights[these], biases, 1, 0.0, train, both_ways, False, layer)
            last += ended
        return x.transpose(0, 1) if batch_first else x, last

    with replaced(module, "_rnn_helper", layer_by_layer):
        yield


def synonyms(graph: fx.Graph) -> None:
    """Operators that torch writes in two ways, in the one that torch.onnx translates."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = _SYNONYMS.get(node.target, node.target)


def _overloads(pairs: Iterable[tuple[str, str]]) -> dict[Any, Any]:
    return {
        getattr(getattr(aten, a), kind): getattr(getattr(aten, b), kind)
        for a, b in pairs
        for kind in ("Tensor", "Scalar")
    }


_SYNONYMS = _overloads((("__and__", "bitwise_and"), ("__or__", "bitwise_or"), ("__xor__", "bitwise_xor")))


def private_module(name: str, *needed: str) -> ModuleType | None:
    """A private module of torch; None where this torch has none, or none with these names."""
    try:
        found = importlib.import_module(name)
    except ImportError:
        return None
    return found if all(attribute in vars(found) for attribute in needed) else None


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Within, `owner` has another value by this name; one thread at a time replaces names."""
    with _TURN:
        kept = vars(owner)[name]
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, kept)


def known_equal(size: int | torch.SymInt, other: int | torch.SymInt) -> bool:
    """Whether two sizes of a trace are the same at every call, without a guard for it."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(size == other))
