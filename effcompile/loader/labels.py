"""Labels of example inputs: what a model's head computes its loss from."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch

from effcompile.loader.figures import TEXTS, ModelSizes
from effcompile.loader.pictures import masked_patches

_NAMES = ("labels", "targets", "target")
_CHARACTERS = 4
#: Models with tokens whose labels are one class an example.
_OF_EXAMPLES = ("SequenceClassification", "ImageClassification", "MultipleChoice", "NextSentencePrediction")
#: Models whose labels are boxes, frames or depths: given by nobody but the user.
_OTHER = ("ObjectDetection", "AudioFrameClassification", "DepthEstimation", "KeypointMatching")


def labels(figures: ModelSizes, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Token ids of a language model, classes of a classifier, or what the forward's docstring describes; {}
    where only the user can tell them: lists of boxes, depths.

    Args:
        figures: of the model.
        made: its other inputs.
    """
    name = next((each for each in _NAMES if each in figures.parameters), None)
    found = _spans(figures) if name is None else _named(figures, name, made)
    found |= _hidden(figures, made)
    for each in ("next_sentence_label", "sentence_order_label"):  # does the second follow the first?
        if each in figures.parameters:
            found[each] = figures.ids(2, (figures.batch,))
    return found


def left_out(figures: ModelSizes, made: Mapping[str, object]) -> str:
    """What the labels are that were not made; '' where they were, or there are none."""
    name = next((each for each in _NAMES if each in figures.parameters), None)
    if name is None or name in made or not figures.training:
        return ""
    return f"{name} ({figures.documents[name]})" if name in figures.documents else name


def _hidden(figures: ModelSizes, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is to be found behind hidden words and patches, of a model that learns from both and from whether
    they belong together (FLAVA).
    """
    if not {"mlm_labels", "mim_labels", "itm_labels"} <= figures.parameters.keys():
        return {}
    masked, rows = masked_patches(figures), figures.number(("vocab_size",), "vision")
    if masked is None or not rows or "input_ids" not in made:
        return {}
    tokens = figures.ids(rows, tuple(masked.shape))
    return {
        "bool_masked_pos": masked,
        "mlm_labels": made["input_ids"].clone(),
        "mim_labels": tokens.masked_fill(~masked, -100),
        "itm_labels": torch.ones(figures.batch, dtype=torch.long),
    }


def _spans(figures: ModelSizes) -> dict[str, torch.Tensor]:
    """Where an answer starts and ends."""
    named = [each for each in ("start_positions", "end_positions") if each in figures.parameters]
    drawn = (torch.arange(figures.batch) + 1) % figures.tokens()  # 0 is no answer to some
    described = figures.documents.get("start_positions")
    if (
        described is not None
        and len(described.dimensions) == 2
        and "question_positions" in figures.parameters
    ):
        named, drawn = [*named, "question_positions"], drawn[:, None]  # of several questions, one
    return dict.fromkeys(named, drawn)


def _named(figures: ModelSizes, name: str, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    kind, classes = type(figures.model).__name__, figures.classes()
    ids = made.get("decoder_input_ids", next((made[each] for each in TEXTS if each in made), None))
    described = figures.documents.get(name)
    if kind.endswith(_OTHER) or (described and described.kind.startswith("list")):
        return {}
    if kind.endswith("ForCTC"):  # a text beside each recording; 0 is the blank
        drawn = figures.ids(figures.vocabulary() - 1, (figures.batch, _CHARACTERS))
        return {name: drawn + 1}
    if "MaskedImageModeling" in kind:  # a visual token for each patch that is hidden
        rows = figures.vocabulary() if "bool_masked_pos" in made else 0
        return {name: figures.ids(rows, (int(made["bool_masked_pos"].sum()),))} if rows else {}
    if "TokenClassification" in kind and ids is not None:
        return {name: ids % classes if classes else ids.clone()}
    if any(task in kind for task in _OF_EXAMPLES) or ("AudioClassification" in kind):
        return {name: _of_examples(figures, classes)} if classes else {}
    height, width = made["pixel_values"].shape[-2:] if "pixel_values" in made else (0, 0)
    if "SemanticSegmentation" in kind and height and classes:
        return {name: figures.ids(classes, (figures.batch, height, width))}
    # the docstrings of some that write texts (T5) say that a label is one class of an example
    wrong = described is not None and len(described.dimensions) == 1 and _writes(figures)
    if described is None or not described.dimensions or wrong:
        if ids is not None:
            return {name: ids.clone()}
        return {name: figures.ids(classes, (figures.batch,))} if classes else {}
    names = described.dimensions
    untyped = not (described.whole or described.fractional)
    if ids is not None and _writes(figures) and (untyped or ids.dim() > len(names)):
        # they are the text, where a docstring says less than that: no type, or one codebook of several
        return {name: ids.clone()}
    column = len(names) == 2 and names[1] == "1"  # of one class an example, which losses take in a row
    shape = figures.dimensions(names[:1] if column else names, (height, width) if height else None)
    found = None if shape is None else _of_shape(figures, shape, described.whole, ids)
    return {} if found is None else {name: found}


def _writes(figures: ModelSizes) -> bool:
    """Whether the model's head is over its vocabulary."""
    head = getattr(figures.model, "get_output_embeddings", None)
    with contextlib.suppress(NotImplementedError):
        return callable(head) and head() is not None
    return False


def _of_examples(figures: ModelSizes, classes: int) -> torch.Tensor:
    """One class of each; a number, or each class or not, where the configuration calls the problem that."""
    problem = figures.config.get("problem_type")
    if problem == "multi_label_classification":
        return figures.ids(2, (figures.batch, classes)).to(figures.dtype)
    if (classes == 1 and problem is None) or problem == "regression":
        return figures.floats(figures.batch, *([classes] * (classes > 1)))
    return figures.ids(classes, (figures.batch,))


def _of_shape(
    figures: ModelSizes, shape: tuple[int, ...], whole: bool, ids: torch.Tensor | None
) -> torch.Tensor | None:
    """As a docstring describes them: classes, ids, or shares between 0 and 1 where they are no integers."""
    classes = figures.classes()
    if len(shape) == 1:
        return figures.ids(classes, shape) if classes else None
    if not whole:
        return figures.ids(2, shape).to(figures.dtype)
    if ids is not None and shape == tuple(ids.shape):
        answers = "QuestionAnswering" in type(figures.model).__name__  # whether a token is part of one
        return ids % 2 if answers and "decoder_input_ids" not in figures.parameters else ids.clone()
    if classes and "Classification" in type(figures.model).__name__:
        return figures.ids(classes, shape)
    rows = figures.vocabulary("decoder" if "decoder_input_ids" in figures.parameters else "text")
    return figures.ids(rows, shape) if ids is not None and rows else None
