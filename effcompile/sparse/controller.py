"""Training with few of the weights, and a pattern of them that moves.

Source: Dietrich et al. 2021, "Towards structured dynamic sparse pre-training of BERT", arXiv 2108.06277.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from effcompile.core.errors import UsageError
from effcompile.ir.sparsity import Efficiency, SparsityFigures, StepFlops
from effcompile.sparse import costs, hold, moments, saliency, select, start, tickets
from effcompile.sparse.figures import figures_of
from effcompile.sparse.growth import growth_keys
from effcompile.sparse.held import Held
from effcompile.sparse.movement import Movement, cosine_ratio, move
from effcompile.sparse.recipe import Execution, Growth, Recipe, learning_rate_factor
from effcompile.sparse.saved import check_state, put_back, remembered

__all__ = ["DynamicSparsity"]


class DynamicSparsity:
    """Keeps linear layers of a model sparse while any torch optimizer trains it, and moves the pattern as
    training goes.

    Make it after the optimizer and before schedulers and torch.compile, and call `step` after every
    `optimizer.step()`:

        sparsity = effcompile.DynamicSparsity(model, optimizer, sparsity=0.9, block=16, steps=10_000)
        for batch in batches:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sparsity.step()

    At an update the blocks of least L1 norm go and others come; new weights and all their moments are zero.
    The number of blocks stays, so that nothing is compiled again. `state_dict`, saved after a `step` with
    those of model and optimizer, resumes exactly.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        sparsity: float = 0.9,
        block: int = 16,
        layers: Sequence[str] | None = None,
        growth: Growth = "random",
        updates: int | None = None,
        steps: int | None = None,
        prune_ratio: float = 0.5,
        distribution: Literal["uniform", "global"] = "uniform",
        balanced: bool = False,
        initial: Literal["random", "magnitude", "dense"] | Mapping[str, Tensor] = "random",
        execution: Execution = "auto",
        seed: int = 0,
    ) -> None:
        """Choose the layers and put them under a first pattern.

        Args:
            model: its chosen layers are changed in place.
            optimizer: trains them; its state, if any, is kept for the blocks that stay.
            sparsity: the share of their weights that is zero, in [0, 1).
            block: side of the blocks that weights come and go in; 1 for single weights.
            layers: names or patterns such as "blocks.*.up"; None: the linear layers inside repeated blocks,
                so not embeddings and heads.
            growth: which blocks come: "random", or "gradient", those of the largest dense gradient, which
                data-parallel ranks average: like equal weights and one seed, it gives them one pattern.
            updates: how often the pattern moves; 0: static; None: 160 for single weights, 80 for blocks.
            steps: training steps that the updates are spread over; None: one update every 100 steps.
            prune_ratio: the share of blocks exchanged at first; falls to 0 as a cosine. Half, as published,
                suits long runs: new blocks need time to learn before the next update. In 5000 steps a tenth
                did better (benchmarks/sparse_training.py).
            distribution: "uniform" sparsity, or "global": layers compete for blocks.
            balanced: equally many blocks in every block row.
            initial: the first pattern: "random", "magnitude", "dense" (a ticket is drawn later), or a mask
                per layer, of its elements or of its blocks (see `effcompile.sparse.saliency` and `collect`).
            execution: "blocks" (block-sparse kernels; the layers are replaced), "masked" (dense products), or
                "auto".
            seed: of the controller's own random generator.

        Raises:
            UsageError: a value out of range; a layer that cannot be sparse (tied, frozen, quantised, not
                divided by the block); an optimizer that cannot follow; masks of another model.
            UnknownNameError: a name in `layers` that no linear layer has.
        """
        self.model, self.optimizer = model, optimizer
        count = (160 if block == 1 else 80) if updates is None else updates
        first = initial if isinstance(initial, str) else "given"
        self.recipe = Recipe(
            sparsity=sparsity, block=block, growth=growth, updates=count, steps=steps,
            prune_ratio=prune_ratio, distribution=distribution, balanced=balanced, initial=first,
            execution=execution, seed=seed,
        )  # fmt: skip
        chosen = select.choose(model, layers, block)
        moments.check(optimizer, {name: layer.weight for name, layer in chosen.items()})
        hold.check(optimizer, chosen, self.recipe)
        self._generator = torch.Generator().manual_seed(seed)
        masks = start.first_masks(chosen, initial, self.recipe, self._generator)
        self._inside = [*(select.inside_blocks(model).keys() | chosen.keys())]
        self._held: list[Held] = [
            hold.hold(model, optimizer, name, layer, masks[name], self.recipe)
            for name, layer in chosen.items()
        ]
        self._explored = {name: mask.clone() for name, mask in masks.items()}
        self._step = self._done = 0
        self._bird = tickets.EarlyBird()
        self._remembered: dict[str, Any] | None = None
        self._measured: tuple[StepFlops, Efficiency | None] | None = None
        self._collect(self._due == self._step + 1)

    # ------------------------------------------------------------ training

    def step(self) -> None:
        """After every optimizer.step(): keep the pattern, and move it when an update is due.

        Raises:
            UsageError: an update by gradient, and there was no backward since the last step.
        """
        for held in self._held:
            held.enforce()
        self._step += 1
        if self._due == self._step:
            self.update()
        self._collect(self._due == self._step + 1)

    @torch.no_grad()
    def update(self) -> None:
        """Move the pattern now. `step` calls this when an update is due.

        Raises:
            UsageError: the pattern is static; growth by gradient without a backward that was collected.
        """
        recipe = self.recipe
        if recipe.updates == 0:
            raise UsageError(
                "This pattern is static: updates=0. Make the controller with updates=80 to move it."
            )
        ratio = cosine_ratio(recipe.prune_ratio, min(self._done, recipe.updates), recipe.updates)
        moves = move(
            {held.name: held.scores() for held in self._held},
            self.masks(),
            growth_keys(self._held, recipe, self._generator),
            ratio,
            generator=self._generator,
            regrow=recipe.growth == "gradient",
            pooled=recipe.distribution == "global",
            balanced=recipe.balanced,
            room={held.name: held.room for held in self._held},
        )
        self._apply(moves)
        self._done += 1

    def masks(self) -> dict[str, Tensor]:
        """The active blocks of every layer, bool (O / b, I / b)."""
        return {held.name: held.mask.clone() for held in self._held}

    @property
    def learning_rate_factor(self) -> float:
        """What the dense model's learning rate is multiplied with at this sparsity: exp(1.969 s² + 0.2905 s).

        Never applied by itself.
        """
        return learning_rate_factor(self.recipe.sparsity)

    def scale_learning_rates(self) -> None:
        """Multiply the learning rate of every param group by `learning_rate_factor`.

        Before schedulers are made.

        Raises:
            UsageError: a scheduler holds the rates already, and would put the old ones back.
        """
        moments.scale_learning_rates(self.optimizer, self.learning_rate_factor)

    def release(self) -> None:
        """End it: the layers are plain nn.Linear again, zeros filled in, in the model and in the optimizer's
        state.
        """
        for held in self._held:
            hold.release(self.model, self.optimizer, held)
        self._held = []

    # ------------------------------------------------------------ tickets

    def watch_ticket(
        self,
        rows: Sequence[str] = (),
        columns: Sequence[str] = (),
        *,
        threshold: float = 0.1,
        window: int = 5,
    ) -> bool:
        """Whether the early-bird ticket is found: the mask that pruning would give now is that of the last
        calls, up to `threshold`.

        Call it every so many steps. Without names the masks are of blocks; with them (`rows=["blocks.*.up"],
        columns=["blocks.*.down"]`) of neurons. `ticket_distance` tells how far it is. Then `draw_ticket` or
        `shrink_neurons`.
        """
        self._bird.threshold, self._bird.window = threshold, window
        if rows or columns:
            return self._bird.observe(
                tickets.neuron_masks(
                    self.model, tickets.find_neurons(self.model, rows, columns), self.recipe.sparsity
                )
            )
        return self._bird.observe(self._ticket(self.recipe.sparsity))

    @property
    def ticket_distance(self) -> float:
        """The greatest share of the mask in which the last calls of `watch_ticket` differ; ∞ until there were
        enough.
        """
        return self._bird.distance

    @torch.no_grad()
    def draw_ticket(self, sparsity: float | None = None) -> None:
        """Prune now, by magnitude among the active blocks, to the recipe's sparsity or another (iterative
        pruning: 0.5, 0.75, ...).
        """
        wanted = (
            self.recipe.sparsity if sparsity is None else replace(self.recipe, sparsity=sparsity).sparsity
        )
        old, masks = self.masks(), self._ticket(wanted)
        self._apply(
            {
                name: Movement(kept=mask & old[name], grown=torch.zeros_like(mask))
                for name, mask in masks.items()
            }
        )

    def remember(self) -> None:
        """Keep weights, buffers and the optimizer's state of this step, for `rewind` (Frankle et al. 2020,
        1912.05671).
        """
        self._remembered = remembered(self.model, self.optimizer)

    @torch.no_grad()
    def rewind(self) -> None:
        """Weights, buffers and moments as they were at `remember`, under the pattern of now.

        Rates and schedules are yours to rewind.

        Raises:
            UsageError: nothing was remembered, or layers changed their form since.
        """
        if self._remembered is None:
            raise UsageError("Nothing to rewind to: call remember() at the step to come back to.")
        masks = self.masks()
        put_back(self._remembered, self.model, self.optimizer)
        nothing = {name: torch.zeros_like(mask) for name, mask in masks.items()}
        self._apply({name: Movement(kept=mask, grown=nothing[name]) for name, mask in masks.items()})

    def shrink_neurons(
        self, rows: Sequence[str], columns: Sequence[str], sparsity: float | None = None
    ) -> None:
        """Take the neurons of least L1 norm out of the model: its layers become smaller and stay dense.

        Args:
            rows: patterns of the layers whose rows make the neurons.
            columns: patterns of those whose columns read them. In between every neuron must go its own way.
            sparsity: the share to take out; None: the recipe's.

        Raises:
            UsageError: a layer that is already sparse in blocks; names that are no set of neurons.
        """
        touched = [
            held
            for held in self._held
            if any(fnmatchcase(held.name, pattern) for pattern in (*rows, *columns))
        ]
        for held in touched:
            if not held.mask.all():
                raise UsageError(
                    f"{held.name!r} is sparse in blocks already. Take neurons out of a controller made "
                    "with initial='dense'."
                )
        sets = tickets.find_neurons(self.model, rows, columns)
        for held in touched:
            hold.release(self.model, self.optimizer, held)
            self._held.remove(held)
        share = self.recipe.sparsity if sparsity is None else replace(self.recipe, sparsity=sparsity).sparsity
        tickets.shrink(self.model, self.optimizer, sets, tickets.neuron_masks(self.model, sets, share))

    def compact(self) -> None:
        """Hold the layers as blocks from now on, moments too, where this machine has kernels: after a ticket
        was drawn.
        """
        recipe = replace(self.recipe, initial="given", execution="auto")
        for place, held in enumerate(self._held):
            if isinstance(held.layer, nn.Linear):
                held.release()
                self._held[place] = hold.hold(
                    self.model, self.optimizer, held.name, held.layer, held.mask, recipe
                )

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that the further course depends on, beside the state dicts of model and optimizer.

        Save it after a `step`.
        """
        return {
            "recipe": asdict(self.recipe),
            "masks": self.masks(),
            "explored": {name: mask.clone() for name, mask in self._explored.items()},
            "step": self._step,
            "updates_done": self._done,
            "generator": self._generator.get_state(),
            "early_bird": asdict(self._bird),
            "remembered": copy.deepcopy(self._remembered),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Make the controller first; then load model, optimizer and this, in any order.

        Raises:
            UsageError: of another recipe or another model.
        """
        check_state(state, self.recipe, self.masks())
        for held in self._held:
            held.set_mask(state["masks"][held.name])
        self._explored = {name: mask.clone() for name, mask in state["explored"].items()}
        self._step, self._done = state["step"], state["updates_done"]
        self._generator.set_state(state["generator"])
        self._bird = tickets.EarlyBird(**copy.deepcopy(state["early_bird"]))
        self._remembered = copy.deepcopy(state["remembered"])
        self._collect(self._due == self._step + 1)

    # ------------------------------------------------------------ figures

    def measure(self, loss: Callable[[], Tensor], *, rounds: int = 5) -> SparsityFigures:
        """Count the FLOPs of a training step, and time its sparse layers against dense ones of their shapes.

        Args:
            loss: runs the forward on a batch and returns the loss. Nothing is trained.
            rounds: how often both are timed, in turn.
        """
        self._measured = costs.measure(self.model, self._inside, self._held, loss, rounds)
        return self.figures()

    def figures(self) -> SparsityFigures:
        """Where the run stands.

        FLOPs and efficiency as `measure` found them; before it, FLOPs of linear layers per row.
        """
        measured = self._measured or (costs.per_row(self.model, self._inside, self._held), None)
        return figures_of(
            self.model, self.recipe, self._held, self._explored, measured,
            step=self._step, updates_done=self._done, next_update=self._due,
        )  # fmt: skip

    def report(self, console: object = None) -> None:
        """Print the figures: layers, density, explored weights, FLOPs, eps beside break-even, and the dense
        model of equal FLOPs.
        """
        self.figures().print(console)

    # ------------------------------------------------------------ parts

    @property
    def _due(self) -> int | None:
        return self.recipe.update_step(self._done)

    def _collect(self, due: bool) -> None:
        for held in self._held:
            held.collect(due and self.recipe.growth == "gradient")

    def _ticket(self, sparsity: float) -> dict[str, Tensor]:
        scores = {held.name: held.scores() for held in self._held}
        return saliency.masks(scores, sparsity, self.recipe.distribution, self.recipe.balanced)

    def _apply(self, moves: Mapping[str, Movement]) -> None:
        for held in self._held:
            change = held.move(moves[held.name])
            moments.edit(self.optimizer, held.parameter, change)
            if held.parameter.grad is not None:
                change(held.parameter.grad, 0.0)
            self._explored[held.name] |= held.mask
