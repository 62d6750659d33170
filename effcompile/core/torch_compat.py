"""Every private or version-dependent torch API that effcompile uses, in one place."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from effcompile.core.versions import released

# else torch's profiler writes its own start and stop to stderr
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

#: The oldest and the newest torch that tests were run with; constraints.txt pins the one that all of them are
#: run with.
OLDEST, NEWEST = (2, 11), (2, 15)


def untested(version: str) -> str | None:
    """What to tell the user of a torch outside of what tests were run with; None inside."""
    found = released(version)
    if found is None or OLDEST <= found <= NEWEST:
        return None
    known = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    mend = f"'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
    return (
        f"effcompile was tested with torch {known}; this is {version}. Plans are verified all the "
        f"same. If one fails: pip install {mend}"
    )


if (_warning := untested(torch.__version__)) is not None:
    warnings.warn(_warning, stacklevel=2)

_ATTENTION = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
#: codes (M, K) and (K, N) in int8 → their product in int32.
int_mm: Any = torch._int_mm

#: Operators whose FLOPs torch does not count, with the formula of one that takes the same operands.
UNCOUNTED_FLOPS = {
    torch.ops.aten.scaled_dot_product_attention: _ATTENTION,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _ATTENTION,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ],
}


def flop_counter() -> FlopCounterMode:
    """torch's counter of the FLOPs of what runs inside it, with attention on CPU."""

    def formula(count: Callable[..., int]) -> Callable[..., int]:
        def counted(*args: object, **kwargs: object) -> int:
            return count(*args, **kwargs)

        counted._get_raw = True  # type: ignore[attr-defined] # takes tensors: the registry's formulas have their wrapper on
        return counted

    return FlopCounterMode(
        display=False, custom_mapping={op: formula(count) for op, count in UNCOUNTED_FLOPS.items()}
    )


def fake_mode() -> Any:
    """A context in which tensors have shapes and no data (torch._subclasses.FakeTensorMode)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(value: object) -> bool:
    """True for a tensor without data: fake or on the meta device."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.is_meta)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody is called with a parameter's gradient, before it is added or after."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def in_function_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp ...) is at work, or forward-mode autograd: tensors
    may be its wrappers.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or getattr(torch.autograd.forward_ad, "_current_level", -1) >= 0
    )


def in_trace() -> bool:
    """Whether torch.export or torch.jit.trace records what is called, weights perhaps as fakes."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def dict_versions(tables: Sequence[dict[Any, Any]]) -> list[int] | None:
    """Numbers that are other ones once a dict was written to (PEP 509); None where Python or torch has none.

    From Python 3.12 on torch counts what a dict's watchers are told, and an object's attribute that is
    set (`module.training = True`) is written past them (3.13).
    """
    version = getattr(torch._C._dynamo.guards, "dict_version", None)
    if version is None or sys.version_info >= (3, 12):
        return None
    return list(map(version, tables))


def is_packed(weight: torch.Tensor) -> bool:
    """True for a weight in oneDNN's own blocked layout."""
    return weight.layout == torch._mkldnn  # type: ignore[attr-defined]


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What a fake tensor raises when a shape depends on data that is not there."""
    from torch._subclasses import fake_tensor

    return (fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException)


def export_guards(exported: torch.export.ExportedProgram) -> tuple[str, ...]:
    """The conditions on input sizes that the export assumed, as Python expressions over `L`; empty before
    torch 2.9.
    """
    said: Sequence[str] = getattr(exported, "_guards_code", None) or ()
    return tuple(re.sub(r"\btorch\.sym_(max|min)\(", r"\1(", guard) for guard in said)  # as 2.15 writes them


def guard_scope(arguments: Mapping[str, object]) -> dict[str, Any]:
    """The names that `export_guards` expressions use."""
    from torch.utils._sympy.functions import FloorDiv, Mod

    return {
        "L": dict(arguments),
        "math": math,
        "torch": torch,
        "max": max,
        "min": min,
        "FloorDiv": FloorDiv,
        "Mod": Mod,
    }


def guard_holds(guard: str, scope: dict[str, Any]) -> bool:
    """Whether one guard of `export_guards` holds; a guard that cannot be evaluated counts as holding."""
    try:
        return bool(eval(guard, scope))
    except (NameError, KeyError, TypeError, AttributeError, IndexError, SyntaxError):
        return True


#: Numbers that tracing computes with symbols.
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def expression(size: Any) -> Any:
    """The sympy expression of a size after all that was learned while tracing; a number when it
    is constant.
    """
    return size.node.expr if isinstance(size, SYMBOLIC) else int(size)


def unbacked(number: object) -> bool:
    """Whether a symbolic number is known only with the data."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(number))


def size_functions() -> dict[str, Any]:
    """The functions of torch's own that formulas of sizes may have, by name."""
    from torch.utils._sympy import functions

    return {name: vars(functions)[name] for name in functions.__all__ if name in vars(functions)}


def specialised_at(value: torch.Tensor) -> dict[tuple[str, int], str]:
    """(input source, axis) → `file:line` of the user's code that made the axis constant, where torch recorded
    it.
    """
    env = getattr(getattr(value, "fake_mode", None), "shape_env", None)
    places: dict[tuple[str, int], str] = {}
    for symbol, sources in getattr(env, "var_to_sources", {}).items():
        place = _place(getattr(getattr(env, "replacements_slocs", {}).get(symbol), "framework_loc", None))
        for source in sources:
            base, axis = getattr(source, "base", None), getattr(source, "idx", None)
            if place and base is not None and axis is not None:
                name = base.name if isinstance(base.name, str) else base.name()
                places[(name, axis)] = place
    return places


def _place(frame: object) -> str | None:
    """`file:line` of a stack frame outside torch."""
    if not isinstance(frame, traceback.FrameSummary) or frame.filename.startswith(
        os.path.dirname(torch.__file__)
    ):
        return None
    return f"{frame.filename}:{frame.lineno}"


@contextlib.contextmanager
def traceable_transformer() -> Iterator[None]:
    """torch.nn.Transformer* as plain operators: no fused inference call, and no look at the values of a mask.

    `_detect_is_causal_mask` compares the mask with a causal one, a branch on data. Its answer is only a hint:
    with `is_causal=False` the mask itself is applied.
    """
    from torch.nn.modules import transformer

    fastpath = torch.backends.mha.get_fastpath_enabled()
    detect = getattr(transformer, "_detect_is_causal_mask", None)
    torch.backends.mha.set_fastpath_enabled(False)
    if detect is not None:
        transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        if detect is not None:
            transformer._detect_is_causal_mask = detect


@contextlib.contextmanager
def unlimited_recompilation() -> Iterator[None]:
    """torch.compile without its limit of eight kernels per function, above which it runs the function
    uncompiled.
    """
    import torch._dynamo.config as config

    with config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16):
        yield


def has_onednn() -> bool:
    """Whether this torch can call oneDNN's packed linears directly (x86 builds since 2.4, Arm builds with
    oneDNN).
    """
    needed = ((torch.ops.mkldnn, "_linear_pointwise"), (torch.ops.mkldnn, "_reorder_linear_weight"))
    return torch.backends.mkldnn.is_available() and all(hasattr(space, name) for space, name in needed)


def has_onednn_bf16() -> bool:
    """Whether oneDNN's packed linears take bf16 on this processor; without AVX-512 they raise, and plain
    linears are slow.
    """
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return has_onednn() and supported is not None and bool(supported())


def has_onednn_int8() -> bool:
    """Whether the int8 linears of Inductor's x86 path are there."""
    needed = ("qlinear_prepack", "qlinear_pointwise")
    return (
        has_onednn()
        and "onednn" in torch.backends.quantized.supported_engines
        and all(hasattr(torch.ops.onednn, n) for n in needed)
    )


_META_KERNELS: list[torch.library.Library] = []


def allow_tracing_packing() -> None:
    """Give oneDNN's weight packing the shape functions it lacks, so that export and Dynamo can trace it.

    Torch inserts these operators only after tracing and so never needed them (seen in 2.11-2.13). Without,
    Dynamo breaks the graph at each. Packing keeps an fp weight's shape and transposes an int8 one.
    """
    shapes = {
        "onednn::qlinear_prepack": lambda weight, x_shape=None: weight.new_empty(
            tuple(reversed(weight.shape))
        ),
        "mkldnn::_reorder_linear_weight": lambda weight, batch_size=None: torch.empty_like(weight),
    }
    for name, function in shapes.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
            space, _, operator = name.partition("::")
            library = torch.library.Library(space, "IMPL", "Meta")
            library.impl(operator, function)
            _META_KERNELS.append(library)  # its registrations end with it


def activation_observer() -> Any:
    """Finds the u8 scale and zero point of a tensor: PT2E's default observer of activations for x86."""
    return _observers().HistogramObserver(dtype=torch.quint8, qscheme=torch.per_tensor_affine)


def _observers() -> Any:
    """The module of quantisation observers, which is moving from torch to torchao."""
    try:
        return importlib.import_module("torch.ao.quantization.observer")
    except ImportError:
        return importlib.import_module("torchao.quantization.pt2e.observer")


def weight_observer(*, per_channel: bool) -> Any:
    """Finds the symmetric s8 scales of an (N, K) weight, one per row or one in all."""
    if per_channel:
        return _observers().PerChannelMinMaxObserver(
            ch_axis=0, dtype=torch.qint8, qscheme=torch.per_channel_symmetric
        )
    return _observers().MinMaxObserver(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)


def packing_operators() -> tuple[Any, ...]:
    """The operators that only re-arrange a weight for oneDNN; their result depends on the machine and is not
    saved.
    """
    names = ((torch.ops.onednn, "qlinear_prepack"), (torch.ops.mkldnn, "_reorder_linear_weight"))
    return tuple(getattr(space, name).default for space, name in names if hasattr(space, name))


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """torch.export without its warnings and the half-made graph that it prints when it fails: our errors say
    what matters.

    Nor is Python code written for the graphs on the way (a tenth of the time): it is, of one that is called.
    Nor does a node keep the stack that made it (another tenth), which nobody reads.
    """
    from torch.fx import config
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    logger = logging.getLogger("torch")
    level, stackless = logger.level, getattr(config, "do_not_emit_stack_traces", False)
    logger.setLevel(logging.CRITICAL)
    config.do_not_emit_stack_traces = True
    try:
        with contextlib.redirect_stderr(io.StringIO()), _use_lazy_graph_module(True):
            yield
    finally:
        logger.setLevel(level)
        config.do_not_emit_stack_traces = stackless


def function_mode() -> object:
    """The innermost TorchFunctionMode that is entered, other than torch.device's; None where
    there is none.
    """
    if not torch._C._len_torch_function_stack():
        return None
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._device import DeviceContext

    return next(
        (
            mode
            for mode in reversed(_get_current_function_mode_stack())
            if not isinstance(mode, DeviceContext)
        ),
        None,
    )


def has_avx512_bf16() -> bool:
    """Whether this CPU multiplies pairs of bf16 numbers (AVX512_BF16)."""
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def global_module_hooks() -> tuple[Mapping[int, Any], ...]:
    """The hooks that run at every module's call (torch.nn.modules.module.register_module_forward_hook and its
    peers).
    """
    from torch.nn.modules import module

    names = (
        "_global_forward_hooks",
        "_global_forward_pre_hooks",
        "_global_backward_hooks",
        "_global_backward_pre_hooks",
    )
    return tuple(found for name in names if (found := getattr(module, name, None)) is not None)


def hide_from_dynamo(kind: type, method: str, reason: str) -> None:
    """Have torch.compile call a class's method as it is.

    While Dynamo is not loaded, nothing is hidden: loading it takes seconds.
    """
    found = kind.__dict__.get(method)
    if (
        found is not None
        and "torch._dynamo" in sys.modules
        and not hasattr(found, "_torchdynamo_orig_callable")
    ):
        setattr(kind, method, torch.compiler.disable(found, reason=reason))
