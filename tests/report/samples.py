"""Plans as the compiler makes them for a BERT-like model, with invented figures.

Import it, or run it to look at every report.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from effcompile.core.causes import Limits
from effcompile.core.cost import Cost, Provenance
from effcompile.core.errors import InfeasibleError
from effcompile.core.findings import Padding
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because, NotFaster, Unsupported
from effcompile.ir.figures import Candidate, Certificate, Check, Totals
from effcompile.ir.plan import Decision, Declined, Plan
from effcompile.machine.target import Target

LAYERS = 12
MIB = 2**20
LINEARS = {
    "attention.self.query": (590_592, 0.90e-3),
    "attention.self.key": (590_592, 0.90e-3),
    "attention.self.value": (590_592, 0.91e-3),
    "attention.output.dense": (590_592, 0.92e-3),
    "intermediate.dense": (2_362_368, 3.61e-3),
    "output.dense": (2_360_064, 3.74e-3),
}


def linear(layer: int, name: str, option: str) -> Decision:
    elements, seconds = LINEARS[name]
    site = f"encoder.layer.{layer}.{name}"
    error = 4.1e-6 * (1 + layer / 12) * (2.5 if name == "output.dense" else 1)
    costs = {
        "fp32": Cost(seconds=seconds, weight_bytes=4 * elements),
        "int8_dynamic": Cost(seconds=0.27 * seconds, weight_bytes=elements + 8, error_squared=error),
        "int8_channel": Cost(seconds=0.31 * seconds, weight_bytes=elements + 3072, error_squared=0.4 * error),
    }
    why = "measured fastest within the budget" if option != "fp32" else "its error does not fit the budget"
    return Decision(
        site=site,
        kind="linear",
        option=option,
        baseline="fp32",
        by="quantize",
        cost=costs[option],
        baseline_cost=costs["fp32"],
        why=Because(why),
        applied=option,
    )


def decisions() -> tuple[Decision, ...]:
    found = []
    for layer in range(LAYERS):
        root = f"encoder.layer.{layer}"
        for name in LINEARS:
            option = "int8_channel" if layer in (0, 11) and name == "output.dense" else "int8_dynamic"
            found.append(
                linear(layer, name, "fp32" if (layer, name) == (11, "intermediate.dense") else option)
            )
        found.append(
            Decision(
                site=f"{root}.attention.self:attention",
                kind="attention",
                option="packed",
                baseline="sdpa",
                by="attention",
                cost=Cost(seconds=0.31e-3),
                baseline_cost=Cost(seconds=0.62e-3),
                why=Because("one kernel"),
                applied="packed",
            )
        )
        found.append(
            Decision(
                site=f"{root}.attention.self:merge",
                kind="merge",
                option="merged",
                baseline="separate",
                by="merge",
                cost=Cost(seconds=-0.21e-3),
                baseline_cost=Cost(),
                why=Because("quantises the shared input once"),
                applied="merged",
            )
        )
        found.extend(
            Decision(
                site=f"{root}.{norm}:add_norm",
                kind="norm",
                option="split",
                baseline="split",
                by="fuse",
                cost=Cost(seconds=0.09e-3),
                baseline_cost=Cost(seconds=0.09e-3),
                why=Because("fused is slower here"),
                applied="split",
            )
            for norm in ("attention.output.LayerNorm", "output.LayerNorm")
        )
        found.append(
            Decision(
                site=f"{root}.intermediate:gelu",
                kind="gelu",
                option="erf",
                baseline="erf",
                by="gelu",
                cost=Cost(seconds=0.18e-3),
                baseline_cost=Cost(seconds=0.18e-3),
                applied="erf",
            )
        )
    found.append(
        Decision(
            site="embeddings.word_embeddings",
            kind="embedding",
            option="int8",
            baseline="fp32",
            by="quantize",
            cost=Cost(seconds=0.021e-3, weight_bytes=23_440_896, error_squared=2.2e-5),
            baseline_cost=Cost(seconds=0.018e-3, weight_bytes=93_763_584),
            why=Because("saves weight bytes"),
            applied="int8",
        )
    )
    return tuple(found)


def declined() -> tuple[Declined, ...]:
    found = []
    for layer in range(LAYERS):
        root = f"encoder.layer.{layer}"
        for name, (elements, seconds) in LINEARS.items():
            bf16 = Cost(
                seconds=1.9 * seconds,
                weight_bytes=2 * elements,
                error_squared=1.1e-7,
                provenance=Provenance.MODELLED,
            )
            slower = NotFaster(seconds=1.9 * seconds, against=seconds, than="fp32")
            found.append(
                Declined(
                    site=f"{root}.{name}",
                    kind="linear",
                    option="bf16",
                    by="quantize",
                    reason=slower,
                    cost=bf16,
                )
            )
            if layer not in (0, 11) or name != "output.dense":
                channel = Cost(seconds=0.31 * seconds, weight_bytes=elements + 3072, error_squared=1.6e-6)
                found.append(
                    Declined(
                        site=f"{root}.{name}",
                        kind="linear",
                        option="int8_channel",
                        by="quantize",
                        cost=channel,
                        reason=Unsupported(
                            f"{0.04 * seconds * 1e6:.0f} µs slower; the error it would save is not needed"
                        ),
                    )
                )
        if layer == 11:
            found.append(
                Declined(
                    site=f"{root}.intermediate.dense",
                    kind="linear",
                    option="int8_dynamic",
                    by="quantize",
                    reason=Unsupported("error 9.4e-3 would exceed the budget by 4 %"),
                    cost=Cost(seconds=0.97e-3, error_squared=8.8e-5),
                )
            )
        found.extend(
            Declined(
                site=f"{root}.{norm}:add_norm",
                kind="norm",
                option="fused",
                by="fuse",
                reason=Unsupported("SkipLayerNormalization costs 0.71 ms, 8.1× what it replaces"),
                cost=Cost(seconds=0.71e-3),
            )
            for norm in ("attention.output.LayerNorm", "output.LayerNorm")
        )
    found.append(
        Declined(
            site="", kind="sparsity", option="2:4", by="sparsify", reason=Unsupported("no kernel on this CPU")
        )
    )
    return tuple(found)


def bert(**changes: Any) -> Plan:
    """Lowered, measured, verified, within its goal."""
    plan = Plan(
        model="BertModel",
        fingerprint="5f1c0a9be2c44d7a90b1",
        parameters=109_482_240,
        goal=Goal(max_error=3.1e-2),
        target="auto",
        target_line="this machine: 2 cores, 220 GFLOP/s fp32, 27 GB/s (calibrated 2026-11-21 02:10)",
        backend="onnxruntime",
        decisions=decisions(),
        declined=declined(),
        certificate=Certificate(
            status="optimal within gap",
            objective=44.1e-3,
            bound=43.7e-3,
            gap=0.01,
            sites=133,
            alternatives=412,
            seconds=0.31,
            solver="z3 4.15.3",
            rounds=2,
            error_scale=1.31,
        ),
        baseline=Totals(seconds=168e-3, weight_bytes=438 * MIB, peak_bytes=462 * MIB, error=0.0),
        predicted=Totals(seconds=44.1e-3, weight_bytes=113 * MIB, peak_bytes=141 * MIB, error=2.3e-2),
        measured=Totals(seconds=45.8e-3, weight_bytes=114 * MIB, peak_bytes=143 * MIB, error=2.1e-2),
        measured_baseline=Totals(seconds=175.2e-3, weight_bytes=438 * MIB, peak_bytes=471 * MIB, error=0.0),
        candidates=(
            Candidate(
                backend="torch",
                predicted_seconds=47.9e-3,
                measured_seconds=51.3e-3,
                error=2.2e-2,
                note=Because("Inductor, x86 int8"),
            ),
            Candidate(
                backend="onnxruntime",
                predicted_seconds=44.1e-3,
                measured_seconds=45.8e-3,
                error=2.1e-2,
                note=Because("opset 23"),
            ),
            Candidate(
                backend="openvino",
                note=Because("not tried: not installed (pip install effcompile[openvino])"),
            ),
        ),
        checks=(
            Check(name="same inputs", error=2.1e-2, limit=3.1e-2),
            Check(name="second shape 2×64", error=1.9e-2, limit=3.1e-2),
            Check(name="padded mask", error=2.4e-2, limit=3.1e-2, note=Padding(effect=0.41)),
        ),
        inputs=("input_ids int64 1×128", "attention_mask int64 1×128"),
        calibration_inputs="8 generated batches of random tokens",
        settings={"threads": 2, "arena": True, "io_binding": True},
        notes=(
            Because("mend: use_cache=False, as a prefill reads no cache"),
            Because(
                "correction: measured error 3.4e-2 was over the limit; errors scaled by 1.31 and solved again"
            ),
        ),
        versions={"effcompile": "0.1.0", "torch": "2.13.0", "onnxruntime": "1.31.0", "z3": "4.15.3"},
    )
    return replace(plan, **changes)


def planned_only() -> Plan:
    """Predicted for a machine that is not here: nothing lowered, nothing measured, memory limited, bound not
    proven.
    """
    plan = bert()
    return replace(
        plan,
        goal=Goal(max_error=3.1e-2, memory=200 * MIB),
        target="h100-sxm",
        target_line="NVIDIA H100 SXM 80 GB (not calibrated: modelled from its data sheet)",
        certificate=replace(
            plan.certificate, status="feasible, bound not proven", bound=41.0e-3, rounds=1, error_scale=1.0
        ),
        measured=None,
        measured_baseline=None,
        candidates=(),
        checks=(),
        notes=(),
        settings={},
        decisions=tuple(replace(d, applied="") for d in plan.decisions),
    )


def exact_failed() -> Plan:
    """An exact goal, long names, a decision that costs time, one not applied, a failed check, a limit
    exceeded.
    """
    deep = "model.language_model.transformer.decoder_stack.residual_branches.layers"
    made = [
        Decision(
            site=f"{deep}.{layer}.feed_forward_network.experts.{expert}.gate_up_projection_with_a_long_name",
            kind="linear",
            option="w8" if expert else "fp32",
            baseline="fp32",
            by="quantize",
            cost=Cost(seconds=1.3e-3, weight_bytes=3 * MIB),
            baseline_cost=Cost(seconds=1.1e-3, weight_bytes=(2 if layer == 1 else 9) * MIB),
            applied="fp32" if expert == 3 else ("w8" if expert else "fp32"),
        )
        for layer in range(3)
        for expert in range(4)
    ]
    return bert(
        model="AVeryLongModelClassNameForConditionalGenerationWithSequenceClassificationHead",
        goal=Goal(memory=100 * MIB, minimize="memory"),
        decisions=tuple(made),
        declined=(),
        checks=(
            Check(
                name="same inputs",
                error=2.1e-2,
                limit=1e-5,
                note=Because("differs from the first layer on [bold]not markup[/bold]"),
            ),
        ),
        certificate=Certificate(
            status="optimal within gap",
            objective=1.0,
            bound=1.0,
            gap=0.0,
            sites=12,
            alternatives=24,
            seconds=0.004,
            solver="z3 4.15.3",
        ),
        notes=(Because("<script>alert(1)</script> & \x1b[31mescape codes\x1b[0m stay text"),),
    )


def nothing_to_decide() -> Plan:
    """A model without a single site."""
    certificate = Certificate(
        status="only one alternative",
        objective=1e-3,
        bound=1e-3,
        gap=0.0,
        sites=0,
        alternatives=0,
        seconds=0.0,
        solver="z3 4.15.3",
    )
    return bert(
        model="Tiny",
        parameters=12,
        goal=Goal(),
        decisions=(),
        declined=(),
        candidates=(),
        certificate=certificate,
        notes=(),
        settings={},
        baseline=Totals(seconds=1e-3),
        predicted=Totals(seconds=1e-3),
        measured=None,
        measured_baseline=None,
        checks=(),
        calibration_inputs="",
    )


def exact() -> Plan:
    """The same model under an exact goal: only the exact decisions change anything."""
    kept = tuple(
        linear(int(d.site.split(".")[2]), d.site.split(".", 3)[3], "fp32") if d.kind == "linear" else d
        for d in decisions()
    )
    return bert(
        goal=Goal(),
        decisions=kept[:-1],
        predicted=Totals(seconds=128e-3, weight_bytes=438 * MIB, peak_bytes=460 * MIB, error=0.0),
        measured=Totals(seconds=131e-3, weight_bytes=438 * MIB, peak_bytes=461 * MIB, error=4.1e-7),
        checks=(Check(name="same inputs", error=4.1e-7, limit=1e-5),),
        candidates=(
            Candidate(backend="onnxruntime", predicted_seconds=128e-3, measured_seconds=131e-3, error=4.1e-7),
        ),
        certificate=replace(bert().certificate, objective=128e-3, bound=127e-3, rounds=1, error_scale=1.0),
        notes=(),
    )


def infeasible() -> tuple[InfeasibleError, Goal]:
    """The weights alone exceed the memory limit at the error allowed."""
    error = InfeasibleError(
        Limits(limits=(("memory", 0.2 * 2**30), ("max_error", 1e-3))),
        binding=("memory", "max_error"),
        nearest={"memory": 0.3312 * 2**30, "max_error": 0.01171},
    )
    return error, Goal(memory=int(0.2 * 2**30), max_error=1e-3)


def targets() -> list[Target]:
    """A GPU from its data sheet and a calibrated CPU."""
    gpu = Target(
        name="h100-sxm",
        description="NVIDIA H100 SXM 80 GB",
        device="cuda",
        cores=132,
        memory_bytes=80 * 2**30,
        memory_bandwidth=3.35e12,
        link_bandwidth=64e9,
        peak_flops={
            "fp32": 66.9e12,
            "tf32": 494.7e12,
            "bf16": 989.4e12,
            "fp16": 989.4e12,
            "fp8": 1978.9e12,
            "int8": 1978.9e12,
        },
        sources={
            "memory_bandwidth": "NVIDIA H100 Tensor Core GPU data sheet, p. 2",
            "peak_flops": "the same, dense, without sparsity",
        },
    )
    cpu = Target(
        name="auto",
        description="this machine: 2 cores",
        device="cpu",
        cores=2,
        memory_bytes=8 * 2**30,
        memory_bandwidth=27e9,
        link_bandwidth=27e9,
        peak_flops={"fp32": 0.22e12, "bf16": 0.41e12, "int8": 0.87e12},
        calibrated="2026-11-21 02:10",
    )
    return [cpu, gpu]
