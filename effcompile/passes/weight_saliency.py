"""What the weights of a program's linears are worth, measured on its inputs: the element saliencies of
`sparse.saliency` for passes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from effcompile.core.errors import FormatError, UsageError
from effcompile.core.stages import first_line
from effcompile.core.types import Args, Arguments, Value
from effcompile.estimate.recorder import WITH_GRADIENTS, floating, lacks_derivative, leaves_of
from effcompile.ir.program import Program
from effcompile.sites.parts import LinearSite, weight_of
from effcompile.sparse import saliency

SALIENCIES = ("magnitude", "wanda", "snip", "given")
#: Inputs that are run.
_INPUTS = 4
#: Draws of random signs per input.
_DRAWS = 4


class SaliencyScores:
    """Element saliencies of some linears; what needs data is measured once, when the first is asked for.

    magnitude: |W|. wanda: |W| ‖x‖ (Sun et al. 2023, eq. 1). snip: |W ∂L/∂W| (Lee et al. 2019, eq. 5); a
    program for inference has no loss, so L is a sum of its outputs, each over its norm, with random signs,
    and the root mean square over the draws is taken.
    """

    def __init__(self, program: Program, how: str, sites: Sequence[LinearSite]) -> None:
        self.program, self.how, self.sites = program, how, sites
        self._norms = functools.cache(lambda: input_norms(program, sites))
        self._gradients = functools.cache(lambda: output_gradients(program, sites))

    def of(self, site: LinearSite) -> Tensor:
        """(N, K)."""
        weight = weight_of(self.program, site)
        if self.how == "wanda":
            return saliency.wanda(weight, self._norms()[site.site])
        if self.how == "snip":
            return saliency.snip(weight, self._gradients()[site.site])
        return saliency.magnitude(weight)


def input_norms(program: Program, sites: Sequence[LinearSite]) -> dict[str, Tensor]:
    """‖x_i‖₂ of every input feature of the sites over the rows of the program's inputs, (K) each."""
    squares: dict[fx.Node, Tensor] = {}
    for inputs in _inputs(program):
        with torch.no_grad():
            _Norms(program, {site.x for site in sites}, squares).run(*inputs, enable_io_processing=False)
    return {site.site: squares[site.x].sqrt() for site in sites}


def output_gradients(program: Program, sites: Sequence[LinearSite]) -> dict[str, Tensor]:
    """Root mean square of ∂(Σ ± y / ‖y‖) / ∂W over random signs, of every entry of the sites' weights, (N, K)
    each.
    """
    generator = torch.Generator().manual_seed(0)
    weights = {site.weight: weight_of(program, site).clone().requires_grad_() for site in sites}
    transposed = {site.weight for site in sites if site.transposed}
    squares = {node: torch.zeros_like(weight) for node, weight in weights.items()}
    for inputs in _inputs(program):
        with torch.enable_grad():
            outputs = floating(
                _Trained(program, weights, transposed).run(*inputs, enable_io_processing=False)
            )
            made = [y for y in outputs if y.requires_grad]
            for _ in range(_DRAWS):
                signs = [torch.randint(0, 2, y.shape, generator=generator).to(y) * 2 - 1 for y in made]
                value = torch.stack(
                    [
                        (y * v).sum() / y.detach().norm().clamp_min(1e-30)
                        for y, v in zip(made, signs, strict=True)
                    ]
                ).sum()
                found = _gradients(value, list(weights.values()))
                for node, gradient in zip(weights, found, strict=True):
                    if gradient is not None:
                        squares[node] += gradient.square()
    draws = _DRAWS * len(_inputs(program))
    return {site.site: (squares[site.weight] / draws).sqrt() for site in sites}


def _gradients(value: Tensor, weights: list[Tensor]) -> tuple[Tensor | None, ...]:
    try:
        return torch.autograd.grad(value, weights, retain_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        if not lacks_derivative(error):
            raise
        raise UsageError(
            f"saliency = 'snip' takes gradients, which this model has not: {first_line(error)}. Choose "
            "'magnitude' or 'wanda'."
        ) from error


def _inputs(program: Program) -> list[list[Value]]:
    """The user's inputs, else the example's."""
    return [
        leaves_of(program, given)
        for given in (program.calibration or ((program.args, program.kwargs),))[:_INPUTS]
    ]


class _Norms(fx.Interpreter):
    """Sums the squares of some values, per feature, while the graph runs."""

    def __init__(self, program: Program, watched: set[fx.Node], squares: dict[fx.Node, Tensor]) -> None:
        super().__init__(program.module)
        self.watched, self.squares = watched, squares

    def run_node(self, n: fx.Node) -> Value:
        result = super().run_node(n)
        if n in self.watched:
            found = result.float().reshape(-1, result.shape[-1]).square().sum(dim=0)
            self.squares[n] = self.squares.get(n, torch.zeros_like(found)) + found
        return result


class _Trained(fx.Interpreter):
    """Runs the graph on other weights (N, K), so that results can be differentiated by them and by nothing
    else.
    """

    def __init__(self, program: Program, weights: Mapping[fx.Node, Tensor], transposed: set[fx.Node]) -> None:
        super().__init__(program.module)
        self.weights, self.transposed = weights, transposed

    def call_function(self, target: fx.node.Target, args: Args, kwargs: Arguments) -> Value:
        return super().call_function(WITH_GRADIENTS.get(target, target), args, kwargs)

    def run_node(self, n: fx.Node) -> Value:
        if n in self.weights:
            return self.weights[n].T if n in self.transposed else self.weights[n]
        result = super().run_node(n)
        return result.detach() if n.op == "get_attr" and isinstance(result, Tensor) else result


def load_masks(path: Path, what: str) -> dict[str, Tensor]:
    """The masks that an option names.

    Raises:
        UsageError: no such file. FormatError: not a mapping of site → tensor.
    """
    if not path.is_file():
        raise UsageError(f"There is no {str(path)!r}. {what} names a file of torch.save({{site: mask}}).")
    try:
        found: Any = torch.load(path, weights_only=True)
    except Exception as error:
        raise FormatError(
            f"{str(path)!r} holds no masks: {error}. Write it with torch.save({{site: mask}})."
        ) from error
    if not isinstance(found, dict) or not all(isinstance(mask, Tensor) for mask in found.values()):
        raise FormatError(
            f"{str(path)!r} holds no masks: it must be a mapping of site → tensor. Write it with "
            f"torch.save({{site: mask}})."
        )
    return found


def check_shares(shares: Sequence[float], what: str, of: str) -> None:
    """Raise UsageError for a share outside [0, 1)."""
    for share in shares:
        if not 0 <= share < 1:
            raise UsageError(
                f"{what} = {share} is the share of {of} to remove, in [0, 1): 0.9 keeps a tenth."
            )
