"""Where to keep and where to recompute: block frontiers, their allocation along the chain, and the proof."""
