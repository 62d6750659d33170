"""Block-sparse weights: the pattern of kept blocks, and a linear layer that stores and computes only these."""

from effcompile.sparse.layer import BlockSparseLinear
from effcompile.sparse.pattern import BLOCKS, BlockPattern

__all__ = ["BLOCKS", "BlockPattern", "BlockSparseLinear"]
