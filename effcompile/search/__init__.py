"""From a request to a plan: the model captured, what passes propose priced and solved for.

Nothing is lowered here.
"""
