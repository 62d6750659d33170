"""Model → Program: inference by torch.export; the decorator by torch.compile's backend hook."""
