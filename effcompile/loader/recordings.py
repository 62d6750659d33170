"""Example recordings: samples, the channels of a codec, frames of a spectrum or a spectrum as an image."""

from __future__ import annotations

import torch

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
        case "input_features" if mel:
            return mel, 2 * config.get("max_source_positions", 1500)
    width = figures.number(_SPECTRA, "audio")
    return (frames, width) if width else None
