"""What the attention operators allocate is never more than they say, and never the matrix of scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_reference import Problem
from test_attention import LAYOUTS, laid_out, listed, problem
from torch import Tensor

from effcompile.core import torch_compat_memory
from effcompile.ops.attention import attention, attention_backward
from effcompile.ops.workspace import workspace_bytes

S = 1024
ids = (torch.arange(S) // 200)[None]
FORMS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"hi": 0},
    "window": {"lo": -100, "hi": 0},
    "prefix": {"hi": 100},
    "padded": {"hi": 0, "valid": torch.arange(S) >= torch.tensor([[300], [0]]), "uniform_empty": True},
    "documents": {"q_ids": ids, "k_ids": ids},
    "mixed documents": {"q_ids": torch.arange(S)[None] % 7, "k_ids": torch.arange(S)[None] % 7},
    "mask": {"mask": torch.rand(1, 1, S, S) > 0.5},
    "slopes": {"hi": 0, "bias": torch.randn(1, 4, 1, S), "sink": torch.randn(4)},
    "bias": {"bias": torch.randn(1, 4, S, S), "lo": -100, "hi": 0},
    "softcap": {"softcap": 2.0, "hi": 0},
    "wide values": {"dv": 32, "hi": 0},
}


def allocated(call: Any, args: tuple[Any, ...], form: dict[str, Any]) -> int:
    """Bytes beyond results at the highest instant, by the allocator's trace."""
    call(*args, **form)
    with torch_compat_memory.memory_profile() as profile:
        results = call(*args, **form)
    return torch_compat_memory.peak_of_memory_events(profile) - sum(t.nbytes for t in results)


def said_and_allocated(p: Problem, grad: Tensor) -> list[tuple[int, int]]:
    form = {key: value for key, value in p.form().items() if value not in (None, False)}
    out, lse = attention(*p.positional(), **p.form())
    calls = [
        (attention, p.positional()),
        (attention_backward, (grad, *p.positional()[:3], out, lse, *p.positional()[3:])),
    ]
    targets = (torch.ops.effcompile.attention.default, torch.ops.effcompile.attention_backward.default)
    found = []
    for target, (call, args) in zip(targets, calls, strict=True):
        said = workspace_bytes(target, args, form)
        assert said is not None
        found.append((said, allocated(call, args, form)))
    return found


@pytest.mark.parametrize(
    "form", [{"hi": 0, "uniform_empty": True}, {"hi": 0, "softcap": 2.0}, {"uniform_empty": True}]
)
def test_of_short_sequences_no_more_than_all_scores_are_counted(form: dict[str, Any]) -> None:
    """Blocks of a million scores would be 14 MiB; here there are 73,728."""
    p = problem(sq=48, sk=48, d=16, dtype=torch.float32, **{"dv": 16, **form})
    scores = p.q.shape[0] * p.q.shape[1] * 48 * 48 * 4
    for said, measured in said_and_allocated(p, torch.randn(*p.q.shape[:3], p.v.shape[3])):
        assert measured <= said <= 5 * scores + 8 * (p.q.nbytes + p.k.nbytes + p.v.nbytes) + 2**18


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_never_more_than_said(name: str, dtype: torch.dtype) -> None:
    p = problem(sq=S, sk=S, d=16, dtype=dtype, **{"dv": 16, **FORMS[name]})
    for said, measured in said_and_allocated(p, torch.randn(2, 4, S, p.v.shape[3]).to(dtype)):
        assert measured <= said


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_other_strides(layout: str) -> None:
    p = problem(sq=S, sk=S, d=16, dv=16, dtype=torch.float32, lo=-100, hi=0)
    p.q, p.k, p.v = (laid_out(x, layout) for x in (p.q, p.k, p.v))
    for said, measured in said_and_allocated(p, laid_out(torch.randn(2, 4, S, 16), layout)):
        assert measured <= said


def test_tiles() -> None:
    p = problem(sq=S, sk=S, d=16, dv=16, dtype=torch.float32)
    listed(p, (1, 4), 64, 64)
    for said, measured in said_and_allocated(p, torch.randn(2, 4, S, 16)):
        assert measured <= said


def test_the_matrix_of_scores_is_never_there() -> None:
    for terms in ({"hi": 0}, {"lo": -512, "hi": 0}, {"softcap": 2.0, "hi": 0}):
        p = problem(b=1, h=8, kv=8, sq=4096, sk=4096, d=16, dv=16, dtype=torch.float32, **terms)  # type: ignore[arg-type]
        said = workspace_bytes(torch.ops.effcompile.attention.default, p.positional(), p.form())
        assert said is not None and said < 8 * 4096 * 4096 * 4 // 16
