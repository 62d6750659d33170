"""An MLP, or one linear with what is behind it, of weights that stay, as a step of a tape (tape.py): what
those in 8 bits and those in bf16 have in common.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from effcompile.ops import int8_codes, tape
from effcompile.ops.int8_mlp import Behind, address
from effcompile.ops.tape import Argument, KernelTold, Made, Scratch, TapeValue

L = TypeVar("L")


class MlpCall(NamedTuple):
    """The function that computes it of so many rows, the rows that a core takes at once, and bytes of
    scratch.
    """

    function: object
    at_once: int
    scratch: int


class HeldMlpOf(ABC, Generic[L]):
    """norm(residual + W2 f(W1 x + b1) + b2), without a first linear norm(residual + W2 x + b2).

    Args:
        first: W1 with what belongs to it. after: f. last: W2.
        norm: weight, bias and eps of a LayerNorm over what comes out; no eps: none.
    """

    pair: ClassVar[bool] = False

    def __init__(
        self,
        first: L | None,
        after: str,
        last: L,
        norm: tuple[Tensor | None, Tensor | None, float | None] = (None, None, None),
    ) -> None:
        self._first, self._after, self._last, self._norm = first, after, last, norm

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """(..., N), for x (..., K) and a residual (..., N)."""
        return self._run(x, (residual, *self._norm))

    def told(self, threads: int, x: TapeValue, residual: TapeValue | None = None) -> KernelTold | None:
        """What the kernel is told; None where it does not take these."""
        n, between = self._outputs(self._last), 0 if self._first is None else self._outputs(self._first)
        rows, k, shape = math.prod(x.shape[:-1]), x.shape[-1], (*x.shape[:-1], n)
        call = self._called(rows, k, between, n) if x.dense and self._fits(k, between, n) else None
        if call is None or not (residual is None or (residual.dense and residual.shape == shape)):
            return None
        weight, bias, eps = self._norm
        arguments = (
            x, k, rows, k, *self._addresses(self._first), between, self._following(),
            *self._addresses(self._last), n, residual, int(eps is not None), address(weight), address(bias),
            Made, Scratch(), call.at_once, threads,
        )  # fmt: skip
        return KernelTold(
            kind=tape.MLP, function=call.function, arguments=arguments, shape=shape, scratch=call.scratch,
            number=eps or 0.0,
        )  # fmt: skip

    def _fits(self, k: int, between: int, n: int) -> bool:
        """Whether the kernel takes what is held, of k columns."""
        held = self._takes(between or k, self._last) and (self._first is None or self._takes(k, self._first))
        return held and all(
            each is None or (each.shape == (n,) and is_plain(each)) for each in self._norm[:2]
        )

    def _following(self) -> int:
        """How the kernel is told what lies between."""
        return int8_codes.AFTER.index(self._after)

    @abstractmethod
    def _run(self, x: Tensor, behind: Behind) -> Tensor:
        """The same without a tape."""

    @abstractmethod
    def _called(self, rows: int, k: int, between: int, n: int) -> MlpCall | None:
        """None where there is no kernel, or it does not pay for so many rows."""

    @abstractmethod
    def _outputs(self, linear: L) -> int:
        """Columns that come out."""

    @abstractmethod
    def _takes(self, k: int, linear: L) -> bool:
        """Whether the kernel takes it, of k columns."""

    @abstractmethod
    def _addresses(self, linear: L | None) -> tuple[Argument, Argument, Argument]:
        """Of the weight, its scales and the bias."""


def is_plain(x: Tensor) -> bool:
    """Whether it is in fp32, one number behind the other."""
    return x.dtype is torch.float32 and x.is_contiguous()
