"""Whether a model's tokens see those before them alone, as a cache has it: a prompt in chunks, and each token
behind it, is then the prompt at once.
"""

from __future__ import annotations

import torch

from effcompile.capture.verify import relative_error
from effcompile.core.errors import UsageError
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
