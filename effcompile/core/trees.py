"""Leaves of nested values with the way to each, also through classes that torch knows only without names of
what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils import _pytree as pytree


def leaves_with_path(tree: object) -> list[tuple[pytree.KeyPath, object]]:
    """(path, leaf) in torch's order of leaves.

    torch's own refuses a class that was registered without `flatten_with_keys_fn`, as the outputs of
    diffusers are. What such a class holds is named by its context where that is a key for each (a
    dictionary's), otherwise by position.
    """
    return list(_walk(tree, ()))


def _walk(tree: object, above: pytree.KeyPath) -> Iterator[tuple[pytree.KeyPath, object]]:
    for path, leaf in pytree.tree_leaves_with_path(tree, is_leaf=_is_unnamed):
        if not _is_unnamed(leaf):
            yield (*above, *path), leaf
            continue
        children, context = pytree.SUPPORTED_NODES[type(leaf)].flatten_fn(leaf)
        keyed = (
            isinstance(context, list | tuple)
            and len(context) == len(children)
            and all(isinstance(key, str) for key in context)
        )
        for at, child in enumerate(children):
            yield from _walk(
                child, (*above, *path, pytree.MappingKey(context[at]) if keyed else pytree.SequenceKey(at))
            )


def _is_unnamed(value: object) -> bool:
    known = pytree.SUPPORTED_NODES.get(type(value))
    return known is not None and known.flatten_with_keys_fn is None
