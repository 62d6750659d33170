"""Whether what was lowered is the model.

Results, gradients, updates and peaks against the original, by means that the plan has no part in.
"""
