"""A mask in a graph understood: closed forms that hold at every size, the inputs that give padding and
documents, or the dense mask.

The mask's computation is taken apart by its operators (terms.py), so that what is found holds for all inputs
and not only for those tried. What depends on no input and is no comparison of positions is evaluated and
fitted at several sizes, under a guard. The result is then compared with the mask itself, element by element,
at the example, at other sizes and under paddings of every kind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, fx

from effcompile.core.mask import MaskForm
from effcompile.core.reasons import Reason, Unsupported
from effcompile.ir.program import Program
from effcompile.sites.attention.mask.assemble import assembled
from effcompile.sites.attention.mask.evaluate import (
    Values,
    Variant,
    ancestors,
    evaluate,
    filled_variants,
    placeholders,
    reads,
    sized_variants,
    tensors,
)
from effcompile.sites.attention.mask.fit_bands import UnfittedError
from effcompile.sites.attention.mask.graph_mask import GraphMask
from effcompile.sites.attention.mask.mask_guards import every_query_sees
from effcompile.sites.attention.mask.mask_terms import NEVER, MaskLeaf, MaskTerms
from effcompile.sites.attention.mask.node_expressions import tested, whole

aten = torch.ops.aten
Sense = Literal["added", "visible", "hidden"]
BLOCKS = (64, 128)
#: Where one of these stands among the ancestors of a value, the model computed it.
_MODEL = ("mm", "addmm", "linear", "conv", "einsum", "embedding", "softmax", "norm", "scaled_dot")


def recover_mask(
    program: Program,
    node: fx.Node,
    *,
    sense: Sense,
    q_len: int,
    k_len: int,
    fill: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> GraphMask:
    """What a side operand of an attention hides, and what it adds.

    `GraphMask.hides` is False where it is nothing but a bias.

    Args:
        program: what the node stands in; its example inputs are used.
        node: the operand, of up to 4 axes that broadcast to [B, H, Sq, Sk].
        sense: what it does: it is "added" to the scores, True in it is "visible", or True in it is "hidden".
        q_len: Sq at the example.
        k_len: Sk at the example.
        fill: what is written over the scores of hidden keys, where something is (masked_fill, where).
        dtype: of the scores that it is written over.
    """
    search = _Search(program=program, node=node, sense=sense)
    try:
        terms = search.terms()
        mask = assembled(program, terms)
        empty = search.verified(mask, terms)
    except UnfittedError as error:
        terms, mask = MaskTerms(), search.as_it_is(error.reason)
        empty = mask.hides
    except (RuntimeError, NotImplementedError, IndexError, TypeError) as error:
        # an operator that fails at our inputs
        terms, mask = MaskTerms(), search.as_it_is(Unsupported.of("{}", " ".join(str(error).split())))
        empty = mask.hides
    terms.fills += [] if fill is None else [(fill, dtype)]
    if mask.hides and empty:
        mask = search.with_empty_rows(mask, terms)
    return search.told(mask, q_len, k_len)


class _DifferentError(UnfittedError):
    """The form is not the mask: a defect of ours, made harmless."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Search:
    """One operand under examination."""

    program: Program
    node: fx.Node
    sense: Sense

    def terms(self) -> MaskTerms:
        """By its operators; addends that are constant or computed from masks and positions, by their values.

        Raises:
            UnfittedError: what is hidden depends on what the model computes.
        """
        terms = MaskTerms()
        if self.sense == "added":
            terms.additive(self.node)
        else:
            terms.truth(self.node, self.sense == "visible")
        conditions = [leaf.node for leaf in terms.leaves] + [
            n for left, right, _ in terms.pairs for n in (left, right)
        ]
        if any(_of_the_model(self.program, n) for n in conditions):
            raise UnfittedError("what is hidden depends on what the model computes")
        for bias in tuple(terms.biases):
            if not _of_the_model(self.program, bias):
                self._by_value(bias, terms)
        return terms

    def _by_value(self, bias: fx.Node, terms: MaskTerms) -> None:
        """A tensor of zeros and fills is a mask; one with other values and fills, a mask and a bias."""
        seen: set[float] = set()
        others = False
        for variant in filled_variants(sized_variants(self.program), reads(bias)):
            value = evaluate(self.program, [bias], variant.values)[bias]
            seen |= set(value[value <= NEVER].unique().tolist())
            others = others or bool(((value != 0) & (value > NEVER)).any())
        if seen:
            terms.fills += [(fill, bias.meta["val"].dtype) for fill in sorted(seen)]
            terms.leaves.append(MaskLeaf(node=bias, test="kept"))
            if not others:
                terms.biases.remove(bias)

    def verified(self, mask: GraphMask, terms: MaskTerms) -> bool:
        """Compare the form with the operand at every variant; returns whether a query may see nothing.

        Raises:
            UnfittedError: they differ.
        """
        if not mask.hides:
            return False
        held = [leaf.node for leaf in terms.leaves if leaf.test == "kept"]
        given = self._without(mask.biases, held)
        empty = False
        for variant in filled_variants(sized_variants(self.program), reads(self.node, given=given)):
            values = evaluate(self.program, [self.node, *mask.sources, *held], {**variant.values, **given})
            seen = self._visible(values[self.node])
            empty = empty or not bool(seen.any(-1).all())
            self._compare(mask, seen, values, variant)
            rest = sum((values[n] for n in mask.biases if n in held), torch.zeros(()))
            if self.sense == "added" and not torch.equal(
                *(t[seen] for t in torch.broadcast_tensors(values[self.node], rest, seen)[:2])
            ):
                raise _DifferentError(
                    "what is added where keys are seen is not the biases alone ({})", variant.name
                )
        return empty

    def _compare(self, mask: GraphMask, seen: Tensor, values: Values, variant: Variant) -> None:
        q_len = seen.shape[-2] if seen.dim() > 1 else 1
        form = mask.visibility(values, q_len, seen.shape[-1])
        batch = max(
            [1, *(t.shape[0] for t in (form.valid, form.q_ids, form.k_ids, form.mask) if t is not None)]
        )
        if not torch.equal(*torch.broadcast_tensors(form.dense(batch, q_len, seen.shape[-1]), seen)):
            raise _DifferentError("the closed form differs from the mask ({})", variant.name)

    def _visible(self, value: Tensor) -> Tensor:
        """In aten operators, as a guard traces it."""
        test, limit = {"added": (aten.gt, NEVER), "visible": (aten.ne, 0), "hidden": (aten.eq, 0)}[self.sense]
        return test.Scalar(value, limit)

    def _without(self, biases: Sequence[fx.Node], held: Sequence[fx.Node]) -> dict[fx.Node, Tensor]:
        """Zeros for the biases, which may be the scores themselves, so that no model has to run."""
        return {n: torch.zeros((), dtype=n.meta["val"].dtype) for n in biases if n not in held}

    def with_empty_rows(self, mask: GraphMask, terms: MaskTerms) -> GraphMask:
        """Decide what a query gets that sees nothing; where that cannot be told, a guard says that there is
        none.

        The lowest finite number swallows every score, so that all keys weigh the same. After −∞ the softmax
        is NaN, which nobody means, and torch's own attention gives zeros. Any other number leaves something
        of the scores.
        """
        lowest = {value == torch.finfo(dtype).min for value, dtype in terms.fills if math.isfinite(value)}
        infinite = any(not math.isfinite(value) for value, _ in terms.fills)
        if not lowest and (infinite or self.sense != "added"):
            return mask
        if lowest == {True} and not infinite and not terms.summed:
            return replace(mask, uniform_empty=True)
        given = self._without(mask.biases, [leaf.node for leaf in terms.leaves if leaf.test == "kept"])
        return replace(
            mask, guards=(*mask.guards, every_query_sees(self.program, self.node, self._visible, given))
        )

    def as_it_is(self, left: Reason) -> GraphMask:
        """The operand unexplained: added as a bias, or as a dense mask."""
        if self.sense == "added":
            return GraphMask(biases=(self.node,), counts={}, left=left)
        leaf = MaskLeaf(node=self.node, test="true" if self.sense == "visible" else "false")
        return GraphMask(mask=(whole(tested(leaf), self.node.meta["val"].dim()),), counts={}, left=left)

    def told(self, mask: GraphMask, q_len: int, k_len: int) -> GraphMask:
        """With its form, and its tiles at the example."""
        if any(_of_the_model(self.program, n) for n in mask.sources):
            return replace(mask, form=MaskForm(mask=()))
        values = evaluate(self.program, mask.sources, placeholders(self.program))
        seen = mask.visibility(values, q_len, k_len)
        return replace(
            mask,
            met=mask.unmet(tensors(self.program, placeholders(self.program))) is None,
            counts={block: seen.tiles(block, block, q_len=q_len, k_len=k_len).counts for block in BLOCKS},
            form=_form(mask, q_len, k_len),
        )


def _form(mask: GraphMask, q_len: int, k_len: int) -> MaskForm:
    """The mask by the names of the inputs behind its ids and conditions."""
    steps = [target for e in (mask.q_ids, mask.k_ids) if e is not None for target, _ in e.steps]
    return mask.told(
        MaskForm,
        ids=lambda e: tuple(n.name for n in reads(e.node)),
        condition=lambda every: tuple(n.name for n in reads(*(e.node for e in every))),
        limit=lambda edge: edge,
        ahead=k_len - q_len,
        flags=aten.logical_not.default in steps,
        guards=tuple(guard.said for guard in mask.guards),
    )


def _of_the_model(program: Program, node: fx.Node) -> bool:
    """Whether a parameter or an operator of a model stands behind the value: then it is data, and dear to
    compute.
    """
    for n in ancestors(node, of_values=True):
        if n.op == "get_attr" and isinstance(program.tensor(n), torch.nn.Parameter):
            return True
        if n.op == "call_function" and any(
            word in str(n.target).split(".")[1 if "." in str(n.target) else 0] for word in _MODEL
        ):
            return True
    return False
