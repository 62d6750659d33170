"""Attention of a training step as one operator each: no scores are kept for the backward, and only what is seen is visited.

The forward is changed before autograd is traced through it, so that the operator brings its own backward and both are nodes
that the planner sees (Dao et al. 2022, FlashAttention, section 3: the softmax is computed again from its row sums).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, fx

from effcompile.ir.program import Program, TensorSpec
from effcompile.sites.attention.closed_masks import in_closed_form, mask_of
from effcompile.sites.attention.find.match import SDPA, match
from effcompile.sites.attention.find.normal_form import AttentionMatch
from effcompile.sites.attention.mask.graph_mask import GraphMask
from effcompile.sites.attention.normalise import normalise, refused
from effcompile.sites.attention.rewrite import why_not
from effcompile.sites.parts import AttentionSite, attentions


@dataclass(slots=True, kw_only=True)
class Attended:
    """What an edit did: fused: site → what it visits, in words; score_bytes: site → bytes of its scores; left: site → why."""

    fused: dict[str, str] = field(default_factory=dict)
    score_bytes: dict[str, int] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedAttention:
    """`enabled`: run every attention as one operator, where that is predicted to be faster or needed for the memory; `always`: anyway."""

    enabled: bool = True
    always: bool = False

    name: ClassVar[str] = "attention"
    exact: ClassVar[bool] = True

    def promises(self, front: fx.GraphModule) -> bool:
        """Whether there is anything to fuse in a forward graph."""
        return self.enabled and any(isinstance(m, AttentionMatch) and _pays(m) for m in match(front.graph))

    def refused(self, front: fx.GraphModule) -> dict[str, str]:
        """Attention → why it stays as it is, of those that nothing can be done about."""
        return refused(match(front.graph)) if self.enabled else {}

    def fuse(self, front: fx.GraphModule, inputs: Sequence[Tensor]) -> Attended:
        """Change a forward graph in place.

        Args:
            front: a flat aten graph as torch.export gives it, parameters as get_attr.
            inputs: the values of its placeholders.
        """
        program = _program(front, inputs)
        attended = Attended(left=normalise(front.graph, training=True))
        found = attentions(program)
        sites = [site for site in found if _gains(program, site)]
        attended.left |= {site.site: reason for site in found if (reason := _why_not(mask_of(program, site.node), site))}
        for site in sites:
            mask = mask_of(program, site.node)
            b, h, sq, sk, _ = site.dims
            attended.fused[site.site] = mask.text if mask is not None else "every key"
            attended.score_bytes[site.site] = b * h * sq * sk * site.node.args[0].meta["val"].element_size()  # type: ignore[union-attr]
        in_closed_form(program, [site.node for site in sites if _is_closed(mask_of(program, site.node))])
        front.graph.eliminate_dead_code()
        front.recompile()
        return attended


def _pays(found: AttentionMatch) -> bool:
    """Whether a match can be fused and is not yet: SDPA without a mask is the kernel that it would become."""
    return not why_not(found) and (found.anchor.target is not SDPA or bool(found.edits))


def _gains(program: Program, site: AttentionSite) -> bool:
    """Ours already, or an SDPA with a mask that is understood: it would compute all scores."""
    return site.ours or (site.mask is not None and _is_closed(mask_of(program, site.node)))


def _why_not(mask: GraphMask | None, site: AttentionSite) -> str:
    """Why an SDPA keeps its dense mask; "" where it has none, or is ours."""
    if site.ours or mask is None or _is_closed(mask):
        return ""
    return f"its mask stays dense: {mask.note}" if mask.note else f"its mask is {mask.text} only where {mask.condition}"


def _is_closed(mask: GraphMask | None) -> bool:
    """A mask in closed form, for all inputs."""
    return mask is not None and not mask.note and not mask.guards


def _program(front: fx.GraphModule, inputs: Sequence[Tensor]) -> Program:
    """A forward graph as a program of static shapes."""
    pairs = zip(front.graph.find_nodes(op="placeholder"), inputs, strict=True)
    specs = [TensorSpec(name=n.name, dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape)) for n, t in pairs]
    return Program(name="step", module=front, args=tuple(inputs), kwargs={}, inputs=tuple(specs), outputs=())
