"""An option for each of n like layers where k micro-batches are held at once: exact, by labels.

With K = Σ kept and S_i the kept bytes before layer i, every instant asks (k − 1) · K + S_i + peak_i ≤ B. Like
layers may change places, and no order is better than the one in which peak − kept falls (exchange argument in
remat/count.py). So options are taken in that order, each as often as wanted, and a label says how many layers
have one: (S, M = the highest S_i + peak_i, seconds). At the end (k − 1) · S + M ≤ B. A label that is no
better than another in S, M and seconds is dropped, so is one that cannot end within B or below the best.
Where more than _MOST labels are left they are thinned; then only `complete` is lost, and the closed form's
bound stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST = 600

Label = tuple[float, int, int, tuple[int, ...]]  # seconds, S, M, indices of the options in their order


@dataclass(frozen=True, slots=True)
class Allotment:
    """The options' indices, layer by layer; whether none is better."""

    choice: tuple[int, ...]
    complete: bool


def allot(
    options: Sequence[tuple[int, int, float]], layers: int, copies: float, budget: float
) -> Allotment | None:
    """The fewest seconds of `layers` layers with these options (kept, peak, seconds) within the budget; None:
    nothing is.
    """
    order = sorted(range(len(options)), key=lambda i: options[i][0] - options[i][1])
    least = min(kept for kept, _, _ in options)
    quickest = min(seconds for _, _, seconds in options)
    labels: list[list[Label]] = [[(0.0, 0, 0, ())], *([] for _ in range(layers))]
    complete = True
    for index in order:
        kept, peak, seconds = options[index]
        for used in range(layers):
            grown = [
                (at + seconds, s + kept, max(m, s + peak), (*choice, index))
                for at, s, m, choice in labels[used]
                if (copies - 1) * (s + kept + (layers - used - 1) * least) + max(m, s + peak) <= budget
            ]
            best = min((label[0] for label in labels[layers]), default=float("inf"))
            grown = [label for label in grown if label[0] + (layers - used - 1) * quickest < best]
            if grown:
                labels[used + 1] = _undominated([*labels[used + 1], *grown])
            if len(labels[used + 1]) > _MOST:
                complete = False
                step = len(labels[used + 1]) / _MOST
                labels[used + 1] = [labels[used + 1][int(i * step)] for i in range(_MOST)]
    found = min(labels[layers], default=None)
    return None if found is None else Allotment(found[3], complete)


def _undominated(labels: list[Label]) -> list[Label]:
    kept: list[Label] = []
    for label in sorted(labels):
        if not any(other[1] <= label[1] and other[2] <= label[2] for other in kept):
            kept.append(label)
    return kept
