"""Tiny models of text and images, random weights, and inputs as their processors give them."""

from __future__ import annotations

import torch
import transformers

_TEXT = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 128,
}  # fmt: skip
_EYE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip


def llava() -> transformers.LlavaForConditionalGeneration:
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_EYE, projection_dim=32),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=98,
    )
    return transformers.LlavaForConditionalGeneration(config)


def gemma() -> transformers.Gemma3ForConditionalGeneration:
    torch.manual_seed(0)
    config = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**_EYE, vision_use_head=False),
        text_config=transformers.Gemma3TextConfig(**_TEXT, head_dim=8, sliding_window=16),
        image_token_id=98, boi_token_id=97, eoi_token_id=96, mm_tokens_per_image=4,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # zeros as it is made
    return model


def idefics() -> transformers.Idefics3ForConditionalGeneration:
    torch.manual_seed(0)
    text = transformers.LlamaConfig(**_TEXT, pad_token_id=0)
    config = transformers.Idefics3Config(
        vision_config=_EYE, text_config=text, image_token_id=98, scale_factor=2
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def qwen() -> transformers.Qwen2_5_VLForConditionalGeneration:
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 48,
        "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    text = {
        **_TEXT,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
    }
    torch.manual_seed(0)
    return transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(
            text_config=text, vision_config=vision, image_token_id=98, video_token_id=97,
            vision_start_token_id=96, vision_end_token_id=95,
        )
    )  # fmt: skip


def qwen3(layers: int = 2) -> transformers.Qwen3VLForConditionalGeneration:
    """Adds what its eye saw at the places of the image's tokens, behind the first layers, too: behind every
    one of so many, of eye and text alike.
    """
    torch.manual_seed(0)
    vision = {
        "depth": layers, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 48,
        "patch_size": 4, "deepstack_visual_indexes": list(range(layers)), "num_position_embeddings": 16,
    }  # fmt: skip
    rope = {
        "rope_type": "default",
        "mrope_section": [2, 1, 1],
        "rope_theta": 1e4,
        "mrope_interleaved": True,
    }
    text = {**_TEXT, "num_hidden_layers": layers, "head_dim": 8, "rope_parameters": rope}
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=98, video_token_id=97,
        vision_start_token_id=96, vision_end_token_id=95,
    )  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(config)


def paligemma() -> transformers.PaliGemmaForConditionalGeneration:
    """Reads its prompt both ways, whether an image is in it or not."""
    torch.manual_seed(0)
    config = transformers.PaliGemmaConfig(
        vision_config=transformers.SiglipVisionConfig(**_EYE, vision_use_head=False, projection_dim=32),
        text_config=transformers.GemmaConfig(**_TEXT, head_dim=8),
        image_token_id=98, projection_dim=32,
    )  # fmt: skip
    return transformers.PaliGemmaForConditionalGeneration(config)


def asked(grid: tuple[int, int] = (4, 4), at: int = 3) -> dict[str, torch.Tensor]:
    """Two rows of 12 tokens, four of which are one image's, as the model's processor gives them."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (2, 12), generator=generator)
    ids[:, at : at + 4], ids[:, at - 1] = 98, 96
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(32, 96, generator=generator),
        "image_grid_thw": torch.tensor([[1, *grid]] * 2),
        "mm_token_type_ids": (ids == 98).int(),
    }
