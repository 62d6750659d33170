"""Masks as graphs compute them, recovered in closed form."""
