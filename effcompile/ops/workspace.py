"""What our operators allocate while they run, by name: for whoever simulates memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from effcompile.ops import (
    attention_workspace,
    bf16_attention,
    bf16_attention_backward,
    bf16_linear,
    bf16_mlp,
    bitmask,
    block_sparse,
    collectives,
    compress,
    consume,
    ctc,
    embedding,
    fp32_attention,
    fp32_linear,
    frozen_codes,
    group_linear,
    grouped,
    int8_attention,
    int8_linear,
    int8_mlp,
    int8_sparse,
    int13_linear,
    loss_head_workspace,
    mask_part,
    recurrence,
    wide,
)
from effcompile.ops.products import Scratch, measured

#: Whose operators allocate by themselves.
_OTHERS = (
    embedding,
    block_sparse,
    compress,
    bitmask,
    collectives,
    int8_linear,
    int13_linear,
    int8_mlp,
    int8_sparse,
    group_linear,
    bf16_attention,
    bf16_attention_backward,
    fp32_attention,
    fp32_linear,
    bf16_linear,
    bf16_mlp,
    int8_attention,
    wide,
    frozen_codes,
    mask_part,
    ctc,
    recurrence,
)


def workspace_bytes(
    target: object,
    args: Sequence[object],
    kwargs: Mapping[str, object] = MappingProxyType({}),
    scratch: Scratch = measured,
) -> int | None:
    """Bytes alive at the highest instant inside a call of `target`, beyond its inputs and outputs.

    Args:
        target: what a node calls (an OpOverload). Its package is imported here, so a graph that holds it can
            run.
        args: its arguments, tensors real or fake in the place of nodes.
        kwargs: those given by name.
        scratch: what the products inside take for themselves: measured on this machine, or a margin for
            another one.

    Returns:
        None when the operator is neither ours nor a product in groups: nothing is known here about its
        workspace.
    """
    if target is consume.consume:
        return int(args[1])  # type: ignore[call-overload]
    name = getattr(target, "name", lambda: "")()
    with_products = (
        module.workspace_bytes(name.removesuffix(".default"), args, scratch)
        for module in (loss_head_workspace, grouped)
    )
    if (found := next((nbytes for nbytes in with_products if nbytes is not None), None)) is not None:
        return found
    known = (module.workspace_bytes(name.removesuffix(".default"), args) for module in _OTHERS)
    if (
        of_attention := attention_workspace.workspace_bytes(name.removesuffix(".default"), args, kwargs)
    ) is not None:
        return of_attention
    return next((nbytes for nbytes in known if nbytes is not None), None)
