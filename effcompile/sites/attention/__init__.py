"""Attention in a graph: found by its softmax, its mask understood."""
