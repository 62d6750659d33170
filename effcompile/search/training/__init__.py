"""The search over the forms of a training step: its blocks, their fronts, and the schedule within a byte
budget.
"""
