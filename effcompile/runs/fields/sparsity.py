"""Sparse stages: `DynamicSparsity` while a stage lasts; with another sparsity in the backward, Top-KAST.

Dietrich et al. 2021 (arXiv 2108.06277); Jayakumar et al. 2021 (arXiv 2106.03517).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from effcompile.core.errors import UsageError
from effcompile.runs.fields.base import Effect, check_share
from effcompile.runs.fields.values import StageValues
from effcompile.sparse.controller import DynamicSparsity
from effcompile.sparse.top_kast import TopKast

#: Fewer steps from one move of the pattern to the next let no new weight learn.
_LEAST_INTERVAL = 10


class Sparsity(Effect):
    """`sparsity`: the share of the linears' weights that is zero; `backward_sparsity`: of those that get no
    gradient.
    """

    name: ClassVar[str] = "sparsity"
    moves_states: ClassVar[bool] = True
    _held: DynamicSparsity | TopKast | None = None

    @classmethod
    def check(cls, stage: StageValues) -> None:
        check_share(stage, "sparsity", one=False)

    @property
    def passes(self) -> tuple[str, ...]:
        """The optimizer's states are its own: the pattern moves them."""
        return ("states.offload=false", "states.eight_bit=false", "states.in_backward=false")

    def begin(self, model: nn.Module, optimizer: Optimizer) -> None:
        steps, backward = self.stage.steps, self.stage.backward_sparsity
        if backward is not None:
            self._held = TopKast(
                model,
                sparsity=self.value,
                backward_sparsity=backward,
                every=max(1, min(100, steps // _LEAST_INTERVAL)),
            )
            self.notes.append(
                f"sparsity {self.value:g} in the forward, {backward:g} in the backward (Top-KAST): "
                "weights dense in memory"
            )
            return
        updates = min(80, steps // _LEAST_INTERVAL)
        width = min(
            min(layer.in_features, layer.out_features)
            for layer in model.modules()
            if isinstance(layer, nn.Linear)
        )
        block = next(size for size in (16, 8, 4, 1) if size == 1 or width >= 4 * size)
        self._held = DynamicSparsity(
            model, optimizer, sparsity=self.value, block=block, updates=updates,
            steps=steps if updates else None, prune_ratio=0.1,
            initial="random" if self.first else "magnitude",
        )  # fmt: skip
        layers = len(self._held.masks())
        self.notes.append(
            f"sparsity {self.value:g} in {layers} linears, blocks of {block}, {updates} moves; learning "
            "rates as they are"
        )

    def stepped(self, model: nn.Module) -> None:
        assert self._held is not None
        self._held.step()

    def end(self) -> None:
        if self._held is not None:
            self._held.release()

    def state(self) -> Mapping[str, object]:
        return {} if self._held is None else self._held.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        assert self._held is not None
        self._held.load_state_dict(state)


class BackwardSparsity(Effect):
    """`backward_sparsity`: checked here, done by `Sparsity`."""

    name: ClassVar[str] = "backward_sparsity"

    @classmethod
    def check(cls, stage: StageValues) -> None:
        check_share(stage, "backward_sparsity", one=False)
        if (
            stage.sparsity is None
            or stage.backward_sparsity is None
            or stage.backward_sparsity > stage.sparsity
        ):
            raise UsageError(
                f"Stage(backward_sparsity={stage.backward_sparsity!r}) wants a sparsity that is at least as "
                "large: weights of the forward are among those of the backward."
            )
