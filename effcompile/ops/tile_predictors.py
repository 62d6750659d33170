"""Where attention will be, guessed before it is computed: cheap estimates of the scores, the softmax mass of
each tile, and what to keep.

The papers build machines that drop single keys. Our kernel visits tiles, so every method is used alike: its
estimate of the scores goes through a softmax, the mass of each tile is summed, and the tiles with the most
mass are visited. The other liberty is `pool`: as many neighbouring queries are averaged before they are
scored (MInference, Jiang et al. 2024, and SpargeAttn, Zhang et al. 2025, do so with whole blocks), for on a
CPU a score per pair of tokens costs half of exact attention. With pool = 1 the estimates are the papers'.

Legend: B batch, H query heads, K key heads, n pooled queries, c columns (keys, or blocks of them), r width of
what is compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from effcompile.core.errors import UsageError
from effcompile.ops.tiles import TileList
from effcompile.ops.visibility import Visibility

#: Bytes of estimated scores that are held at once: they should stay in the cache.
_AT_ONCE = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreEstimate:
    """Scores that are estimated as finish(left · rightᵀ), not computed yet.

    Attributes:
        left: fp32 [B, H, n, r] of the pooled queries. right: fp32 [B, K or H, c, r]. width: keys of a column;
            it divides a tile's.
        finish: from products [B, H, rows, columns] and their slices of rows and columns to scores; None: the
            products are the scores.
    """

    left: Tensor
    right: Tensor
    width: int = 1
    finish: Callable[[Tensor, slice, slice], Tensor] | None = None

    def scores(self, rows: slice, columns: slice) -> Tensor:
        """[B, H, rows, columns] for slices with bounds."""
        left, right = self.left[:, :, rows], self.right[:, :, columns]
        b, h, n, r = left.shape
        grouped = left.reshape(b, right.shape[1], -1, r)  # the query heads of a key head lie side by side
        products = (grouped @ right.transpose(-1, -2)).view(b, h, n, right.shape[2])
        return products if self.finish is None else self.finish(products, rows, columns)


def pooled_rows(x: Tensor, size: int) -> Tensor:
    """Means over `size` neighbours along axis 2, in fp32: [B, H, S, D] → [B, H, ⌈S / size⌉, D].

    The last has what is left.
    """
    whole = x.shape[2] // size * size
    parts = [x[:, :, :whole].unflatten(2, (-1, size)).mean(3, dtype=torch.float32)] if whole else []
    if whole < x.shape[2]:
        parts.append(x[:, :, whole:].mean(2, keepdim=True, dtype=torch.float32))
    return torch.cat(parts, 2)


def exact(q: Tensor, k: Tensor, _: int, __: Sequence[Tensor]) -> ScoreEstimate:
    """The scores themselves: what a calibrated mask is made from.

    ViTCoD (You et al., HPCA 2023) averages a head's attention over the training data and fixes the mask that
    keeps the most of it; we do so by tiles, on the calibration inputs.
    """
    return ScoreEstimate(left=q, right=k.float())


def block_means(q: Tensor, k: Tensor, block: int, _: Sequence[Tensor]) -> ScoreEstimate:
    """Queries against the means of `block` keys each: MInference's block-sparse heads and SpargeAttn's first
    stage.
    """
    return ScoreEstimate(left=q, right=pooled_rows(k, block), width=block)


def low_bits(q: Tensor, k: Tensor, bits: int, _: Sequence[Tensor]) -> ScoreEstimate:
    """Sanger's prediction (Lu et al., MICRO 2021): q and k rounded to `bits` (4 there), symmetric; then their
    product.

    One scale per head for the keys and one per query, so that no query's choice depends on another's size.
    The integers are multiplied as floats, which is exact: no CPU multiplies 4 bits.
    """
    most = float(2 ** (bits - 1) - 1)

    def rounded(x: Tensor, over: tuple[int, ...]) -> Tensor:
        step = x.abs().amax(over, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny) / most
        return (x / step).round_() * step

    return ScoreEstimate(left=rounded(q, (3,)), right=rounded(k.float(), (2, 3)))


def sign_hashes(q: Tensor, k: Tensor, bits: int, _: Sequence[Tensor]) -> ScoreEstimate:
    """ELSA's approximate similarity (Ham et al., ISCA 2021): the Hamming distance of signs of orthogonal
    random projections.

    It tells the angle: θ ≈ π · distance / bits (Charikar 2002), and q·k = ‖q‖ ‖k‖ cos θ. The signs' product
    is a = 1 − 2 · distance / bits, so cos θ = sin(π a / 2). ELSA subtracts a bias from θ so as not to miss
    keys; it would not change their order: we do not.
    """
    planes = _planes(q.shape[3], bits).to(q.device)
    k = k.float()
    q_norm, k_norm = q.norm(dim=-1), k.norm(dim=-1)

    def finish(products: Tensor, rows: slice, columns: slice) -> Tensor:
        cosine = products.mul_(math.pi / 2 / bits).sin_()
        lengths = k_norm[:, :, columns].repeat_interleave(q_norm.shape[1] // k_norm.shape[1], 1)
        return cosine.mul_(q_norm[:, :, rows, None]).mul_(lengths[:, :, None])

    return ScoreEstimate(left=_signs(q @ planes), right=_signs(k @ planes), finish=finish)


def low_rank(q: Tensor, k: Tensor, rank: int, factors: Sequence[Tensor]) -> ScoreEstimate:
    """DOTA's detector (Qu et al., ASPLOS 2022): scores of q and k projected to `rank` dimensions.

    DOTA trains its projections to the least squared error of the scores; `fit_low_rank` has that optimum in
    closed form. `factors`: of q [H, D, r] and of k [H, D, r].
    """
    left, right = (factor.float() for factor in factors)
    wide = k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)
    return ScoreEstimate(left=q @ left[..., :rank], right=wide @ right[..., :rank])


def largest_components(q: Tensor, k: Tensor, count: int, _: Sequence[Tensor]) -> ScoreEstimate:
    """A3's candidate search (Ham et al., HPCA 2020): the score of a key from the products of largest
    magnitude alone.

    A3 sorts the keys by each component and takes products off the top; we keep the `count` components in
    which the query is largest.
    """
    top = q.abs().topk(min(count, q.shape[3]), -1).indices
    return ScoreEstimate(left=torch.zeros_like(q).scatter_(-1, top, q.gather(-1, top)), right=k.float())


@dataclass(frozen=True, slots=True)
class Method:
    """How scores are estimated.

    `detail`: the default of its parameter, named by `unit`; `fitted`: it needs factors.
    """

    estimate: Callable[[Tensor, Tensor, int, Sequence[Tensor]], ScoreEstimate]
    detail: int
    unit: str
    fitted: bool = False


#: The methods that look at q and k of each call.
METHODS: dict[str, Method] = {
    "pooled": Method(block_means, 0, "keys averaged; by default a tile's"),
    "sanger": Method(low_bits, 4, "bits"),
    "elsa": Method(sign_hashes, 64, "bits of a hash"),
    "dota": Method(low_rank, 16, "dimensions", fitted=True),
    "a3": Method(largest_components, 8, "components"),
}
#: The one whose tiles are fixed when the model is compiled.
STATIC = "vitcod"


def tile_mass(
    found: ScoreEstimate, see: Visibility, *, q_len: int, k_len: int, pool: int, block_q: int, block_k: int
) -> Tensor:
    """The share of a block of queries' softmax that the estimate puts into each tile: fp32 [B, H, nq, nk];
    rows add to at most 1.

    A pooled query sees what any of its queries sees, by the band, the chunks and the padding of `see`.

    `found` has ⌈q_len / pool⌉ rows; `pool` divides block_q.
    """
    b, h, n, _ = found.left.shape
    width = found.width
    result = found.left.new_zeros((b, h, n, -(-k_len // block_k)))
    step = max(1, _AT_ONCE // max(1, 4 * b * h * found.right.shape[2]))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        queries = slice(rows.start * pool, min(rows.stop * pool, q_len))
        columns = _reach(see, queries, k_len, width, block_k)
        if columns.start >= columns.stop:
            continue
        scores = found.scores(rows, columns)
        hidden = _hidden(see, rows, columns, pool, width, (q_len, k_len), scores.device)
        if hidden is not None:
            scores = scores.masked_fill_(hidden, -torch.inf)
        weights = torch.softmax(scores, -1)
        first = columns.start * width // block_k
        sums = _by_tile(weights, block_k // width).nan_to_num_(0.0)
        result[:, :, rows, first : first + sums.shape[3]] = sums
    return pooled_rows(result, block_q // pool)


def select(mass: Tensor, candidates: Tensor, always: Tensor, share: float) -> Tensor:
    """Which tiles to visit: those that always are, then those of most mass until `share` of a row's mass is
    seen; bool [B, H, nq, nk].

    `candidates`, `always`: bool, broadcastable; nothing else than candidates is kept.
    """
    candidates, always = candidates.expand(mass.shape), (always & candidates).expand(mass.shape)
    if share >= 1.0:
        return candidates.clone()
    ranked = mass.masked_fill(~candidates, -1.0).masked_fill(always, torch.inf)
    order = ranked.argsort(-1, descending=True)
    ordered = mass.masked_fill(~candidates, 0.0).gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    wanted = before < share * ordered.sum(-1, keepdim=True)
    return (torch.zeros_like(wanted).scatter_(-1, order, wanted) & candidates) | always


def listed(
    mass: Tensor, see: Visibility, share: float, *, q_len: int, k_len: int, block_q: int, block_k: int
) -> TileList:
    """The tiles that `select` keeps of the visible ones.

    The first tile and the diagonal of each row are always kept.

    The first, as models park attention on the first token (Xiao et al. 2023, "Efficient Streaming Language
    Models with Attention Sinks"); the diagonal, so that no query that sees itself sees nothing.
    """
    partial, full = _grids(see, block_q, block_k, q_len, k_len)
    candidates = partial | full
    first = candidates & (candidates.cumsum(-1) == 1)
    kept = select(
        mass, candidates, first | _diagonal(see, block_q, block_k, q_len, k_len).to(first.device), share
    )
    return TileList.from_grids(
        kept & partial, kept & full, q_len=q_len, k_len=k_len, block_q=block_q, block_k=block_k
    )


def fit_low_rank(q: Tensor, k: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The projections of q and k to `rank` dimensions whose scores are nearest to q·k in the mean square,
    over these samples.

    With second moments Cq = E qqᵀ and Ck = E kkᵀ, the best approximation of Cq^½ Ck^½ of that rank (Eckart
    and Young 1936) is U Σ Vᵀ cut, and the projections are Cq^-½ U Σ^½ and Ck^-½ V Σ^½. k is centred: what is
    common to all keys does not change a softmax.

    q and k are [H, samples, D], rank is at most D; the result is two fp32 [H, D, rank].
    """
    roots, inverses = zip(
        *(_root(x.double().mT @ x.double() / max(1, x.shape[1])) for x in (q, k - k.mean(1, keepdim=True))),
        strict=True,
    )
    u, s, vh = torch.linalg.svd(roots[0] @ roots[1])
    half = s[:, None, :rank].sqrt()
    return (inverses[0] @ (u[..., :rank] * half)).float(), (inverses[1] @ (vh.mT[..., :rank] * half)).float()


def check(method: str, share: float, pool: int, block: int) -> None:
    """Refuse settings that mean nothing.

    Raises:
        UsageError: an unknown method, a share outside ]0, 1], or a pool that does not divide the block.
    """
    if method not in (*METHODS, STATIC):
        raise UsageError(
            f"There is no attention predictor {method!r}. Choose among: {', '.join((*METHODS, STATIC))}."
        )
    if not 0.0 < share <= 1.0:
        raise UsageError(
            f"mass = {share!r} is no share of a softmax to keep: give a number above 0 and up to 1, e.g. "
            "0.95."
        )
    if block < 1 or pool < 1 or block % pool:
        raise UsageError(f"pool = {pool} queries do not cut a tile of {block} evenly: give a divisor of it.")


@functools.cache
def _planes(width: int, bits: int) -> Tensor:
    """[width, bits]: random directions, orthogonal in groups of `width` as in ELSA; the same in every
    process.
    """
    generator = torch.Generator().manual_seed(0)
    groups = [
        torch.linalg.qr(torch.randn(width, width, generator=generator))[0] for _ in range(-(-bits // width))
    ]
    return torch.cat(groups, 1)[:, :bits].contiguous()


def _signs(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0)


def _root(c: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of symmetric positive semidefinite [H, D, D], and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(c)
    values = values.clamp(min=0).sqrt()
    floor = 1e-6 * values.amax(-1, keepdim=True)
    inverse = torch.where(values > floor, 1 / values.clamp(min=torch.finfo(values.dtype).tiny), 0.0)
    return (vectors * values[:, None]) @ vectors.mT, (vectors * inverse[:, None]) @ vectors.mT


def _reach(see: Visibility, queries: slice, k_len: int, width: int, block_k: int) -> slice:
    """The columns that the band lets these queries see, from the start of a tile on."""
    first = 0 if see.lo is None else max(0, queries.start + see.lo)
    last = k_len if see.hi is None else min(k_len, queries.stop + see.hi)
    return slice(first // block_k * block_k // width, -(-last // width))


def _hidden(
    see: Visibility,
    rows: slice,
    columns: slice,
    pool: int,
    width: int,
    sizes: tuple[int, int],
    device: torch.device,
) -> Tensor | None:
    """True where no query of a pooled row sees a key of the column, broadcastable to [B, 1, rows, columns];
    None where all do.
    """
    i = torch.arange(rows.start, rows.stop, device=device)[:, None] * pool
    j = torch.arange(columns.start, columns.stop, device=device) * width
    i_last, j_last = (i + pool - 1).clamp(max=sizes[0] - 1), (j + width - 1).clamp(max=sizes[1] - 1)
    hidden = torch.zeros((len(i), len(j)), dtype=torch.bool, device=device)
    if see.lo is not None:
        hidden |= j_last < i + see.lo
    if see.hi is not None:
        hidden |= j > i_last + see.hi
    if see.chunk:
        hidden |= (j_last // see.chunk < i // see.chunk) | (j // see.chunk > i_last // see.chunk)
    if see.valid is None:
        return hidden if bool(hidden.any()) else None
    valid = see.valid.to(torch.float32)[:, None, :, None]
    seen = pooled_rows(valid, width)[:, :, columns, 0] > 0
    return hidden[None, None] | ~seen[:, :, None]


def _by_tile(weights: Tensor, per_tile: int) -> Tensor:
    """Sums over `per_tile` columns each; the last tile has what is left."""
    if per_tile == 1:
        return weights
    lacking = -weights.shape[3] % per_tile
    if lacking:
        weights = torch.nn.functional.pad(weights, (0, lacking))
    return weights.unflatten(3, (-1, per_tile)).sum(-1)


def _grids(see: Visibility, block_q: int, block_k: int, q_len: int, k_len: int) -> tuple[Tensor, Tensor]:
    """Partial and full tiles of the exact attention."""
    if see.valid is None:
        return _static_grids(see.lo, see.hi, see.chunk, block_q, block_k, q_len, k_len)
    tiles = see.tiles(block_q, block_k, q_len=q_len, k_len=k_len)
    return tiles.partial, tiles.full


@functools.lru_cache(maxsize=64)
def _static_grids(
    lo: int | None, hi: int | None, chunk: int, block_q: int, block_k: int, q_len: int, k_len: int
) -> tuple[Tensor, Tensor]:
    tiles = Visibility(lo=lo, hi=hi, chunk=chunk).tiles(block_q, block_k, q_len=q_len, k_len=k_len)
    return tiles.partial, tiles.full


def _diagonal(see: Visibility, block_q: int, block_k: int, q_len: int, k_len: int) -> Tensor:
    """Tiles with the key that stands where the query does: aligned at the last, or as near to that as the
    band allows.
    """
    at = k_len - q_len
    at = at if see.hi is None else min(at, see.hi)
    at = at if see.lo is None else max(at, see.lo)
    partial, full = _static_grids(at, at, 0, block_q, block_k, q_len, k_len)
    return partial | full
