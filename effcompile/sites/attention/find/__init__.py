"""Attentions as graphs write them, in their normal form."""
