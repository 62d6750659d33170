"""Program → ONNX, with every linear, attention, norm and embedding of the graph found again by site.

`torch.onnx.export` does the translation and writes into each ONNX node the name of the fx node it came from.
That name, never a pattern, ties a site to its node; what cannot be tied is left alone and reported as not
applied.
"""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import onnxscript.optimizer
import torch
from torch import fx

from effcompile.backends.indices import raising
from effcompile.backends.onnxruntime.not_numbers import as_in_torch
from effcompile.backends.onnxruntime.single import in_single, with_own_epsilon
from effcompile.backends.onnxruntime.spelled import spell_out
from effcompile.backends.torch.edit_attentions import share_heads
from effcompile.core.errors import LoweringError
from effcompile.core.quiet import quiet_libraries
from effcompile.core.torch_compat_export import swift_onnx, synonyms
from effcompile.ir.export import reexport, refresh_shapes
from effcompile.ir.program import Program
from effcompile.sites import parts as sites
from effcompile.sites.attention.expand import without_ours

#: Opset 23 has one `Attention` operator instead of a dozen; 20 is the oldest with `Gelu`.
OPSETS = (23, 20)

aten = torch.ops.aten
_FX_NAME = re.compile(r"%(\S+) ")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxExport:
    """An ONNX model and, for each site, the node that carries it (site → node name in the model)."""

    model: ir.Model
    opset: int
    linears: Mapping[str, str]
    embeddings: Mapping[str, str]
    attentions: Mapping[str, str]
    norms: Mapping[str, str]
    gelus: Mapping[str, str]


def export(program: Program, *, opset: int = OPSETS[0]) -> OnnxExport:
    """Translate a program; dynamic axes, input and output names as in `program.inputs` and `program.outputs`.

    Raises:
        LoweringError: torch.onnx has no translation for something; names the operator.
    """
    program = raising(without_ours(program))
    if program.carried and opset == OPSETS[0]:
        program = _sharing(program)
    try:
        exported = reexport(program)
    except Exception as error:
        raise LoweringError(
            f"torch.export cannot export the graph of {program.name} again: {_cause(error)}"
        ) from error
    _copy_before_views(exported.graph)
    spell_out(exported.graph)
    synonyms(exported.graph)
    twin = replace(program, module=exported.module(check_guards=False))
    # sites are told apart by their shapes at the example
    refresh_shapes(twin.module, program.args, program.kwargs)
    with _quiet(), swift_onnx():
        try:
            onnx_program = torch.onnx.export(
                exported,
                (),
                dynamo=True,
                opset_version=opset,
                optimize=False,
                verify=False,
                verbose=False,
                input_names=[spec.name for spec in program.inputs],
                output_names=_output_names(program),
            )
        except Exception as error:
            raise LoweringError(
                f"torch.onnx.export cannot translate {program.name}: {_cause(error)}. Leave the "
                "backend out, or name another: torch-eager runs what torch does."
            ) from error
        assert onnx_program is not None
        model = onnx_program.model
        # torch's own `optimize` also fuses rotary embeddings, into an operator that ORT refuses to run for a
        # cache of batch 1
        onnxscript.optimizer.optimize_ir(model)
    if len(model.graph.inputs) == len(program.inputs):
        # an input that is also an output was given another name
        for value, spec in zip(model.graph.inputs, program.inputs, strict=True):
            value.name = spec.name
    _name_all(model)
    as_in_torch(model.graph)
    in_single(model.graph)
    with_own_epsilon(model.graph)
    by_fx = _nodes_by_fx_name(model)
    _without_source_paths(model)
    return OnnxExport(
        model=model,
        opset=opset,
        linears=dict(
            _matched(_pairs(sites.linears(program), sites.linears(twin)), by_fx, ("MatMul", "Gemm"))
        ),
        embeddings=dict(
            _matched(_pairs(sites.embeddings(program), sites.embeddings(twin)), by_fx, ("Gather",))
        ),
        attentions=dict(
            _matched(_pairs(sites.attentions(program), sites.attentions(twin)), by_fx, ("Attention",))
        ),
        norms=dict(
            _matched(_pairs(sites.add_norms(program), sites.add_norms(twin)), by_fx, ("LayerNormalization",))
        ),
        gelus=dict(_matched(_pairs(sites.gelus(program), sites.gelus(twin)), by_fx, ("Gelu",))),
    )


def _copy_before_views(graph: fx.Graph) -> None:
    """A view of transposed heads is one because of how a kernel laid them out; torch.onnx's decompositions
    need not.

    Seen with T5, whose attention mask is a position bias. In ONNX the copy is an Identity, which is optimised
    away.
    """
    # a reshape is decomposed into a view by the layout that tracing assumed
    views = (aten.view.default, aten.reshape.default)
    for node in [node for target in views for node in graph.find_nodes(op="call_function", target=target)]:
        source = node.args[0]
        if isinstance(source, fx.Node) and source.target in (aten.transpose.int, aten.permute.default):
            with graph.inserting_before(node):
                copy = graph.call_function(
                    aten.clone.default, (source,), {"memory_format": torch.contiguous_format}
                )
            copy.meta = {**source.meta, "val": source.meta["val"].contiguous()}
            node.replace_input_with(source, copy)


def _output_names(program: Program) -> list[str]:
    """The program's, made different from its inputs': in ONNX all names of a graph are one space."""
    inputs = {spec.name for spec in program.inputs}
    return [f"{spec.name}_output" if spec.name in inputs else spec.name for spec in program.outputs]


def _pairs(ours: Sequence[sites.Site], theirs: Sequence[sites.Site]) -> list[tuple[str, str]]:
    """(site, fx node name in the re-exported graph): re-export keeps the order of nodes, so the i-th is the
    i-th.
    """
    if len(ours) != len(theirs):
        return []
    return [(a.site, b.node.name) for a, b in zip(ours, theirs, strict=True)]


def _matched(
    pairs: list[tuple[str, str]], by_fx: Mapping[str, list[ir.Node]], ops: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    for site, fx_name in pairs:
        nodes = [node for node in by_fx.get(fx_name, []) if node.op_type in ops]
        if len(nodes) == 1:
            yield site, str(nodes[0].name)


def _nodes_by_fx_name(model: ir.Model) -> dict[str, list[ir.Node]]:
    found: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        match = _FX_NAME.match(node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
        if match:
            found.setdefault(match[1], []).append(node)
    return found


def _without_source_paths(model: ir.Model) -> None:
    """Stack traces name the files of the user's machine: they do not go where the model goes."""
    parts: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for graph in parts:
        for node in ir.traversal.RecursiveGraphIterator(graph):
            node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
            node.doc_string = None


def _sharing(program: Program) -> Program:
    """A step whose queries of a group read their keys as they are: to repeat them takes as long as attention
    to 1,024 tokens.
    """
    edited = program.editable("share heads")
    share_heads(edited.graph)
    edited.graph.eliminate_dead_code()
    edited.module.recompile()
    return replace(edited, history=program.history)


def _name_all(model: ir.Model) -> None:
    """Unique names, so that a node is found again by name in the quantised model."""
    taken: set[str] = set()
    for index, node in enumerate(model.graph):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{index}"
        taken.add(node.name)


def _cause(error: BaseException) -> str:
    """The innermost message's first line: torch wraps the operator's name several errors deep."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:400]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx prints and logs its progress; ours is in the report."""
    quiet = quiet_libraries("torch.onnx", "onnxscript", "onnx_ir")
    with quiet, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
