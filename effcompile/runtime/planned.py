"""What every planned model has: its plan, and what it answers a call that the plan does not hold for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from effcompile.core.errors import Fallback, GuardError
from effcompile.core.types import Args, Kwargs, Outputs
from effcompile.ir.plan import Plan

#: What may stand in the place of a refused call, in words.
_OFFERS = {
    "replan": "on_change='replan' plans again by itself",
    "eager": "on_change='eager' runs the model's own forward there",
}

#: Methods of well-known models that run the model's modules themselves, past what is planned of a call:
#: HuggingFace's, sentence-transformers', timm's.
_OWN_WAYS = frozenset(
    {"encode", "encode_query", "encode_document", "predict", "forward_features"}
    | {f"get_{what}_features" for what in ("text", "image", "audio", "video")}
)

if TYPE_CHECKING:
    from rich.console import Console


def past_the_plan(name: str) -> str:
    """Why a method of this name runs nothing that is planned; '' of any other."""
    if name == "generate":
        return "generate() calls it token by token with a cache, for which nothing is planned"
    if name not in _OWN_WAYS:
        return ""
    return f"{name}() calls the modules in it, for which nothing is planned: plan the module that it calls"


class SetOnModel(nn.Module):
    """What stands around a model (`model` among its attributes, or its child `original`), and hands on what
    is set.

    An attribute that the model has, and this has not, is set on the model, as torch.compile's modules do it:
    else its forward would go on with the value of before.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        held = self.__dict__
        model = held.get("model") or held.get("_modules", {}).get("original")
        own = name in held or name.startswith("_") or hasattr(type(self), name) or value is model
        if model is None or own or not _has(model, name):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)


def _has(model: nn.Module, name: str) -> bool:
    """Also what is there and cannot be read yet (the `trainer` of a LightningModule, before it has one)."""
    try:
        return hasattr(model, name)
    except Exception:
        return True


class PlannedModel(nn.Module):
    """A model that runs as its plan says.

    A call that the plan does not hold for is refused, or answered (`on_change`).
    """

    plan: Plan
    #: What runs in the place of a refused call (`on_change`): a name that no model has, as it stands beside
    #: the model's own attributes.
    _effcompile_fallback: Fallback | None
    #: What else `on_change` could have been.
    _effcompile_offers: tuple[str, ...] = ()

    def unplanned(self) -> nn.Module:
        """The model as it was given, with all that it holds."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """What the original has beside (`config`, `device`, `can_generate` ...): HuggingFace's pipelines ask
        for it.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("_modules", {}).get("original")
            if original is None or name.startswith("_"):
                raise
        return self._beside(name, getattr(original, name))

    def _beside(self, name: str, found: object) -> object:
        """What is given out for an attribute that only the original has."""
        return found

    def report(self, console: Console | None = None, *, verbose: bool = False) -> None:
        """Print the plan."""
        self.plan.report(console, verbose=verbose)

    def _refuse(self, error: GuardError, args: Args, kwargs: Kwargs) -> Outputs:
        """What stands for a refused call.

        Raises:
            GuardError: nothing does.
        """
        if self._effcompile_fallback is None:
            raise self._offering(error)
        return self._effcompile_fallback(error, args, kwargs)

    def _offering(self, error: GuardError) -> GuardError:
        """The error, with what a call of this model could do instead, had it been asked for."""
        said = ", ".join(_OFFERS[how] for how in self._effcompile_offers)
        return error.saying(said and f"In effcompile.optimize, {said}.")
