"""Whether a strategy can divide a model at all: its heads, its layers, its batch."""

from __future__ import annotations

from effcompile.core.errors import UsageError
from effcompile.ir.strategy import Strategy

__all__ = ["Strategy", "check_model"]


def check_model(
    strategy: Strategy, *, layers: int, heads: int, key_heads: int, sequence: int, global_batch: int
) -> None:
    """Refuse what this model cannot be divided into.

    Args:
        strategy: how it is to be divided.
        layers: repeated blocks.
        heads: of each attention.
        key_heads: fewer with grouped queries.
        sequence: tokens of one example.
        global_batch: sequences of one step, over all devices.

    Raises:
        UsageError: it says what is divided by what, and which numbers would do.
    """
    strategy.layers(layers)
    strategy.micro_batches(global_batch)
    if heads % strategy.tp or (strategy.engine == "ours" and key_heads % strategy.tp):
        of, count = ("key heads", key_heads) if not heads % strategy.tp else ("heads", heads)
        allowed = ", ".join(str(n) for n in range(1, count + 1) if not count % n and not heads % n)
        raise UsageError(f"tp = {strategy.tp} does not divide the model's {count} {of}. These do: {allowed}.")
    if strategy.engine == "megatron" and key_heads % strategy.tp and strategy.tp % key_heads:
        raise UsageError(
            f"tp = {strategy.tp} neither divides the model's {key_heads} key heads nor is a multiple of them."
        )
    # A balanced division of a causal mask gives each rank two pieces: one from the head and one from the
    # tail.
    pieces = (2 * strategy.cp if strategy.cp > 1 else 1) * (strategy.tp if strategy.sp else 1)
    if sequence % pieces:
        raise UsageError(
            f"A sequence of {sequence} tokens does not divide into {pieces} pieces (2 × cp × tp with sp). "
            "Give another cp, or sp=0."
        )
