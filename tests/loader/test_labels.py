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


def test_recordings_come_as_the_model_takes_them() -> None:
    """Samples of each channel to a codec, a spectrum's patches or frames to others: each runs."""
    heads = {"num_attention_heads": 2, "intermediate_size": 32, "hidden_size": 16, "num_hidden_layers": 1}
    sides = {
        f"{side}_{what}": figure
        for side in ("encoder", "decoder")
        for what, figure in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
    }
    text = transformers.Speech2TextConfig(
        **sides,
        d_model=16,
        vocab_size=50,
        input_feat_per_channel=8,
        conv_channels=16,
        conv_kernel_sizes=[3],
        num_conv_layers=1,
        max_target_positions=12,
    )
    codec = transformers.EncodecConfig(
        num_filters=2, num_lstm_layers=1, codebook_size=8, upsampling_ratios=[4, 2], target_bandwidths=[24.0]
    )
    patches = transformers.ASTConfig(**heads, max_length=64, num_mel_bins=32)
    for model, name, sizes in (
        (transformers.EncodecModel(codec), "input_values", (1, 640)),
        (transformers.ASTForAudioClassification(patches), "input_values", (64, 32)),
        (transformers.Speech2TextForConditionalGeneration(text), "input_features", (200, 8)),
    ):
        reading = Reading(
            training=False, shape=(2, 640) if isinstance(model, transformers.EncodecModel) else None
        )
        made = derive(model.eval(), reading, "it").kwargs
        assert made[name].shape[1:] == sizes
        with torch.no_grad():
            model(**made)
