"""Example recordings: samples, the channels of a codec, frames of a spectrum or a spectrum as an image."""

from __future__ import annotations

import torch
from torch import nn

from effcompile.loader.documented import documented
from effcompile.loader.figures import ModelSizes

SAMPLES, _FRAMES = 16000, 200
#: Features of a frame, where frames come before features.
_SPECTRA = ("input_feat_per_channel", "feature_projection_input_dim")


def recording(figures: ModelSizes, name: str) -> dict[str, torch.Tensor]:
    """A recording a row under the name of its argument; {} where the settings do not tell its sizes."""
    sizes = _sizes(figures, name)
    made = {} if sizes is None else {name: figures.floats(figures.batch, *sizes)}
    if made and "is_longer" in figures.parameters:
        made["is_longer"] = torch.zeros(figures.batch, 1, dtype=torch.bool)
    if made and figures.training and type(figures.model).__name__.endswith("ForCTC"):
        # what it counts the frames of its loss by, where there is no convolution to count them through
        frames = made[name].shape[1]
        if "attention_mask" in figures.parameters and made[name].dim() == 3:
            made["attention_mask"] = torch.ones(figures.batch, frames, dtype=torch.long)
    return made


def _sizes(figures: ModelSizes, name: str) -> tuple[int, ...] | None:
    """Of one recording."""
    config, samples = figures.part("audio"), figures.length or SAMPLES
    frames = min(figures.length or _FRAMES, config.get("max_source_positions", _FRAMES))
    mel = figures.number(("num_mel_bins",), "audio")
    match name:
        case "input_values" if "frequency_stride" in config:  # a spectrogram cut into patches
            return config["max_length"], mel
        case "input_values" if "audio_channels" in config or "downsampling_ratios" in config:  # codecs
            return config.get("audio_channels", 1), samples
        case "input_values":
            return (samples,)
        case "input_features" if (side := figures.number(("spec_size",), "audio")) and mel:
            # four where windows of a long one are put together
            return (4 if config.get("enable_fusion") else 1), side * max(side // mel, 1), mel
        case "input_features" if mel and _frames_first(figures, name, mel):
            return frames, mel
        case "input_features" if mel:
            return mel, 2 * config.get("max_source_positions", 1500)
    width = figures.number(_SPECTRA, "audio")
    return (frames, width) if width else None


def _frames_first(figures: ModelSizes, name: str, mel: int) -> bool:
    """Whether time comes before what a frame consists of (Parakeet), not after it (Whisper, whose docstring
    says that it does, too): no convolution takes the frame's numbers as its channels.

    A docstring that tells of two axes tells of samples (Canary's and CohereAsr's do): that of the encoder, to
    which the spectrum goes on, is read.
    """
    described = figures.documents.get(name)
    axes = described.dimensions if described is not None else ()
    if len(axes) == 2:
        within = (documented(part).get(name) for part in figures.model.modules())
        axes = next((found.dimensions for found in within if found and len(found.dimensions) == 3), axes)
    as_channels = any(
        isinstance(part, nn.Conv1d) and part.in_channels == mel and part.groups == 1
        for part in figures.model.modules()
    )
    return len(axes) == 3 and axes[2].startswith(("feature", "num_mel", "config.num_mel")) and not as_channels
