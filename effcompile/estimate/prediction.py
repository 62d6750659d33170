"""What predicted tiles do to a model: how many are visited, how much of the softmax they hold, and the error
at the model's output.

Measured, not modelled: the captured model runs on its calibration inputs; at each attention the predictor
chooses its tiles, and the change of that attention's result is then put into a run of the whole model. A
row's recall, the share of its true softmax that the tiles hold, is exp(lse over the tiles − lse over all
keys).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.core.reasons import Recall
from effcompile.core.types import Arguments, Outputs, Value
from effcompile.estimate.inputs import Inputs, generate_inputs
from effcompile.estimate.recorder import floating, leaves_of
from effcompile.ir.program import Program
from effcompile.ops.tile_predictors import METHODS, fit_low_rank
from effcompile.sites.attention.closed_masks import in_closed_form
from effcompile.sites.attention.expand import arguments
from effcompile.sites.attention.predictor import Predictor, exact_mass, visible_tiles
from effcompile.sites.parts import attentions

#: Inputs that are run: of long sequences one has many draws.
MOST_INPUTS = 2

#: (site, method)
Key = tuple[str, str]
#: (site, method) → tensors that its tiles or factors are made of.
Constants = Mapping[Key, tuple[Tensor, ...]]


@dataclass(slots=True, kw_only=True)
class PredictorFigure:
    """One predictor at one attention, over the calibration inputs.

    Attributes:
        visited, visible: tiles that it visits, and that the exact attention does.
        keys: keys that a query visits in the mean, whole tiles counted.
        recall: the share of the true softmax in them, the mean over all rows that see something.
    """

    visited: int = 0
    visible: int = 0
    keys: float = 0.0
    recall: float = 0.0

    @property
    def density(self) -> float:
        """Visited tiles over visible ones."""
        return self.visited / max(1, self.visible)

    @property
    def reason(self) -> Recall:
        """The same for a plan."""
        return Recall(recall=self.recall, share=self.density)


def told(program: Program, sites: Iterable[str]) -> tuple[Program, dict[str, fx.Node]]:
    """A copy in which these attentions are calls of `effcompile::attention` with their masks in closed form;
    site → call.

    Raises:
        NotThisFormError: an attention is not what it was matched as.
    """
    edited = program.editable("")
    nodes = {site.site: site.node for site in attentions(edited) if site.site in set(sites)}
    replaced = in_closed_form(edited, list(nodes.values()))
    edited.module.recompile()
    return edited, {site: replaced[node] for site, node in nodes.items()}


def inputs_of(program: Program) -> list[Inputs]:
    """What predictors are calibrated and measured on: the user's inputs, else the example and one like it."""
    given = list(program.calibration) or [(program.args, program.kwargs), *generate_inputs(program, 1)]
    return given[:MOST_INPUTS]


@torch.no_grad()
def calibrate(program: Program, nodes: Mapping[str, fx.Node], predictors: Sequence[Predictor]) -> Constants:
    """Constants of the predictors that need some; `program` and `nodes` as `told` returns them."""
    wanted = [predictor for predictor in predictors if predictor.calibrated]
    if not wanted:
        return {}
    gathered = _Gatherer(program, nodes, wanted)
    for inputs in inputs_of(program):
        gathered.run(*leaves_of(program, inputs), enable_io_processing=False)
    return {(site, p.method): gathered.constants(site, p) for site in nodes for p in wanted}


class _Watcher(fx.Interpreter):
    """Runs a graph and shows `at` the arguments and the result of each watched attention."""

    def __init__(self, program: Program, nodes: Mapping[str, fx.Node]) -> None:
        super().__init__(program.module)
        self.sites = {node: site for site, node in nodes.items()}

    def run_node(self, n: fx.Node) -> Outputs:
        result = super().run_node(n)
        if n not in self.sites:
            return result
        return self.at(self.sites[n], fx.map_arg(arguments(n), self.env.__getitem__), result)

    def at(self, site: str, given: Arguments, result: Value) -> Value:
        """What stands for the result from here on."""
        raise NotImplementedError


class _Gatherer(_Watcher):
    """Sums up the true mass of tiles, and keeps samples of queries and keys."""

    def __init__(
        self, program: Program, nodes: Mapping[str, fx.Node], predictors: Sequence[Predictor]
    ) -> None:
        super().__init__(program, nodes)
        self.predictors = predictors
        self.mass: dict[str, Tensor] = {}
        self.last: dict[str, dict[str, Any]] = {}
        self.samples: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def at(self, site: str, given: Arguments, result: Value) -> Value:
        self.last[site] = {**given, "v": None}
        for predictor in self.predictors:
            if predictor.static:
                found = exact_mass(given, predictor.block).mean(0, keepdim=True)
                self.mass[site] = self.mass.get(site, torch.zeros_like(found)) + found
            else:
                q, k = given["q"], given["k"].repeat_interleave(given["q"].shape[1] // given["k"].shape[1], 1)
                self.samples.setdefault(site, []).append((_by_head(q), _by_head(k)))
        return result

    def constants(self, site: str, predictor: Predictor) -> tuple[Tensor, ...]:
        if predictor.static:
            return predictor.fixed(self.mass[site], self.last[site])
        q, k = (torch.cat(parts, 1) for parts in zip(*self.samples[site], strict=True))
        detail = predictor.detail or METHODS[predictor.method].detail
        return fit_low_rank(q, k, min(detail, q.shape[2]))


def _by_head(x: Tensor) -> Tensor:
    """[B, H, S, D] → [H, B·S, D]."""
    return x.transpose(0, 1).flatten(1, 2)


@dataclass(slots=True, kw_only=True)
class Trial:
    """Predictors tried on a model's attentions.

    `figures` are there at once; errors are measured when they are asked for.

    Attributes:
        seconds: after so many, measured since the start, no further error is measured.
    """

    program: Program
    nodes: Mapping[str, fx.Node]
    seconds: float
    figures: dict[Key, PredictorFigure] = field(default_factory=dict)
    # by input: what a predictor adds to the attention's result
    changes: list[dict[Key, Tensor]] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)  # by input, of the model as it is
    started: float = field(default_factory=time.perf_counter)
    errors: dict[Key, float] = field(default_factory=dict)

    @classmethod
    @torch.no_grad()
    def of(
        cls, program: Program, sites: Sequence[str], predictors: Sequence[Predictor], seconds: float
    ) -> Trial:
        """Run the model on its calibration inputs with every predictor looking on.

        Raises:
            NotThisFormError: an attention is not what it was matched as.
        """
        edited, nodes = told(program, sites)
        trial = cls(program=edited, nodes=nodes, seconds=seconds)
        constants = calibrate(edited, nodes, predictors)
        for inputs in inputs_of(edited):
            observer = _Observer(edited, nodes, predictors, constants)
            trial.outputs.append(
                floating(observer.run(*leaves_of(edited, inputs), enable_io_processing=False))
            )
            trial.changes.append(observer.changes)
            for key, figure in observer.figures.items():
                trial.figures[key] = _joined(trial.figures.get(key), figure, len(trial.changes))
        return trial

    @torch.no_grad()
    def error_squared(self, site: str, method: str) -> float | None:
        """‖y − y₀‖² / ‖y₀‖² at the model's output with this predictor there alone, the largest over floating
        outputs.

        None: there is no time left. Over all inputs, each run once more with the attention's result changed.
        """
        key = (site, method)
        if key not in self.errors:
            if time.perf_counter() - self.started > self.seconds:
                return None
            self.errors[key] = self._measured(key)
        return self.errors[key]

    def _measured(self, key: Key) -> float:
        moved = [torch.zeros(2, dtype=torch.float64) for _ in self.outputs[0]]
        for inputs, before, changes in zip(inputs_of(self.program), self.outputs, self.changes, strict=True):
            shifted = _Shifted(self.program, {key[0]: self.nodes[key[0]]}, changes[key])
            after = floating(shifted.run(*leaves_of(self.program, inputs), enable_io_processing=False))
            for total, new, old in zip(moved, after, before, strict=True):
                total += torch.stack([(new - old).double().square().sum(), old.double().square().sum()]).cpu()
        return max(
            (float(changed / whole) if whole > 0 else float(changed > 0) for changed, whole in moved),
            default=0.0,
        )


class _Observer(_Watcher):
    """Tries every predictor at every attention; the model goes on with the exact result."""

    def __init__(
        self,
        program: Program,
        nodes: Mapping[str, fx.Node],
        predictors: Sequence[Predictor],
        constants: Constants,
    ) -> None:
        super().__init__(program, nodes)
        self.predictors, self.constants = predictors, constants
        self.figures: dict[Key, PredictorFigure] = {}
        self.changes: dict[Key, Tensor] = {}

    def at(self, site: str, given: Arguments, result: Value) -> Value:
        for predictor in self.predictors:
            key = (site, predictor.method)
            out, lse, tiles = predictor.run(given, self.constants.get(key, ()))
            self.figures[key] = figure_of(given, predictor.block, result[1], lse, tiles)
            self.changes[key] = out - result[0]
        return result


class _Shifted(_Watcher):
    """Adds a change to an attention's result."""

    def __init__(self, program: Program, nodes: Mapping[str, fx.Node], change: Tensor) -> None:
        super().__init__(program, nodes)
        self.change = change

    def at(self, site: str, given: Arguments, result: Value) -> Value:
        return result[0] + self.change, result[1]


def figure_of(
    given: Arguments, block: int, lse: Tensor, found: Tensor, tiles: Sequence[Tensor]
) -> PredictorFigure:
    """The figures of one call, whose arguments are `given`, from the lse over all keys and over the tiles."""
    b, h, nq = *lse.shape[:2], tiles[0].shape[2]
    visited = int(tiles[0].sum() + tiles[2].sum()) * b * h // (tiles[0].shape[0] * tiles[0].shape[1])
    seeing = lse > -torch.inf
    recall = torch.exp(found - lse)[seeing].mean() if bool(seeing.any()) else torch.ones(())
    keys = min(visited * block / max(1, b * h * nq), float(given["k"].shape[2]))
    return PredictorFigure(
        visited=visited, visible=visible_tiles(given, block), keys=keys, recall=float(recall)
    )


def _joined(first: PredictorFigure | None, second: PredictorFigure, count: int) -> PredictorFigure:
    """The figures over `count` inputs, of which the second is the last."""
    if first is None:
        return second
    share = 1 / count
    return PredictorFigure(
        visited=first.visited + second.visited, visible=first.visible + second.visible,
        keys=first.keys + (second.keys - first.keys) * share,
        recall=first.recall + (second.recall - first.recall) * share,
    )  # fmt: skip
