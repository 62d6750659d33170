"""A plan for many ranks is proven on ranks: processes of this machine, a shrunk copy of the model."""
