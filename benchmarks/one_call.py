"""Layers in 8 bits as one call of C beside the same kernels one by one, in turn in one run: two layers of
each model, all linears `int8_token`, all attentions `sdpa_fp32`, by torch-eager.

    python benchmarks/one_call.py [--models bert,minilm,vit,whisper,gpt2] [--threads 1] [--rounds 80]

Of each the least and the median time; the ratio is the median of pairs.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import _common

LAYERS = 2


def model_of(name: str) -> tuple[Any, dict[str, Any]]:
    """A model of random weights, and its inputs."""
    import torch
    import transformers as hf
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    ids = {"input_ids": torch.randint(0, 1000, (1, 128))}
    if name in ("bert", "minilm"):
        sizes = {"bert": (768, 3072), "minilm": (384, 1536)}[name]
        config = hf.BertConfig(
            num_hidden_layers=LAYERS, hidden_size=sizes[0], intermediate_size=sizes[1], vocab_size=1000
        )
        return hf.BertModel(config), ids
    if name == "gpt2":
        return hf.GPT2Model(hf.GPT2Config(n_layer=LAYERS, vocab_size=1000)), {**ids, "use_cache": False}
    if name == "vit":
        return hf.ViTModel(hf.ViTConfig(num_hidden_layers=LAYERS)), {
            "pixel_values": torch.randn(1, 3, 224, 224)
        }
    audio = hf.WhisperConfig(
        encoder_layers=LAYERS, d_model=512, encoder_attention_heads=8, encoder_ffn_dim=2048
    )
    return WhisperEncoder(audio), {"input_features": torch.randn(1, 80, 3000)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="bert,minilm,vit,whisper,gpt2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=80)
    options = parser.parse_args()
    _common.use_threads(options.threads)
    import torch

    from effcompile.backends.torch import TorchEager
    from effcompile.capture import capture
    from effcompile.ir.formats import INT8_TOKEN, Form
    from effcompile.ops.tape import Tape
    from effcompile.sites.parts import attentions, linears

    print(f"{options.threads} threads; {LAYERS} layers")
    print(f"{'':10}{'calls':>7}{'one by one ms':>22}{'one call ms':>20}{'ratio':>8}")
    for name in options.models.split(","):
        torch.manual_seed(0)
        model, inputs = model_of(name)
        program = capture(model.eval(), (), inputs)
        tags = {site.site: Form(weights=INT8_TOKEN) for site in linears(program)}
        tags |= {site.site: Form(word="sdpa_fp32") for site in attentions(program)}
        given = program.flat_inputs()
        lowered = TorchEager().lower(program.tagged(tags, "benchmark"), None, [given])  # type: ignore[arg-type]
        lowered(*given)
        tapes = [n.target for n in lowered._called._direct.graph.nodes if isinstance(n.target, Tape)]  # type: ignore[attr-defined]
        together = {tape: dict(tape._kept) for tape in tapes}
        apart = {tape: dict.fromkeys(tape._kept) for tape in tapes}  # None: no call has them together

        def run(kept: dict[Tape, dict[object, Any]], call: Any = lowered, given: Any = given) -> float:
            for tape, held in kept.items():
                tape._kept = dict(held) if len(tape._steps) > 1 else tape._kept
            return _common.seconds(lambda: call(*given))

        for kept in (apart, together):
            run(kept)
        pairs = [(run(apart), run(together)) for _ in range(options.rounds)]
        first, second = zip(*pairs, strict=True)
        ratio = statistics.median(a / b for a, b in pairs)
        steps = sum(len(tape._steps) for tape in tapes)
        print(
            f"{name:10}{f'{steps}→{len(tapes)}':>7}"
            f"{min(first) * 1e3:12.2f} {statistics.median(first) * 1e3:9.2f}"
            f"{min(second) * 1e3:10.2f} {statistics.median(second) * 1e3:9.2f}{ratio:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
