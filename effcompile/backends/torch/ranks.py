"""A planned step on one of several ranks: the parameters that the user sees are DTensors, the graph's are their padded local shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from effcompile.core.errors import GuardError
from effcompile.ir.step import Spread
from effcompile.ops import collectives
from effcompile.ops.collectives import rows_of_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where a step runs.

    Attributes:
        mesh: the ranks that divide the batch. spread: how the parameters lie over them.
        beside: further axes of which the step has collectives → the ranks along them.
    """

    mesh: DeviceMesh
    spread: Spread
    beside: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Collectives within are among the mesh's processes."""
        with collectives.over({"dp": self.mesh.get_group(), **self.beside}):
            yield

    def local(self, name: str, value: Tensor) -> Tensor:
        """What the graph takes for a parameter: of a DTensor its shard with ⌈N / W⌉ rows, a view of its memory where that has them."""
        if not isinstance(value, DTensor):
            return value
        local = value.to_local()
        if name not in self.spread.shapes:
            return local
        rows = rows_of_shard(self.spread.shapes[name][0], self.spread.ranks)
        if local.shape[0] == rows:
            return local
        shape = (rows, *local.shape[1:])
        strides = _contiguous_strides(shape)
        room = local.untyped_storage().nbytes() // local.element_size() - local.storage_offset()
        if room >= rows * max(1, strides[0]) and (local.is_contiguous() or not local.numel()):
            return local.as_strided(shape, strides)
        padded = local.new_zeros(shape)
        padded[: local.shape[0]].copy_(local)
        return padded

    def gradient(self, name: str, value: Tensor | None) -> Tensor | None:
        """What the user finds for a parameter: a DTensor like it."""
        if value is None or not self.spread.shapes:
            return value
        shape = self.spread.shapes.get(name)
        if shape is None:
            return DTensor.from_local(value, self.mesh, [Replicate()], run_check=False)
        return as_dtensor(value, torch.Size(shape), self.mesh)

    @contextlib.contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """The model with its parameters gathered, for its own forward: on all ranks together, and all of them at once."""
        swapped: list[tuple[dict[str, Any], str, Tensor]] = []
        gathered: dict[int, Tensor] = {}
        try:
            tables: list[dict[str, Any]] = [module._parameters for module in model.modules()]
            for table in tables:
                for name, value in list(table.items()):
                    if isinstance(value, DTensor):
                        if id(value) not in gathered:
                            gathered[id(value)] = value.full_tensor(grad_placements=[Partial("avg")] * self.mesh.ndim)
                        swapped.append((table, name, value))
                        table[name] = gathered[id(value)]
            yield
        finally:
            for table, name, value in swapped:
                table[name] = value

    def check(self, name: str, value: Tensor) -> None:
        """Raise GuardError for a parameter that is no longer spread as it was."""
        if name in self.spread.shapes and not (isinstance(value, DTensor) and value.placements == (Shard(0),)):
            how = f"a DTensor {value.placements}" if isinstance(value, DTensor) else f"a plain {type(value).__name__} {tuple(value.shape)}"
            raise GuardError(
                f"{name} is {how} now; the step was planned for a DTensor sharded along its first axis over {self.spread.ranks} ranks "
                "(something else has sharded or gathered the model: fully_shard, distribute_tensor, .data = ...). A planned step shards "
                "its parameters itself: leave that out, or call effcompile.optimize again.",
                place=f"model.{name}",
                of_model=True,
            )


def refuse_distributed(name: str, parameter: Tensor) -> None:
    """Raise GuardError for a parameter that was sharded after its step was planned for one process."""
    if isinstance(parameter, DTensor):
        raise GuardError(
            f"{name} is a DTensor {parameter.placements} now; the step was planned for a whole parameter in one process. fully_shard or "
            "parallelize_module was applied to a planned model, whose one graph they cannot shard. Give effcompile.optimize the original "
            "model with mesh=..., which shards it within its memory; or apply fully_shard to the original, and plan its blocks with "
            "block.compile(backend='effcompile').",
            place=f"model.{name}",
            of_model=True,
        )


def as_dtensor(padded: Tensor, shape: torch.Size, mesh: DeviceMesh) -> DTensor:
    """The DTensor of which a padded shard holds this rank's rows; it shares its memory."""
    world, me = mesh.size(), mesh.get_local_rank()
    rows = rows_of_shard(shape[0], world)
    mine = max(0, min(rows, shape[0] - me * rows))
    return DTensor.from_local(padded[:mine], mesh, [Shard(0)], run_check=False, shape=shape, stride=_contiguous_strides(shape))


def spread_parameters(model: nn.Module, spread: Spread, mesh: DeviceMesh) -> None:
    """Replace the model's parameters by DTensors of their own values, in place; tied ones stay tied. Nothing where none is sharded.

    The whole values are freed one after the other.
    """
    if not spread.shapes:
        return
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the old one is held, so that its id is not given out again
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is None:
                continue
            if id(old) not in made:
                new = nn.Parameter(_spread(old.detach(), mesh), requires_grad=old.requires_grad)
                made[id(old)] = old, new
                vars(new).update(vars(old))
                with torch.no_grad():
                    old.data = old.new_empty(0)
            module._parameters[name] = made[id(old)][1]


def _spread(whole: Tensor, mesh: DeviceMesh) -> DTensor:
    if not whole.dim():
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    world, me = mesh.size(), mesh.get_local_rank()
    rows = rows_of_shard(whole.shape[0], world)
    padded = whole.new_zeros((rows, *whole.shape[1:]))
    mine = whole[me * rows : (me + 1) * rows]
    padded[: mine.shape[0]].copy_(mine)
    return as_dtensor(padded, whole.shape, mesh)


def made_alike(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every rank the first one's parameters and buffers, in place, as DDP does."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.numel():
                continue
            contiguous = tensor.detach().contiguous()
            dist.broadcast(contiguous, group=mesh.get_group(), group_src=0)
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.copy_(contiguous)


def _contiguous_strides(shape: tuple[int, ...] | torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
