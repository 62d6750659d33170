"""Files of images among a prompt, as the processor of a model gives them to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoProcessor
from transformers.image_utils import load_image

from effcompile.core.errors import MissingPackageError, UsageError
from effcompile.core.stages import first_line
from effcompile.core.trust import refuse_own_code

#: What transformers' processors of images are made with → how it is installed.
_NEEDED = {"PIL": "pip install pillow", "torchvision": "pip install torchvision"}


class Processor(Protocol):
    """What is asked of those of transformers."""

    def __call__(
        self, *, text: list[str], images: list[list[object]], return_tensors: str
    ) -> Mapping[str, object]: ...

    def apply_chat_template(
        self, said: list[Mapping[str, object]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str: ...


def processor_in(folder: Path) -> Processor:
    """The processor that stands in a folder, with one of images.

    Raises:
        UsageError: there is none, or it is code of the folder's own. MissingPackageError: what it is made
            with is not installed.
    """
    _installed("PIL")
    try:
        found: Processor = AutoProcessor.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except ImportError as error:
        if "torchvision" in str(error).lower():
            _installed("torchvision")
        raise UsageError(
            f"The processor of images in {str(folder)!r} cannot be imported: {first_line(error)}. Mend what "
            "it is made with (pillow, torchvision of torch's own version)."
        ) from error
    except Exception as error:  # whatever the many processors raise
        refuse_own_code(folder, "processor", error)
        raise UsageError(
            f"There is no processor of images in {str(folder)!r}: {first_line(error)}. Give the folder of "
            "the model that has one: --tokenizer DIR."
        ) from error
    if getattr(found, "image_processor", None) is None:  # a folder with a tokenizer alone gives that
        raise UsageError(
            f"There is no processor of images in {str(folder)!r}, but a {type(found).__name__}. Give the "
            "folder of the model that has one: --tokenizer DIR."
        )
    return found


def with_pictures(processor: Processor, prompt: str, files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """What generate() takes of a prompt and images.

    The images stand where the prompt has the processor's token for one; of a prompt that has none, before it:
    as the model's chat template puts them, where it has one.

    Raises:
        UsageError: a file that is no image, or other images than the prompt has tokens for.
    """
    pictures = [_opened(file) for file in files]
    token = str(getattr(processor, "image_token", None) or "<image>")
    places = prompt.count(token)
    if places not in (0, len(files)):
        raise UsageError(
            f"Images: {len(files)}, and the prompt has places ({token!r}) for {places}. Write one for each "
            "image, or none."
        )
    try:
        text = prompt if places else _before(processor, token, prompt, len(files))
        made = processor(text=[text], images=[pictures], return_tensors="pt")
    except Exception as error:  # whatever the many processors raise
        raise UsageError(
            f"{type(processor).__name__} cannot read the prompt with its images: {first_line(error)}."
        ) from error
    return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}


def _before(processor: Processor, token: str, prompt: str, images: int) -> str:
    """The prompt behind so many images."""
    if not getattr(processor, "chat_template", None):
        return f"{token * images} {prompt}"
    said = [*[{"type": "image"}] * images, {"type": "text", "text": prompt}]
    return processor.apply_chat_template(
        [{"role": "user", "content": said}], add_generation_prompt=True, tokenize=False
    )


def _opened(file: Path) -> object:
    """The image in a file, upright, in red, green and blue."""
    if not file.is_file():
        raise UsageError(f"There is no file {str(file)!r}.")
    try:
        return load_image(str(file))
    except Exception as error:  # no image, half of one, or too large for PIL
        raise UsageError(f"{str(file)!r} cannot be read as an image: {first_line(error)}.") from error


def _installed(package: str) -> None:
    if find_spec(package) is None:
        raise MissingPackageError(package, "An image beside a prompt", _NEEDED[package])
