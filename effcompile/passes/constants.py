"""Other constants in the place of those that a program's operators read, and who reads what."""

from __future__ import annotations

from collections import Counter

from torch import Tensor, fx, nn

from effcompile.ir.program import Program


def readers(program: Program) -> Counter[int]:
    """Storage → nodes that read it."""
    found: Counter[int] = Counter()
    for node in program.graph.nodes:
        value = program.tensor(node)
        if value is not None:
            found[storage_of(value)] += len(node.users)
    return found


def storage_of(value: Tensor) -> int:
    """What tensors of one storage have in common."""
    return value.untyped_storage()._cdata


def replace_constant(program: Program, user: fx.Node, constant: fx.Node, value: Tensor) -> None:
    """Make one node read another tensor, kept beside the one it read under a name of its own, which goes when
    nobody reads it.
    """
    owner, _, leaf = str(constant.target).rpartition(".")
    holder, name = program.module.get_submodule(owner), f"{leaf}_pruned"
    holder.register_parameter(name, nn.Parameter(value, requires_grad=False))
    with program.graph.inserting_before(constant):
        node = program.graph.get_attr(f"{owner}.{name}" if owner else name)
    node.meta = dict(constant.meta)
    fake = constant.meta.get("val")
    if isinstance(fake, Tensor):
        node.meta["val"] = fake.new_empty(value.shape)
    user.replace_input_with(constant, node)
    if constant.users:
        return
    program.graph.erase_node(constant)
    if not any(other.op == "get_attr" and other.target == constant.target for other in program.graph.nodes):
        delattr(holder, leaf)
