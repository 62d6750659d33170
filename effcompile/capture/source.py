"""How a step was captured, so that it can be captured again: with its forward changed before autograd is
traced through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from effcompile.capture.exported import Exported, copied
from effcompile.capture.training import Edit, Loss, capture_training
from effcompile.core.torch_compat import is_fake
from effcompile.ir.step import Step

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A model with example inputs. Arguments as in `capture_training`; by: it, or the same under autocast.

    base: a change of the forward that comes before all edits; noted: says in the step what that made of it.
    made: what was captured again, by the name of the change; by "", the forward before any change; "as it
    is", the step without one.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Loss | None = None
    keep_outputs: bool = False
    by: Callable[..., Step] = capture_training
    base: Edit | None = None
    noted: Callable[[Step], Step] | None = None
    made: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def once(self, change: str, make: Callable[[], T]) -> T:
        """What a change made of the step; it is captured with it but once."""
        if change not in self.made:
            self.made[change] = make()
        found: T = self.made[change]
        return found

    def capture(self, edit: Edit | None = None) -> Step:
        """The step, its forward changed by `edit`; the forward is traced once.

        Raises what `capture_training` does.
        """
        exported = self.once("", Exported)
        edits = [each for each in (self.base, edit) if each is not None]

        def edited(front: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
            for each in edits:
                each(front, inputs)

        step = self.by(
            self.model, self.args, self.kwargs, loss=self.loss, keep_outputs=self.keep_outputs,
            edit=edited if edits else None, exported=exported,
        )  # fmt: skip
        return step if self.noted is None else self.noted(step)

    def edited(self, base: Edit, noted: Callable[[Step], Step]) -> Source:
        """The same with a forward that is always changed by `base` first, after what changes it already; it
        is not exported again.
        """
        return replace(
            self,
            base=base if self.base is None else _both(self.base, base),
            noted=noted,
            made={"": self.once("", Exported)},
        )

    def capture_with_front(self) -> tuple[Step, fx.GraphModule | None]:
        """The step, and a copy of the forward that autograd was traced through; None where Dynamo gave it.

        Captured but once.
        """
        return self.once("as it is", self._capture_with_front)

    def _capture_with_front(self) -> tuple[Step, fx.GraphModule | None]:
        fronts: list[fx.GraphModule] = []

        def keep(front: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
            fronts.append(copied(front))

        step = self.capture(keep)
        return step, fronts[-1] if fronts else None

    @property
    def called(self) -> Tensor | None:
        """The model's own loss at these inputs, where it was called as it was captured, or since."""
        return self.once("", Exported).loss

    def wait(self) -> None:
        """The model is not called as it is captured where `call_alone` or `tells` come after."""
        self.once("", Exported).patient = True

    @property
    def waits(self) -> bool:
        """Whether nobody has called the model yet, and it is to be."""
        return self.once("", Exported).uncalled is not None

    def call_alone(self) -> None:
        """Have the model called, unless it was.

        Raises:
            CaptureError: it reads again what an earlier call kept outside of buffers.
        """
        if (uncalled := self.once("", Exported).uncalled) is not None:
            uncalled.call()

    def tells(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """The model's own step, which is to run from memory.SEED: what calling it alone would tell, where
        nobody did.
        """
        uncalled = self.once("", Exported).uncalled
        return step if uncalled is None else uncalled.within(step)

    @property
    def without_data(self) -> bool:
        """Whether some tensor has no values to look at."""
        given = [
            leaf for leaf in pytree.tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)
        ]
        return any(is_fake(tensor) for tensor in (*self.model.parameters(), *self.model.buffers(), *given))


def _both(first: Edit, second: Edit) -> Edit:
    def edit(front: fx.GraphModule, inputs: Sequence[Tensor]) -> None:
        first(front, inputs)
        second(front, inputs)

    return edit
