"""How each leaf of a cache is held, as choices of the solve: keys and values of each layer as the model has
them, in bf16, in 8 bits with a scale for each row, or in 4 bits with a scale for each 32 numbers.

A narrower cache leaves memory to the weights and is read faster; its error counts with that of the weights.
It is offered where the cache grows in place, and nothing but attentions of ours reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from effcompile.backends.torch.in_place import narrowable
from effcompile.capture.generation import GenerationStep
from effcompile.core.cost import Cost, Provenance
from effcompile.core.errors import FormatError
from effcompile.core.goal import Goal
from effcompile.core.types import HFModel
from effcompile.ir.cache import CACHE, CacheLayout, CacheLeaf
from effcompile.ir.formats import BF16, FP32, ROWS_INT4_GROUPS, TABLE_INT8_ROWS, Form
from effcompile.ir.plan import Plan
from effcompile.ir.program import shape_of
from effcompile.machine.target import Target
from effcompile.ops.cached_attention import FEW, scratch_floats
from effcompile.passes import Choice, Option
from effcompile.search.generation.cache_errors import leaf_errors
from effcompile.search.generation.text import CalibrationText
from effcompile.sites.parts import attentions

#: What a row may be held in → its form; the dtypes are those of `CacheLeaf.narrowed`.
FORMS: Mapping[str, Form] = {
    "": Form(weights=FP32),
    "bfloat16": Form(weights=BF16),
    "int8": Form(weights=TABLE_INT8_ROWS),
    "uint8": Form(weights=ROWS_INT4_GROUPS),
}


def held_in(plan: Plan, layout: CacheLayout) -> CacheLayout:
    """The layout as a plan holds it. Earlier plans say one form of all leaves.

    Raises:
        FormatError: it says what no leaf is held in, or decides about one that is not there.
    """
    forms, dtypes = plan.forms(), {form: dtype for dtype, form in FORMS.items()}
    said = {leaf.site: forms.get(leaf.site, forms.get(CACHE, FORMS[""])) for leaf in layout}
    for site, form in said.items():
        if form not in dtypes:
            raise FormatError(
                f"The plan holds {site} in {form.name}; leaves of a cache are held in "
                f"{', '.join(each.name for each in FORMS.values())}. Plan this model anew, without `plan`."
            )
    if gone := [site for site in forms if site.startswith(f"{CACHE}.") and site not in said]:
        raise FormatError(
            f"The plan decides about {gone[0]}, and the model's cache has no such leaf. Plan this model "
            "anew, without `plan`."
        )
    return layout.narrowed({leaf.name: dtypes[said[leaf.site]] for leaf in layout})


def forms_of(layout: CacheLayout) -> dict[str, Form]:
    """Site → how the rows of each leaf are held, and of them all where they are held alike."""
    found = {leaf.site: FORMS[leaf.held] for leaf in layout}
    alike = set(found.values())
    return found | ({CACHE: alike.pop()} if len(alike) == 1 else {})


def narrowest(layout: CacheLayout, choices: Sequence[Choice]) -> CacheLayout:
    """The layout with each leaf in the smallest form that is offered for it."""
    dtypes = {form: dtype for dtype, form in FORMS.items()}
    least = {each.site: min(each.options, key=lambda option: option.cost.bytes_kept) for each in choices}
    return layout.narrowed(
        {leaf.name: dtypes[least[leaf.site].form] for leaf in layout if leaf.site in least}
    )


def cache_choices(
    step: GenerationStep,
    model: HFModel,
    goal: Goal,
    target: Target,
    texts: Sequence[CalibrationText],
    chunk: int,
) -> tuple[Choice, ...]:
    """A choice for each leaf; none where there is nothing to choose.

    `chunk`: tokens of a prompt that are read at once.
    """
    leaves = [] if goal.exact else _narrowable(step)
    if not leaves:
        return ()
    errors = leaf_errors(model, step, texts, [leaf.name for leaf in leaves])
    heads = max(shape_of(each.node.args[0])[1] for each in attentions(step.program))  # type: ignore[arg-type]
    most = min(chunk, goal.tokens[0])
    return tuple(
        Choice(
            site=leaf.site,
            kind=CACHE,
            baseline=FORMS[""].name,
            options=tuple(_options(leaf, leaves, goal, target, errors, heads, most)),
        )
        for leaf in leaves
    )


def _options(
    leaf: CacheLeaf,
    leaves: Sequence[CacheLeaf],
    goal: Goal,
    target: Target,
    errors: Mapping[tuple[str, str], float],
    heads: int,
    most: int,
) -> Iterator[Option]:
    """A GPU's kernels read keys and values of one form, and none in 4 bits."""
    context, prompt, new = goal.tokens
    middle = min(context, prompt + new // 2)
    bytes_of = lambda one, tokens: one.nbytes(one.capacity(tokens), goal.batch)  # noqa: E731
    beside = next((other for other in leaves if other.layer == leaf.layer and other != leaf), leaf)
    for dtype, form in FORMS.items():
        narrow = leaf.narrowed(dtype)
        if narrow.held != dtype or (dtype == "uint8" and target.device == "cuda"):
            continue
        cost = Cost(
            seconds=-new * (bytes_of(leaf, middle) - bytes_of(narrow, middle)) / target.memory_bandwidth,
            bytes_kept=bytes_of(narrow, context),
            bytes_transient=beside_rows(narrow, context, goal.batch, heads, most, target.device),
            error_squared=errors[leaf.name, dtype] if dtype else 0.0,
            provenance=Provenance.MODELLED,
        )
        together = target.device == "cuda" and leaf.name < beside.name
        yield Option(form=form, cost=cost, by=CACHE, requires={beside.site: (form.name,)} if together else {})


def beside_rows(leaf: CacheLeaf, context: int, batch: int, heads: int, most: int, device: str = "cpu") -> int:
    """Bytes that an attention takes for an instant beside these rows: of few queries as a CPU's kernel does,
    or of as many tokens as are read at once.

    `heads`: of queries.
    """
    if not leaf.held:
        return 0
    widened = _widened(leaf, context, batch, heads * most)
    if device != "cpu":
        return widened
    groups, few = leaf.shape[0], min(FEW, most)
    own = scratch_floats(
        batch * groups, -(-heads // groups) * few, leaf.rows(context), leaf.shape[-1],
        torch.get_num_threads(), narrow=True,
    )  # fmt: skip
    return max(4 * own, widened)


def _widened(leaf: CacheLeaf, context: int, batch: int, queries: int) -> int:
    """Bytes of one head's keys and values in 32 bits, as an attention of many queries takes them; with its
    result, or with what is made while codes are widened.
    """
    heads, width = leaf.shape[0], leaf.shape[-1]
    made = 4 * (queries // heads) * width if heads > 1 else 0
    return batch * (8 * leaf.rows(context) * width + max(made, leaf.rows(context) * width))


def _narrowable(step: GenerationStep) -> list[CacheLeaf]:
    """The leaves that may be held narrower."""
    layout = step.layout.narrowed("bfloat16")
    places = [at for at, spec in enumerate(step.program.inputs) if spec.name.startswith("past")]
    wide = {places[at]: step.layout.leaves[at] for at in layout.written if layout.leaves[at].held}
    return [wide[at] for at in narrowable(step.program.module, list(wide))]
