"""BERT-base with block-sparse projections on this CPU: served sparse by effcompile beside the same model
dense in the same backend.

    python benchmarks/sparse_inference.py [--sparsity 0.9] [--block 16] [--shapes 1x128,8x128] [--rounds 7]
                                          [--threads 2] [--out FILE] [--backends
                                          torch-eager,torch-inductor,onnxruntime]

Attention and FFN projections of every layer have random blocks set to 0, as a model trained sparse has;
embeddings stay dense. Plans are exact. Ways are timed in turn in one process. For onnxruntime the sparse
model is also run as sessions on the pieces between the sparse products, these by our torch operator
(_split_graph.py): what there would be without our operator library. The bar: sparse at least twice as fast as
dense in the same backend; exit 1 below it.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import _common
from _common import Call, Row

from effcompile.core.reasons import SparseSpeed
from effcompile.report.reasons import words

BAR = 2.0
SPLIT = "onnxruntime between sparse products by torch"
EXACT = 1e-5  # reordered fp32 sums differ by less


def main() -> int:
    options = _options()
    _common.use_threads(options.threads)
    warnings.filterwarnings("ignore")
    title = f"BERT-base inference, {options.sparsity:.0%} of the projections' blocks of {options.block} at 0"
    lines = _common.header(title, options.threads)
    print("\n".join(lines), flush=True)
    tables: list[dict[str, Any]] = []
    reached = True
    for shape in options.shapes:
        rows, disturbed = _run(shape, options)
        text = [f"## {shape}", "", *_table(rows), "", disturbed, ""]
        verdicts = [_verdict(rows, backend) for backend in options.backends] + _against_split(rows)
        reached &= all(ok for ok, _ in verdicts)
        text += [line for _, line in verdicts] + [""]
        print("\n".join(text), flush=True)
        lines += text
        tables.append({"shape": shape, "disturbed": disturbed, "rows": [row.as_dict() for row in rows]})
        _common.write_out(options.out, lines, {"header": lines[:7], "tables": tables})
    return int(not reached)


def _options() -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--shapes", type=words, default=["1x128", "8x128"], help="batch x sequence")
    parser.add_argument("--backends", type=words, default=["torch-eager", "torch-inductor", "onnxruntime"])
    parser.add_argument("--layers", type=int, default=12, help="fewer for a quick look")
    parser.add_argument("--rounds", type=int, default=7, help="each row is timed twice in each")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="writes FILE.md and FILE.json")
    return parser.parse_args()


def _model(options: argparse.Namespace) -> Any:
    """BERT-base of random weights, the same random pattern per layer at every run."""
    import torch
    from transformers import BertConfig, BertModel

    from effcompile.sparse import BlockPattern

    torch.manual_seed(0)
    model = BertModel(BertConfig(num_hidden_layers=options.layers), add_pooling_layer=False).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name.startswith("encoder."):
                shape = (module.out_features, module.in_features)
                module.weight.mul_(
                    BlockPattern.random(*shape, options.block, options.sparsity, generator).mask()
                )
    return model


def _run(shape: str, options: argparse.Namespace) -> tuple[list[Row], str]:
    import torch

    model = _model(options)
    batch, seq = (int(part) for part in shape.split("x"))
    ids = torch.randint(0, 30522, (batch, seq), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        reference = model(**inputs)[0]

    def stock() -> Any:
        with torch.inference_mode():
            return model(**inputs)[0]

    megabytes = sum(p.nbytes for p in model.parameters()) / 1e6
    rows = [Row(name="torch eager, dense (stock)", family="torch", error=0.0, megabytes=megabytes)]
    calls: dict[str, Call] = {rows[0].name: stock}
    for backend in options.backends:
        for form in ("dense", "sparse"):
            row, made = _ours(model, inputs, reference, backend, form)
            rows.append(row)
            if made is not None:
                calls[row.name] = partial(made, **inputs)
            if made is not None and "register_custom_ops_library" in made.plan.settings:
                row, call = _split(made, inputs, reference, options.threads)
                rows.append(row)
                calls[row.name] = call
    return rows, f"{_common.time_in_turn(calls, rows, options.rounds)}."


def _split(made: Any, inputs: dict[str, Any], reference: Any, threads: int) -> tuple[Row, Call]:
    """The sparse model of the onnxruntime backend in pieces, without our operator."""
    import torch
    from _split_graph import split

    row = Row(name=SPLIT, family="split")
    with _common.told(row.name), tempfile.TemporaryDirectory() as folder:
        run = split(made.save(folder) / "model.onnx", threads)
    call = partial(run, {name: value.numpy() for name, value in inputs.items()})
    row.error = _common.relative_error(torch.from_numpy(call()[0]), reference)
    return row, call


def _name(backend: str, form: str) -> str:
    return f"effcompile {backend}, {form}"


def _ours(model: Any, inputs: dict[str, Any], reference: Any, backend: str, form: str) -> tuple[Row, Any]:
    """(row, the Executable or None)."""
    import effcompile

    row = Row(name=_name(backend, form), family="effcompile")
    with _common.told(row.name):
        try:
            made = effcompile.optimize(
                model, inputs=inputs, backend=backend, passes=["no-sparsify"] if form == "dense" else None
            )
            row.error = _common.relative_error(made(**inputs)[0].detach(), reference)
        except Exception as error:
            row.failed = _common.reason_of(error)
            return row, None
    plan = made.plan
    row.megabytes = plan.measured.weight_bytes / 1e6 if plan.measured and plan.measured.weight_bytes else None
    sparse = [d for d in plan.decisions if d.by == "sparsify" and d.option != d.baseline]
    found = sum(d.applied == d.option for d in sparse)
    if sparse:
        speeds = [d.note for d in sparse if isinstance(d.note, SparseSpeed)]
        eps = sorted(speed.epsilon for speed in speeds)
        even = sorted({f"{speed.break_even:.1f}" for speed in speeds})
        row.note = (
            f"{found} of {len(sparse)} linears found {sparse[0].option}; eps "
            f"{eps[0]:.1f}–{eps[-1]:.1f}, break-even {'/'.join(even)}"
        )
    elif form == "sparse":
        reasons = [words(d.reason) for d in plan.declined if d.by == "sparsify"]
        row.note = f"dense: {reasons[0]}" if reasons else "dense: nothing was found"
    return row, made


def _table(rows: list[Row]) -> list[str]:
    timed = sorted((row for row in rows if row.samples), key=lambda row: row.median)
    slowest = rows[0].median
    cells = [
        [
            row.name,
            f"{row.median * 1e3:.1f}",
            f"{row.best * 1e3:.1f}",
            f"{slowest / row.median:.2f}",
            f"{row.error or 0:.1e}",
            f"{row.megabytes:.0f}" if row.megabytes is not None else "–",
            row.note,
        ]
        for row in timed
    ]
    failed = [f"{row.name}: failed: {row.failed}" for row in rows if row.failed]
    return [
        *_common.markdown(
            ["way", "ms median", "ms best", "× stock", "error", "MB", "what the plan says"], cells
        ),
        *failed,
    ]


def _verdict(rows: list[Row], backend: str) -> tuple[bool, str]:
    by_name = {row.name: row for row in rows if row.samples}
    dense, sparse = (by_name.get(_name(backend, form)) for form in ("dense", "sparse"))
    if dense is None or sparse is None:
        return False, f"- {backend}: not measured"
    ratio = dense.median / sparse.median
    right = (sparse.error or 0.0) <= EXACT
    wrong = "" if right else f", and its error {sparse.error:.1e} is too large"
    return ratio >= BAR and right, (
        f"- {backend}: sparse {ratio:.2f}× as fast as dense (best of each: "
        f"{dense.best / sparse.best:.2f}×); the bar is {BAR:.0f}×: "
        f"{'reached' if ratio >= BAR else 'missed'}{wrong}"
    )


def _against_split(rows: list[Row]) -> list[tuple[bool, str]]:
    """Whether our operator or the split graph is faster: no bar, for the backend ships what wins."""
    by_name = {row.name: row for row in rows if row.samples}
    ours, other = by_name.get(_name("onnxruntime", "sparse")), by_name.get(SPLIT)
    if ours is None or other is None:
        return []
    ratio = other.median / ours.median
    return [
        (
            True,
            f"- onnxruntime: our operator is {ratio:.2f}× as fast as the split graph (best of each: "
            f"{other.best / ours.best:.2f}×)",
        )
    ]


if __name__ == "__main__":
    raise SystemExit(main())
