"""A merged weight that was packed stands in a file: no call reads it, what saves the program does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from form_names import form
from resident_pages import resident_at
from torch import Tensor, nn

from effcompile.backends.torch import TorchEager, TorchInductor
from effcompile.backends.torch import edit as torch_edit
from effcompile.backends.torch import pack as packing
from effcompile.backends.torch.lowered import load
from effcompile.capture import capture
from effcompile.core import torch_compat
from effcompile.passes.merge import Merge
from effcompile.sites import parts as sites

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the system does not say what is resident"),
    pytest.mark.skipif(not torch_compat.has_onednn(), reason="nothing is packed"),
]


class Shared(nn.Module):
    """Two linears of one input, whose merged weight a pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(320, 320), nn.Linear(320, 320)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) * self.k(x)


@pytest.mark.parametrize("backend", [TorchEager(), TorchInductor()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("full", [False, True])
def test_no_byte_of_it_is_resident_and_answers_and_files_are_as_before(
    backend: TorchEager | TorchInductor, full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.unavailable() is not None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(torch_edit, "packing", lambda *dims, ours: "ours" if ours else "oneDNN")
    monkeypatch.setattr(packing, "LARGE", 64)
    if full:
        monkeypatch.setattr(packing, "mapped", _no_room)
    torch.manual_seed(0)
    model, x = Shared().eval(), torch.randn(2, 5, 320)
    program = capture(model, (x,), {})
    (site,) = sites.merges(program)
    merged = Merge().apply(program, SimpleNamespace(forms=lambda: {site.site: form("merged")}))
    weight, own = merged.module.get_parameter(merged.made[0]), model.q.weight.data_ptr()
    before = weight.detach().clone()
    lowered = backend.lower(merged, None, [])
    for given in (x, torch.randn(3, 4, 320)):
        assert torch.allclose(lowered(given)[0], model(given), atol=1e-5)
    assert (resident_at(weight.data_ptr()) == 0) is not full
    assert model.q.weight.data_ptr() == own
    (path,) = lowered.save(tmp_path)
    assert torch.equal(weight, before)
    assert torch.allclose(load(path)(x), model(x), atol=1e-5)


def _no_room(parameters: object) -> list[object]:
    raise OSError("no space left on device")
