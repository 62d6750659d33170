"""Triton's interpreter, mended: with it, kernels are tested against float64 without a GPU.

The stock interpreter (3.6 to 3.9) computes on the bit patterns of bfloat16 and truncates or mis-rounds casts
to narrow floats, without an error (triton-lang/triton #11584, #11604, #8322). `patch_interpreter` computes in
float32 and rounds to nearest even with ml_dtypes; `kernels.checks.defects` runs the cases that were wrong, so
that a new triton whose internals have moved is noticed. Import this module only in a process that was started
with TRITON_INTERPRET=1.

What the mend does not do: casts beyond the range of float8 give NaN (infinity for e5m2), where NVIDIA's
instructions saturate. Kernels clamp before they cast, and a kernel that forgets to is caught here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter as stock

from effcompile.backends.triton.interpreted_types import remember_types
from effcompile.core.arrays import Array

__all__ = ["patch_interpreter"]

#: What the stock interpreter hands around: tensors, types and builders of its own, for which it has no
#: annotations.
Handle = Any
#: Floats that the interpreter stores as unsigned integers.
_NARROW: dict[str, Any] = {
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
    "fp8e4b8": ml_dtypes.float8_e4m3fnuz,
    "fp8e5b16": ml_dtypes.float8_e5m2fnuz,
}
_BUILDER: Any = stock.InterpreterBuilder
_REDUCE: Any = stock.ReduceOps
_SCAN: Any = stock.ScanOps
_MARK = "effcompile_mended"


def patch_interpreter() -> None:
    """Mend the interpreter of this process, once. Call before the first kernel runs."""
    if getattr(stock, _MARK, False):
        return
    setattr(stock, _MARK, True)
    for name, mended in (
        ("binary_op", _binary_op),
        ("unary_op", _unary_op),
        ("ternary_op", _ternary_op),
        ("create_fma", _fma),
        ("create_dot", _dot),
        ("cast_impl", _cast),
        ("create_fp_to_fp", _fp_to_fp),
    ):
        setattr(_BUILDER, name, _method(mended, getattr(_BUILDER, name)))
    for owner, names in ((_REDUCE, ("sum", "min_max")), (_SCAN, ("cumsum", "cumprod"))):
        for name in names:
            setattr(owner, name, _method(_reduction, getattr(owner, name)))
    stock._patch_lang_tensor = partial(_patch_tensor, stock._patch_lang_tensor)
    stock._patch_lang = partial(_patch_once, stock._patch_lang)
    executor: Any = stock.GridExecutor
    executor._restore_args_dev = _method(_restore, executor._restore_args_dev)
    stock._get_np_dtype = partial(_np_dtype, stock._get_np_dtype, {})
    remember_types()


def _method(mended: Callable[..., object], original: Callable[..., object]) -> Callable[..., Handle]:
    """A method that hands the one it replaces to the mend."""
    return lambda self, *args, **kwargs: mended(self, original, *args, **kwargs)


def _np_dtype(original: Callable[..., Handle], known: dict[str, Handle], dtype: Handle) -> Handle:
    """The stock one makes a table of all types at each call, and is called by every operation."""
    scalar = dtype.scalar
    if isinstance(scalar, tl.pointer_type):
        return original(scalar)
    if scalar.name not in known:
        known[scalar.name] = original(scalar)
    return known[scalar.name]


def _narrow(handle: Handle) -> Handle | None:
    """The ml_dtypes type of a handle that is stored as integers, else None."""
    return _NARROW.get(handle.dtype.scalar.name)


def _decode(handle: Handle) -> Array:
    """The numbers in a handle."""
    narrow = _narrow(handle)
    return np.asarray(handle.data).view(narrow).astype(np.float32) if narrow is not None else handle.data


def _encode(values: Array, dtype: Handle) -> Handle:
    """A handle of triton type `dtype` with these numbers, rounded to nearest even."""
    narrow = _NARROW.get(dtype.scalar.name)
    if narrow is None:
        return stock.TensorHandle(values.astype(stock._get_np_dtype(dtype)), dtype.scalar)
    # float8 by way of float16 would round twice; ml_dtypes rounds float32 and float64 once.
    wide = values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return stock.TensorHandle(
            np.ascontiguousarray(wide).astype(narrow).view(stock._get_np_dtype(dtype)), dtype.scalar
        )


def _binary_op(self: Handle, original: Handle, lhs: Handle, rhs: Handle, op: Handle) -> Handle:
    if _narrow(lhs) is None and _narrow(rhs) is None:
        return original(self, lhs, rhs, op)
    result = op(_decode(lhs), _decode(rhs))
    return stock.TensorHandle(result, tl.int1) if result.dtype == np.bool_ else _encode(result, lhs.dtype)


def _unary_op(self: Handle, original: Handle, arg: Handle, op: Handle) -> Handle:
    return original(self, arg, op) if _narrow(arg) is None else _encode(op(_decode(arg)), arg.dtype)


def _ternary_op(
    self: Handle, original: Handle, lhs: Handle, rhs: Handle, other: Handle, op: Handle
) -> Handle:
    if _narrow(other) is None:
        return original(self, lhs, rhs, other, op)
    return _encode(op(_decode(lhs), _decode(rhs), _decode(other)), other.dtype)


def _fma(self: Handle, original: Handle, x: Handle, y: Handle, z: Handle) -> Handle:
    if _narrow(z) is None:
        return original(self, x, y, z)
    return _encode(_decode(x).astype(np.float64) * _decode(y) + _decode(z), z.dtype)


def _dot(self: Handle, original: Handle, a: Handle, b: Handle, d: Handle, *rest: Handle) -> Handle:
    if _narrow(a) is None and _narrow(b) is None and _narrow(d) is None:
        return original(self, a, b, d, *rest)
    return _encode(np.matmul(_decode(a), _decode(b), dtype=np.float32) + _decode(d), d.dtype)


def _cast(self: Handle, original: Handle, src: Handle, dst_type: Handle) -> Handle:
    if _narrow(src) is None and dst_type.scalar.name not in _NARROW:
        return original(self, src, dst_type)
    return _encode(_decode(src), dst_type)


def _fp_to_fp(
    self: Handle, original: Handle, src: Handle, dst_type: Handle, rounding_mode: Handle = None
) -> Handle:
    truncates = rounding_mode is not None and rounding_mode == stock._ir.ROUNDING_MODE.RTZ
    known = {src.dtype.scalar.name, dst_type.scalar.name} <= {*_NARROW, "fp16", "fp32", "fp64"}
    if truncates or not known:
        return original(self, src, dst_type, rounding_mode)
    return _encode(_decode(src), dst_type)


def _reduction(self: Handle, original: Handle, arg: Handle, *rest: Handle, **kwargs: Handle) -> Handle:
    """A reduction or scan of narrow floats: in float32, and rounded once."""
    first = arg[0] if isinstance(arg, tuple) else arg
    if _narrow(first.handle) is None:
        return original(self, arg, *rest, **kwargs)
    wide = tl.core.tensor(
        stock.TensorHandle(_decode(first.handle), tl.float32), tl.block_type(tl.float32, list(first.shape))
    )
    result = original(self, wide, *rest, **kwargs)
    many = result if isinstance(result, (tuple, list)) else (result,)
    back = [_rounded(one, first.dtype) if one.dtype == tl.float32 else one for one in many]
    return type(result)(back) if isinstance(result, (tuple, list)) else back[0]


def _rounded(value: Handle, dtype: Handle) -> Handle:
    kind = tl.block_type(dtype.scalar, list(value.shape)) if value.shape else dtype.scalar
    return tl.core.tensor(_encode(value.handle.data, dtype), kind)


def _patch_tensor(original: Callable[..., None], tensor: Handle, *rest: Handle) -> None:
    """Triton 3.6 cannot use a loaded scalar as a bound of `range` with numpy ≥ 2.4."""
    original(tensor, *rest)
    tensor.__index__ = lambda self: int(self.handle.data.item())


_launch = SimpleNamespace(running=False)


def _patch_once(original: Callable[..., Handle], _fn: Handle) -> Handle:
    """Patch the language once per launch.

    The stock interpreter does so at each call of a device function: most of its time.
    """
    if _launch.running:
        return stock._LangPatchScope()
    scope = original(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    _launch.running, restore = True, scope.restore

    def end() -> None:
        _launch.running = False
        restore()

    scope.restore = end
    return scope


def _restore(
    self: Handle, original: Handle, args_dev: Handle, args_hst: Handle, kwargs: Handle, kwargs_hst: Handle
) -> None:
    """Tensors of the CPU were written in place: copying storages onto themselves would touch every page of
    them.
    """
    tensors = [arg for arg in (*args_dev, *kwargs.values()) if hasattr(arg, "device")]
    if any(arg.device.type != "cpu" for arg in tensors):
        original(self, args_dev, args_hst, kwargs, kwargs_hst)
