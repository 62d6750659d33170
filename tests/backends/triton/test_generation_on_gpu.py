"""Generation on a GPU that is here: skipped in plain sight where there is none. What can be shown without
one is in interpreted/test_generation.py.
"""

import pytest
import torch
from generation_models import bare, ids, same, tiny

from effcompile.backends.torch.still import StillStep
from effcompile.capture.generation import capture_step

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("narrow", ["", "int8"])
def test_each_token_is_a_graph_that_is_replayed(narrow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded once for a batch and a cache; the tokens are the model's own, and a second text's, too."""
    monkeypatch.setenv("EFFCOMPILE_CUDA_GRAPHS", "1")
    model = tiny("llama").cuda()
    planned = bare((model, capture_step(model)), "triton", 64, narrow=narrow)
    step = planned[1].lowered.run
    assert isinstance(step, StillStep), planned[1].plan.settings
    for seed in (1, 2):
        text = ids(2, 9, seed=seed).cuda()
        if narrow:
            planned[1].generate(text, max_new_tokens=12, do_sample=False)
        else:
            same(planned, text, max_new_tokens=12, do_sample=False)
    assert 1 <= len(step._calls) <= 2 and all(call._recorded is not None for call in step._calls.values())


def test_torchs_own_operators_generate_there_too() -> None:
    model = tiny("llama").cuda()
    same(
        bare((model, capture_step(model)), "torch-eager", 64),
        ids(2, 9).cuda(),
        max_new_tokens=6,
        do_sample=False,
    )
