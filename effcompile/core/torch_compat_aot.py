"""Every private torch API that only training uses: AOTAutograd's joint graph, Dynamo's whole-graph front,
gradients without bytes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch.utils import _pytree as pytree

from effcompile.core.kernel_cache import mended
from effcompile.core.torch_compat_inductor import compiling
from effcompile.core.types import Value

#: What a placeholder or a result of the joint graph is, and the index of the flat input or output that it
#: belongs to.
Kind = Literal["input", "tangent", "output", "updated", "gradient", "other"]
Role = tuple[Kind, int]


def begin_autograd() -> None:
    """Have torch's autograd count its devices while there are none.

    A build with CUDA on a machine without counts stand-ins as soon as a fake tensor was made, starts a thread
    for each at its first backward, and from then on refuses every backward in forked processes
    (torch/csrc/autograd/engine.cpp, start_device_threads). It counts once.
    """
    if not torch.accelerator.is_available():
        small_backward()


def small_backward() -> None:
    """The least that autograd can do."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()


def joint_graph(
    module: fx.GraphModule, tensors: Sequence[torch.Tensor]
) -> tuple[fx.GraphModule, list[Role], list[Role]]:
    """Forward and backward of a module without state as one functional graph, no operator decomposed beyond
    autograd.

    Args:
        module: flat: one placeholder per tensor, one flat tuple out. Only its differentiable outputs get a
            tangent.
        tensors: its inputs; gradients are taken for those that require them. Where any is on the meta device,
            the module is changed to be traced as on a CPU.

    Returns:
        The graph, the role of each placeholder and that of each result, both in graph order. An "input" is
        the index in `tensors`; a "tangent" that of the output it arrives at; "updated" and "gradient" those
        of the input they are for.
    """
    import torch._inductor.config
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    if any(tensor.is_meta for tensor in tensors):
        tensors = _as_on_cpu(module, tensors)
    with contextlib.ExitStack() as stack:
        # fallback_random: or else fx removes random operators whose result is not used
        stack.enter_context(torch._inductor.config.patch(fallback_random=True))
        stack.enter_context(_without_code())
        stack.enter_context(_whole_resizes())
        joint = aot_export_joint_with_descriptors(stack, module, tuple(tensors)).graph_module
    joint.graph.set_codegen(fx.graph.CodeGen())
    inputs = [_role(node.meta["desc"]) for node in joint.graph.find_nodes(op="placeholder")]
    results = [_role(descriptor) for descriptor in joint.graph.output_node().meta["desc"]]
    return joint, inputs, results


def graph_module(root: nn.Module | Mapping[str, Any], graph: fx.Graph, class_name: str) -> fx.GraphModule:
    """A graph with its attributes, whose Python code is written when it is called or printed: most forms of a
    step never are.
    """
    try:
        from torch.fx._lazy_graph_module import _LazyGraphModule
    except ImportError:
        return fx.GraphModule(root, graph, class_name)  # type: ignore[arg-type]
    return _LazyGraphModule(root, graph, class_name)  # type: ignore[arg-type]


def _without_code() -> AbstractContextManager[None]:
    """The same for the graphs that PyTorch traces."""
    try:
        from torch.fx._lazy_graph_module import _use_lazy_graph_module
    except ImportError:
        return contextlib.nullcontext()
    return _use_lazy_graph_module(True)


@contextlib.contextmanager
def _whole_resizes() -> Iterator[None]:
    """Resized images as one operator each, as autograd has it. torch registers decompositions of them for
    tracing: sums of pixels looked up, which keep several times the result for the backward, and whose
    gradient is six times as far from the true one (SegFormer's, which a batch norm then shows).
    """
    ops = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and "upsample" in name
    ]
    held = []
    for name in ops:
        packet, _, overload = name.removeprefix("aten::").partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        for key in (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd):
            if key in operator.py_kernels:
                held.append((operator, key, operator.py_kernels.pop(key)))
                operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, key, kernel in held:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()


def _as_on_cpu(module: fx.GraphModule, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fake CPU tensors in the place of those on the meta device, which is changed to the CPU in the graph,
    too.

    On the meta device autograd loses gradients (that of cross_entropy), and attention is not the operator
    that machines run.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    off_meta(module)
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    fakes = []
    for tensor in tensors:
        with mode:
            fake = torch.empty_strided(
                tensor.shape,
                tensor.stride(),
                dtype=tensor.dtype,
                device="cpu" if tensor.is_meta else tensor.device,
            )
        fakes.append(fake.requires_grad_(tensor.requires_grad))
    return fakes


def off_meta(module: fx.GraphModule) -> None:
    """Change what a graph makes on the meta device to the CPU, in place."""
    for part in module.modules():
        for node in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            node.args, node.kwargs = pytree.tree_map(_off_meta, (node.args, node.kwargs))
        if isinstance(part, fx.GraphModule):
            part.recompile()


def _off_meta(value: object) -> Value:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "meta" else value


def _role(descriptor: object) -> Role:
    """AOTAutograd's descriptor in short; kinds that a module without state and aliases does not have are
    "other".
    """
    from torch._functorch._aot_autograd import descriptors

    kinds: tuple[tuple[type, Kind, str], ...] = (
        (descriptors.PlainAOTInput, "input", ""),
        (descriptors.PlainAOTOutput, "output", ""),
        (descriptors.TangentAOTInput, "tangent", "output"),
        (descriptors.InputMutationAOTOutput, "updated", "mutated_input"),
        (descriptors.GradAOTOutput, "gradient", "grad_of"),
    )
    for cls, kind, inner in kinds:
        if type(descriptor) is cls:
            return kind, getattr(getattr(descriptor, inner) if inner else descriptor, "idx", -1)
    return "other", -1


def dynamo_front(module: nn.Module, tensors: Sequence[torch.Tensor]) -> fx.GraphModule:
    """A module as one torch.fx graph, traced from its bytecode by Dynamo: one placeholder per tensor, weights
    as get_attr.
    """
    from torch._dynamo.functional_export import _dynamo_graph_capture_for_export

    return _dynamo_graph_capture_for_export(module)(*tensors)


@contextlib.contextmanager
def python_gradients() -> Iterator[list[str]]:
    """Notes what defines gradients in Python while open, as "what (file:line)": torch.export records no such
    thing.

    It traces through the forward of a torch.autograd.Function and forgets its backward; of a tensor's hook
    nothing is left. The gradient that is registered of an operator is another matter: the operator is
    recorded, and its gradient is traced later.
    """
    noted: list[str] = []
    registered = "torch._library.autograd"  # whose classes these are
    # of checkpoint in torch 2.11: changes no gradient
    saver = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)
    apply, hook = vars(torch.autograd.Function)["apply"], torch.Tensor.register_hook

    def note(what: str) -> None:
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(
            os.path.dirname(torch.__file__)
        ):
            frame = frame.f_back
        noted.append(f"{what} ({frame.f_code.co_filename}:{frame.f_lineno})")

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Value:
        known = cls is saver or cls.__module__ == registered
        if (
            not known
            and torch.is_grad_enabled()
            and any(isinstance(value, torch.Tensor) and value.requires_grad for value in args)
        ):
            of_module = cls.__name__ == "BackwardHookFunction" and cls.__module__.startswith("torch.")
            whose = "a backward hook on a module, torch's" if of_module else "the torch.autograd.Function"
            note(f"{whose} {cls.__name__}")
        return apply.__get__(None, cls)(*args, **kwargs)  # a classmethod, in torch 2.15 a built-in one

    def hooked(tensor: torch.Tensor, function: object) -> Value:
        note("a hook on a tensor")
        return hook(tensor, function)

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment, method-assign]
    torch.Tensor.register_hook = hooked  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        torch.Tensor.register_hook = hook  # type: ignore[method-assign]


def is_random(target: object) -> bool:
    """Whether an operator draws from the random generator: it must neither be removed nor change places with
    another.
    """
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def writes(node: fx.Node) -> bool:
    """Whether a node calls an operator whose schema says that it writes into an argument."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def draws(node: fx.Node) -> bool:
    """Whether a node draws from the random generator: an attention that drops nothing does not, though its
    operator may.
    """
    if not is_random(node.target):
        return False
    arguments: Any = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    return given.get("dropout_p") != 0.0


def with_dropout_mask(*given: Any, **options: Any) -> torch.Tensor:
    """torch's attention by products and a softmax, of (q, k, v, mask, dropout_p, is_causal, what is kept)."""
    found: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math.default(*given, **options)[0]
    return found


def elementwise_kernel(
    module: fx.GraphModule, layouts: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, str]]
) -> tuple[Callable[[list[torch.Tensor]], Sequence[torch.Tensor]], int]:
    """A graph of aten operators compiled by Inductor for tensors of exactly these layouts: no guards, no
    gradients.

    Args:
        module: one placeholder per layout; returns a flat tuple of tensors.
        layouts: shape, stride, dtype and device type of each input.

    Returns:
        A function of the list of inputs, which it empties, and how many tensors it allocates. It uses as many
        threads as are set now. Compiled code is kept in Inductor's own cache on disk.

    Raises:
        Exception: whatever Inductor raises where it cannot compile (there is no C++ compiler, say).
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mended(cache_dir())
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
    with torch.no_grad():
        with mode:
            examples = [
                torch.empty_strided(shape, stride, dtype=dtype, device=device)
                for shape, stride, dtype, device in layouts
            ]
            traced = make_fx(module, decomposition_table=select_decomp_table())(*examples)
        output = traced.graph.output_node()
        results: Any = output.args[0]
        # or else Inductor is free to choose their strides
        output.meta["user_visible_output_idxs"] = list(range(len(results)))
        output.meta["original_output_strides"] = [tuple(node.meta["val"].stride()) for node in results]
        with tracing(TracingContext(mode)), compiling():
            compiled: Any = compile_fx_inner(traced, examples, is_inference=True)
    return compiled, compiled.source_code.partition("def call(")[2].partition("\ndef ")[0].count(
        " = empty_strided"
    )


def compile_with_partition(
    module: fx.GraphModule, inputs: Sequence[Any], partition: Any, compiler: Any
) -> Callable[..., Any]:
    """AOTAutograd's callable of a graph from torch.compile: `partition` cuts its joint graph, `compiler`
    makes each part callable.

    Args:
        module: the graph, as torch.compile gives it to a backend.
        inputs: its example inputs.
        partition: (joint module, joint inputs, *, num_fwd_outputs, ...) → (forward module, backward module).
        compiler: (module, example inputs) → a function of one list, which it empties.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]

    def boxed(part: fx.GraphModule, examples: Sequence[Any]) -> Value:
        run = compiler(part, examples)
        run._boxed_call = True
        return run

    def inference(part: fx.GraphModule, examples: Sequence[object]) -> Value:
        return make_boxed_func(part.forward)

    backend = aot_autograd(
        fw_compiler=boxed, bw_compiler=boxed, inference_compiler=inference, partition_fn=partition
    )
    result: Callable[..., Any] = backend(module, inputs)
    return result


def without_storage(kind: type[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass, of another's shape, dtype and device, that holds no bytes."""
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        kind, like.shape, dtype=like.dtype, device=like.device
    )
    return made
