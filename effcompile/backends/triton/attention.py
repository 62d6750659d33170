"""Attention on the tiled kernels: `effcompile::attention` and its backward, once `register` has made them a
device's kernels.

What the kernels do not take goes to the default kernel, with a reason (`declines`): never a wrong result.
What calls of one form have in common is made at the first of them (`AttentionForm`): a model's step waits for
the host where a launch takes it longer than the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from effcompile.backends.triton import tune
from effcompile.backends.triton.attention_calls import AttentionForm, backward, run_forward
from effcompile.backends.triton.attention_tiles import declines
from effcompile.backends.triton.configs import forced
from effcompile.core.building import under_way
from effcompile.ops import attention_kernel
from effcompile.ops.attention import attention, attention_backward
from effcompile.ops.attention_terms import ALL_WANTED, NeededGradients, Terms, check

__all__ = ["declines", "register"]

#: Forms that are held at once: two kilobytes each, and no tensor.
_FORMS = 512
_NEEDED = tuple(one.name for one in fields(NeededGradients))


#: Forms by what they hang on.
_forms: dict[object, AttentionForm] = {}


def _form(
    q: Tensor, k: Tensor, v: Tensor, rest: Sequence[object], numbers: Mapping[str, object], *, backward: bool
) -> AttentionForm:
    """Of a call with the operators' arguments; it is checked where there was none of its form."""
    if forced():  # what is tried once is not how calls are launched
        return _checked(q, k, v, rest, numbers, backward=backward)
    key = (
        backward, under_way(), tune.Tuner.measured, q.shape, q.stride(), q.dtype, q.device, k.shape,
        k.stride(), k.dtype, k.device, v.shape, v.stride(), v.dtype, v.device,
        tuple([None if one is None else _told(one) for one in rest]), tuple(numbers.items()),
    )  # fmt: skip
    found = _forms.get(key)
    if found is None:
        if len(_forms) >= _FORMS:
            _forms.clear()
        found = _forms[key] = _checked(q, k, v, rest, numbers, backward=backward)
    return found


def _told(given: Any) -> object:
    """All that a form hangs on of an operand, or of a list of tiles."""
    return (
        (given.shape, given.stride(), given.dtype, given.device)
        if isinstance(given, Tensor)
        else tuple(map(_told, given))
    )


def _checked(
    q: Tensor, k: Tensor, v: Tensor, rest: Sequence[object], numbers: Mapping[str, object], *, backward: bool
) -> AttentionForm:
    terms = Terms.of(*rest, **numbers)
    check(q, k, v, terms)
    return AttentionForm.of(q, k, v, terms, reason=declines(q, k, v, terms, backward=backward))


def register(device: str) -> None:
    """Run `effcompile::attention` and its backward on the tiled kernels on this type of device."""
    attention.register_kernel(device)(_attention)
    attention_backward.register_kernel(device)(_attention_backward)


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: object, **numbers: object) -> tuple[Tensor, Tensor]:
    form = _form(q, k, v, rest, numbers, backward=False)
    if form.reason is not None:
        return attention_kernel.forward(q, k, v, Terms.of(*rest, **numbers))
    return run_forward(form.call(q, k, v, rest))


def _attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *rest: object,
    **numbers: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    wanted = {name: bool(numbers.pop(name)) for name in _NEEDED if name in numbers}
    form = _form(q, k, v, rest, numbers, backward=True)
    needed = NeededGradients(**wanted) if wanted else ALL_WANTED
    if form.reason is not None:
        return attention_kernel.backward(grad_out, q, k, v, out, lse, Terms.of(*rest, **numbers), needed)
    return backward(form.call(q, k, v, rest), grad_out, out, lse, needed)
