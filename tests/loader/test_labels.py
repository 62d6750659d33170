"""Labels that are derived are what the model's head computes its loss from."""

from __future__ import annotations

import pytest
import torch

from effcompile.loader.derive import derive
from effcompile.loader.source import Reading

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("QuestionAnswering", {"start_positions", "end_positions"}),
        ("NextSentencePrediction", {"labels"}),
        ("MultipleChoice", {"labels"}),
        ("PreTraining", {"labels", "next_sentence_label"}),
    ],
)
def test_labels_are_the_heads_own(kind: str, names: set[str]) -> None:
    config = transformers.BertConfig(
        vocab_size=99, max_position_embeddings=24, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = getattr(transformers, f"BertFor{kind}")(config)
    made = derive(model, Reading(training=True, shape=(3, 8)), "it").kwargs
    assert names < made.keys()
    assert torch.isfinite(model(**made).loss)


def test_labels_of_recordings_are_texts_and_those_of_segments_are_pixels() -> None:
    heads = {"num_attention_heads": 2, "intermediate_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    speech = transformers.Wav2Vec2Config(
        **heads,
        conv_dim=[8] * 7,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        mask_time_prob=0.0,
    )
    sizes = {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4}
    parts = transformers.SegformerConfig(**sizes, decoder_hidden_size=8, num_labels=3, image_size=64)
    for model, shape in (
        (transformers.Wav2Vec2ForCTC(speech), (2, 3200)),
        (transformers.SegformerForSemanticSegmentation(parts), (2, 64)),
    ):
        made = derive(model, Reading(training=True, shape=shape), "it").kwargs
        assert torch.isfinite(model(**made).loss)
