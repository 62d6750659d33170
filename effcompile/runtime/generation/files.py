"""The folder of a planned generation: its graphs, what their tensors are, the model's configs, and its
tokenizer where it has one.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import safetensors.torch
import transformers

from effcompile.backends import triton as kernels
from effcompile.backends.base import Lowered
from effcompile.backends.onnxruntime import OpenedStep, check_beside
from effcompile.backends.openvino import steps as openvino
from effcompile.backends.torch import lowered as torch_lowered
from effcompile.backends.torch.called import called
from effcompile.capture.generation import GenerationStep
from effcompile.capture.images import ImageToken
from effcompile.core.errors import EffcompileError, FormatError, clipped
from effcompile.core.files import TOKENIZERS, found_in, read_bounded
from effcompile.core.stages import first_line
from effcompile.core.types import HFClass, HFModel
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.ir.saved import PLAN, check_artifact
from effcompile.runtime.generation.header import Header, SavedGraph, objection
from effcompile.runtime.generation.steps import LoweredStep, Run, assembled

HEADER = "generation.json"
#: The id of the token that stands for an image, and the row that it is embedded as.
_IMAGE = "image_token.safetensors"
_MOST_BYTES = 16 << 20
_MOST_LAYERS = 10_000
_AGAIN = "Write the folder again."
#: What processors of images, videos and chats are held in.
_PROCESSOR = ("chat_template*", "*preprocessor_config.json", "processor_config.json")


def write(
    folder: Path, step: GenerationStep, lowered: LoweredStep, parts: Mapping[str, Lowered], model: HFModel
) -> tuple[Path, ...]:
    """Write all but the plan; returns the files."""
    found: list[Path] = []
    graphs: dict[str, SavedGraph] = {}
    programs = {"step": step.program, "source": step.source, "encoder": step.encoder, "eye": step.eye}
    for name, part in parts.items():
        inner = folder / f".{name}"
        saved = part.save(inner)
        for file in saved:
            ours = file.stem == saved[0].stem
            new = file.rename(folder / (f"{name}{file.suffix}" if ours else file.name))
            found.append(new)
            graphs.setdefault(name, SavedGraph(file=new.name, inputs=_names(programs[name])))
        inner.rmdir()
    header = Header(
        kind=_opened_as(type(model)).__name__, boundary=lowered.boundary, layout=lowered.layout,
        room=lowered.room, inputs=lowered.inputs, graphs=graphs, tables=dict(lowered.tables),
        eye=lowered.eye_inputs,
    )  # fmt: skip
    (folder / HEADER).write_bytes(msgspec.json.encode(header))
    if lowered.image is not None:
        found.append(folder / _IMAGE)
        safetensors.torch.save_file(
            {str(lowered.image.id): lowered.image.row.cpu().contiguous()}, folder / _IMAGE
        )
    return (*found, folder / HEADER, *_configs(folder, model), *_tokenizer(folder, model))


def _opened_as(kind: HFClass) -> HFClass:
    """The class of transformers whose generate() is the model's: its own, or that of which a user's class
    changes no more than the forward, which is planned. Another is itself, which `kind_of` refuses.
    """
    for each in kind.__mro__:
        if getattr(transformers, each.__name__, None) is each:
            return each if getattr(each, "config_class", None) is kind.config_class else kind
        changed = {name for name in vars(each) if not name.startswith("__")}
        if changed - {"forward", "config_class"}:  # the latter is set on each subclass
            break
    return kind


def _configs(folder: Path, model: HFModel) -> tuple[Path, Path]:
    """As the model has them. save_pretrained refuses what generate() takes with a warning (a temperature
    where nothing is drawn), and one that is marked as made from a model's config loses its further entries
    when it is read (Whisper's languages).
    """
    of_model, of_generation = folder / "config.json", folder / "generation_config.json"
    told = copy.deepcopy(model.generation_config)
    told._from_model_config = False
    model.config.to_json_file(of_model)
    told.to_json_file(of_generation)
    return of_model, of_generation


def _tokenizer(folder: Path, model: HFModel) -> list[Path]:
    """The files of tokenizer and processor, where the model was read from a folder that has them."""
    source = Path(str(getattr(model, "name_or_path", "") or "/nowhere"))
    return [
        Path(shutil.copyfile(file, folder / file.name))
        for file in found_in(source, (*TOKENIZERS, *_PROCESSOR))
    ]


def _names(program: Program | None) -> tuple[str, ...]:
    return () if program is None else tuple(spec.name for spec in program.inputs)


def read(folder: Path) -> tuple[Plan, Header]:
    """The plan and the header of a folder, whose files are those that were written.

    Raises:
        UsageError: a file is missing. FormatError: one is not ours, or another one.
    """
    plan = Plan.load(folder / PLAN)
    check_artifact(plan, folder)
    place = plan.file(folder, HEADER)
    try:
        header = msgspec.json.decode(read_bounded(place, _MOST_BYTES, "the header"), type=Header)
        wrong = objection(header, plan)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, IndexError) as error:
        raise _no_header(folder, error) from error
    if wrong is not None:
        raise _no_header(folder, wrong)
    return plan, header


def _no_header(folder: Path, why: object) -> FormatError:
    said = f"{str(folder / HEADER)!r} is no header of a planned generation"
    return FormatError(f"{said}: {clipped(why)}. {_AGAIN}")


def opened(folder: Path, plan: Plan, header: Header) -> LoweredStep:
    """The graphs at work again.

    Raises:
        FormatError: the header is of other graphs.
    """
    try:
        return _at_work(folder, plan, header)
    except EffcompileError:
        raise
    except Exception as error:  # whatever reading a graph by a wrong header raises
        raise FormatError(
            f"{str(folder / HEADER)!r} does not describe the graphs beside it ({first_line(error)}). {_AGAIN}"
        ) from error


def _at_work(folder: Path, plan: Plan, header: Header) -> LoweredStep:
    runs: dict[str, Run] = {
        name: _open(plan.file(folder, Path(graph.file).name), graph, plan, is_step=name == "step")
        for name, graph in header.graphs.items()
    }
    made = _image(plan.file(folder, _IMAGE)) if header.boundary.images else None
    of_step = (header.boundary, header.layout, header.room, header.inputs)
    return assembled(*of_step, header.tables, runs, made, header.eye)


def _image(file: Path) -> ImageToken:
    """What stands for an image in a text.

    Raises:
        FormatError: it cannot be read.
    """
    try:
        ((token, row),) = safetensors.torch.load_file(file).items()
        return ImageToken(int(token), row)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise FormatError(f"{str(file)!r} cannot be read: {error}. Write the folder again.") from error


def _open(file: Path, graph: SavedGraph, plan: Plan, *, is_step: bool) -> Run:
    if file.suffix == ".xml":
        if (weights := file.with_suffix(".bin")).is_file():  # which it reads, too
            plan.file(file.parent, weights.name)
        return openvino.open_graph(file, graph.inputs)
    if file.suffix != ".onnx":
        if plan.backend == "triton":
            kernels.register(kernels.device())  # where they cannot run, torch's own do
        opened = torch_lowered.open_flat(file)
        return opened if is_step else called(opened)  # as it was planned; a step's cache grows in place
    check_beside(file, plan.artifact)
    return OpenedStep(file, plan.settings, graph.inputs)


def kind_of(header: Header) -> HFClass:
    """The model's class, of transformers as it is installed here.

    Raises:
        FormatError: it has no such class.
    """
    kind = getattr(transformers, header.kind, None) if header.kind.isidentifier() else None
    if not isinstance(kind, type) or not hasattr(kind, "generate") or not getattr(kind, "config_class", None):
        raise FormatError(
            f"transformers {transformers.__version__} has no {clipped(header.kind)}, whose generate() the "
            "folder is opened with. Install the version that the plan was made with (plan.json, versions); a "
            "class of your own opens again where it changes nothing but __init__ and forward."
        )
    return kind


def configs_of(folder: Path, kind: HFClass) -> tuple[Any, Any]:
    """The model's config, and that of its generation.

    Raises:
        FormatError: transformers does not read them, or token ids in them are none.
    """
    try:
        file = "config.json"
        config = kind.config_class.from_pretrained(folder, local_files_only=True)
        file = "generation_config.json"
        told = transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever the many configs raise
        raise FormatError(
            f"{str(folder / file)!r} is no config of {kind.__name__}: {clipped(first_line(error))}. {_AGAIN}"
        ) from error
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None) or 0
    if layers > _MOST_LAYERS:  # a cache has an object for each
        raise FormatError(
            f"{str(folder / 'config.json')!r} says num_hidden_layers = {layers}, more than a model has. "
            f"{_AGAIN}"
        )
    for name, value in told.to_dict().items():
        ids = value if isinstance(value, list) else [value]
        if name.endswith("_token_id") and any(type(each) not in (int, type(None)) for each in ids):
            raise FormatError(
                f"{str(folder / file)!r} says {name} = {clipped(value, 120)}, which is no token. {_AGAIN}"
            )
    return config, told
