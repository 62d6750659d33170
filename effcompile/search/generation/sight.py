"""The images that a prompt is planned with, and what encoding them takes."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from effcompile.capture import images
from effcompile.capture.eye import alike, capture_eye
from effcompile.capture.generation import GenerationStep
from effcompile.capture.mends import evaluating
from effcompile.core import torch_compat_memory
from effcompile.core.errors import FormatError, InputsError
from effcompile.core.goal import Goal
from effcompile.core.reasons import Because, Reason
from effcompile.core.timing import median_seconds
from effcompile.core.types import HFModel, Inputs, Kwargs, Outputs, Value
from effcompile.estimate.timeline import timeline
from effcompile.ir.plan import Plan
from effcompile.ir.program import Program
from effcompile.loader.derive import derive
from effcompile.loader.source import Reading
from effcompile.runtime.generation.eye import PIXELS, Eye, described, together

#: What the figures count, where images are from the user's inputs, and where they are not.
_GIVEN = (
    "images: {} in a row of text, {} of its tokens, the largest of the inputs; their encoder has {bytes} "
    "of weights in the model and takes {bytes} while it runs, and {bytes} of images and rows are held until "
    "the last token"
)
_OF_SIZE = (
    "images: {} in a row of text, {} of its tokens, of the size that the model's settings say (give inputs "
    "with yours); their encoder has {bytes} of weights in the model and takes {bytes} while it runs, and "
    "{bytes} of images and rows are held until the last token"
)
_TOO_LONG = (
    "images: one has {} tokens, for which a context of {} has no room; their encoder's {bytes} of weights "
    "are counted, and nothing else of it"
)
_UNKNOWN = (
    "images: no figure counts what encoding them takes, for the model tells no size; {bytes} of weights that "
    "the text does not read are counted as their encoder's; give inputs with images"
)
#: What becomes of the encoder.
_PLANNED = "images: encoded one by one by a planned graph of {name}; others by the model itself"
_OWN = "images: their encoder is not planned and runs as it stands in the model: {name}"
_SIZES = "the images of a row are of several sizes"


@dataclass(frozen=True, kw_only=True)
class Sight:
    """The images that a prompt is planned with, and what encoding them takes.

    Attributes:
        eye: what encodes them.
        token: what stands for a row of one in a text.
        given: what is encoded for all rows of the batch; nothing where no image is planned with.
        images, tokens: how many a row has, and how many of its tokens they are.
        program: encodes one image; None: all are encoded as the model does it.
        weight_bytes: what encoding reads and no graph of the plan does.
        working_bytes: at the most while it runs, beside its weights and what it is given.
        made_bytes: rows of features, which are held until the last token is written.
        said: for the report.
    """

    eye: Eye
    token: images.ImageToken
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)
    images: int = 0
    tokens: int = 0
    program: Program | None = None
    weight_bytes: int = 0
    working_bytes: int = 0
    made_bytes: int = 0
    said: tuple[Reason, ...] = ()

    @property
    def given_bytes(self) -> int:
        """Of images as the encoder reads them; the caller holds them until the last token is written."""
        return sum(value.nbytes for value in self.given.values())

    @property
    def each(self) -> int:
        """Tokens of an image."""
        return -(-self.tokens // max(1, self.images))

    @property
    def kept_bytes(self) -> int:
        """While tokens are written: the images, and what was made of them."""
        return self.given_bytes + self.made_bytes

    def seconds(self) -> float:
        """Of encoding all images of the batch as the model does it: measured; 0 where a graph does."""
        if self.program is not None or not self.given:
            return 0.0
        return median_seconds(partial(self.eye, self.given), min_rounds=2)

    def pictures(self) -> dict[str, torch.Tensor]:
        """The images again, as a caller holds them."""
        return {name: value.clone() for name, value in self.given.items()}

    def beside(self, ids: torch.Tensor, seen: Outputs, axes: int) -> tuple[torch.Tensor, Kwargs]:
        """A text (rows, tokens) that ends with these images, and what a forward takes beside it.

        `seen`: what was made of the images. `axes`: of its position ids.
        """
        text: torch.Tensor = ids.masked_fill(ids == self.token.id, (self.token.id + 1) % 3)
        text[:, ids.shape[1] - self.tokens :] = self.token.id
        places = torch.arange(ids.shape[1], device=ids.device).repeat(axes, len(ids), 1) if axes else None
        positions = {"position_ids": places} if axes else {}
        return text, {images.ENCODED: {"image": seen}, **positions}


def planned_images(sight: Sight | None) -> tuple[int, int]:
    """How many tokens of a row are images', and how many of one of these."""
    return (sight.tokens, sight.each) if sight else (0, 0)


def check_images(plan: Plan, sight: Sight | None) -> None:
    """Make sure that the images of a saved plan are encoded as it says.

    Raises:
        FormatError: its graph was of images of another size.
    """
    was, found = (
        [note for note in notes if isinstance(note, Because) and note.text == _PLANNED]
        for notes in (plan.notes, sight.said if sight else ())
    )
    if was and was != found:
        now = str(found[0]) if found else "no image among the inputs, nor of the model's settings, is so"
        raise FormatError(
            f"This plan was made with images of another size: it has {was[0]!s}; now {now}. Give inputs with "
            "such images, or plan anew."
        )


class _Read(TorchDispatchMode):
    """The storages of tensors that operators read while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.storages = set[int]()

    def __torch_dispatch__(self, func: Value, types: object, args: Value = (), kwargs: Value = None) -> Value:
        tensors = (t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        self.storages |= {tensor.untyped_storage()._cdata for tensor in tensors}
        return func(*args, **(kwargs or {}))


def sight_of(
    model: HFModel, step: GenerationStep, given: Sequence[Inputs] | None, goal: Goal
) -> Sight | None:
    """With as many images in a row as the user's inputs have at the most, of the largest; without such, one
    of the model's own size. None where the model takes no images.
    """
    if step.image is None:
        return None
    eye = Eye(model.base_model)
    theirs = _of_inputs(eye, given or ())
    row = theirs or _of_inputs(eye, [((), derived(model))])
    if not row or model.device.type == "meta":
        weights = _beyond(model, None, step)
        return Sight(eye=eye, token=step.image, weight_bytes=weights, said=(Because(_UNKNOWN, (weights,)),))
    asked = together(row * goal.batch)
    with evaluating(model), torch.no_grad():
        with _Read() as read:
            tokens = len(images.rows_of(_made(eye, together(row)))[0])
        with torch_compat_memory.watched_memory(model.device.type) as peak:
            made = _made(eye, asked)
    weights = _beyond(model, read.storages, step)
    if tokens >= goal.tokens[0]:
        why = Because(_TOO_LONG, (tokens // len(row), goal.tokens[0], weights))
        return Sight(eye=eye, token=step.image, weight_bytes=weights, said=(why,))
    found = Sight(
        eye=eye, token=step.image, given=asked, images=len(row), tokens=tokens, weight_bytes=weights,
        working_bytes=peak(), made_bytes=sum(each.nbytes for each in images.rows_of(made)),
    )  # fmt: skip
    program = _graph(model, eye, row)
    if isinstance(program, str):
        what = Because(_OWN, (program,))
    else:
        sizes = ", ".join(f"{spec.name} {described(spec)}" for spec in program.inputs)
        others = found.made_bytes - found.made_bytes // (len(row) * goal.batch)
        what = Because(_PLANNED, (sizes,))
        found = replace(
            found, program=program, weight_bytes=0, working_bytes=others + timeline(program).activation_bytes
        )
    figures = (len(row), tokens, weights, found.working_bytes, found.kept_bytes)
    return replace(found, said=(Because(_GIVEN if theirs else _OF_SIZE, figures), what))


def _graph(model: HFModel, eye: Eye, row: Sequence[Mapping[str, torch.Tensor]]) -> Program | str:
    """The graph of an image, or why there is none."""
    first = row[0]
    sizes = [{name: value.shape for name, value in each.items()} for each in row]
    if sizes.count(sizes[0]) < len(row):
        return _SIZES
    other = {n: v.flip(-1) if v.is_floating_point() else v for n, v in first.items()}
    with evaluating(model), torch.no_grad():
        apart = [images.rows_of(_made(eye, each)) for each in (first, other)]
        beside = images.rows_of(_made(eye, together([first, other])))
    several = all(map(alike, map(torch.cat, zip(*apart, strict=True)), beside))
    return capture_eye(model, first, several)


def _made(eye: Eye, given: Mapping[str, torch.Tensor]) -> Outputs:
    made = eye(given)
    assert made is not None
    return made


def _beyond(model: HFModel, read: set[int] | None, step: GenerationStep) -> int:
    """Bytes of the model's tensors that were read (None: of all), without those that the step reads, too."""
    module = step.program.module
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
    }
    return sum(sizes[each] for each in sizes.keys() - own if read is None or each in read)


def _of_inputs(eye: Eye, given: Sequence[Inputs]) -> list[dict[str, torch.Tensor]]:
    """Of the inputs with most images in a row so many of the largest; none where they have no images."""
    found: list[dict[str, torch.Tensor]] = []
    for _, kwargs in given:
        mine = {name: value for name in eye.names if isinstance(value := kwargs.get(name), torch.Tensor)}
        if not any(name in mine for name in PIXELS):
            continue
        each = sorted(eye.apart(mine), key=_size, reverse=True)
        row = each[: -(-len(each) // max(1, len(kwargs.get("input_ids", ()))))]
        found = max(found, row, key=lambda images: sum(map(_size, images)))
    return found


def _size(given: Mapping[str, torch.Tensor]) -> int:
    return next(given[name] for name in PIXELS if name in given).numel()


def derived(model: HFModel) -> Kwargs:
    """A text with one image, where the model's settings tell the size of one; else nothing."""
    with contextlib.suppress(InputsError):
        made = derive(model, Reading(), type(model).__name__).kwargs
        return {name: value.to(model.device) for name, value in made.items()}
    return {}
