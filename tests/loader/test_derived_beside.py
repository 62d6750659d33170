"""What models take beside a text or an image is derived, too: entities, regions, several images, a text's
end.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from effcompile.capture import capture, verify_capture
from effcompile.loader.derive import derive
from effcompile.loader.source import Reading

transformers = pytest.importorskip("transformers")

HEADS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**HEADS, "vocab_size": 64, "max_position_embeddings": 24}
SEEN = {**HEADS, "image_size": 32, "patch_size": 8}
LUKE = {**TEXT, "entity_vocab_size": 10, "entity_emb_size": 16, "num_labels": 3}
LXMERT = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "l_layers": 1,
    "x_layers": 1, "r_layers": 1, "visual_feat_dim": 16, "num_qa_labels": 5, "max_position_embeddings": 24,
}  # fmt: skip
KOSMOS = {"vocab_size": 64, "embed_dim": 32, "layers": 1, "ffn_dim": 32, "attention_heads": 2,
          "max_position_embeddings": 64}  # fmt: skip
IDEFICS = {
    **TEXT, "additional_vocab_size": 0, "cross_layer_interval": 1, "pad_token_id": 0,
    "vision_config": {"embed_dim": 32, "image_size": 32, "patch_size": 8, "num_attention_heads": 2,
                      "num_hidden_layers": 1, "intermediate_size": 32},
}  # fmt: skip
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 32,
    "num_labels": 3,
}  # fmt: skip
GLUE = {
    "keypoint_detector_config": {
        "encoder_hidden_sizes": [16, 16], "decoder_hidden_size": 16, "keypoint_decoder_dim": 65,
        "descriptor_decoder_dim": 32, "max_keypoints": 16,
    },
    "hidden_size": 32, "keypoint_encoder_sizes": [8, 16], "gnn_layers_types": ["self", "cross"],
    "sinkhorn_iterations": 3, "num_attention_heads": 2,
}  # fmt: skip
FLAVA = {
    "image_config": SEEN, "text_config": TEXT, "multimodal_config": HEADS, "hidden_size": 32,
    "image_codebook_config": {"num_groups": 4, "num_blocks_per_group": 1, "hidden_size": 8, "vocab_size": 64},
}  # fmt: skip
FORMER = {**TEXT, "encoder_hidden_size": 32, "use_qformer_text_input": True}
BLIP = {
    "text_config": {**TEXT, "encoder_hidden_size": 32, "projection_dim": 16, "bos_token_id": 1,
                    "pad_token_id": 0, "sep_token_id": 2, "eos_token_id": 2},
    "vision_config": SEEN, "projection_dim": 16, "image_text_hidden_size": 16,
}  # fmt: skip
FLOW = {"num_latents": 8, "d_latents": 32, "d_model": 322, "num_blocks": 1, "num_self_attends_per_block": 1,
        "num_self_attention_heads": 2, "num_cross_attention_heads": 1, "train_size": [16, 24]}  # fmt: skip

VIDEO = {
    "num_latents": 4, "d_latents": 32, "d_model": 32, "num_blocks": 1, "num_self_attends_per_block": 1,
    "num_self_attention_heads": 2, "num_cross_attention_heads": 1, "image_size": 32, "num_frames": 2,
    "audio_samples_per_frame": 32, "samples_per_patch": 16, "num_labels": 5, "output_shape": [1, 2, 32, 32],
    "output_num_channels": 16, "_label_trainable_num_channels": 16,
}  # fmt: skip


def made(kind: str, config: str, **given: object) -> Callable[[], nn.Module]:
    """A model by the names of its class and of its configuration's."""
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**given))


#: A model, the sizes of one of its inputs, and whether it computes a loss of what is made for training.
CASES: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...], bool]] = {
    "classes of entities": (
        made("LukeForEntityClassification", "LukeConfig", **LUKE), "entity_position_ids", (2, 4), True,
    ),
    "pairs of entities": (
        made("LukeForEntityPairClassification", "LukeConfig", **LUKE), "entity_ids", (2,), True,
    ),
    "spans of entities": (
        made("LukeForEntitySpanClassification", "LukeConfig", **LUKE), "entity_start_positions", (2,), True,
    ),
    "no entities": (made("LukeForMaskedLM", "LukeConfig", **LUKE), "input_ids", (22,), True),
    "regions": (made("LxmertForPreTraining", "LxmertConfig", **LXMERT), "visual_feats", (36, 16), True),
    "regions of a question": (
        made("LxmertForQuestionAnswering", "LxmertConfig", **LXMERT), "visual_pos", (36, 4), True,
    ),
    "a mark of the image": (
        made("Kosmos2ForConditionalGeneration", "Kosmos2Config", text_config=KOSMOS, vision_config=SEEN,
             latent_query_num=4),
        "image_embeds_position_mask", (64,), True,
    ),
    "images with an axis": (
        made("IdeficsForVisionText2Text", "IdeficsConfig", **IDEFICS), "pixel_values", (1, 3, 32, 32), True,
    ),
    "two images": (
        made("SuperGlueForKeypointMatching", "SuperGlueConfig", **GLUE), "pixel_values", (2, 3, 224, 224),
        False,
    ),
    "a text's end": (made("BartForSequenceClassification", "BartConfig", **BART), "input_ids", (32,), True),
    "visual tokens": (
        made("BeitForMaskedImageModeling", "BeitConfig", **SEEN, vocab_size=64, use_mask_token=True),
        "bool_masked_pos", (16,), True,
    ),
    "hidden words and patches": (
        made("FlavaForPreTraining", "FlavaConfig", **FLAVA), "bool_masked_pos", (16,), True,
    ),
    "a part that answers": (
        made("BlipForQuestionAnswering", "BlipConfig", **BLIP), "input_ids", (24,), True,
    ),
    "a text of what joins": (
        made("Blip2ForImageTextRetrieval", "Blip2Config", vision_config=SEEN, qformer_config=FORMER,
             num_query_tokens=4, image_text_hidden_size=16),
        "input_ids", (24,), False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_model_runs_on_what_is_made_beside(case: str) -> None:
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


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (made("PerceiverForOpticalFlow", "PerceiverConfig", **FLOW), "inputs"),
        (made("PerceiverForMultimodalAutoencoding", "PerceiverConfig", **VIDEO), "inputs"),
        (made("BeitForMaskedImageModeling", "BeitConfig", **SEEN, vocab_size=64), "pixel_values"),
    ],
)
def test_what_cannot_train_on_derived_inputs_runs_forward(build: Callable[[], nn.Module], name: str) -> None:
    torch.manual_seed(0)
    model = build().eval()
    given = derive(model, Reading(), "model.py").kwargs
    assert name in given
    with torch.no_grad():
        model(**given)


def test_an_image_with_nothing_to_hide_it_by_is_not_hidden() -> None:
    model = made("BeitForMaskedImageModeling", "BeitConfig", **SEEN, vocab_size=64)().train()
    found = derive(model, Reading(training=True), "model.py")
    assert found.kwargs.keys() == {"pixel_values"}
    assert "labels were not made" in " ".join(map(str, found.notes))


def test_what_an_argument_holds_is_told_by_name() -> None:
    model = made("PerceiverForMultimodalAutoencoding", "PerceiverConfig", **VIDEO)()
    told = derive(model, Reading(), "model.py").told
    assert "inputs.image [1 × 2 × 3 × 32 × 32] float32" in told
    assert "subsampled_output_points.audio [1] int64" in told


def test_a_text_that_is_classified_ends_once() -> None:
    model = CASES["a text's end"][0]()
    ids = derive(model, Reading(shape=(16, 32)), "model.py").kwargs["input_ids"]
    assert (ids == model.config.eos_token_id).sum(1).tolist() == [1] * 16
    assert set(ids[:, -1].tolist()) == {model.config.eos_token_id}


def test_a_class_that_is_read_at_the_end_is_captured() -> None:
    """Rows that a mask selects are as many as data tells."""
    torch.manual_seed(0)
    model = CASES["a text's end"][0]().eval()
    given = derive(model, Reading(), "model.py").kwargs
    checks = verify_capture(capture(model, (), given), model)
    assert len(checks) == 3 and all(check.passed for check in checks)
