"""A training step as a schedule: cut into blocks for the planner, emitted as forward and backward graphs,
simulated byte by byte.
"""
