"""What a model's folder must hold, seen before torch loads: weights that are there, whole and no pickles, and
a task that exists.
"""

from __future__ import annotations

import json
from pathlib import Path

from effcompile.core.errors import UsageError
from effcompile.core.stages import first_line
from effcompile.loader.source import Kind, ModelSource, Reading, code_of

#: Task, as transformers' pipelines name it → the class that has its head.
TASKS = {
    "feature-extraction": "AutoModel",
    "text-generation": "AutoModelForCausalLM",
    "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "multiple-choice": "AutoModelForMultipleChoice",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "translation": "AutoModelForSeq2SeqLM",
    "summarization": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "object-detection": "AutoModelForObjectDetection",
    "automatic-speech-recognition": "AutoModelForSpeechSeq2Seq",
    "audio-classification": "AutoModelForAudioClassification",
}
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "diffusion_pytorch_model.bin")


def check_source(source: ModelSource, reading: Reading) -> None:
    """See what can be seen of a model without loading it.

    Raises:
        UsageError: its weights are missing, damaged, pickles, or nobody's. Its file is not Python. No such
            task.
    """
    if reading.task is not None:
        check_task(reading.task)
    if source.kind in (Kind.FOLDER, Kind.DIFFUSERS):
        check_weights(source.path, reading)
    elif source.kind is Kind.PYTHON:
        code_of(source.path)
    elif source.kind is Kind.SAFETENSORS:
        if not (source.path.parent / "config.json").is_file():
            raise UsageError(
                f"{str(source.path)!r} holds weights alone: there is no config.json beside it that says "
                "whose. Put the model's config.json there, or load the weights in a model.py of yours "
                "(model.load_state_dict(safetensors.torch.load_file(path)))."
            )
        check_safetensors(source.path)


def check_task(task: str) -> None:
    """Raises UsageError for a task that there is not."""
    if task not in TASKS:
        raise UsageError(f"No task is named {task!r}. Known: {', '.join(TASKS)}.")


def check_safetensors(file: Path) -> None:
    """Open a file as far as it takes to see that it is whole.

    Raises:
        UsageError: it is not.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{str(file)!r} is not a whole safetensors file ({first_line(error)}; {file.stat().st_size:,} "
            "bytes). It may be cut off: download or copy it again."
        ) from error


def check_weights(folder: Path, reading: Reading) -> None:
    """See that a folder's weights are there, whole, and no pickles.

    Raises:
        UsageError: they are not.
    """
    found = sorted(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        found += [folder / name for name in _shards(index) if folder / name not in found]
    for file in found:
        if not file.is_file():
            raise UsageError(
                f"{str(file)!r} is missing, which the index beside it names. Download the model again."
            )
        check_safetensors(file)
    pickles = [name for name in _PICKLES if (folder / name).is_file()]
    if found or (pickles and reading.allow_pickle):
        return
    if pickles:
        raise UsageError(
            f"The weights in {str(folder)!r} are a pickle ({pickles[0]}), which may run code when it is "
            "opened. If you trust where it came from, give --allow-pickle; model.save_pretrained(folder) "
            "then writes safetensors."
        )
    raise UsageError(
        f"{str(folder)!r} has a config.json and no weights: there is no model.safetensors. Download the "
        "model again."
    )


def _shards(index: Path) -> list[str]:
    try:
        return sorted(
            {Path(str(name)).name for name in json.loads(index.read_bytes())["weight_map"].values()}
        )
    except (ValueError, KeyError, AttributeError) as error:
        raise UsageError(f"{str(index)!r} is no index of weights. Download the model again.") from error
