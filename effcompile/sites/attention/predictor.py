"""The tiles that an attention should visit, predicted from q and k in every call, as one operator in front of
`effcompile::attention`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import register_flop_formula

from effcompile.core.errors import UsageError
from effcompile.core.types import Arguments, Shape
from effcompile.ir.formats import Form
from effcompile.ops.attention import attention
from effcompile.ops.mask import BAND, OPERANDS, declared
from effcompile.ops.tile_predictors import METHODS, STATIC, check, exact, listed, pooled_rows, tile_mass
from effcompile.ops.tiles import TileList
from effcompile.ops.visibility import Visibility
from effcompile.sites.attention.expand import arguments
from effcompile.sites.attention.node_builder import Emitter

_SCHEMA = (
    f"(Tensor q, Tensor k, {declared('valid')}, Tensor[]? factors=None, *, str method, {declared('scale')}, "
    f"float mass, int detail=0, int pool=8, int block=64, {declared(*BAND)}) -> (Tensor, Tensor, Tensor, "
    "Tensor)"
)


@torch.library.custom_op("effcompile::predicted_tiles", mutates_args=(), schema=_SCHEMA)
def predicted_tiles(
    q: Tensor, k: Tensor, valid: Tensor | None = None, factors: Sequence[Tensor] | None = None, *,
    method: str, scale: float, mass: float, detail: int = 0, pool: int = 8, block: int = 64,
    lo: int | None = None, hi: int | None = None, chunk: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`TileList.tensors()[:4]` of the tiles, block × block, that hold `mass` of the estimated softmax; int32
    [B, H, nq] and [B, H, nq, nk].

    No tile without an element that `lo`, `hi`, `chunk` and `valid` (bool [B or 1, Sk]) let through is listed;
    a tile is full where they let all through. So the attention that takes the lists has these terms and no
    `mask`, ids or bias beside them.

    q and k are (B, H, Sq, D) and (B, K, Sk, D); `factors` two (H, D, r) of `predictors.fit_low_rank`, for
    "dota". `method` is one of `predictors.METHODS` and `detail` its parameter, 0 for the default there;
    `pool` queries are averaged before they are scored.

    Raises:
        UsageError: an unknown method, a setting that means nothing, or factors that are missing or not
            wanted.
    """
    check(method, mass, pool, block)
    if method not in METHODS:
        raise UsageError(
            f"The tiles of {method!r} are calibrated when the model is compiled, not predicted in a call."
        )
    if METHODS[method].fitted != bool(factors):
        raise UsageError(
            f"predicted_tiles takes {'two' if METHODS[method].fitted else 'no'} factors for {method!r}."
        )
    b, h, sq, _ = q.shape
    sk = k.shape[2]
    if not (b and h and sq and sk):
        return _shaped(q, k, block, torch.zeros)
    see = Visibility(lo=lo, hi=hi, chunk=chunk, valid=valid)
    if valid is not None:  # nothing of what is hidden decides what is seen
        k = k.masked_fill(~valid[:, None, :, None], 0.0)
    chosen = METHODS[method]
    found = chosen.estimate(pooled_rows(q, pool) * scale, k, detail or chosen.detail or block, factors or ())
    shares = tile_mass(found, see, q_len=sq, k_len=sk, pool=pool, block_q=block, block_k=block)
    return _tensors(listed(shares, see, mass, q_len=sq, k_len=sk, block_q=block, block_k=block))


@predicted_tiles.register_fake
def _(q, k, valid=None, factors=None, *, block=64, **_):  # type: ignore[no-untyped-def]
    return _shaped(q, k, block, torch.empty)


@register_flop_formula(torch.ops.effcompile.predicted_tiles)
def _flops(q: Shape, k: Shape, *_: object, method: str, pool: int = 8, block: int = 64, **__: object) -> int:
    """One product of the pooled queries with the keys, as if all of them were visible: an upper bound."""
    keys = -(-k[2] // block) if method == "pooled" else k[2]
    return int(2 * q[0] * q[1] * -(-q[2] // pool) * keys * q[3])


def exact_mass(given: Arguments, block: int) -> Tensor:
    """The true share of the softmax in each tile, [B, H, nq, nk], of an attention's arguments by name.

    Sinks and biases are left out.
    """
    q, k = given["q"], given["k"]
    sizes: dict[str, int] = {"q_len": q.shape[2], "k_len": k.shape[2], "block_q": block, "block_k": block}
    return tile_mass(exact(q.float() * given["scale"], k, 0, ()), _seen_by(given), pool=1, **sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A method and its settings, see `predicted_tiles`; "vitcod" has its tiles as constants.

    Raises:
        UsageError: an unknown method, or a setting that means nothing.
    """

    method: str
    mass: float
    detail: int = 0
    pool: int = 8
    block: int = 64

    def __post_init__(self) -> None:
        check(self.method, self.mass, self.pool, self.block)

    @property
    def static(self) -> bool:
        """Its tiles are constants."""
        return self.method == STATIC

    @property
    def calibrated(self) -> bool:
        """It needs constants that are found on the calibration inputs."""
        return self.static or METHODS[self.method].fitted

    @classmethod
    def of(cls, form: Form) -> Predictor:
        """The predictor that a form means.

        Raises:
            UsageError: a form without its figures, or with ones that mean nothing.
        """
        figures = dict(form.figures)
        if missing := {"mass", "detail", "pool", "block"} - set(figures):
            raise UsageError(
                f"The option {form.name!r} does not say its {', '.join(sorted(missing))}. Plan again."
            )
        counts = {name: int(figures[name]) for name in ("detail", "pool", "block")}
        return cls(method=form.word, mass=figures["mass"], **counts)

    @staticmethod
    def known(form: Form) -> bool:
        """Whether a form means a predictor."""
        return form.word == STATIC or form.word in METHODS

    def as_option(self) -> Form:
        """What it is in a plan."""
        figures = (("mass", self.mass), ("detail", self.detail), ("pool", self.pool), ("block", self.block))
        return Form(word=self.method, figures=figures)

    @property
    def form(self) -> dict[str, Any]:
        """The settings as arguments of `predicted_tiles`."""
        return {
            "method": self.method,
            "mass": self.mass,
            "detail": self.detail,
            "pool": self.pool,
            "block": self.block,
        }

    def fixed(self, mass: Tensor, given: Arguments) -> tuple[Tensor, ...]:
        """The tiles of "vitcod" from the mean true mass [1, H, nq, nk].

        With padding none is full, for that differs from call to call.
        """
        q, k = given["q"], given["k"]
        see = Visibility(lo=given["lo"], hi=given["hi"], chunk=given["chunk"])
        tiles = listed(
            mass, see, self.mass, q_len=q.shape[2], k_len=k.shape[2], block_q=self.block, block_k=self.block
        )
        if given["valid"] is not None:
            everything = {
                "q_len": tiles.q_len,
                "k_len": tiles.k_len,
                "block_q": self.block,
                "block_k": self.block,
            }
            tiles = TileList.from_grids(
                tiles.partial | tiles.full, torch.zeros_like(tiles.full), **everything
            )
        return _tensors(tiles)

    def tiles(self, given: Arguments, constants: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The lists for an attention's arguments by name."""
        if self.static:
            return tuple(constants)
        seen = {name: given[name] for name in (*BAND, "scale")}
        result: tuple[Tensor, ...] = predicted_tiles(
            given["q"], given["k"], given["valid"], list(constants) or None, **self.form, **seen
        )
        return result

    def run(self, given: Arguments, constants: Sequence[Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """(out, lse) of the attention on the predicted tiles, and the tiles."""
        tiles = self.tiles(given, constants)
        out, lse = attention(**{**given, "tiles": list(tiles), "block_q": self.block, "block_k": self.block})
        return out, lse, tiles

    def insert(self, emit: Emitter, node: fx.Node, constants: Sequence[fx.Node]) -> None:
        """Let a call of `effcompile::attention` in a graph visit the predicted tiles only, in place."""
        given = arguments(node)
        lists: list[fx.Node] = list(constants)
        if not self.static:
            seen = {name: given[name] for name in (*BAND, "scale")}
            args = (given["q"], given["k"], given["valid"], list(constants) or None)
            made = emit.before(node).call(
                torch.ops.effcompile.predicted_tiles.default, args, {**self.form, **seen}
            )
            lists = [emit.call(operator.getitem, (made, position)) for position in range(4)]
        tensors = ("q", "k", "v", *OPERANDS)
        node.args = (*(given[name] for name in tensors), lists)
        node.kwargs = {**node.kwargs, "block_q": self.block, "block_k": self.block}


def visible_tiles(given: Arguments, block: int) -> int:
    """Tiles that the exact attention visits, over all batch entries and heads."""
    q, k = given["q"], given["k"]
    tiles = _seen_by(given).tiles(block, block, q_len=q.shape[2], k_len=k.shape[2])
    lead = q.shape[0] * q.shape[1] // (tiles.partial_count.shape[0] * tiles.partial_count.shape[1])
    return lead * tiles.visited


def _seen_by(given: Arguments) -> Visibility:
    return Visibility(lo=given["lo"], hi=given["hi"], chunk=given["chunk"], valid=given["valid"])


def _tensors(tiles: TileList) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tiles.partial_count, tiles.partial_index, tiles.full_count, tiles.full_index


def _shaped(
    q: Tensor, k: Tensor, block: int, make: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    counts = (q.shape[0], q.shape[1], -(-q.shape[2] // block))
    shapes = (counts, (*counts, -(-k.shape[2] // block))) * 2
    first, second, third, fourth = (make(shape, dtype=torch.int32, device=q.device) for shape in shapes)
    return first, second, third, fourth
