"""Inputs made for models of text and images: the model runs on them, and sees the image."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from vision_language_models import gemma, idefics, llava, qwen

from effcompile.core.errors import InputsError
from effcompile.loader.derive import derive
from effcompile.loader.source import Reading


@pytest.mark.parametrize("make", [llava, gemma, idefics, qwen])
@pytest.mark.parametrize("training", [False, True])
def test_a_model_runs_on_the_image_that_is_made_for_it(make: Callable[[], nn.Module], training: bool) -> None:
    model = make().eval()
    given = derive(model, Reading(training=training, shape=(2, 0)), "model.py").kwargs
    with torch.no_grad():
        seen, other = model(**given), model(**{**given, "pixel_values": given["pixel_values"].flip(-1)})
    assert (seen.loss is not None) == training
    assert not torch.allclose(seen.logits, other.logits)


def test_a_vocabulary_of_nothing_is_told() -> None:
    with pytest.raises(InputsError, match="a table of 0 rows"):
        derive(nn.Sequential(nn.Embedding(0, 4)), Reading(), "model.py")


def test_a_frozen_part_keeps_its_mode() -> None:
    """A tower that the user holds in eval mode while the rest trains."""
    model = llava().train()
    model.model.vision_tower.eval()
    before = [module.training for module in model.modules()]
    derive(model, Reading(training=True), "model.py")
    assert [module.training for module in model.modules()] == before
