"""A model described for the division of its step among many devices, and the plan that comes of it."""
