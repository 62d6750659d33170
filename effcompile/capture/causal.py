"""Whether a model's tokens see those before them alone, as a cache has it: a prompt in chunks, and each token
behind it, is then the prompt at once. And whether it takes such a cache at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from effcompile.capture.diagnose import own_error
from effcompile.capture.verify import relative_error
from effcompile.core.errors import UsageError
from effcompile.core.stages import first_line
from effcompile.core.types import HFModel

#: What the logits of a token differ by, of their size, where they follow from a later one: more than products
#: of other rows round by.
_SEEN = {torch.float32: 1e-4, torch.float64: 1e-8}
_SEEN_IN_16_BITS = 2e-2


def check_causal(model: HFModel, tokens: torch.Tensor) -> None:
    """Ask a model that has an attention both ways, an image encoder's or its own (PaliGemma).

    `tokens`: ids (rows, tokens) of a text.

    Raises:
        UsageError: a token reads one behind it.
    """
    if not any(getattr(part, "is_causal", None) is False for part in model.modules()):
        return
    other = tokens.clone()
    other[:, -1] = torch.where(tokens[:, -1] > 3, 3, 4)
    plain, changed = (
        model(input_ids=ids, use_cache=False, return_dict=True).logits[:, :-1] for ids in (tokens, other)
    )
    if relative_error(changed, plain) > _SEEN.get(plain.dtype, _SEEN_IN_16_BITS):
        raise UsageError(
            f"{type(model).__name__} reads a prompt both ways: its first tokens see the last ones, so that "
            "no token can be read behind a cache of those before it alone. Let it generate as it is, or "
            "plan its forward with mode = 'inference'."
        )


def without_a_cache(model: HFModel, given: Mapping[str, object], cache: str, error: Exception) -> UsageError:
    """What to tell of a model that raised with an empty cache: whether it runs without one.

    `given`: its other inputs. `cache`: the class.
    """
    name = type(model).__name__
    try:
        model(**given, use_cache=False, return_dict=True)
    except Exception as alone:
        return own_error(alone, model, "token ids alone", "Mend the model or its config.")
    return UsageError(
        f"{name} does not run with the {cache} that generate() makes for most models: "
        f"{first_line(error).rstrip('.')}. A captured step carries no other. Let it generate as it is."
    )
