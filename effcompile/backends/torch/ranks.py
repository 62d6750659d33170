"""A planned step on one of several ranks: the parameters that the user sees are DTensors, the graph's are
their padded local shards.

The mesh has the axes "pp" (each rank has some of the layers), "tp" (each has a part of the heads and neurons)
and "dp" (each has examples of its own), in this order: a parameter is divided along tp first, and what a rank
has of it along dp.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from effcompile.core.errors import GuardError, InputsError
from effcompile.ir.step import Spread
from effcompile.ops import collectives
from effcompile.ops.messages import answered, rows_of_shard
from effcompile.ops.places import dense_strides

#: The axes of a mesh, in the order in which parameters are divided along them.
AXES = ("pp", "tp", "dp")
#: What is no data parallelism by these names; a mesh of one axis with any other is that.
OTHER_AXES = frozenset({"cp", "ep", "sp"})


def ordered_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh with its axes in the order of AXES; one of one axis, which may have any name, as it is."""
    names = mesh.mesh_dim_names or ()
    wanted = tuple(axis for axis in AXES if axis in names)
    if mesh.ndim == 1 or names == wanted:
        return mesh
    layout = mesh.mesh.permute([names.index(axis) for axis in wanted]).contiguous()
    return DeviceMesh.from_group(
        [mesh.get_group(axis) for axis in wanted], mesh.device_type, mesh=layout, mesh_dim_names=wanted
    )


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Where a step runs. `mesh`: as `ordered_mesh` makes it. `spread`: how the parameters lie over it."""

    mesh: DeviceMesh
    spread: Spread

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The mesh's axes; a single one of another name divides the batch."""
        names = tuple(self.mesh.mesh_dim_names or ())
        return names if set(names) <= set(AXES) and names else ("dp",)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The processes along an axis; None where the mesh has none such."""
        return self.mesh.get_group(self.axes.index(axis)) if axis in self.axes else None

    def place(self, axis: str) -> tuple[int, int]:
        """(number of this rank along an axis, how many there are)."""
        at = self.axes.index(axis) if axis in self.axes else None
        return (0, 1) if at is None else (self.mesh.get_local_rank(at), self.mesh.size(at))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Collectives within are among the mesh's processes."""
        with collectives.over({axis: self.mesh.get_group(at) for at, axis in enumerate(self.axes)}):
            yield

    @cached_property
    def among(self) -> tuple[str, ...]:
        """The axes along which a parameter lies: the ranks of another place in a pipeline have not got it."""
        return tuple(axis for axis in self.axes if axis != "pp")

    @cached_property
    def holders(self) -> DeviceMesh:
        """The ranks along these axes."""
        return self.mesh if self.among == self.axes else self.mesh[self.among]

    def placements(self, name: str) -> tuple[Placement, ...]:
        """How a parameter lies along each axis of its holders."""
        parts, shapes = self.spread.parts, self.spread.shapes
        along = {
            "tp": Shard(parts[name].axis) if name in parts else Replicate(),
            "dp": Shard(0) if name in shapes else Replicate(),
        }
        return tuple(along.get(axis, Replicate()) for axis in self.among)

    @property
    def divides(self) -> bool:
        """Whether some parameter is not the same on every rank."""
        return bool(self.spread.shapes or self.spread.parts)

    def mine(self, name: str, whole: Tensor) -> Tensor:
        """What this rank has of a tensor of a parameter's shape, without padding."""
        part, shapes = self.spread.parts.get(name), self.spread.shapes
        local = whole if part is None else part.of(whole)
        if name not in shapes:
            return local
        me, world = self.place("dp")
        rows = rows_of_shard(shapes[name][0], world)
        return local[me * rows : (me + 1) * rows]

    def local(self, name: str, value: Tensor) -> Tensor:
        """What the graph takes for a parameter: of a DTensor its shard with ⌈N / W⌉ rows, a view of its
        memory where that has them.
        """
        if not isinstance(value, DTensor):
            return value
        local = value.to_local()
        if name not in self.spread.shapes:
            return local
        rows = rows_of_shard(self.spread.shapes[name][0], self.spread.ranks)
        if local.shape[0] == rows:
            return local
        shape = (rows, *local.shape[1:])
        strides = dense_strides(shape)
        room = local.untyped_storage().nbytes() // local.element_size() - local.storage_offset()
        if room >= rows * max(1, strides[0]) and (local.is_contiguous() or not local.numel()):
            return local.as_strided(shape, strides)
        padded = local.new_zeros(shape)
        padded[: local.shape[0]].copy_(local)
        return padded

    def gradient(self, name: str, value: Tensor | None) -> Tensor | None:
        """What the user finds for a parameter: a DTensor like it."""
        if value is None or not self.divides:
            return value
        return self.as_dtensor(name, value)

    def as_dtensor(self, name: str, padded: Tensor) -> DTensor:
        """The DTensor of which a padded shard holds this rank's rows; it shares its memory."""
        parts, shapes = self.spread.parts, self.spread.shapes
        local = padded
        if name in shapes:
            me, world = self.place("dp")
            count, rows = shapes[name][0], rows_of_shard(shapes[name][0], world)
            local = padded[: max(0, min(rows, count - me * rows))]
        whole = parts[name].shape if name in parts else shapes.get(name, tuple(padded.shape))
        return DTensor.from_local(
            local,
            self.holders,
            self.placements(name),
            run_check=False,
            shape=torch.Size(whole),
            stride=dense_strides(whole),
        )

    @contextlib.contextmanager
    def whole(self, model: nn.Module) -> Iterator[None]:
        """The model with its parameters gathered, for its own forward: on all ranks together, and all of them
        at once.
        """
        swapped: list[tuple[dict[str, Any], str, Tensor]] = []
        gathered: dict[int, Tensor] = {}
        try:
            tables: list[dict[str, Any]] = [module._parameters for module in model.modules()]
            for table in tables:
                for name, value in list(table.items()):
                    if isinstance(value, DTensor):
                        if id(value) not in gathered:
                            with answered(self.holders.get_group(0)):
                                gathered[id(value)] = value.full_tensor(
                                    grad_placements=[Partial("avg")] * self.holders.ndim
                                )
                        swapped.append((table, name, value))
                        table[name] = gathered[id(value)]
            yield
        finally:
            for table, name, value in swapped:
                table[name] = value

    def check(self, name: str, value: Tensor) -> None:
        """Raise GuardError for a parameter that is no longer spread as it was."""
        if not self.divides or (isinstance(value, DTensor) and value.placements == self.placements(name)):
            return
        how = (
            f"a DTensor {value.placements}"
            if isinstance(value, DTensor)
            else f"a plain {type(value).__name__} {tuple(value.shape)}"
        )
        raise GuardError(
            f"{name} is {how} now; the step was planned for a DTensor {self.placements(name)} over "
            f"{self.holders.size()} ranks (something else has sharded or gathered the model: fully_shard, "
            "distribute_tensor, .data = ...). A planned step shards its parameters itself: leave that out, "
            "or call effcompile.optimize again.",
            place=f"model.{name}",
            of_model=True,
        )


class Alone:
    """Whether ranks still treat their parameters alike, of a step that is one process's (else:
    runtime/agreement.py).
    """

    def begin(self) -> Callable[[], None]:
        """Ask the others; what is returned waits for their answers, and raises GuardError where they
        differ.
        """
        return _nothing

    def bound_to(self, model: nn.Module) -> Alone:
        """The same for a copy of the model."""
        return self


def _nothing() -> None:
    """Nobody was asked."""


#: What to do about ranks of one place along "dp" that have different inputs.
SAMPLER = (
    "Ranks along 'tp' and 'pp' compute parts of one result: give them the same examples (a sampler over "
    "mesh['dp'].size() replicas, not over all ranks)."
)


def refuse_other_inputs(ranks: Ranks, leaves: Iterable[object]) -> None:
    """Require that ranks which compute parts of one result were called with equal tensors; all of them call
    this.

    Raises:
        InputsError: they were not; on all of these ranks.
    """
    groups = [group for axis in ("tp", "pp") if (group := ranks.group(axis)) is not None]
    if not groups:
        return
    digest = hashlib.sha256()
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            digest.update(f"{tuple(leaf.shape)} {leaf.dtype}".encode())
            digest.update(leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    said = int.from_bytes(digest.digest()[:7], "big")
    for group in groups:
        ends = told_as([said, -said], ranks.mesh.device_type)
        with answered(group):
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
        if int(ends[0]) != -int(ends[1]):
            first, second = _differing(said, group, ranks.mesh.device_type)
            raise InputsError(
                f"Ranks {first} and {second} stand in one place along 'dp' and were called with different "
                f"inputs. {SAMPLER}"
            )


def told_as(values: list[int], device: str) -> Tensor:
    """Numbers for other ranks; on a CPU in NumPy's memory.

    gloo's threads may let go of what they carried in the midst of the step, of whose peak it is no part.
    """
    return (
        torch.from_numpy(np.array(values, dtype=np.int64))
        if device == "cpu"
        else torch.tensor(values, device=device)
    )


def _differing(said: int, group: dist.ProcessGroup, device: str) -> tuple[int, int]:
    """The first rank of a group, and the first that says another number."""
    found = [told_as([0], device) for _ in range(group.size())]
    with answered(group):
        dist.all_gather(found, told_as([said], device), group=group)
    other = next(at for at, each in enumerate(found) if not torch.equal(each, found[0]))
    return dist.get_global_rank(group, 0), dist.get_global_rank(group, other)


def refuse_distributed(name: str, parameter: Tensor) -> None:
    """Raise GuardError for a parameter that was sharded after its step was planned for one process."""
    if isinstance(parameter, DTensor):
        raise GuardError(
            f"{name} is a DTensor {parameter.placements} now; the step was planned for a whole parameter in "
            "one process. fully_shard or parallelize_module was applied to a planned model, whose one "
            "graph they cannot shard. Give effcompile.optimize the original model with mesh=..., which "
            "shards it within its memory; or apply fully_shard to the original, and plan its blocks with "
            "block.compile(backend='effcompile').",
            place=f"model.{name}",
            of_model=True,
        )


def spread_parameters(model: nn.Module, ranks: Ranks) -> None:
    """Replace the model's parameters by DTensors of their own values, in place; tied ones stay tied.

    Nothing where none is divided.

    The whole values are freed one after the other.
    """
    if not ranks.divides:
        return
    names = {id(p): name for name, p in model.named_parameters()}
    # the old one is held, so that its id is not given out again
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is None:
                continue
            if id(old) not in made:
                new = nn.Parameter(
                    spread_value(names[id(old)], old.detach(), ranks), requires_grad=old.requires_grad
                )
                made[id(old)] = old, new
                vars(new).update(vars(old))
                with torch.no_grad():
                    old.data = old.new_empty(0)
            module._parameters[name] = made[id(old)][1]


def spread_value(name: str, whole: Tensor, ranks: Ranks) -> DTensor:
    """A whole value of a parameter as the DTensor of which this rank has its part."""
    mine = ranks.mine(name, whole)
    if name not in ranks.spread.shapes:
        return ranks.as_dtensor(
            name, whole if mine is whole else mine.clone(memory_format=torch.contiguous_format)
        )
    shape = ranks.spread.shapes[name]
    padded = whole.new_zeros((rows_of_shard(shape[0], ranks.spread.ranks), *shape[1:]))
    padded[: mine.shape[0]].copy_(mine)
    return ranks.as_dtensor(name, padded)


def made_alike(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank the first one's parameters and buffers, in place, as DDP does."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.numel():
                continue
            contiguous = tensor.detach().contiguous()
            for at in range(ranks.mesh.ndim):
                group = ranks.mesh.get_group(at)
                with answered(group):
                    dist.broadcast(contiguous, group=group, group_src=0)
            if contiguous.data_ptr() != tensor.data_ptr():
                tensor.copy_(contiguous)
