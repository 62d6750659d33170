"""Finders of places where there is something to decide."""
