"""What lies between attentions as one call: the same bits as operator by operator, and torch's own where it
does not fit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn

from effcompile.backends.torch import regions
from effcompile.backends.torch.in_place import appending
from effcompile.ops import few_rows, group_codes, group_native, int8_codes, row_program
from effcompile.ops.add_norm import add_layer_norm
from effcompile.ops.append import append, buffer
from effcompile.ops.cache_rows import as_numbers
from effcompile.ops.cached_attention import cached_attention
from effcompile.ops.group_linear import group_linear
from effcompile.ops.int8_linear import int8_linear
from effcompile.ops.rows import rms_norm, rms_norm_alone, rotary, swiglu

aten = torch.ops.aten
WIDTH, HEADS, WIDE = 24, 3, 40

pytestmark = pytest.mark.skipif(not row_program.available(), reason="no kernels are compiled here")


def _weights(module: nn.Module) -> None:
    """Those of a block, as buffers."""
    torch.manual_seed(0)
    for name, n, k in (
        ("q", WIDTH, WIDTH),
        ("k", WIDTH, WIDTH),
        ("gate", WIDE, WIDTH),
        ("up", WIDE, WIDTH),
        ("down", WIDTH, WIDE),
    ):
        bits = 8 if name == "k" else 4
        module.register_buffer(name, group_codes.pack(*group_codes.quantize(torch.randn(n, k), bits), bits))
    codes = torch.randint(-127, 128, (WIDTH, WIDTH)).to(torch.int8)
    module.register_buffer("o", int8_codes.pack(codes))
    for name in ("scales", "bias", "norm"):
        module.register_buffer(name, torch.rand(WIDTH) / 50)


def block() -> fx.GraphModule:
    """Rows, cos and sin in: heads turned, then what follows an attention, which is a softmax over the tokens
    here.
    """
    module, graph = nn.Module(), fx.Graph()
    _weights(module)
    values: dict[fx.Node, Tensor] = {}
    shapes = {"x": (2, 3, WIDTH), "cos": (2, 3, WIDTH // HEADS), "sin": (2, 3, WIDTH // HEADS)}

    def put(node: fx.Node) -> fx.Node:
        if node.op == "placeholder":
            values[node] = torch.randn(shapes[node.name])
        else:
            args = fx.map_arg(
                node.args,
                lambda each: getattr(module, each.target) if each.op == "get_attr" else values[each],
            )
            values[node] = node.target(*args, **node.kwargs)  # type: ignore[operator]
        node.meta["val"] = values[node]
        return node

    def call(target: Callable[..., object], *args: object) -> fx.Node:
        return put(graph.call_function(target, args))  # type: ignore[arg-type]

    x, cos, sin = (put(graph.placeholder(name)) for name in shapes)
    held = {name: graph.get_attr(name) for name, _ in module.named_buffers()}
    normed = call(rms_norm_alone._opoverload, x, held["norm"], 1e-5)
    turned = []
    for name in ("q", "k"):
        rows = call(group_linear.default, normed, held[name], WIDTH, held["bias"])
        heads = call(
            aten.transpose.int, call(aten.reshape.default, rows, [2, 3, HEADS, WIDTH // HEADS]), 1, 2
        )
        turned.append(call(rotary._opoverload, heads, cos, sin, False))
    mixed = call(aten._softmax.default, call(aten.add.Tensor, *turned), 2, False)
    seen = call(aten.reshape.default, call(aten.transpose.int, mixed, 1, 2), [2, 3, WIDTH])
    after = call(int8_linear.default, call(aten.clone.default, seen), held["o"], held["scales"], None)
    both = call(rms_norm._opoverload, after, x, held["norm"], 1e-5)
    normed, total = (call(operator.getitem, both, at) for at in (0, 1))
    gate, up = (call(group_linear.default, normed, held[name], WIDE) for name in ("gate", "up"))
    down = call(group_linear.default, call(swiglu._opoverload, gate, up), held["down"], WIDTH, None, "gelu")
    graph.output((call(aten.add.Tensor, total, down), turned[0]))
    made = fx.GraphModule(module, graph)
    return made


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def called(module: fx.GraphModule) -> list[regions.Region]:
    return [node.target for node in module.graph.nodes if isinstance(node.target, regions.Region)]


def test_regions_are_the_same_bits(threads: Callable[[int], None]) -> None:
    plain = block()
    fused = regions.with_regions(block())
    assert len(called(fused)) == 2 and not any(
        node.target in (group_linear.default, int8_linear.default) for node in fused.graph.nodes
    )
    inputs = [torch.randn(2, 3, WIDTH), *(torch.randn(2, 3, WIDTH // HEADS) for _ in range(2))]
    for count in (1, 2):
        threads(count)
        for found, wanted in zip(fused(*inputs), plain(*inputs), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
            assert found.shape == wanted.shape and found.stride() == wanted.stride()


def test_one_call_and_one_by_one_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = regions.with_regions(block())
    inputs = [torch.randn(2, 3, WIDTH), *(torch.randn(1, 3, WIDTH // HEADS) for _ in range(2))]
    at_once = fused(*inputs)
    monkeypatch.setattr(regions, "FEW", 0)
    assert all(torch.equal(a, b) for a, b in zip(at_once, fused(*inputs), strict=True))


def test_a_layout_that_no_program_takes() -> None:
    fused = regions.with_regions(block())
    x, cos, sin = (
        torch.randn(3, 2, WIDTH).transpose(0, 1),
        torch.randn(2, 3, WIDTH // HEADS),
        torch.randn(2, 3, WIDTH // HEADS),
    )
    wanted = fused(x.contiguous(), cos, sin)
    for found, right in zip(fused(x, cos, sin), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_stays_in_its_row() -> None:
    fused = regions.with_regions(block())
    x, cos, sin = (
        torch.randn(2, 3, WIDTH),
        torch.randn(2, 3, WIDTH // HEADS),
        torch.randn(2, 3, WIDTH // HEADS),
    )
    x[1, 2, 3] = torch.nan
    found = fused(x, cos, sin)[1]
    assert found[1, :, 2].isnan().all() and found[0].isfinite().all() and found[1, :, :2].isfinite().all()


def test_without_kernels_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_program, "available", lambda: False)
    plain = block()
    before = [node.target for node in plain.graph.nodes]
    assert [node.target for node in regions.with_regions(appending(plain, {})).graph.nodes] == before


def layers(
    form: torch.dtype = torch.float32, *, masked: bool = True, told: bool = False
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Two layers of heads turned, appended and attended over; rows, cos, sin, two caches a layer and a mask
    in.

    `told`: the last attention's heads out, too.
    """
    module, graph = nn.Module(), fx.Graph()
    torch.manual_seed(1)
    for at in range(2):
        for name, n in (("q", WIDTH), ("k", WIDTH // HEADS), ("v", WIDTH // HEADS), ("o", WIDTH)):
            module.register_buffer(
                f"{name}{at}", group_codes.pack(*group_codes.quantize(torch.randn(n, WIDTH), 4), 4)
            )
    module.register_buffer("norm", torch.rand(WIDTH))
    each, past = WIDTH // HEADS, 5
    like = torch.zeros(2, 1, 0, each + (4 if form is torch.int8 else 0)).to(form)
    held = [buffer(like, 9) for _ in range(4)]
    held = [
        append(one, torch.randn(2, 1, past, each).to(form if form.is_floating_point else torch.float32), 9)
        for one in held
    ]
    seen = torch.rand(2, 1, 3, past + 3) > 0.3
    seen[..., 0] = True
    inputs = [torch.randn(2, 3, WIDTH), torch.randn(2, 3, each), torch.randn(2, 3, each), *held, seen]
    nodes = [graph.placeholder(f"in{at}") for at in range(len(inputs))]
    values: dict[fx.Node, Tensor] = dict(zip(nodes, inputs, strict=True))

    def call(target: Callable[..., object], *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        found = fx.map_arg(
            args, lambda one: getattr(module, one.target) if one.op == "get_attr" else values[one].clone()
        )
        values[node] = target(*found)  # type: ignore[assignment]
        return node

    constants = {name: graph.get_attr(name) for name, _ in module.named_buffers()}
    x, cos, sin, *caches, mask = nodes
    longer = []
    for at in range(2):
        normed = call(rms_norm_alone._opoverload, x, constants["norm"], 1e-5)
        heads = []
        for name, count in (("q", HEADS), ("k", 1), ("v", 1)):
            rows = call(group_linear.default, normed, constants[f"{name}{at}"], count * each)
            heads.append(call(aten.transpose.int, call(aten.view.default, rows, [2, 3, count, each]), 1, 2))
        turned = [call(rotary._opoverload, one, cos, sin, False) for one in heads[:2]]
        keys, found = (
            call(append, caches[2 * at], turned[1], 9),
            call(append, caches[2 * at + 1], heads[2], 9),
        )
        mixed = call(cached_attention, turned[0], keys, found, mask if masked else None, None)
        mixed = call(aten.reshape.default, mixed, [2, HEADS, 3, each])  # as exported models have it
        beside = call(aten.reshape.default, call(aten.transpose.int, mixed, 1, 2), [2, 3, WIDTH])
        x = call(aten.add.Tensor, x, call(group_linear.default, beside, constants[f"o{at}"], WIDTH))
        longer += [keys, found]
    graph.output((x, *longer, *((beside.args[0],) if told else ())))
    for node, value in values.items():
        node.meta["val"] = (
            value if value.is_floating_point() or value.dtype is torch.bool else value[..., :each].float()
        )
    return fx.GraphModule(module, graph), inputs


@pytest.mark.parametrize("form", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("masked", [True, False])
def test_all_layers_are_one_call_with_the_same_bits(
    form: torch.dtype, masked: bool, threads: Callable[[int], None]
) -> None:
    """Rows of a cache go where appends put them: in its buffer, and nowhere else.

    A code that is half way may go either way.
    """
    plain, inputs = layers(form, masked=masked)
    close = {"rtol": 1e-5, "atol": 1e-6} if form.is_floating_point else {"rtol": 1e-2, "atol": 2e-2}
    wanted = plain(*[one.clone() for one in inputs])
    fused = regions.with_regions(plain)
    assert len(called(fused)) == 1 and not any(
        node.target in (append, cached_attention) for node in fused.graph.nodes
    )
    for count in (1, 2):
        threads(count)
        found = fused(*inputs)
        for one, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                *(as_numbers(each) if each.dtype is torch.int8 else each for each in (one, right)), **close
            )
        for before, after in zip(inputs[3:7], found[1:], strict=True):
            assert (
                after.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
                and after.shape[2] == before.shape[2] + 3
            )


def test_caches_of_another_kind_run_operator_by_operator() -> None:
    plain, inputs = layers()
    fused = regions.with_regions(plain)
    wanted = fused(*[one.clone() for one in inputs])
    strided = [one.transpose(2, 3).contiguous().transpose(2, 3) for one in inputs[3:7]]
    for caches in ([one.double() for one in inputs[3:7]], strided):
        found = fused(*inputs[:3], *caches, inputs[7])
        assert all(map(torch.equal, found, plain(*inputs[:3], *caches, inputs[7])))
        for one, right in zip(found, wanted, strict=True):
            # of doubles sums are rounded elsewhere, by an epsilon of numbers of up to 60
            rounded = torch.finfo(torch.float32).eps * right.abs().max().item()
            atol = 1e-6 if caches is strided else rounded
            torch.testing.assert_close(one.float(), right, rtol=1e-5, atol=atol)


def test_an_attention_that_no_program_takes_leaves_the_rest() -> None:
    """Heads behind their tokens are no result of a program: what lies between the attentions is one call each
    then.
    """
    plain, inputs = layers(told=True)
    wanted = plain(*[one.clone() for one in inputs])
    fused = regions.with_regions(plain)
    assert len(called(fused)) > 1 and any(node.target is cached_attention for node in fused.graph.nodes)
    for one, right in zip(fused(*inputs), wanted, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-5, atol=1e-6)


def decoder(batch: int) -> tuple[fx.GraphModule, list[Tensor]]:
    """A layer of an encoder-decoder in fp32: learned positions, LayerNorms, an attention over a cache that
    grows and one over an encoder's rows (which lie with heads behind the rows), each of its followers, and a
    head with a row that is added.
    """
    module, graph = nn.Module(), fx.Graph()
    torch.manual_seed(2)
    each, past, source = WIDTH // HEADS, 5, 7
    for name, n, k in (
        *((name, WIDTH, WIDTH) for name in ("q", "k", "v", "o", "q2", "o2", "fc3")),
        ("fc1", WIDE, WIDTH),
        ("fc2", WIDTH, WIDE),
        ("head", 51, WIDTH),
    ):
        module.register_buffer(name, torch.randn(n, k) / 5)
        module.register_buffer(f"{name}_bias", torch.randn(n))
    module.register_buffer("norm", torch.rand(WIDTH))
    module.register_buffer("shift", torch.randn(1, 51))
    held = [
        append(buffer(torch.zeros(batch, HEADS, 0, each), 9), torch.randn(batch, HEADS, past, each), 9)
    ] * 2
    held = [one.clone() for one in held]
    beside = [torch.randn(batch, source, HEADS, each).transpose(1, 2) for _ in range(2)]
    bias = torch.randn(1, HEADS, 2, past + 2)
    rows = [torch.randn(batch, 2, WIDTH), torch.randn(1, 2, WIDTH)]
    inputs = [*rows, *held, *beside, bias]
    nodes = [graph.placeholder(f"in{at}") for at in range(len(inputs))]
    values: dict[fx.Node, Tensor] = dict(zip(nodes, inputs, strict=True))

    def call(target: Callable[..., object], *args: object, **kwargs: object) -> fx.Node:
        node = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        given = fx.map_arg(
            args, lambda one: getattr(module, one.target) if one.op == "get_attr" else values[one].clone()
        )
        values[node] = target(*given, **kwargs)  # type: ignore[assignment]
        return node

    constants = {name: graph.get_attr(name) for name, _ in module.named_buffers()}

    def product(name: str, x: fx.Node) -> fx.Node:
        return call(few_rows.linear, x, constants[name], constants[f"{name}_bias"])

    def heads(x: fx.Node) -> fx.Node:
        return call(aten.transpose.int, call(aten.view.default, x, [batch, 2, HEADS, each]), 1, 2)

    def together(x: fx.Node) -> fx.Node:
        return call(aten.reshape.default, call(aten.transpose.int, x, 1, 2), [batch, 2, WIDTH])

    x, positions, *caches, keys, found, added = nodes
    x = call(aten.mul.Tensor, call(aten.add.Tensor, x, positions), 2.5)
    x = call(aten.layer_norm.default, x, [WIDTH], constants["norm"], constants["o_bias"], 1e-5)
    longer = [
        call(append, cache, heads(product(name, x)), 9) for cache, name in zip(caches, "kv", strict=True)
    ]
    mixed = product("o", together(call(cached_attention, heads(product("q", x)), *longer, added, 1.0)))
    x = call(add_layer_norm.default, x, mixed, constants["norm"], None, 1e-5)
    mixed = call(cached_attention, heads(product("q2", x)), keys, found, None, None)
    x = call(aten.add.Tensor, x, product("o2", together(mixed)))
    x = call(aten.add.Tensor, x, product("fc2", call(aten.gelu.default, product("fc1", x))))
    x = call(aten.gelu.default, call(aten.silu.default, product("fc3", x)), approximate="tanh")
    logits = call(aten.add.Tensor, product("head", call(aten.relu.default, x)), constants["shift"])
    graph.output((logits, *longer))
    for node, value in values.items():
        node.meta["val"] = value
    return fx.GraphModule(module, graph), inputs


@pytest.mark.parametrize("batch", [1, 3])
def test_a_decoder_beside_an_encoder_is_one_call(batch: int, threads: Callable[[int], None]) -> None:
    """By torch alone on the other side; found at a batch of one, run at one whose rows share positions."""
    plain, inputs = decoder(batch)
    for node in plain.graph.nodes:
        if node.target is few_rows.linear:
            node.target = torch.nn.functional.linear
    plain.recompile()
    wanted = plain(*[one.clone() for one in inputs])
    fused = regions.with_regions(decoder(1)[0])
    left = [node for node in fused.graph.nodes if node.op == "call_function"]
    assert len(called(fused)) == 1 and {node.target for node in left[1:]} == {operator.getitem}
    for count in (1, 2):
        threads(count)
        for one, right in zip(fused(*inputs), wanted, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-5, atol=1e-5)


def test_an_encoder_without_rows_and_a_mask_of_another_length_run_one_by_one() -> None:
    plain, inputs = decoder(2)
    fused = regions.with_regions(plain)
    none = [one[:, :, :0] if at in (4, 5) else one for at, one in enumerate(inputs)]
    assert fused(*none)[0].shape == (2, 2, 51)
    with pytest.raises(RuntimeError):
        fused(*inputs[:6], inputs[6][..., 1:])


def test_a_kernel_that_is_not_here_leaves_its_operator_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_native, "kernels", lambda: "it does not agree with torch")
    assert not row_program.has(row_program.GROUPS) and row_program.has(row_program.ADD)
    made = regions.with_regions(block()).graph.nodes
    assert not any(isinstance(node.target, regions.Region) for node in made)
