"""What some models take beside a text or an image: entities in it, regions that a detector found, marks of
where an image stands, rows of patches.
"""

from __future__ import annotations

import torch

from effcompile.core.types import Value
from effcompile.loader.figures import ModelSizes

#: Of one text; a pair's relation is that of two.
_ENTITIES, _MENTION = 2, 4
#: What a detector finds in an image, as LXMERT's authors take them.
_REGIONS = 36
#: Pixels of a patch and its neighbours, of each of two images, as Perceiver takes them.
_NEIGHBOURS = 27
#: Of a video that is decoded.
_PARTS = 128


def beside(figures: ModelSizes, name: str) -> dict[str, Value]:
    """The argument of this name; {} where the model does not tell."""
    kind = type(figures.model).__name__
    if name.startswith("entity_") and "Entity" in kind:
        return {**_of_entities(figures, name)}
    match name:
        case "visual_feats" if width := figures.number(("visual_feat_dim",)):
            return {name: figures.floats(figures.batch, _REGIONS, width)}
        case "visual_pos" if width := figures.number(("visual_pos_dim",)):  # shares of the image's sides
            return {name: figures.floats(figures.batch, _REGIONS, width).sigmoid()}
        case "image_embeds_position_mask" if count := figures.number(("latent_query_num",)):
            # behind the token that begins the text
            at = torch.arange(figures.tokens()).expand(figures.batch, -1)
            return {name: (at > 0) & (at <= count)}
        case "image_attention_mask" if figures.number(("cross_layer_interval",)):
            return {name: torch.ones(figures.batch, figures.tokens(), 1, dtype=torch.long)}
        case "inputs" | "subsampled_output_points" if kind.endswith("ForMultimodalAutoencoding"):
            return {name: _of_a_video(figures, name)}
        case "inputs" if kind.endswith("ForOpticalFlow"):
            sides = figures.config.get("train_size", ())
            return {name: figures.floats(figures.batch, 2, _NEIGHBOURS, *sides)} if len(sides) == 2 else {}
    return {}


def _of_a_video(figures: ModelSizes, name: str) -> dict[str, torch.Tensor | None]:
    """A video with its sound and no class, as Perceiver takes them; or which pixels and patches of sound it
    is asked for: the first of its authors' parts, as it decodes one part after the other.
    """
    frames, side, each = (
        figures.number((what,)) for what in ("num_frames", "image_size", "audio_samples_per_frame")
    )
    if name == "inputs":
        return {
            "image": figures.floats(figures.batch, frames, 3, side, side),
            "audio": figures.floats(figures.batch, frames * each, 1),
            "label": torch.zeros(figures.batch, figures.classes()),
        }
    patches = frames * each // (figures.number(("samples_per_patch",)) or 1)
    counts = {"image": frames * side**2, "audio": patches}
    return {what: torch.arange(max(count // _PARTS, 1)) for what, count in counts.items()} | {"label": None}


def images_of_each(figures: ModelSizes) -> int:
    """Images of one example, where they have an axis of their own; 0 where it has one without."""
    if type(figures.model).__name__.endswith("ForKeypointMatching"):
        return 2
    return int("image_attention_mask" in figures.parameters and "cross_layer_interval" in figures.config)


def with_end(figures: ModelSizes, ids: torch.Tensor) -> torch.Tensor:
    """The text with its end where a head reads the class: one token of its kind, the last."""
    end, kind = figures.config.get("eos_token_id"), type(figures.model).__name__
    if not (
        isinstance(end, int)
        and figures.config.get("is_encoder_decoder")
        and kind.endswith("ForSequenceClassification")
    ):
        return ids
    ids = ids.masked_fill(ids == end, end - 1 if end else end + 1)
    ids[:, -1] = end
    return ids


def _of_entities(figures: ModelSizes, name: str) -> dict[str, torch.Tensor]:
    """Each is of two tokens, one behind the other."""
    count = min(_ENTITIES, figures.tokens() // 2)
    figures.known["entity_length"] = count
    first = 2 * torch.arange(count).expand(figures.batch, -1)
    match name:
        case "entity_ids" if rows := figures.number(("entity_vocab_size",)):
            return {name: figures.ids(rows, (figures.batch, count))}
        case "entity_attention_mask":
            return {name: torch.ones(figures.batch, count, dtype=torch.long)}
        case "entity_token_type_ids":
            return {name: torch.zeros(figures.batch, count, dtype=torch.long)}
        case "entity_position_ids":  # -1 is no token
            tokens = first[..., None] + torch.arange(_MENTION)
            return {name: tokens.masked_fill(torch.arange(_MENTION) > 1, -1)}
        case "entity_start_positions" | "entity_end_positions":
            return {name: first + ("end" in name)}
    return {}
