"""Example inputs of a model of time series: the past that it sees, and in training what it has to foresee."""

from __future__ import annotations

import torch

from effcompile.loader.figures import ModelSizes


def series(figures: ModelSizes) -> dict[str, torch.Tensor]:
    """Of a configuration with a `context_length`, {} of others: [batch, time], with an axis of channels where
    there are several.
    """
    context, ahead = figures.number(("context_length",)), figures.number(("prediction_length",))
    if "past_values" not in figures.parameters or not context:
        return {}
    lags = figures.config.get("lags_sequence")
    past = context + (max(lags) if isinstance(lags, (list, tuple)) and lags else 0)
    channels: tuple[int, ...] = (figures.number(("num_input_channels",)),)
    if not channels[0]:
        width = figures.number(("input_size",))
        channels = (width,) if width > 1 else ()
    batch, moments = figures.batch, figures.config.get("num_time_features", 0)
    made = {"past_values": figures.floats(batch, past, *channels)}
    if figures.needs("past_time_features"):
        made["past_time_features"] = figures.floats(batch, past, moments)
    if figures.needs("past_observed_mask"):
        made["past_observed_mask"] = torch.ones(batch, past, *channels, dtype=torch.bool)
    whole, real = (figures.number((f"num_static_{kind}_features",)) for kind in ("categorical", "real"))
    if whole and isinstance(rows := figures.config.get("cardinality"), (list, tuple)):
        made["static_categorical_features"] = torch.stack([figures.ids(each, (batch,)) for each in rows], 1)
    if real:
        made["static_real_features"] = figures.floats(batch, real)
    # a forecast from the past alone is drawn by generate(); a forward runs the decoder on what came then
    if "future_values" in figures.parameters and ahead and (figures.training or lags):
        made["future_values"] = figures.floats(batch, ahead, *channels)
        if "future_time_features" in figures.parameters:
            made["future_time_features"] = figures.floats(batch, ahead, moments)
    targets = figures.number(("num_targets",))
    if figures.training and "target_values" in figures.parameters and targets:
        of_classes = "Classification" in type(figures.model).__name__
        made["target_values"] = (
            figures.ids(targets, (batch,)) if of_classes else figures.floats(batch, targets)
        )
    return made
