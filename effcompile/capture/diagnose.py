"""From an exception inside torch.export to an error that names the user's line, the construct and the known
fix.
"""

from __future__ import annotations

import inspect
import linecache
import os
import re
import sysconfig
import traceback
from dataclasses import dataclass

import torch
from torch import nn

from effcompile.core.errors import CaptureError, InputsError
from effcompile.core.stages import causes, first_line

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(torch.__file__)
_STDLIB = sysconfig.get_paths()["stdlib"]


@dataclass(frozen=True, slots=True)
class _Known:
    """A class of failure: what its message looks like, what it is, how it is mended."""

    pattern: str
    construct: str
    fix: str


_READS_VALUES = _Known(
    r"GuardOnDataDependent|data-dependent expression|data-dependent control "
    r"flow|DataDependentOutput|_local_scalar_dense",
    "Python that depends on the values in a tensor (an `if`, a slice bound, `.item()`, `int(tensor)`)",
    "decide on shapes instead, or use torch.where or torch.cond",
)
_SHAPED_BY_VALUES = _Known(
    r"DynamicOutputShape|nonzero|unbacked",
    "an operator whose output shape depends on the data",
    "use a mask of fixed shape instead of selecting elements",
)
#: First match wins. Patterns are searched in `ExceptionType: message`, and then in the line of the user's
#: that raised.
_KNOWN = (
    _Known(
        r"not a known type|DynamicCache|EncoderDecoderCache",
        "an input or output whose type torch.export does not know",
        "return tensors, tuples, dicts or dataclasses registered with torch.export.register_dataclass; "
        "for a key/value cache pass use_cache=False",
    ),
    _Known(
        r"layer_?drop|skip_the_layer|dropout_probability",
        "layers that are left out by chance, drawn in Python: every step is another one",
        "set the configuration's layerdrop (encoder_layerdrop, decoder_layerdrop) to 0, or draw a factor "
        "for each layer with torch",
    ),
    _Known(
        r"mask_time|spec_?augment|_compute_mask_indices",
        "a mask that is drawn outside of torch (SpecAugment)",
        "set the configuration's mask_time_prob and mask_feature_prob to 0, or give mask_time_indices as "
        "an input",
    ),
    _Known(
        r"labels\.max\(\) >= self\.config\.vocab_size",
        "a loss (CTC) that selects the labels which are none of the padding, as many as there are",
        "give no `labels` but inputs of other names, which the forward does not take, and the loss beside "
        "the model: loss=lambda outputs, inputs: F.ctc_loss(...) of padded targets and their lengths",
    ),
    _READS_VALUES,
    _SHAPED_BY_VALUES,
    _Known(
        r"Constraints violated|not all values of|specialized",
        "an axis that was asked to be dynamic and that the code makes constant",
        "leave that axis out of `dynamic`, or pass dynamic=False",
    ),
    _Known(
        r"UnsupportedOperatorException|no fake impl|NotImplementedError|Could not run .* from the "
        r"'Meta'|not supported",
        "an operator that cannot be traced",
        "give it a fake implementation with torch.library.register_fake, or replace it",
    ),
    _Known(
        r"numpy|Expected .* FakeTensor|convert all Tensors to FakeTensors",
        "a tensor that leaves torch on the way, or is made outside the traced code",
        "keep it in torch and register it as a buffer",
    ),
)


#: A gradient that the forward takes, which torch.export follows into tensors that are none of its own.
_GRADIENT = _Known(
    r"fake tensor in the exported program constant|functorch tensor|unpack_hook|does not require grad",
    "a gradient that the forward takes itself, which torch.export cannot trace",
    "plan the part that is differentiated, and take the gradient outside of it",
)
_TAKES_GRADIENT = re.compile(
    r"autograd\.grad\(|func\.(grad|grad_and_value|vjp|jvp|jacrev|hessian)\(|\.backward\("
)


def depends_on_values(error: BaseException) -> bool:
    """Whether torch.export could not follow Python or a shape into the values of a tensor."""
    head = f"{type(error).__name__}: {error}"
    return any(re.search(known.pattern, head, re.IGNORECASE) for known in (_READS_VALUES, _SHAPED_BY_VALUES))


def capture_error(error: BaseException, model: nn.Module) -> CaptureError:
    """The CaptureError for what torch.export raised."""
    head = f"{type(error).__name__}: {error}"
    place = place_of(error, model)
    takes = _takes_gradient(model) if re.search(_GRADIENT.pattern, head) else None
    told = f"{head}\n{place.partition(' (')[2]}"
    matching = (each for each in _KNOWN if re.search(each.pattern, told, re.IGNORECASE))
    known, place = (_GRADIENT, takes) if takes else (next(matching, None), place)
    construct = known.construct if known else "a construct that torch.export does not take"
    fix = known.fix if known else "run torch.export.draft_export on the model for torch's own full report"
    return CaptureError(
        f"{type(model).__name__} cannot be captured. {place}: {construct}.\n  torch says: "
        f"{first_line(error)}\n  Mend it: {fix}."
    )


def own_error(error: Exception, model: nn.Module, given: str, mend: str) -> InputsError:
    """What a model's own forward raised, with the line; `given`: "these inputs"."""
    return InputsError(
        f"{type(model).__name__} itself raises with {given}, before effcompile does anything. "
        f"{first_line(error)}\n  at {place_of(error, model)}\n  {mend}"
    )


def place_of(error: BaseException, model: nn.Module | None = None) -> str:
    """`file:line (source line)` of the innermost frame in the user's code; the model's forward where there is
    none.
    """
    frames = [
        frame
        for one in causes(error)
        for frame in traceback.extract_tb(one.__traceback__)
        if _is_users(frame.filename)
    ]
    if frames:
        return _written(frames[-1])
    if model is None:
        return "place unknown"
    try:
        forward = type(model).forward
        return f"{inspect.getsourcefile(forward)}:{inspect.getsourcelines(forward)[1]} (somewhere in forward)"
    except (TypeError, OSError):
        return "in the model's forward"


def place_here() -> str:
    """The innermost line of the user's code that is being run, as `place_of` writes it."""
    frames = (frame for frame in reversed(traceback.extract_stack()) if _is_users(frame.filename))
    return next(map(_written, frames), "place unknown")


def _written(frame: traceback.FrameSummary) -> str:
    source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f"{frame.filename}:{frame.lineno}" + (f" ({source})" if source else "")


def _takes_gradient(model: nn.Module) -> str | None:
    """Where a forward of the model takes a gradient, as `place_of` writes it; None where none does."""
    for kind in dict.fromkeys(type(module) for module in model.modules()):
        try:
            file, (lines, first) = inspect.getsourcefile(kind.forward), inspect.getsourcelines(kind.forward)
        except (TypeError, OSError):
            continue
        for number, line in enumerate(lines, first):
            if file and _is_users(file) and _TAKES_GRADIENT.search(line):
                return f"{file}:{number} ({line.strip()})"
    return None


def _is_users(filename: str) -> bool:
    """Neither torch, nor the standard library, nor effcompile, nor generated code."""
    if filename.startswith(("<", _TORCH, _OURS)):
        return False
    return not filename.startswith(_STDLIB) or "site-packages" in filename
