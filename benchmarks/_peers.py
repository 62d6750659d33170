"""Everyone else's way to run the same model on a CPU, each built as its own documentation says.

Nothing of ours.

Models have random weights from one seed, so errors are numerical fidelity and not task accuracy. What is
built for a model is kept in the work folder and used again; delete the folder to build anew.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

Call = Callable[[], Any]
CALIBRATION_SEEDS = range(100, 108)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to compare on."""

    name: str
    vocabulary: int
    build: Callable[[], nn.Module]  # the unmodified HF model


def _bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(), add_pooling_layer=False)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False))


SUBJECTS = {
    "bert": Subject(name="bert", vocabulary=30522, build=_bert),
    "gpt2": Subject(name="gpt2", vocabulary=50257, build=_gpt2),
}


class Net(nn.Module):
    """The HF model with tensors in and one tensor out, which every exporter takes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.m = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        extra = {"use_cache": False} if hasattr(self.m, "lm_head") else {}
        return self.m(input_ids=input_ids, attention_mask=attention_mask, return_dict=False, **extra)[0]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model at one shape."""

    subject: Subject
    model: nn.Module
    batch: int
    seq: int
    folder: Path
    threads: int

    def inputs(self, seed: int = 1) -> dict[str, torch.Tensor]:
        """Random tokens without padding."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, self.subject.vocabulary, (self.batch, self.seq), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def net(self, dtype: torch.dtype = torch.float32) -> Net:
        """The model in a module of its own where it will be changed, else around the shared weights."""
        return Net(self.model if dtype == torch.float32 else copy.deepcopy(self.model).to(dtype))

    def artifact(self, name: str, write: Callable[[Path], None]) -> Path:
        """The kept file of this name, or a new one: written beside it first, so that a kill leaves none half
        done.
        """
        path = self.folder / f"{self.subject.name}_{name}"
        if not path.exists():
            part = path.with_name(f"part_{os.getpid()}_{path.name}")
            write(part)
            if (weights := part.with_suffix(".bin")).exists():
                os.replace(weights, path.with_suffix(".bin"))
            os.replace(part, path)
        return path


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A peer ready to be called, and the MB of its weights (None: not told by it)."""

    call: Call
    megabytes: float | None


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A way to run the model; `load` raises what the peer raises."""

    name: str
    family: str
    load: Callable[[Case], Loaded]


# ---------------------------------------------------------------- PyTorch


def _weights_mb(model: nn.Module) -> float:
    return sum(p.nbytes for p in model.parameters()) / 1e6


def _stored_mb(model: nn.Module) -> float:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.tell() / 1e6


def _eager(case: Case, net: nn.Module, megabytes: float) -> Loaded:
    inputs = tuple(case.inputs().values())

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return net(*inputs)

    return Loaded(call=call, megabytes=megabytes)


def _torch_eager(case: Case, dtype: torch.dtype) -> Loaded:
    net = case.net(dtype)
    return _eager(case, net, _weights_mb(net))


def _frozen(case: Case, net: Callable[..., torch.Tensor], megabytes: float | None) -> Loaded:
    """Compiled with Inductor's freezing, which packs weights for oneDNN; compiled here, so that calls only
    run.
    """
    import torch._inductor.config as inductor

    inputs = tuple(case.inputs().values())
    compiled = torch.compile(net, dynamic=False)

    def call() -> torch.Tensor:
        with torch.no_grad():
            return compiled(*inputs)

    with inductor.patch(freezing=True):
        call()
        call()
    return Loaded(call=call, megabytes=megabytes)


def _torch_compile(case: Case, dtype: torch.dtype) -> Loaded:
    net = case.net(dtype)
    return _frozen(case, net, _weights_mb(net))


def _quantize_dynamic(case: Case) -> Loaded:
    import torch.ao.quantization as quantization

    net = quantization.quantize_dynamic(copy.deepcopy(case.net()), {nn.Linear}, dtype=torch.qint8)
    return _eager(case, net, _stored_mb(net))


def _torchao(case: Case) -> Loaded:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    net = copy.deepcopy(case.net())
    quantize_(net, Int8DynamicActivationInt8WeightConfig())
    return _frozen(case, net, _stored_mb(net))


def _pt2e(case: Case) -> Loaded:
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    with torch.no_grad():
        exported = torch.export.export(case.net(), tuple(case.inputs().values())).module()
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(exported, quantizer)
        for seed in CALIBRATION_SEEDS[:4]:
            prepared(*case.inputs(seed).values())
        return _frozen(case, convert_pt2e(prepared), None)


# ---------------------------------------------------------------- ONNX Runtime


def _export(case: Case, opset: int, path: Path) -> None:
    """The dynamo exporter with dynamic axes."""
    axes = {0: torch.export.Dim("b", min=1, max=64), 1: torch.export.Dim("s", min=2, max=512)}
    example = tuple(value[:, :64].repeat(2, 1)[:2] for value in case.inputs().values())
    torch.onnx.export(
        case.net(), example, str(path), dynamo=True, input_names=["input_ids", "attention_mask"],
        output_names=["out"], dynamic_shapes=(axes, axes), external_data=False, opset_version=opset,
        verbose=False,
    )  # fmt: skip


def _export_torchscript(case: Case, path: Path) -> None:
    """The old exporter and eager attention, which ORT's fusions were written for."""
    model = copy.deepcopy(case.model)
    model.config._attn_implementation = "eager"  # type: ignore[union-attr]
    example = tuple(value[:, :64].repeat(2, 1)[:2] for value in case.inputs().values())
    axes = {name: {0: "b", 1: "s"} for name in ("input_ids", "attention_mask")}
    torch.onnx.export(
        Net(model), example, str(path), dynamo=False, input_names=["input_ids", "attention_mask"],
        output_names=["out"], dynamic_axes=axes, opset_version=17,
    )  # fmt: skip


def _dynamo(case: Case, opset: int = 18) -> Path:
    return case.artifact(f"op{opset}.onnx", partial(_export, case, opset))


def _torchscript(case: Case) -> Path:
    return case.artifact("ts.onnx", partial(_export_torchscript, case))


def _optimized(case: Case) -> Path:
    """onnxruntime.transformers.optimizer on the TorchScript export."""
    source = _torchscript(case)

    def write(path: Path) -> None:
        from onnxruntime.transformers import optimizer
        from onnxruntime.transformers.fusion_options import FusionOptions

        kind = case.subject.name
        made = optimizer.optimize_model(
            str(source),
            model_type=kind,
            num_heads=12,
            hidden_size=768,
            optimization_options=FusionOptions(kind),
            opt_level=1,
        )
        made.save_model_to_file(str(path), use_external_data_format=False)

    return case.artifact("ts_optimized.onnx", write)


def _int8(
    source: Callable[[Case], Path], name: str, case: Case, *, typed: bool = False, **options: Any
) -> Path:
    """quantize_dynamic; `typed`: DefaultTensorType, without which it stops on graphs of the optimizer."""

    def write(path: Path) -> None:
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

        extra = {"extra_options": {"DefaultTensorType": onnx.TensorProto.FLOAT}} if typed else {}
        quantize_dynamic(str(source(case)), str(path), weight_type=QuantType.QInt8, **options, **extra)

    return case.artifact(f"{name}.onnx", write)


def _qdq(case: Case) -> Path:
    """Static quantisation with 8 random calibration inputs."""

    def write(path: Path) -> None:
        from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

        class Reader(CalibrationDataReader):
            def __init__(self) -> None:
                self.left = iter(
                    {k: v.numpy() for k, v in case.inputs(seed).items()} for seed in CALIBRATION_SEEDS
                )

            def get_next(self) -> Any:
                return next(self.left, None)

        quantize_static(
            str(_dynamo(case)), str(path), Reader(), quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, per_channel=True,
            op_types_to_quantize=["MatMul", "Gemm"],
            extra_options={"WeightSymmetric": True, "MatMulConstBOnly": True},
        )  # fmt: skip

    return case.artifact("qdq.onnx", write)


def _nbits8(case: Case) -> Path:
    def write(path: Path) -> None:
        import onnx
        from onnxruntime.quantization.matmul_nbits_quantizer import (
            DefaultWeightOnlyQuantConfig,
            MatMulNBitsQuantizer,
        )

        config = DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, accuracy_level=4, bits=8)
        quantizer = MatMulNBitsQuantizer(onnx.load(str(_dynamo(case))), algo_config=config)
        quantizer.process()
        quantizer.model.save_model_to_file(str(path), use_external_data_format=False)

    return case.artifact("nbits8.onnx", write)


def _session(build: Callable[[Case], Path], case: Case, off: tuple[str, ...] = ()) -> Loaded:
    import onnxruntime

    path = build(case)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = case.threads, 1
    options.log_severity_level = 3
    # or its threads burn cores while others are timed
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=list(off) or None
    )
    wanted, inputs = {i.name for i in session.get_inputs()}, case.inputs()
    outputs = [session.get_outputs()[0].name]

    def call() -> Any:
        return session.run(
            outputs, {name: value.numpy() for name, value in inputs.items() if name in wanted}
        )[0]

    return Loaded(call=call, megabytes=path.stat().st_size / 1e6)


# ---------------------------------------------------------------- OpenVINO


def _ov_fp32(case: Case) -> Path:
    def write(path: Path) -> None:
        import openvino

        openvino.save_model(openvino.convert_model(str(_dynamo(case))), str(path), compress_to_fp16=False)

    return case.artifact("ov.xml", write)


def _ov_int8(case: Case) -> Path:
    """NNCF post-training quantisation, 8 random calibration inputs, its preset for transformers."""

    def write(path: Path) -> None:
        import nncf
        import openvino

        data = nncf.Dataset(
            [{k: v.numpy() for k, v in case.inputs(seed).items()} for seed in CALIBRATION_SEEDS]
        )
        model = openvino.Core().read_model(str(_ov_fp32(case)))
        quantized = nncf.quantize(model, data, model_type=nncf.ModelType.TRANSFORMER, subset_size=8)
        openvino.save_model(quantized, str(path), compress_to_fp16=False)

    return case.artifact("ov_int8.xml", write)


def _openvino(build: Callable[[Case], Path], precision: str, case: Case) -> Loaded:
    import openvino

    path, core = build(case), openvino.Core()
    hints = {
        "INFERENCE_NUM_THREADS": case.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }
    compiled = core.compile_model(core.read_model(str(path)), "CPU", hints)
    request, inputs = compiled.create_infer_request(), case.inputs()
    names = {
        name: value
        for name, value in inputs.items()
        if any(name in port.get_names() for port in compiled.inputs)
    }

    def call() -> Any:
        return request.infer({name: value.numpy() for name, value in names.items()}, share_inputs=True)[0]

    return Loaded(call=call, megabytes=path.with_suffix(".bin").stat().st_size / 1e6)


# ---------------------------------------------------------------- the list

EAGER = "torch eager fp32"
_ONNX: Mapping[str, Callable[[Case], Loaded]] = {
    "ORT fp32 (dynamo, opset 18)": partial(_session, _dynamo),
    "ORT fp32 (dynamo, opset 23)": partial(_session, partial(_dynamo, opset=23)),
    "ORT fp32 (transformers.optimizer, ts)": partial(_session, _optimized),
    "ORT int8 dynamic (raw)": partial(_session, partial(_int8, _dynamo, "int8_raw")),
    "ORT int8 dynamic, per channel": partial(
        _session, partial(_int8, _dynamo, "int8_channel", per_channel=True)
    ),
    "ORT int8 dynamic (transformers.optimizer, ts)": partial(
        _session, partial(_int8, _optimized, "int8_optimized", typed=True)
    ),
    "ORT int8 static QDQ": partial(_session, _qdq),
    "ORT MatMulNBits 8": partial(_session, _nbits8),
    "graph choices: ORT int8 op23, SkipLayerNormFusion off": partial(
        _session,
        partial(_int8, partial(_dynamo, opset=23), "int8_op23", typed=True, op_types_to_quantize=["MatMul"]),
        off=("SkipLayerNormFusion",),
    ),
    "graph choices: ORT int8 ts, SkipLayerNormFusion off": partial(
        _session,
        partial(_int8, _torchscript, "int8_ts", typed=True, op_types_to_quantize=["MatMul"]),
        off=("SkipLayerNormFusion",),
    ),
}
_TORCH: Mapping[str, Callable[[Case], Loaded]] = {
    EAGER: partial(_torch_eager, dtype=torch.float32),
    "torch eager bf16": partial(_torch_eager, dtype=torch.bfloat16),
    "compile fp32, freezing": partial(_torch_compile, dtype=torch.float32),
    "compile bf16, freezing": partial(_torch_compile, dtype=torch.bfloat16),
    "torch quantize_dynamic int8": _quantize_dynamic,
    "torchao int8 dynamic + compile": _torchao,
    "PT2E x86 int8 + compile": _pt2e,
}
_OPENVINO: Mapping[str, Callable[[Case], Loaded]] = {
    "OpenVINO fp32": partial(_openvino, _ov_fp32, "f32"),
    "OpenVINO bf16 hint": partial(_openvino, _ov_fp32, "bf16"),
    "OpenVINO NNCF int8": partial(_openvino, _ov_int8, "f32"),
}
PEERS = [
    Peer(name=name, family=family, load=load)
    for family, group in (("torch", _TORCH), ("onnxruntime", _ONNX), ("openvino", _OPENVINO))
    for name, load in group.items()
]
