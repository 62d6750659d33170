"""An edited program made runnable by one of torch's two engines, with its artifact `model.pt2`."""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import json
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import fx

from effcompile.backends.torch import read_back as found
from effcompile.backends.torch.at_shapes import AtShapes
from effcompile.backends.torch.called import Called, called
from effcompile.backends.torch.pack import (
    by_rows,
    flatten,
    flatten_exported,
    pack,
    packed_elsewhere,
    packed_weights,
    put_plain_aside,
)
from effcompile.core import torch_compat, torch_compat_inductor, torch_compat_memory
from effcompile.core.autocast import Autocasts, autocasts, named, of_names, within
from effcompile.core.errors import FormatError, LoweringError, UsageError
from effcompile.core.garbage import uncollected
from effcompile.core.torch_compat_archives import what_runs_code
from effcompile.core.torch_compat_narrow import made_elsewhere, products_saturate
from effcompile.core.types import Forward
from effcompile.ir.export import reexport
from effcompile.ir.formats import Form
from effcompile.ir.of_sizes import SHARE
from effcompile.ir.program import Program, stored_bytes
from effcompile.machine import huge_pages
from effcompile.ops import wide
from effcompile.ops.bf16_attention import bf16_attention
from effcompile.ops.bf16_attention import told as attentions_told
from effcompile.ops.bf16_linear import bf16_linear
from effcompile.ops.bf16_linear import told as halves_told
from effcompile.ops.bf16_mlp import bf16_linear_residual, bf16_mlp
from effcompile.ops.fp32_attention import fp32_attention
from effcompile.ops.fp32_attention import told as fp32_attentions_told
from effcompile.ops.fp32_linear import fp32_linear
from effcompile.ops.fp32_linear import told as floats_told
from effcompile.ops.group_linear import group_linear
from effcompile.ops.group_linear import told as groups_told
from effcompile.ops.int8_attention import int8_attention
from effcompile.ops.int8_attention import told as int8_attentions_told
from effcompile.ops.int8_linear import int8_linear
from effcompile.ops.int8_linear import told as int8_told
from effcompile.ops.int8_mlp import int8_linear_residual, int8_mlp
from effcompile.ops.int8_sparse import int8_sparse_linear
from effcompile.ops.int8_sparse import told as sparse_told
from effcompile.ops.int13_linear import int13_linear
from effcompile.ops.int13_linear import told as int13_told

ARTIFACT = "model.pt2"
_HEADER = "effcompile.json"


class _Header(NamedTuple):
    """Of a file: the engine that it was made for, the autocast that it was planned in, the shapes of its
    example, None where an older one does not tell, and `TorchLowered.keeps`.
    """

    engine: str
    autocast: Autocasts
    shapes: Sequence[list[int]] | None
    keeps: bool


@dataclass(frozen=True, kw_only=True)
class TorchLowered:
    """See `backends.base.Lowered`. `program`: the edited one, which `save` exports. `autocast`: around it.
    `keeps`: whether bytes beside the weights are taken for time: what follows from the sizes of a call alone
    is kept, and 16-bit weights are widened.
    """

    program: Program
    engine: str
    run: Forward
    applied: Mapping[str, Form]
    settings: Mapping[str, Any]
    weight_bytes: int
    autocast: Autocasts = field(default_factory=autocasts)
    keeps: bool = False

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            # else a caller within inference_mode has everything compiled once more
            return list(self._called(*inputs))

    @functools.cached_property
    def _called(self) -> Forward:
        most = int(SHARE * self.weight_bytes) if self.keeps else 0
        return called(self.run, most) if isinstance(self.run, fx.GraphModule) else self.run

    def tune(self, inputs: Sequence[torch.Tensor]) -> bool:
        return False  # threads are the process's own, kernels were tuned while planning

    def rest(self) -> None:
        """Its weights are the program's, or packed from them: there is no file to read them from."""

    def peak_bytes(self, inputs: Sequence[torch.Tensor]) -> int | None:
        """Weights plus the highest sum of live CPU allocations during one call, from the profiler's memory
        events.
        """
        self(*inputs)
        with torch_compat_memory.memory_profile() as profile:
            self(*inputs)
        kept = self._called.kept_bytes if isinstance(self._called, Called) else 0
        return self.weight_bytes + kept + torch_compat_memory.peak_of_memory_events(profile)

    def save(self, directory: Path) -> tuple[Path, ...]:
        """Export the edited program to `directory/model.pt2`.

        Raises:
            LoweringError: torch cannot export the program.
        """
        header = {"format": "effcompile-torch", "version": 1, "engine": self.engine}
        header |= {"autocast": named(self.autocast)}
        header |= {"shapes": [list(tensor.shape) for tensor in self.program.flat_inputs()]}
        header |= {"keeps": self.keeps}
        content = io.BytesIO()
        try:
            # into memory first: on a full disk torch's own file writer does not raise but aborts the process
            with uncollected():  # what planning left is looked through again and again meanwhile, for nothing
                torch.export.save(
                    _without_source_paths(reexport(self.program)),
                    content,
                    extra_files={_HEADER: json.dumps(header)},
                )
        except Exception as error:
            raise LoweringError(
                f"torch.export cannot save {self.program.name}: {_line(error)}. Choose another backend."
            ) from error
        directory.mkdir(parents=True, exist_ok=True)
        # not a view of it: held by the error of a full disk, Python 3.12.0 and 3.12.1 crash in collecting it
        # (python/cpython#111049); these bytes are shared, not copied
        (directory / ARTIFACT).write_bytes(content.getvalue())
        return (directory / ARTIFACT,)


def _without_source_paths(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Stack traces name the files of the user's machine: they do not go where the program goes."""
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return exported


def load(path: Path) -> Forward:
    """The saved artifact as a callable with the original model's signature. For Inductor it is compiled at
    the first call of the example's shapes, and runs uncompiled at others.

    Raises:
        UsageError: no such file. FormatError: not a model.pt2 of effcompile.
    """
    exported, header = _exported(path)
    # Dynamo cannot trace export's guards and hooks, and makes its own
    module = exported.module(check_guards=header.engine != "inductor")
    assert isinstance(module, fx.GraphModule)
    run = _run(module, path, header)

    def call(*args: object, **kwargs: object) -> Any:
        with torch.inference_mode(False), torch.no_grad(), within(header.autocast):
            return run(*args, **kwargs)

    return call


def load_flat(path: Path) -> tuple[Callable[..., list[torch.Tensor]], fx.Graph]:
    """The same as a function of the flat tensors alone, to tensors, and its graph: what else the model was
    given stands in the artifact. It runs what the `TorchLowered` that wrote it does, call by call.

    Raises what `load` does.
    """
    # an Artifact takes the calls that its plan says; the guards of what was exported again are narrower, of a
    # batch of 1 (`seq < batch * seq`), than what the model was compared at
    exported, header = _exported(path)
    run = _run(flatten_exported(exported), path, header)

    def call(*tensors: torch.Tensor) -> list[torch.Tensor]:
        with torch.inference_mode(False), torch.no_grad(), within(header.autocast):
            return list(run(*tensors))

    return call, exported.graph


def open_flat(path: Path) -> fx.GraphModule:
    """The same as a graph of flat tensors, run operator by operator, with its weights packed.

    Raises what `load` does.
    """
    return by_rows(pack(flatten_exported(_exported(path)[0])))


def _run(module: fx.GraphModule, path: Path, header: _Header) -> Forward:
    if header.engine == "inductor":
        return _compiled_when_called(module, path, header.shapes)
    packed = by_rows(pack(module), widens=header.keeps)
    return called(packed, int(SHARE * stored_bytes(packed)) if header.keeps else 0)


def _exported(path: Path) -> tuple[torch.export.ExportedProgram, _Header]:
    """What a file holds, and what is said of it."""
    if not path.is_file():
        raise UsageError(f"There is no {str(path)!r}. Give the folder that `effcompile optimize -o` wrote.")
    torch_compat.allow_tracing_packing()
    files = {_HEADER: ""}
    try:
        brought = what_runs_code(path)
    except (ValueError, OSError) as error:
        raise _no_artifact(path, error) from error
    if brought is not None:
        raise FormatError(
            f"{str(path)!r} holds {brought}, which may run code when it is opened: no artifact that "
            "effcompile writes does. Write it again with `effcompile optimize -o`."
        )
    try:
        exported = torch.export.load(path, extra_files=files)
        said = json.loads(files[_HEADER])
        autocast, keeps = of_names(said.get("autocast", {})), bool(said.get("keeps", False))
        header = _Header(said["engine"], autocast, said.get("shapes"), keeps)
    except Exception as error:
        raise _no_artifact(path, error) from error
    huge_pages.move([*exported.state_dict.values(), *exported.constants.values()])
    int8 = {torch.ops.onednn.qlinear_pointwise} if torch_compat.has_onednn_int8() else set()
    packets = {getattr(node.target, "overloadpacket", None) for node in exported.graph.nodes}
    if int8 & packets and products_saturate():
        raise made_elsewhere(path)
    return exported, header


def _no_artifact(path: Path, error: Exception) -> FormatError:
    return FormatError(f"{str(path)!r} is not an artifact of effcompile: {_line(error)}. Write it again.")


def lower_eager(program: Program, *, keeps: bool = False) -> TorchLowered:
    """Run the edited graph operator by operator, weights packed."""
    module = flatten(program)
    packed = packed_weights(module)
    put_plain_aside(module, program.made)
    module = pack(module, packed)
    huge_pages.move(module.buffers())
    _try(module, program)
    applied = found.applied(program, module)
    run = by_rows(module, widens=keeps)
    widened = run.graph.find_nodes(op="call_function", target=wide.linear)
    settings = {"16-bit linears": "fp32, rounded once"} if widened else {}
    return TorchLowered(
        program=program,
        engine="eager",
        run=run,
        applied=applied,
        settings={"threads": torch.get_num_threads(), **settings, **_kernels(program)},
        weight_bytes=artifact_bytes(program),
        keeps=keeps,
    )


def lower_inductor(program: Program) -> TorchLowered:
    """Compile the edited graph at the example's shapes, weights frozen into it, packed once for these shapes
    and all others.
    """
    import msgspec  # which kernels alone do without

    from effcompile.estimate.kept import of_code

    code = of_code(program, _what_compiles(torch.get_num_threads()))
    module = flatten(program)
    packed = packed_weights(module)
    put_plain_aside(module, program.made)
    start = perf_counter()
    with torch_compat_inductor.read_as_compiled(_words, code) as (reader, words):
        compiled = _compile(packed_elsewhere(flatten(program), packed), reader)
        with torch_compat_inductor.not_kept_by_inductor():
            _try(compiled, program)
    kept = Counter({msgspec.json.decode(word, type=found.Signature): n for word, n in words.items()})
    seconds = perf_counter() - start
    return TorchLowered(
        program=program,
        engine="inductor",
        run=AtShapes(
            [list(t.shape) for t in program.flat_inputs()], compiled, lambda: pack(flatten(program), packed)
        ),
        applied=found.confirm(found.applied(program, module), module, kept),
        settings={
            "threads": torch.get_num_threads(),
            "freezing": True,
            "compile_seconds": round(seconds, 1),
            "other_shapes": "run uncompiled, weights packed",
            **_kernels(program),
        },
        weight_bytes=artifact_bytes(program),
    )


def _kernels(program: Program) -> dict[str, str]:
    """Which instruction set multiplies bytes or bf16, where the program has such operators of ours, and why
    not a better one.
    """
    used = {node.target for node in program.graph.nodes}
    ours = {
        "int8 linears": ((int8_linear, int8_mlp, int8_linear_residual), int8_told),
        "int13 linears": ((int13_linear,), int13_told),
        "bf16 linears": ((bf16_linear, bf16_mlp, bf16_linear_residual), halves_told),
        "sparse int8 linears": ((int8_sparse_linear,), sparse_told),
        "linears in groups": ((group_linear,), groups_told),
        "fp32 linears": ((fp32_linear,), floats_told),
        "attentions of bf16": ((bf16_attention,), attentions_told),
        "attentions of fp32": ((fp32_attention,), fp32_attentions_told),
        "attentions in bytes": ((int8_attention,), int8_attentions_told),
    }
    return {
        name: told()
        for name, (operators, told) in ours.items()
        if used & {each.default for each in operators}
    }


def _compiled_when_called(module: fx.GraphModule, path: Path, shapes: Sequence[list[int]] | None) -> Forward:
    """The graph of a file, compiled at the first call of these shapes (of any, where a file does not tell);
    its code is kept by the file's bytes, for the next process that loads it.
    """
    with path.open("rb") as content:
        bytes_of = hashlib.file_digest(content, "sha256").hexdigest()
    packed = packed_weights(module)
    elsewhere = packed_elsewhere(_copied(module), packed)
    made = list[Forward]()

    def call(*args: object, **kwargs: object) -> Any:
        if made:
            return made[0](*args, **kwargs)
        code = f"{bytes_of} {_what_compiles(torch.get_num_threads())}"
        with torch_compat_inductor.read_as_compiled(lambda _: (), code) as (reader, _):  # one at a time
            if not made:
                made.append(_compile(elsewhere, reader))
            return made[0](*args, **kwargs)

    return AtShapes(shapes, call, lambda: pack(_copied(module), packed))


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    return fx.GraphModule(module, copy.deepcopy(module.graph))


def _compile(module: fx.GraphModule, reader: Any | None) -> Forward:
    """torch.compile with frozen weights, which go when the result goes; `reader`: a pass that reads
    Inductor's final graph.
    """
    options = {} if reader is None else {"post_grad_custom_post_pass": reader}
    compiled = torch.compile(module.forward, dynamic=False, fullgraph=True, options=options)

    def call(*args: object, **kwargs: object) -> Any:
        with torch_compat_inductor.freezing():
            # Dynamo reads it whenever it compiles; as an option it would reach Inductor only
            return compiled(*args, **kwargs)

    weakref.finalize(call, torch_compat_inductor.forget_compiled, module.forward.__code__).atexit = False
    return call


@functools.cache
def _what_compiles(threads: int) -> str:
    """What code follows from beside the program and torch: threads, the CPU's instructions, the definitions
    of our operators and of what is read off the graph.
    """
    here = Path(__file__)
    files = [here, Path(found.__file__), *sorted((here.parents[2] / "ops").glob("*.py"))]
    texts = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return f"{threads} {torch_compat_inductor.instruction_set()} {texts}"


def _words(graph: fx.Graph) -> list[str]:
    """The kernels of a graph, each as a text."""
    import msgspec

    module = graph.owning_module
    assert module is not None
    return [msgspec.json.encode(signature).decode() for *_, signature in found.signatures(module)]


def _try(run: Callable[..., object], program: Program) -> None:
    try:
        with torch.no_grad():
            run(*program.flat_inputs())
    except Exception as error:
        raise LoweringError(
            f"torch cannot run {program.name} as planned: {_line(error)}. Plan again with another backend."
        ) from error


def artifact_bytes(*programs: Program) -> int:
    """Bytes of the weights that the edited graphs read, each storage once."""
    # such a module keeps only what its graph reads
    return stored_bytes(*(fx.GraphModule(program.module, program.graph) for program in programs))


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"
