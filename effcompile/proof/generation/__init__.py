"""A planned generation beside the model: the same text told, and what a token costs."""
