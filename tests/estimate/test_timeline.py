import logging

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from effcompile.capture import capture
from effcompile.estimate.storages import storages
from effcompile.estimate.timeline import timeline
from effcompile.ir.program import Program


class LiveStorages(fx.Interpreter):
    """Runs a graph on real tensors with last-use frees and sums the storages that are referenced at each
    step.
    """

    def __init__(self, module):
        super().__init__(module, garbage_collect_values=True)
        self.live: dict[str, int] = {}

    def run_node(self, n):
        result = super().run_node(n)
        if n.op == "call_function":
            self.live[n.name] = self._bytes([*self.env.values(), result, *self.weights()])
        if not n.users:  # fx's code drops at once what nobody reads; the interpreter would keep it
            return None if n.op != "output" else result
        return result

    def weights(self):
        return [*self.module.parameters(), *self.module.buffers()]

    @staticmethod
    def _bytes(values):
        leaves = [t for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, torch.Tensor)]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in leaves}.values())


def placeholders(program):
    return list(program.flat_inputs())


def assert_same_as_a_real_run(program):
    predicted = timeline(program)
    interpreter = LiveStorages(program.module)
    with torch.no_grad():
        interpreter.run(*placeholders(program), enable_io_processing=False)
    # gone again when the op returns
    workspace = {node.name: size for node, size in storages(program).workspace.items()}
    # the interpreter drops an input after its last use, the caller of a model does not: compare from where it
    # is dropped
    missing = _dropped_inputs(program)
    assert {
        name: size - missing.get(name, 0) - workspace[name] for name, size in predicted.steps
    } == interpreter.live


def _dropped_inputs(program) -> dict[str, int]:
    """Step → bytes of inputs that an interpreter has dropped by then."""
    held, nodes = storages(program), list(program.graph.nodes)
    position = {n: i for i, n in enumerate(nodes)}
    dropped = {}
    for i, node in enumerate(nodes):
        gone = 0
        for source in nodes:
            if source.op == "placeholder" and source.users:
                storage = set(held.of[source])
                last = max(
                    position[user]
                    for n in nodes
                    if storage & set(held.of[n])
                    for user in (n.users or {n: None})
                )
                gone += sum(held.nbytes[s] for s in storage) if last < i else 0
        dropped[node.name] = gone
    return dropped


class Views(nn.Module):
    """Chunks, transposes, an in-place op, a reshape that copies and one that does not, a dead value."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 96), nn.Linear(32, 16)

    def forward(self, x):
        q, k, v = self.up(x).chunk(3, dim=-1)
        s = (q.transpose(0, 1).reshape(32, -1) @ k.reshape(-1, 32)).relu_()
        _ = torch.zeros(1000) + 1
        return self.down(v) + s.sum(), s[:2, :2]


class Stack(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            )
            for _ in range(depth)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_views_in_place_and_copies_as_a_real_run(capture):
    assert_same_as_a_real_run(capture(Views(), torch.randn(40, 16)))


def test_residual_stack_as_a_real_run(capture):
    assert_same_as_a_real_run(capture(Stack(), torch.randn(8, 64)))


def test_tiny_transformers_as_a_real_run(tiny):
    assert_same_as_a_real_run(tiny[1])


def allocator_peak(program) -> int:
    """The most bytes that torch's CPU allocator held at once over one call of the graph's own code, above the
    start.
    """
    with torch.no_grad():
        program.module(*program.args, **program.kwargs)  # oneDNN's first call allocates its scratchpads
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            program.module(*program.args, **program.kwargs)
    live = peak = 0
    # profiler.events() hides allocations made inside an op; the raw trace has them all
    for event in sorted(
        (e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"),
        key=lambda e: e.start_ns(),
    ):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak > 0
    return peak


# tolerance against the allocator: 1 % for the few bytes of scalars and indices that kernels make; equal in
# practice


@pytest.mark.parametrize("rows", [64, 512])
def test_peak_equals_torchs_allocator(capture, rows):
    program = capture(Stack(), torch.randn(rows, 64))
    assert timeline(program).activation_bytes == pytest.approx(allocator_peak(program), rel=0.01)


def test_peak_of_tiny_transformers_equals_torchs_allocator(tiny):
    assert timeline(tiny[1]).activation_bytes == pytest.approx(allocator_peak(tiny[1]), rel=0.01)


class Inner(nn.Module):
    """Ops whose peak lies inside them: a boolean mask made float, expanded operands made contiguous."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, q, mask):
        if self.form == "mask":
            return nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return q.unsqueeze(2).expand(-1, -1, 8, -1, -1) @ q.unsqueeze(2).transpose(-1, -2)


@pytest.mark.parametrize("form", ["mask", "expand"])
@pytest.mark.parametrize("length", [16, 200])
def test_workspace_inside_composite_ops_is_counted(capture, form, length):
    program = capture(
        Inner(form), torch.randn(1, 4, length, 16), torch.ones(1, 1, length, length, dtype=torch.bool)
    )
    found = timeline(program)
    assert found.activation_bytes == pytest.approx(allocator_peak(program), rel=0.01)
    assert sum(storages(program).workspace.values()) > 0


def test_parts_of_the_timeline(capture):
    model, x = Stack(depth=2), torch.randn(8, 64)
    found = timeline(capture(model, x))
    assert found.weight_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert found.input_bytes == 8 * 64 * 4
    assert found.peak_bytes == max(size for _, size in found.steps) == dict(found.steps)[found.peak_node]
    # the peak: the residual stream (the input in the first layer), a hidden layer and its GELU
    assert found.activation_bytes == 8 * 64 * 4 * (1 + 4 + 4)
    assert found.activation_bytes == found.peak_bytes - found.weight_bytes - found.input_bytes


def test_shared_weights_and_constants_count_once(capture):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
            self.b.weight = self.a.weight
            self.plain = torch.ones(100)

        def forward(self, x):
            return self.b(self.a(x)) + self.plain.sum()

    assert timeline(capture(Tied(), torch.randn(2, 32))).weight_bytes == 32 * 32 * 4 + 400


def test_in_place_ops_share_their_operands_storage():
    def fn(x):
        y = x + 1
        z = y.view(-1)[:10]
        z.mul_(2.0)
        return y.sum() + torch.ones(50).exp_().sum()

    x = torch.randn(10, 10)
    program = Program(name="fn", module=make_fx(fn)(x), args=(x,), kwargs={}, inputs=(), outputs=())
    held = storages(program)
    written = {n.name for n in held.written}
    assert written == {"mul_", "exp_"}
    assert not any(held.made[n] for n in held.written)
    assert_same_as_a_real_run(program)


def test_a_larger_batch_is_never_smaller(capture):
    peaks = [timeline(capture(Stack(depth=1), torch.randn(rows, 64))).activation_bytes for rows in (1, 7, 64)]
    assert peaks == sorted(set(peaks))


def test_planning_on_the_meta_device(capture):
    with torch.device("meta"):
        program = capture(Stack(), torch.empty(8, 64))
    real = capture(Stack(), torch.randn(8, 64))
    assert timeline(program).peak_bytes == timeline(real).peak_bytes


class ByCounts(nn.Module):
    """Rows in parts whose sizes depend on data, as JetMoE gives tokens to experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        parts = x.split(torch.bincount(chosen, minlength=3)[:3].tolist())
        return torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])


def test_a_split_by_data_has_memory(caplog: pytest.LogCaptureFixture) -> None:
    model = ByCounts().eval()
    program = capture(model, (torch.randn(9, 8), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])), dynamic=False)
    (split,) = [node for node in program.graph.nodes if "split" in str(node.target)]
    held = storages(program)
    assert len(held.of[split]) == 3 and all(held.nbytes[s] > 0 for s in held.of[split])
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
