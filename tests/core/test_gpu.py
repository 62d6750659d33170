"""Where a model lies, and what is free there; the GPU's answers are made up."""

import pytest
import torch
from torch import nn

from effcompile.core import gpu, torch_compat
from effcompile.machine import memory


def test_where_a_model_lies() -> None:
    x = torch.ones(2)
    assert gpu.place_of(nn.Linear(2, 2), x).type == "cpu"
    assert gpu.place_of(nn.ReLU(), x).type == "cpu"
    assert gpu.place_of(nn.ReLU()).type == "cpu"
    assert gpu.place_of(nn.Linear(2, 2, device="meta"), x).type == "meta"
    with torch_compat.fake_mode():
        model, given = nn.Module(), torch.empty(2, device="cuda:0")
        model.register_buffer("there", torch.empty(2, device="cuda:1"))
        assert gpu.place_of(model, (given,)) == torch.device("cuda", 1), "the model's, not the inputs'"
        assert gpu.place_of(nn.ReLU(), ((), {"x": [given]})) == torch.device("cuda", 0)


@pytest.mark.parametrize(("nbytes", "taken"), [(0, 0), (1, 512), (512, 512), (513, 1024)])
def test_blocks_are_rounded(nbytes: int, taken: int) -> None:
    assert gpu.rounded(nbytes) == taken


def test_what_the_allocator_holds_without_using_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 60 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 5 << 30)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 1.0)
    assert memory.free_bytes("cuda") == 65 << 30
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 0.8)
    assert memory.free_bytes("cuda") == 59 << 30, "4 GiB more may be reserved, of the 10 free"
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: 0.5)
    assert memory.free_bytes("cuda") == 55 << 30, "nothing more"
