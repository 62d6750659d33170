"""Graphs and tensors by what is in them: what a measurement or a proof follows from, for a hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import fx

#: What `add` raises of a tensor that has no bytes to read.
UNREADABLE = (NotImplementedError, RuntimeError, TypeError)


def lines(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """Every node, and how it is written with its arguments."""
    for node in graph.nodes:
        target = (
            node.target
            if isinstance(node.target, str)
            else f"{getattr(node.target, '__module__', '')}.{node.target}"
        )
        arguments = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n.name)
        yield node, f"{node.op}:{node.name}:{target}:{arguments};"


def add(digest: hashlib._Hash, part: object) -> None:
    """A tensor by its dtype, shape and bytes; anything else by how it is written.

    Raises:
        NotImplementedError, RuntimeError, TypeError: a tensor has no bytes to read (it is on the meta device,
            sparse, or packed by another library).
    """
    if not isinstance(part, torch.Tensor):
        digest.update(repr(part).encode())
        return
    if type(part) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"a {type(part).__name__} is not read by its bytes")
    digest.update(f"{part.dtype}{tuple(part.shape)};".encode())
    digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
