import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from effcompile.core.cost import Provenance
from effcompile.estimate.nodes import estimate, kernel_calls
from effcompile.machine.machines import load_target
from effcompile.machine.target import KernelCall, Law, Target

aten = torch.ops.aten


def kernels(program) -> list[KernelCall]:
    return [call for calls in kernel_calls(program).values() for call in calls]


class Fn(nn.Module):
    def __init__(self, fn, **tensors):
        super().__init__()
        self.fn = fn
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, *args):
        return self.fn(self, *args)


# torch's counter has no formula for CPU's fused attention, so the comparison runs it as its two products
# (MATH)


def test_flops_agree_with_torchs_counter(tiny):
    model, program = tiny
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**program.kwargs)
    total = estimate(program, load_target("h200"), "torch").total
    assert total.matmul_flops == counter.get_total_flops() > 0
    assert total.flops > total.matmul_flops


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (lambda m, a, b: a @ b, [(3, 4, 5), (3, 5, 6)]),
        (lambda m, a, b: a @ b, [(2, 3, 4, 5), (3, 5, 6)]),
        (lambda m, a, b: a @ b, [(7, 4, 5), (5, 6)]),
        (lambda m, a, b: torch.baddbmm(torch.zeros(3, 4, 6), a, b), [(3, 4, 5), (3, 5, 6)]),
        (lambda m, a, b: torch.einsum("bik,bjk->bij", a, b), [(3, 4, 5), (3, 6, 5)]),
        (lambda m, a, b: torch.einsum("bhd,bshd->bhs", a, b), [(2, 3, 5), (2, 4, 3, 5)]),
        (lambda m, a, b: F.conv1d(a, b), [(2, 4, 9), (6, 4, 3)]),
        (lambda m, a, b: F.conv2d(a, b, stride=2), [(2, 4, 9, 9), (6, 4, 3, 3)]),
        (lambda m, a, b: F.conv1d(a, b, groups=4), [(2, 4, 9), (8, 1, 3)]),
        (lambda m, q, k: F.scaled_dot_product_attention(q, k, k), [(2, 3, 4, 8), (2, 3, 6, 8)]),
    ],
)
def test_products_agree_with_torchs_counter(capture, fn, shapes):
    inputs = [torch.randn(s) for s in shapes]
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        fn(None, *inputs)
    total = estimate(capture(Fn(fn), *inputs), load_target("h200"), "torch").total
    assert total.matmul_flops == counter.get_total_flops() > 0


def test_constant_matrices_are_linears_whichever_way_they_are_written(capture):
    weight = torch.randn(5, 6)
    x = torch.randn(2, 3, 5)
    forms = [
        lambda m, x: x @ m.w,
        lambda m, x: x @ m.w.t().contiguous().t(),
        lambda m, x: torch.addmm(torch.zeros(6), x.view(6, 5), m.w),
        lambda m, x: F.linear(x, m.w.t()),
        lambda m, x: torch.mm(x.view(6, 5), m.w),
    ]
    found = [
        [c for c in kernels(capture(Fn(f, w=weight), x)) if not c.kernel.startswith("pointwise")]
        for f in forms
    ]
    assert [f for i, f in enumerate(found) if i != 1] == [[KernelCall("linear/fp32", (6, 5, 6))]] * 4
    assert found[1][0].flops == 2 * 6 * 5 * 6


def test_each_kind_of_op_maps_to_its_kernel(capture):
    def forward(m, ids, x):
        x = F.layer_norm(x + F.embedding(ids, m.table), (8,))
        x = F.rms_norm(F.gelu(x), (8,)) + F.gelu(x, approximate="tanh")
        return F.softmax(x, dim=-2)

    program = capture(
        Fn(forward, table=torch.randn(50, 8)), torch.randint(0, 50, (2, 4)), torch.randn(2, 4, 8)
    )
    found = {c.kernel: c.dims for c in kernels(program) if c.kernel != "pointwise/fp32"}
    assert found == {
        "embedding/fp32": (8, 8), "norm/layer": (8, 8), "gelu/erf": (64,), "norm/rms": (8, 8),
        "gelu/tanh": (64,), "softmax/fp32": (16, 4),
    }  # fmt: skip


def test_views_are_free_and_copies_move_their_bytes(capture):
    def forward(m, x):  # x: 4 × 6
        free = x.view(2, 12).t().unsqueeze(0).contiguous
        return free().split(6, dim=1)[0], x.reshape(24).expand(3, 24), x.contiguous()

    program = capture(Fn(forward), torch.randn(4, 6))
    # only the transposed contiguous() copies: 96 B in, 96 B out
    assert kernels(program) == [KernelCall("pointwise/fp32", (24,))]


def test_pointwise_ops_count_operands_and_results_in_their_own_width(capture):
    program = capture(Fn(lambda m, a, b: a + b), torch.randn(16, 8), torch.randn(8))
    assert kernels(program) == [KernelCall("pointwise/fp32", ((16 * 8 * 2 + 8) * 4 // 8,))]
    half = capture(Fn(lambda m, a: -a), torch.randn(16, 8, dtype=torch.bfloat16))
    assert kernels(half) == [KernelCall("pointwise/fp32", (16 * 8 * 2 * 2 // 8,))]


def test_a_lookup_does_not_pay_for_the_whole_table(capture):
    program = capture(Fn(lambda m, i: m.table[i], table=torch.randn(1000, 8)), torch.tensor([1, 2]))
    assert sum(c.bytes for c in kernels(program)) == 2 * 2 * 8 * 4


def test_totals_and_overrides(tiny):
    _, program = tiny
    target = load_target("a100-80gb")
    plain = estimate(program, target, "torch")
    assert plain.total.provenance is Provenance.MODELLED
    assert plain.seconds == pytest.approx(sum(f.seconds for f in plain.nodes.values()))
    node = next(n for n in plain.nodes if plain.calls[n][0].kernel.startswith("linear"))
    changed = estimate(program, target, "torch", {node: 1.0})
    assert changed.nodes[node].seconds == 1.0
    assert changed.nodes[node].flops == plain.nodes[node].flops
    assert changed.seconds == pytest.approx(plain.seconds - plain.nodes[node].seconds + 1.0)


def test_measured_kernels_are_marked_and_the_rest_falls_back_to_the_model(capture):
    program = capture(Fn(lambda m, x: F.gelu(x @ m.w), w=torch.randn(8, 8)), torch.randn(4, 8))
    law = Law(points=(((4, 8, 8), 0.25),))
    target = Target(
        name="t", description="", device="cpu", cores=1, memory_bytes=1, memory_bandwidth=1e9,
        link_bandwidth=1e9, peak_flops={"fp32": 1e9}, laws={"torch": {"linear/fp32": law}},
    )  # fmt: skip
    figures = {
        estimated.provenance: estimated.seconds
        for estimated in estimate(program, target, "torch").nodes.values()
    }
    assert figures[Provenance.MEASURED] == 0.25
    assert 0 < figures[Provenance.MODELLED] < 0.25
    assert estimate(program, target, "torch").total.provenance is Provenance.MODELLED


def test_a_dtype_the_machine_lacks_is_still_predicted(capture):
    program = capture(
        Fn(lambda m, x: x @ m.w, w=torch.randn(64, 64, dtype=torch.bfloat16)),
        torch.randn(4, 64, dtype=torch.bfloat16),
    )
    found = estimate(program, load_target("v100-32gb"), "torch").total
    assert found.provenance is Provenance.MODELLED
    assert math.isfinite(found.seconds)
    assert found.seconds > 0


def test_backends_without_prices_are_never_asked_twice_for_one_kernel(tiny):
    _, program = tiny
    asked = []

    def probe(backend, call):
        asked.append(call)
        return 1e-6

    target = Target(
        name="t", description="", device="cpu", cores=1, memory_bytes=1, memory_bandwidth=1e9,
        link_bandwidth=1e9, peak_flops={"fp32": 1e9}, probe=probe,
    )  # fmt: skip
    assert estimate(program, target, "torch").total.provenance is Provenance.MEASURED
    assert len(asked) == len(set(asked)) > 5
