"""The words of every reason. Reasons of many sites that differ in figures only are one phrase, with ranges.

A phrase is made of texts and of figures. Two reasons are alike when their phrases have the same texts and
figures of the same nature at the same places; what is printed of many is then the first one's texts, with the
least and the most of every figure.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import singledispatch

from effcompile.core import findings as f
from effcompile.core import mask as m
from effcompile.core import reasons as r
from effcompile.core.units import format_bytes, format_error, format_seconds
from effcompile.report.masks import condition_words, mask_words
from effcompile.report.phrases import Figure, Part, Phrase, SiteName, joined, nature, spread


def words(reason: r.Reason | None) -> str:
    """A reason in words; "" for none."""
    return "" if reason is None else together([reason])


def likeness(reason: r.Reason) -> Hashable:
    """What two reasons have in common that differ in figures and names of sites only."""
    return type(reason), tuple(nature(part) for part in phrase(reason))


def together(reasons: Sequence[r.Reason]) -> str:
    """One phrase for reasons that are alike: `takes 1.2–3.4 ms more a step`."""
    phrases = [phrase(reason) for reason in reasons]
    return "".join(spread(parts) for parts in zip(*phrases, strict=True))


def alike(found: Iterable[r.Reason]) -> list[list[r.Reason]]:
    """Reasons that are alike together, in the order of the first of each."""
    groups: dict[Hashable, list[r.Reason]] = {}
    for reason in found:
        groups.setdefault(likeness(reason), []).append(reason)
    return list(groups.values())


# ------------------------------------------------------------------ figures

_percent, _tenth_percent, _change = "{:.0%}".format, "{:.1%}".format, "{:+.1%}".format
_tenths, _hundredths, _thousandths = "{:.1f}".format, "{:.2f}".format, "{:.3f}".format


def _size(value: float) -> Figure:
    return Figure(value, format_bytes)


def _time(value: float) -> Figure:
    return Figure(value, format_seconds)


def _error(value: float) -> Figure:
    return Figure(value, format_error)


def _share(value: float) -> Figure:
    return Figure(value, _percent)


def _number(value: float) -> Figure:
    return Figure(value, _plain)


def _plain(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:g}"


_HOLES: dict[str | None, Callable[[float], Figure]] = {
    "": _number,
    "bytes": _size,
    "seconds": _time,
    "error": _error,
    "share": _share,
}


# ------------------------------------------------------------------ the phrases


@singledispatch
def phrase(reason: r.Reason) -> Phrase:
    """What a reason says, its figures and names of sites apart."""
    raise AssertionError(f"{type(reason).__name__} has no words")


@phrase.register(r.Because)
@phrase.register(r.Unsupported)
def _text(reason: r.Because | r.Unsupported) -> Phrase:
    parts: list[Part] = []
    for before, hole, figure in reason.parts:
        parts.append(before)
        if isinstance(figure, str):
            parts += [SiteName(figure) if hole == "site" else figure] * (hole is not None)
        elif hole is not None:
            parts.append(_HOLES[hole](figure))
    return tuple(parts)


@phrase.register
def _slower(reason: r.Slower) -> Phrase:
    return (
        "takes at least " if reason.at_least else "the fastest plan with it takes ",
        _time(reason.seconds),
        " more a step",
    )


@phrase.register
def _not_faster(reason: r.NotFaster) -> Phrase:
    if reason.against < 0:
        return (f"not faster: {reason.than} saves ", _time(-reason.against))
    return ("not faster: ", _time(reason.seconds), " against ", _time(reason.against), f" ({reason.than})")


@phrase.register
def _not_smaller(reason: r.NotSmaller) -> Phrase:
    return ("not smaller: ", _size(reason.bytes), " against ", _size(reason.against), f" ({reason.than})")


@phrase.register
def _over_budget(reason: r.OverBudget) -> Phrase:
    if reason.budget is None:
        return ("needs at least ", _size(reason.needed))
    if reason.saves is None:
        return ("would bring the peak memory to ", _size(reason.needed), ", above ", _size(reason.budget))
    return (
        "saves ",
        _time(reason.saves),
        ", but its peak is ",
        _size(reason.needed - reason.budget),
        " above the budget",
    )


@phrase.register
def _over_error(reason: r.OverError) -> Phrase:
    return ("would bring the error to ", _error(reason.error), ", above ", _error(reason.limit))


@phrase.register
def _within_gap(reason: r.WithinGap) -> Phrase:
    if reason.saves is not None:
        return ("would fit and save ", _time(reason.saves), ": within the proof's gap")
    return ("within the proven gap of ", Figure(reason.gap or 0.0, _tenth_percent))


@phrase.register
def _no_kernel(reason: r.NoKernel) -> Phrase:
    because = f": {reason.because}" if reason.because else ""
    *most, last = reason.others or ("",)
    named = f"{', '.join(most)} and {last} have" if most else f"{last} has"
    others = f"; {named}" if reason.others else ""
    return (f"{reason.backend} has no {reason.kernel} kernel here{because}{others}",)


@phrase.register
def _not_allowed(reason: r.NotAllowed) -> Phrase:
    if reason.allow:
        return (f"{reason.because}: allow it with {' or '.join(reason.allow)}",)
    return (f"{reason.because}{', and the ' * bool(reason.because)}goal allows no error (max_error = 0)",)


@phrase.register
def _requires(reason: r.Requires) -> Phrase:
    but = "which costs more than it gains" if reason.offered else "which is not offered"
    return ("needs ", SiteName(reason.site), f" to be {' or '.join(reason.options)}, {but}")


@phrase.register
def _needed(reason: r.Needed) -> Phrase:
    return ("with it ", SiteName(reason.site), f" could not be {reason.option}")


@phrase.register
def _not_measured(reason: r.NotMeasured) -> Phrase:
    also = f", or that of {reason.also}" if reason.also else ""
    within = (f" within {reason.setting} = ", _number(reason.seconds)) if reason.seconds is not None else ()
    return (f"its error at the output was not measured{also}", *within)


@phrase.register
def _gains(reason: r.Gains) -> Phrase:
    said: list[Phrase] = []
    if reason.seconds:
        said.append((_time(abs(reason.seconds)), " faster" if reason.seconds > 0 else " slower"))
    if reason.bytes:
        said.append((_size(reason.bytes), " smaller"))
    if reason.error:
        said.append(("adds error ", _error(reason.error)))
    return joined(said)


@phrase.register
def _faster(reason: r.Faster) -> Phrase:
    if reason.seconds is None:
        return (f"no plan in {reason.than} is within the budget",)
    return (_time(reason.seconds), f" less a step than the best in {reason.than}")


@phrase.register
def _kept(reason: r.Kept) -> Phrase:
    if reason.bytes is not None:
        return (_size(reason.bytes), " are there at every instant, and fit")
    if reason.options is None:
        return ("all fits",)
    return (
        "nothing else is possible here" if reason.options == 1 else "no alternative is worth its cost here",
    )


@phrase.register
def _frees(reason: r.Frees) -> Phrase:
    when = " at every instant" if reason.throughout else " between forward and backward"
    cost: Phrase = (_time(reason.seconds),) if reason.seconds > 0 else ("no more time",)
    host: Phrase = ("; ", _size(reason.host_bytes), " on the host") if reason.host_bytes else ()
    link: Phrase = (
        (", ", _size(reason.link_bytes), " over the link in every step") if reason.link_bytes else ()
    )
    return ("frees ", _size(reason.bytes), f"{when} for ", *cost, *host, *link)


@phrase.register
def _divided(reason: r.Divided) -> Phrase:
    return (
        "activations of ", _number(reason.examples), " of ", _number(reason.batch),
        " examples at a time, beside ", _size(reason.gradient_bytes), " of summed gradients; the step takes ",
        Figure(reason.slower, _change), " against the unplanned one",
    )  # fmt: skip


@phrase.register
def _sees(reason: m.Sees) -> Phrase:
    share: Phrase = (", ", _share(reason.share), " of the scores") if reason.share is not None else ()
    if reason.form is None:
        return ("sees what the plan does not keep", *share)  # an older one, which had it in words
    check = (
        f"; every call checks that {condition_words(reason.form)}, else the dense mask is read"
        if reason.form.guards
        else ""
    )
    return (f"sees {mask_words(reason.form)}", *share, check)


@phrase.register
def _stays_dense(reason: m.StaysDense) -> Phrase:
    return ("its mask stays dense: ", *phrase(reason.because))


@phrase.register
def _only_where(reason: m.OnlyWhere) -> Phrase:
    unmet = ", which the example inputs are not" if reason.unmet else ""
    where = f" only where {condition_words(reason.form)}" if reason.form.guards else ""
    return (f"its mask is {mask_words(reason.form)}{where}{unmet}",)


@phrase.register
def _sparse_speed(reason: r.SparseSpeed) -> Phrase:
    bits = f" in {reason.bits} bits" if reason.bits else ""
    stock: Phrase = (
        (" (", Figure(reason.over_stock, _tenths), " over F.linear)") if reason.over_stock is not None else ()
    )
    start = "" if reason.gains else "no gain here: "
    published = (
        f"; ×{reason.published:.2f} where arithmetic binds: {reason.source}"
        if reason.published is not None
        else ""
    )
    return (
        f"{start}eps = time per sparse FLOP / time per dense FLOP{bits} = ", Figure(reason.epsilon, _tenths),
        *stock, ", break-even ", Figure(reason.break_even, _tenths), published,
    )  # fmt: skip


@phrase.register
def _recall(reason: r.Recall) -> Phrase:
    but = ("; ", *phrase(reason.but)) if reason.but is not None else ()
    return (
        "recall ",
        Figure(reason.recall, _thousandths),
        " of softmax mass at ",
        _share(reason.share),
        " of tiles",
        *but,
    )


@phrase.register
def _together(reason: f.Together) -> Phrase:
    return joined([phrase(fact) for fact in reason.facts], "; ")


@phrase.register
def _failed(reason: f.Failed) -> Phrase:
    return (f"failed: {reason.message}",)


@phrase.register
def _not_built(reason: f.NotBuilt) -> Phrase:
    return ("not built: predicted ", Figure(reason.times, _hundredths), "× the best")


@phrase.register
def _corrected(reason: f.Corrected) -> Phrase:
    apart = reason.rounding not in (0.0, reason.factor)
    return (
        "before lowering: emulated" if reason.emulated else f"round {reason.round}: measured", " error ",
        _error(reason.measured), " against predicted ", _error(reason.predicted), "; errors scaled by ",
        Figure(reason.factor, _hundredths),
        *((" (of 16 bits by ", Figure(reason.rounding, _hundredths), ")") if apart else ()),
        " and solved again",
    )  # fmt: skip


@phrase.register
def _host_use(reason: f.HostUse) -> Phrase:
    return (
        "host memory measured: ",
        _size(reason.bytes),
        " (",
        _number(reason.bytes),
        f" bytes) at its highest, in {reason.folder}",
    )


@phrase.register
def _unmeasured(reason: f.Unmeasured) -> Phrase:
    return (f"the original step was not measured: it {reason.because}",)


@phrase.register
def _padding(reason: f.Padding) -> Phrase:
    return (
        ("padding changes the output by ", _error(reason.effect))
        if reason.effect
        else ("the model itself ignores this mask",)
    )


@phrase.register
def _equals(reason: f.Equals) -> Phrase:
    on = (" on: ", *joined([phrase(each) for each in reason.inputs])) if reason.inputs else ()
    return ("captured graph equals the model", *on)


@phrase.register
def _of(reason: f.Of) -> Phrase:
    return (reason.name, *((" (", *phrase(reason.known), ")") if reason.known is not None else ()))


@phrase.register
def _cosine(reason: f.Cosine) -> Phrase:
    alone = "" if reason.alone is None else f"{words(reason.alone)}, "
    return (
        f"cosine of the whole gradient {reason.cosine:.6f}; of one parameter's alone {alone}",
        _error(reason.error),
    )


@phrase.register
def _nats(reason: f.Nats) -> Phrase:
    return (f"{reason.change:+.4f} nats per token",)


@phrase.register
def _alike_errors(reason: f.AlikeErrors) -> Phrase:
    return (
        f"largest of {reason.count}; by their spread {reason.share:.0%} of such inputs are below ",
        _error(reason.below),
    )


@phrase.register
def _token_rates(reason: f.TokenRates) -> Phrase:
    prefill, decode = _rate(reason.prefill, reason.prefill_before), _rate(reason.decode, reason.decode_before)
    return ("prefill ", *prefill, ", decode ", *decode, ", measured interleaved")


def _rate(rate: float, before: float) -> Phrase:
    return (Figure(rate, _tenths), " tokens/s (the model itself ", Figure(before, _tenths), ")")
