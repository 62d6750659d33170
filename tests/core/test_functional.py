"""A graph that is made functional operator by operator is the one that torch traces twice more for."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as fn
from torch.utils import _pytree as pytree

from effcompile.capture import cleanup
from effcompile.core import torch_compat_functional as functional
from effcompile.ir.export import refresh_shapes

aten = torch.ops.aten
Forward = Callable[[torch.Tensor, torch.Tensor], Any]


class Calls(nn.Module):
    def __init__(self, forward: Forward, **parts: Any) -> None:
        super().__init__()
        self.parts, self.called = nn.ModuleDict(parts), forward
        self.register_buffer("count", torch.ones(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.called(x, y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 4, 8), torch.randn(3, 4, 8)


def exported(model: nn.Module, *, free: bool = False) -> torch.export.ExportedProgram:
    axes = dict.fromkeys(range(2), torch.export.Dim.AUTO)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(
            model.eval(), batch(), dynamic_shapes=({"x": axes, "y": axes} if free else None), strict=False
        )


def views(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Every composite operator that torch takes apart and that is said to lead to none that stays whole."""
    a, b = x.chunk(2, -1)
    taken = x[1:, 0].unflatten(-1, (2, -1)).movedim(0, 1).swapaxes(0, 1).flatten(0, 1).T
    made = fn.dropout(x, 0.5, training=False).to(torch.float64).to("cpu").contiguous().narrow(0, 0, 2)
    return (
        (a * b).transpose(0, 1).reshape(-1),
        taken,
        made,
        y.view_as(x).reshape_as(x),
        a[..., :1].expand_as(a),
        y.mT,
        *x.unbind(0),
    )


def writes(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Into values of their own."""
    z = torch.empty_like(x).fill_(3.0).copy_(y)
    wide = torch.zeros_like(x, dtype=torch.float64)
    wide.copy_(x)
    wide.add_(y).mul_(wide)
    put = (x + y).masked_fill_(y > 0, -1.0).clamp_(-2).scatter_(-1, y.argsort(-1), x)
    put[y > 1] = 0.5
    put.index_put_((torch.tensor([0]),), y[:1]).index_add_(0, torch.tensor([1]), x[:1])
    strided = (x.mT + 1).add_(y.mT.contiguous())
    counted = (x > 0).long().add_(1)
    counted += 2
    grown = (x + 0).unsqueeze_(0)
    relued = fn.relu(x + y, inplace=True) + fn.silu(x * y, inplace=True) + fn.hardtanh(x - y, inplace=True)
    best, places = x.topk(2)
    best.div_(best.sum(-1, keepdim=True))
    narrow, rest = torch.split_with_sizes_copy(x, [2, 6], -1)
    narrow.add_(1)
    return (
        narrow,
        rest,
        best,
        places,
        z * x,
        wide,
        put.softmax(-1),
        strided.reshape(-1),
        counted * y,
        grown,
        relued,
        z.lerp_(y, 0.5),
    )


def read_before_and_after(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What read a value before it was written keeps the earlier one."""
    z = x + y
    before = z * 2
    z.add_(1.0)
    return before - z


def kept_whole(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Composite operators that stay whole, and regions that change nothing here."""
    with torch.no_grad():
        z = torch.einsum("bsd,btd->bst", x, y)
    z.add_(1.0)
    with torch.autocast("cpu", enabled=False):
        z = z.float() @ y
    return fn.layer_norm(z, (8,)), fn.gelu(x).type_as(y), torch.cat([x, y], 1).sort(1)[0], x, x.view(-1)


def repeated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Keys of a cache, repeated for each query that shares them: a copy, whose strides torch writes in
    another way.
    """
    keys = torch.cat([x, y], 1)
    rows, many, _ = keys.shape
    heads = keys.view(rows, many, 2, 4).transpose(1, 2)
    return heads[:, :, None].expand(-1, -1, 2, -1, -1).reshape(rows, 4, many, 4)


def layers() -> nn.Module:
    made = Calls(lambda x, y: made.parts["encoder"](x) + made.parts["lstm"](y)[0])
    made.parts["encoder"], made.parts["lstm"] = (
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        nn.LSTM(8, 8, batch_first=True),
    )
    return made


SHORT = {
    "views": views,
    "writes": writes,
    "before and after": read_before_and_after,
    "kept whole": kept_whole,
    "repeated": repeated,
}


def described(module: fx.GraphModule) -> tuple[int, str]:
    """How many operators there are, and what is returned: as the operators that make it, with types and
    layouts; sizes as numbers.
    """
    made: dict[fx.Node, Any] = {}
    for node in module.graph.nodes:
        given = fx.map_arg((node.args, dict(node.kwargs)), made.__getitem__)  # type: ignore[arg-type, return-value]
        value = node.meta.get("val")
        leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        text = (
            f"{node.op} {node.target} {given} {[(leaf.dtype, leaf.shape, leaf.stride()) for leaf in leaves]}"
        )
        made[node] = value if isinstance(value, int) else hashlib.sha256(text.encode()).hexdigest()
    operators = [
        node
        for node in module.graph.nodes
        if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor)
    ]
    return len(operators), made[module.graph.output_node()]


def tidied(module: Any) -> fx.GraphModule:
    """As a capture keeps it: without asserts and copies, laid out for the example."""
    module = fx.GraphModule(module, module.graph)
    cleanup.drop_asserts(module.graph)
    refresh_shapes(module, batch(), {})
    cleanup.drop_copies(module.graph)
    return module


@pytest.mark.parametrize(
    ("name", "free"),
    [
        *((name, False) for name in (*SHORT, "layers")),
        *((name, True) for name in ("before and after", "kept whole", "layers", "repeated")),
    ],
)
def test_the_short_ways_graph_is_torchs_own(name: str, free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = layers() if name == "layers" else Calls(SHORT[name])
    theirs = exported(model, free=free).run_decompositions({})
    monkeypatch.delattr(functional, "traced_again")  # else torch's way would be compared with itself
    program, module = functional.functional(exported(model, free=free))
    ours, torchs = tidied(module), tidied(theirs.module(check_guards=False))
    assert described(ours) == described(torchs)
    assert program.range_constraints == theirs.range_constraints
    with torch.no_grad():
        torch.testing.assert_close(pytree.tree_leaves(ours(*batch())), pytree.tree_leaves(model(*batch())))


def into_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x * 2
    z[:, 0].add_(1)
    return z + y


def under_a_view(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = x * 2
    view = z[:, 0]
    z.add_(1)
    return view, z


def into_a_slice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.zeros_like(x)
    z[:, 1:].copy_(x[:, :-1])
    return z + y


def under_its_dropout(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = x + 0
    kept = fn.dropout(z, 0.5, training=False)  # which is its input
    kept.add_(1)
    return z, kept * y


def into_a_part(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = (x + 0).chunk(2, -1)
    a.add_(b)
    return a * b, a


def chained(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = x + 0
    view = z.add_(1)[:, 0]
    z.mul_(2)
    return view, z * y


def of_a_list(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    made = [x + 0, y + 0]
    torch._foreach_add_(made, 1.0)
    return made[0] * made[1]


def both_branches(x: torch.Tensor, y: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda a, b: a + b, lambda a, b: a - b, (x, y))


def lower(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ y.mT


def doubled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = x + 0
    for row in z.unbind(0):
        row.mul_(2)
    return z * y


@pytest.mark.parametrize(
    "forward",
    [
        into_a_view,
        under_a_view,
        into_a_slice,
        into_a_part,
        under_its_dropout,
        chained,
        of_a_list,
        both_branches,
        lower,
        doubled,
    ],
)
def test_what_is_not_certain_goes_torchs_way(forward: Forward) -> None:
    model = Calls(forward)
    program = exported(model)
    module = program.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    assert forward is under_its_dropout or not functional._took_apart(module)
    with torch.no_grad():
        made = functional.functional(program)[1](*batch())
        torch.testing.assert_close(pytree.tree_leaves(made), pytree.tree_leaves(model(*batch())))


@pytest.mark.parametrize("of", ["an input", "a buffer"])
def test_a_write_into_what_was_given_goes_torchs_way(of: str) -> None:
    model = Calls(lambda x, y: (x.add_(1) if of == "an input" else model.count.add_(1)) * y)
    module = exported(model).module(check_guards=False)
    assert isinstance(module, fx.GraphModule) and not functional._took_apart(module)


def test_draws_go_torchs_way() -> None:
    module = exported(Calls(lambda x, y: x * torch.empty_like(y).uniform_())).module(check_guards=False)
    assert isinstance(module, fx.GraphModule) and not functional._took_apart(module)


@pytest.mark.parametrize(
    "operator", [aten.batch_norm.default, aten.feature_dropout.default, aten.sym_numel.default]
)
def test_what_may_lead_to_others_goes_torchs_way(operator: torch._ops.OpOverload) -> None:
    assert functional._may_lead_elsewhere(operator)


def test_a_name_outside_of_aten_promises_nothing() -> None:
    """A library may have `scale_` and a `scale` that is something else."""
    with torch.library._scoped_library("effcompile_functional", "FRAGMENT") as library:
        library.define("scale_(Tensor(a!) x, float by) -> Tensor(a!)")
        library.define("scale(Tensor x, float by) -> Tensor")
        assert functional._without_writing(torch.ops.effcompile_functional.scale_.default) is None
    assert functional._without_writing(aten.add_.Tensor) is aten.add.Tensor


def test_torchs_table_is_put_back() -> None:
    """torch's way with the operators of the graph alone gives what it gives with all of its own."""
    model = Calls(under_a_view, norm=nn.BatchNorm1d(8))
    theirs, ours = exported(model).run_decompositions({}), functional.traced_again(exported(model))
    assert [node.format_node() for node in theirs.graph.nodes] == [
        node.format_node() for node in ours.graph.nodes
    ]
    found: Any = torch.export.exported_program
    assert len(found._collect_all_valid_cia_ops()) > 100
