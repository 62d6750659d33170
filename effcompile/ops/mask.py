"""The arguments of the operators for attention: their declarations, and the names that masks have
among them.
"""

from __future__ import annotations

#: What the operators for attention take beside q, k and v: name → declaration. Their schemas and all lists of
#: names are made of it.
ARGUMENTS = {
    "bias": "Tensor? bias=None", "sink": "Tensor? sink=None", "mask": "Tensor? mask=None",
    "q_ids": "Tensor? q_ids=None", "k_ids": "Tensor? k_ids=None", "valid": "Tensor? valid=None",
    "tiles": "Tensor[]? tiles=None", "scale": "float scale", "softcap": "float softcap=0.0",
    "lo": "SymInt? lo=None", "hi": "SymInt? hi=None", "chunk": "SymInt chunk=0", "block_q": "int block_q=0",
    "block_k": "int block_k=0", "uniform_empty": "bool uniform_empty=False", "fills": "bool fills=False",
}  # fmt: skip
#: The tensors among them, in order; those that say who sees whom beside `mask`; and the numbers that do.
OPERANDS = tuple(name for name, declared in ARGUMENTS.items() if declared.startswith("Tensor? "))
IDS = ("q_ids", "k_ids", "valid")
BAND = ("lo", "hi", "chunk")
#: The arguments by keyword.
FORM = tuple(name for name in ARGUMENTS if name not in (*OPERANDS, "tiles"))
#: The four tensors of a list of tiles that the forward reads.
TILES = ("partial_count", "partial_index", "full_count", "full_index")


def declared(*names: str) -> str:
    """The declarations of these arguments, for a schema."""
    return ", ".join(ARGUMENTS[name] for name in names)
