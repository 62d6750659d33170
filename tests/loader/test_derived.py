"""Inputs that are derived are such as the model runs on, whatever it sees, hears or foresees; and an error
that it meets at them tells what they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from effcompile.core.errors import CaptureError, InputsError
from effcompile.loader.derive import derive
from effcompile.loader.loaded import Loaded
from effcompile.loader.reading import load
from effcompile.loader.source import Reading

transformers = pytest.importorskip("transformers")

HEADS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**HEADS, "vocab_size": 64, "max_position_embeddings": 24}
SEEN = {**HEADS, "image_size": 32, "patch_size": 8}
SERIES = {
    "prediction_length": 6, "context_length": 12, "lags_sequence": [1, 3], "num_time_features": 2,
    "d_model": 16,
} | {
    f"{side}_{what}": figure
    for side in ("encoder", "decoder")
    for what, figure in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
}  # fmt: skip


def made(kind: str, config: str, **settings: object) -> Callable[[], nn.Module]:
    """A model by the names of its class and of its configuration's."""
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**settings))


def musicgen() -> nn.Module:
    text = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    codec = transformers.EncodecConfig(
        num_filters=2, num_lstm_layers=1, codebook_size=64, upsampling_ratios=[4, 2]
    )
    decoder = transformers.MusicgenDecoderConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, num_codebooks=4
    )
    parts = {"text_encoder": text, "audio_encoder": codec, "decoder": decoder}
    config = transformers.MusicgenConfig(**{name: part.to_dict() for name, part in parts.items()})
    return transformers.MusicgenForConditionalGeneration(config)


def pair(kind: str, first: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        joined = getattr(transformers, f"{kind}Config").from_encoder_decoder_configs(
            first, transformers.BertConfig(**TEXT)
        )
        joined.decoder_start_token_id, joined.pad_token_id = 1, 0
        return getattr(transformers, f"{kind}Model")(joined)

    return build


CLAP = {
    "text_config": {**TEXT, "max_position_embeddings": 26},
    "audio_config": {
        "hidden_size": 64, "patch_embeds_hidden_size": 8, "depths": [1] * 4, "num_attention_heads": [1] * 4,
        "num_hidden_layers": 4, "spec_size": 64, "num_mel_bins": 32, "window_size": 2, "patch_stride": [4, 4],
    },
    "projection_dim": 16,
}  # fmt: skip
SPEECH = {key: value for key, value in SERIES.items() if key.startswith(("encoder", "decoder"))} | {
    "hidden_size": 32,
    "vocab_size": 50,
    "num_mel_bins": 8,
    "speech_decoder_prenet_units": 16,
}
MASKS = {"decoder_hidden_size": 32, "decoder_num_attention_heads": 2, "decoder_num_hidden_layers": 1}
MOVING = {**SEEN, "num_frames": 4, "mit_hidden_size": 32, "mit_intermediate_size": 32,
          "mit_num_hidden_layers": 1, "mit_num_attention_heads": 2}  # fmt: skip

#: A model, the sizes of one of its inputs, and whether it computes a loss of what is made for training.
CASES: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...], bool]] = {
    "video": (
        made("VideoMAEForVideoClassification", "VideoMAEConfig", **SEEN, num_frames=4),
        "pixel_values", (4, 3, 32, 32), True,
    ),
    "masked video": (
        made("VideoMAEForPreTraining", "VideoMAEConfig", **SEEN, **MASKS, num_frames=4),
        "bool_masked_pos", (32,), True,
    ),
    "video and text": (
        made("XCLIPModel", "XCLIPConfig", text_config=TEXT, vision_config=MOVING, projection_dim=32,
             prompt_attention_heads=2),
        "pixel_values", (4, 3, 32, 32), True,
    ),
    "masked image": (
        made("ViTForMaskedImageModeling", "ViTConfig", **SEEN, encoder_stride=8),
        "pixel_values", (3, 32, 32), True,
    ),
    "parts in one file": (
        made("FlavaModel", "FlavaConfig", image_config=SEEN, text_config=TEXT, multimodal_config=HEADS,
             hidden_size=32),
        "pixel_values", (3, 32, 32), False,
    ),
    "answers of many": (
        made("ViltForQuestionAnswering", "ViltConfig", **TEXT, image_size=32, patch_size=8, num_labels=5),
        "labels", (5,), True,
    ),
    "pixels of a text": (
        made("CLIPSegForImageSegmentation", "CLIPSegConfig", text_config=TEXT, vision_config=SEEN,
             projection_dim=32, extract_layers=[0], reduce_dim=16, decoder_num_attention_heads=2,
             decoder_intermediate_size=16),
        "labels", (32, 32), True,
    ),
    "sound and text": (made("ClapModel", "ClapConfig", **CLAP), "input_features", (1, 128, 32), True),
    "music": (musicgen, "labels", (128, 4), True),
    "speech of a text": (
        made("SpeechT5ForTextToSpeech", "SpeechT5Config", **SPEECH), "labels", (128, 8), True,
    ),
    "words on a page": (
        made("LayoutLMv3ForTokenClassification", "LayoutLMv3Config", **TEXT, coordinate_size=4, shape_size=8,
             input_size=32, patch_size=8),
        "bbox", (22, 4), True,  # two rows of positions are the padding's
    ),
    "patches": (
        made("Pix2StructForConditionalGeneration", "Pix2StructConfig",
             text_config={"vocab_size": 64, "hidden_size": 32, "d_kv": 16, "d_ff": 32, "num_layers": 1,
                          "num_heads": 2},
             vision_config={**HEADS, "d_ff": 32, "d_kv": 16, "patch_embed_hidden_size": 48, "seq_len": 64}),
        "flattened_patches", (64, 50), True,
    ),
    "text to text": (
        pair("EncoderDecoder", transformers.BertConfig(**TEXT)), "decoder_input_ids", (24,), True,
    ),
    "a docstring that is wrong": (
        made("T5ForConditionalGeneration", "T5Config", vocab_size=64, d_model=32, d_kv=16, d_ff=32,
             num_layers=1, num_heads=2),
        "labels", (128,), True,
    ),
    "labels of which no type is said": (
        made("GPTBigCodeForCausalLM", "GPTBigCodeConfig", vocab_size=64, n_embd=32, n_layer=1, n_head=2,
             n_positions=24),
        "labels", (24,), True,
    ),
    "frames before what they hold": (
        made("ParakeetForCTC", "ParakeetCTCConfig", vocab_size=20, pad_token_id=0,
             encoder_config={**HEADS, "num_mel_bins": 16, "subsampling_conv_channels": 8,
                             "subsampling_factor": 4}),
        "input_features", (200, 16), True,
    ),
    "a spectrum that a docstring takes for samples": (
        made("CohereAsrForConditionalGeneration", "CohereAsrConfig", **HEADS, vocab_size=20, pad_token_id=0,
             encoder_config={**HEADS, "num_mel_bins": 16, "subsampling_conv_channels": 8,
                             "subsampling_factor": 4}),
        "input_features", (200, 16), True,
    ),
    "characters": (
        made("CanineForMultipleChoice", "CanineConfig", **HEADS, num_hash_functions=2, num_hash_buckets=256,
             max_position_embeddings=128, local_transformer_stride=16),
        "input_ids", (2, 128), True,
    ),
    "image to text": (
        pair("VisionEncoderDecoder", transformers.ViTConfig(**SEEN)), "pixel_values", (3, 32, 32), True,
    ),
    "series": (
        made("TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", **SERIES, input_size=1,
             num_static_categorical_features=1, cardinality=[5], embedding_dimension=[4],
             num_static_real_features=2),
        "past_values", (15,), True,
    ),
    "classes of series": (
        made("PatchTSTForClassification", "PatchTSTConfig", num_input_channels=2, context_length=16,
             patch_length=4, patch_stride=4, d_model=16, num_attention_heads=2, ffn_dim=16,
             num_hidden_layers=1, num_targets=3),
        "past_values", (16, 2), True,
    ),
    "a number of a text": (
        made("BertForSequenceClassification", "BertConfig", **TEXT, num_labels=1), "labels", (), True,
    ),
    "several classes of a text": (
        made("BertForSequenceClassification", "BertConfig", **TEXT, num_labels=3,
             problem_type="multi_label_classification"),
        "labels", (3,), True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_model_runs_on_what_is_made_for_it(case: str) -> None:
    build, name, sizes, has_loss = CASES[case]
    torch.manual_seed(0)
    model = build()
    for training in (False, True):
        given = derive(model, Reading(training=training), "model.py").kwargs
        if training or name in given:
            assert given[name].shape[1:] == sizes
        with torch.set_grad_enabled(training):
            found = model.train(training)(**given)
    assert not has_loss or (torch.isfinite(found.loss) and found.loss.requires_grad)


def test_boxes_are_on_the_page_and_masks_are_as_many_of_each_example() -> None:
    torch.manual_seed(0)
    boxes = derive(CASES["words on a page"][0](), Reading(shape=(3, 7)), "model.py").kwargs["bbox"]
    assert boxes.shape == (3, 7, 4) and boxes.dtype == torch.int64
    assert (
        int(boxes.min()) >= 0 and int(boxes.max()) <= 1000 and bool((boxes[..., :2] <= boxes[..., 2:]).all())
    )
    masked = derive(CASES["masked video"][0](), Reading(shape=(2, 0)), "model.py").kwargs["bool_masked_pos"]
    assert masked.sum(1).tolist() == [16, 16]


def test_an_image_is_as_large_as_this_model_takes_not_its_checkpoint() -> None:
    patches = nn.Conv2d(3, 8, 16, 16)
    patches.img_size = (64, 32)  # type: ignore[assignment]
    model = nn.Sequential(patches, nn.Flatten(1), nn.Linear(8 * 4 * 2, 5))
    model.pretrained_cfg = {"input_size": (3, 224, 224)}  # as timm keeps it
    image = derive(model, Reading(), "model.py").args[0]
    assert image.shape == (1, 3, 64, 32)
    model(image)


def test_boxes_to_find_are_left_to_the_user() -> None:
    model = made("YolosForObjectDetection", "YolosConfig", **{**SEEN, "image_size": [32, 32]})()
    made_of = derive(model, Reading(training=True), "model.py")
    assert made_of.kwargs.keys() == {"pixel_values"}
    assert "labels were not made: labels (list[Dict])" in " ".join(map(str, made_of.notes))


def test_what_nothing_tells_is_refused_by_name() -> None:
    settings = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "input_vocab_size": 64}
    model = made("BarkFineModel", "BarkFineConfig", **settings, output_vocab_size=64)()
    with pytest.raises(InputsError, match=r"needs as `codebook_idx` \(int\)\. Define `inputs` beside"):
        derive(model, Reading(), "model.py")


def test_an_error_at_derived_inputs_tells_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torch\nmodel = torch.nn.Linear(3, 2)\n")
    (tmp_path / "own.py").write_text(
        "import torch\nmodel, inputs = torch.nn.Linear(3, 2), torch.ones(1, 3)\n"
    )

    def said(loaded: Loaded, kind: type[Exception]) -> str:
        with pytest.raises(kind) as caught, loaded.telling():
            raise kind("It raises.")
        return str(caught.value)

    for kind in (InputsError, CaptureError):
        told = said(load(str(tmp_path / "model.py")), kind)
        assert told.startswith(
            "It raises.\n  No inputs were given: effcompile made these from the model's first"
        )
        for part in (
            "input [1 × 3] float32 (-",
            "Define `inputs` beside `model`",
            "--shape 2x64",
        ):
            assert part in told
        assert said(load(str(tmp_path / "own.py")), kind) == "It raises."
