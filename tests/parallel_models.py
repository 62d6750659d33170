"""Models in plain numbers for tests of the division: nothing is captured."""

from effcompile.machine.cluster import Cluster, Links
from effcompile.machine.machines import load_target
from effcompile.planner.parallel.division import DivisionProblem
from effcompile.planner.parallel.model import Bytes, Layer, LayerWork, Model, StrategyOption

MIB = 1 << 20


def layer(scale: float = 1.0, parameters: int = 200_000_000) -> Layer:
    """A layer with three options: all kept, elementwise work again, all again."""
    forward = LayerWork(products=4e12 * scale, attention=5e11 * scale, moved=6e9 * scale, kernels=40)

    def option(kept: int, working: int, again: LayerWork, label: str) -> StrategyOption:
        whole, split = int(kept * MIB * scale) // 4, int(kept * MIB * scale) * 3 // 4
        top = Bytes(whole=whole + int(working * MIB * scale), split=split)
        return StrategyOption(
            kept=Bytes(whole=whole, split=split), forward=top, backward=top, again=again, label=label
        )

    none = option(2000, 200, LayerWork(), "keep all")
    some = option(900, 500, LayerWork(moved=5e9 * scale, kernels=30), "recompute some")
    full = option(
        64,
        1800,
        LayerWork(products=3e12 * scale, attention=5e11 * scale, moved=6e9 * scale, kernels=40),
        "recompute all",
    )
    return Layer(
        name="layers.1", parameters=parameters, forward=forward, backward=forward * 2,
        options=(none, some, full), rules={"none": none, "op": some, "full": full},
    )  # fmt: skip


def model(layers: int = 32, **changes: object) -> Model:
    """32 like layers, a table and a head of a vocabulary of 128 thousand."""
    known: dict[str, object] = {
        "name": "Made", "layers": (layer(),), "order": (0,) * layers, "embedding": 500_000_000,
        "head": 500_000_000, "around": 4096, "hidden": 4096, "vocabulary": 128_000, "heads": 32,
        "key_heads": 8, "sequence": 8192, "causal": True,
    }  # fmt: skip
    return Model(**{**known, **changes})  # type: ignore[arg-type]


def problem(
    devices: int = 8, batch: int = 64, layers: int = 32, target: str = "h100-sxm", links: Links | None = None
) -> DivisionProblem:
    """A step of the model on so many devices."""
    machine = load_target(target)
    joined = links or machine.cluster
    assert joined is not None
    return DivisionProblem(
        model=model(layers), cluster=Cluster.of(joined, devices), target=machine, global_batch=batch
    )
