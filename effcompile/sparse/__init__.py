"""Block-sparse weights: the pattern of kept blocks, and a linear layer that stores and computes
only these.
"""

from effcompile.ops.block_sparse_native import BLOCKS
from effcompile.sparse.layer import BlockSparseLinear
from effcompile.sparse.pattern import BlockPattern

__all__ = ["BLOCKS", "BlockPattern", "BlockSparseLinear"]
