"""A planned step run beside the original one: loss, every gradient, the update, and what the
allocator held.
"""
