"""Passes of a training step: they change its form, or propose how its values, states and
gradients are held.
"""
