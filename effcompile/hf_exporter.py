"""effcompile as a backend of `transformers.exporters`: importing this module registers it there, as the
format "effcompile".
"""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from effcompile import api
from effcompile.core.errors import FormatError, UsageError
from effcompile.core.temporary import own_folder
from effcompile.core.types import HFModel, Outputs
from effcompile.ir.saved import PLAN
from effcompile.runtime.loaded import LoadedExecutable

try:
    from transformers import GenerationConfig
    from transformers.exporters.auto import register_backend
    from transformers.exporters.base import ExportedComponent, ExportedModel, HfExporter
    from transformers.exporters.configs import ExportConfigMixin
    from transformers.exporters.metadata import ExportMetadata, build_export_metadata, record_output_structure
    from transformers.exporters.runners.base import ModelRunner
except ImportError as error:
    raise ImportError(
        "effcompile.hf_exporter needs a transformers that has `transformers.exporters`; 5.23 does."
    ) from error

FORMAT = "effcompile"
#: The component of a generation.
GENERATION = "generation"


@dataclass(kw_only=True)
class EffcompileConfig(ExportConfigMixin):
    """What is asked, as `effcompile.optimize` takes it; what is None is left to it.

    Attributes:
        max_error, memory, minimize, reads, robust: the goal. context, batch, prompt, new: of a generation.
        backend, passes, effort: how it is reached.
    """

    export_format: str = FORMAT
    max_error: float | None = None
    memory: int | str | None = None
    minimize: str | None = None
    reads: str | None = None
    robust: bool | None = None
    context: int | None = None
    batch: int | None = None
    prompt: int | None = None
    new: int | None = None
    backend: str | None = None
    passes: tuple[str, ...] | None = None
    effort: str | None = None


class EffcompileExporter(HfExporter):
    """Plans a model for this machine.

    A program is an Executable, or the executable of a generation; its file holds the saved folder.
    """

    export_format = FORMAT
    config_class = EffcompileConfig
    program_prefix = "effcompile_"
    program_suffix = ".zip"
    required_packages = ["torch"]  # noqa: RUF012  as the base class has it

    def export_program(
        self, model: HFModel, sample_inputs: MutableMapping[str, Any], config: ExportConfigMixin
    ) -> tuple[Any, ExportMetadata]:
        """Plan, lower and verify a forward call.

        Raises:
            EffcompileError: as `effcompile.optimize` does.
        """
        given = dict(sample_inputs)
        program = api.optimize(model, given, **_asked(config))
        return program, _metadata(model, given, program(**given), self.required_packages)

    def export_for_generation(
        self,
        model: HFModel,
        sample_inputs: MutableMapping[str, Any],
        config: ExportConfigMixin | dict[str, ExportConfigMixin],
        *,
        generation_config: GenerationConfig | None = None,
        multi_token_decode: bool = False,
    ) -> ExportedModel:
        """Plan prefill and decoding at once; the one component, "generation", has `generate()`.

        The inputs are text to measure errors on.

        Args:
            model: a Hugging Face model that generates.
            sample_inputs: as `generate()` takes them.
            config: an EffcompileConfig, or {"generation": one}.
            generation_config: kept beside the program, for `generate(...,
                generation_config=exported.generation_config)`.
            multi_token_decode: not read: one graph takes any number of tokens.

        Raises:
            UsageError: a cache of Hugging Face's is asked for, or a config of another component.
            EffcompileError: as `effcompile.optimize` does.
        """
        if generation_config is not None and generation_config.cache_implementation:
            raise UsageError(
                f"generation_config.cache_implementation = {generation_config.cache_implementation!r}: "
                "effcompile plans the cache itself. Leave it out."
            )
        if isinstance(config, dict):
            if set(config) != {GENERATION}:
                raise UsageError(
                    f"config names {', '.join(map(repr, config)) or 'nothing'}: the one component is "
                    f"{GENERATION!r}."
                )
            config = config[GENERATION]
        given, asked = dict(sample_inputs), _asked(config)
        program = api.optimize(model, given, mode="generation", **asked)
        metadata = _metadata(model, given, None, self.required_packages)
        metadata.export_config = {"export_format": FORMAT, **asked}
        component = ExportedComponent(program, metadata)
        return ExportedModel(
            {GENERATION: component}, FORMAT, config=model.config, generation_config=generation_config
        )

    @classmethod
    def save_program(cls, program: Any, path: str | Path) -> None:
        """The folder that `program.save` writes, in one file."""
        with tempfile.TemporaryDirectory(dir=Path(path).parent) as aside:
            folder = Path(program.save(Path(aside) / "saved"))
            with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
                for each in sorted(folder.rglob("*")):
                    if each.is_file():
                        file.write(each, each.relative_to(folder))

    @classmethod
    def load_program(cls, path: str | Path) -> Any:
        """What `save_program` wrote, without the model.

        Its files lie in a temporary folder until the process ends: copies need them, too.

        Raises:
            FormatError: not such a file.
        """
        try:
            with zipfile.ZipFile(path) as file:
                _checked(file, path)
                folder = own_folder("effcompile-export-")
                file.extractall(folder)
        except zipfile.BadZipFile as error:
            raise FormatError(
                f"{str(path)!r} is no file of effcompile's exporter: {error}. Export the model again."
            ) from error
        return api.load(folder)


class EffcompileRunner(ModelRunner):
    """Calls a program as the model is called."""

    def __init__(self, program: Any, metadata: ExportMetadata) -> None:
        super().__init__(metadata)
        self.program = program

    @property
    def device(self) -> torch.device:
        """The one that it was planned for."""
        return torch.device(self.metadata.export_device or "cpu")

    @classmethod
    def from_program(cls, program: Any, metadata: ExportMetadata, device: Any = None) -> EffcompileRunner:
        """Raises UsageError: another device than the one that it was planned for."""
        made = cls(program, metadata)
        if device is not None and torch.device(device).type != made.device.type:
            raise UsageError(
                f"device = {str(device)!r}: the plan is for {made.device}. Export the model anew where it "
                "is to run."
            )
        return made

    def __call__(self, share_inputs: bool = True, share_outputs: bool = False, **kwargs: Any) -> Outputs:
        """What the model returns, in its own class."""
        given = {**self.metadata.in_constants, **kwargs}
        if isinstance(self.program, LoadedExecutable):
            return self.unflatten(self.program.artifact(**given))
        return self.program(**given)


def _asked(config: ExportConfigMixin) -> dict[str, Any]:
    """Arguments of `optimize`.

    Raises:
        UsageError: a config of another exporter.
    """
    if not isinstance(config, EffcompileConfig):
        raise UsageError(
            f"config is a {type(config).__name__}. Give an effcompile.hf_exporter.EffcompileConfig."
        )
    return {
        name: value for name, value in asdict(config).items() if value is not None and name != "export_format"
    }


def _metadata(model: HFModel, given: dict[str, Any], outputs: Outputs, packages: list[str]) -> ExportMetadata:
    """What transformers records of a graph: the inputs, and the structure of the outputs."""
    spec = SimpleNamespace(in_spec=pytree.tree_structure(((), given)), out_spec=pytree.tree_structure(None))
    metadata = build_export_metadata(model, given, SimpleNamespace(call_spec=spec), packages)
    record_output_structure(metadata, outputs)
    return metadata


def _checked(file: zipfile.ZipFile, path: str | Path) -> None:
    """Raises FormatError for what `save_program` does not write: files that are compressed, lie elsewhere, or
    are none of ours.
    """
    for entry in file.infolist():
        name = PurePosixPath(entry.filename)
        if (
            entry.compress_type != zipfile.ZIP_STORED
            or name.is_absolute()
            or ".." in name.parts
            or "\\" in entry.filename
        ):
            raise FormatError(
                f"{str(path)!r} holds {entry.filename!r}, which effcompile's exporter does not write. "
                "Export the model again."
            )
    if PLAN not in file.namelist():
        raise FormatError(f"{str(path)!r} holds no {PLAN}. Export the model again.")


register_backend(EffcompileExporter, EffcompileRunner)
