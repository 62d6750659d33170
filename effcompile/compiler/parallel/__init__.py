"""Many devices: a model described for the division of its step, the plan that comes of it."""
