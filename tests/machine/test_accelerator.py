"""A GPU as a target, with the device's answers made up: what is measured there is the lead's to run
(benchmarks/gpu.py).
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from effcompile.backends.triton.configs import candidates
from effcompile.capture import float8
from effcompile.core.errors import UsageError
from effcompile.estimate.operators import Measured
from effcompile.machine import calibration as store
from effcompile.machine import memory
from effcompile.machine.hardware import Accelerator, DeviceRates
from effcompile.machine.machines import known_targets, load_target
from effcompile.search import machine as module
from effcompile.search.machine import AUTO, is_here, resolve
from effcompile.search.training.figures import figures_path, keep_figures, known_figures

H100 = Accelerator(
    name="NVIDIA H100 80GB HBM3", capability="9.0", processors=132, memory_bytes=81_079 << 20,
    driver="580.159.04", runtime="CUDA 13.0", packages="torch 2.11.0, triton 3.6.0", kernels="f82917b9",
)  # fmt: skip
RATES = DeviceRates(
    bandwidth=3.0e12, peak_flops={"fp32": 52e12, "bf16": 785e12}, to_host=55e9, from_host=54e9,
    launch_seconds=8.8e-6, library_bytes=(32 << 20, 1 << 20),
)  # fmt: skip
GPU = torch.device("cuda", 0)


@pytest.fixture
def h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Accelerator]:
    """A machine with this GPU; the GPUs that were measured."""
    measured: list[Accelerator] = []

    def rates() -> DeviceRates:
        measured.append(H100)
        return RATES

    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "this_accelerator", lambda: H100)
    monkeypatch.setattr(module, "device_rates", rates)
    monkeypatch.setattr(memory, "free_bytes", lambda device="cpu": 60 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 4 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: H100.name)
    return measured


def test_a_model_on_a_gpu_is_planned_for_it(h100: list[Accelerator]) -> None:
    found = resolve(AUTO, [], GPU)
    target = found.target
    assert found.here
    assert (target.device, target.memory_bandwidth, target.link_bandwidth, target.launch_seconds) == (
        "cuda",
        3.0e12,
        54e9,
        8.8e-6,
    )
    assert target.peak_flops["bf16"] == 785e12
    assert target.library_bytes == (32 << 20, 1 << 20)
    assert target.memory_bytes == 64 << 30, (
        "what others hold is not to be had: free, and what this process holds"
    )
    assert "H100" in target.describe()
    assert "55 GB/s to the host" in target.describe()


def test_a_model_on_the_processor_is_planned_for_that(
    h100: list[Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "read_bandwidth", lambda: 27e9)
    monkeypatch.setattr(store, "matmul_peak", lambda: 5e9)
    assert resolve(AUTO, [], torch.device("cpu")).target.device == "cpu"
    assert resolve(AUTO, []).target.device == "cpu"
    assert h100 == []


def test_a_gpu_is_measured_once_and_its_store_is_kept_apart(
    h100: list[Accelerator], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve(AUTO, [], GPU).keep_timings() == ()
    resolve(AUTO, [], GPU)
    assert len(h100) == 1
    with pytest.raises(Exception, match="not calibrated"):
        store.load()
    for change in (
        {"driver": "999"},
        {"packages": "torch 2.12.0, triton 3.6.0"},
        {"kernels": "0"},
        {"name": "NVIDIA H200"},
    ):
        fields = {f: getattr(H100, f) for f in H100.__struct_fields__}
        monkeypatch.setattr(
            module,
            "this_accelerator",
            lambda change=change, fields=fields: Accelerator(**{**fields, **change}),
        )
        assert store.load_or_none(device=module.this_accelerator()) == (None, None), change


def test_operator_figures_of_a_gpu_are_kept_apart(h100: list[Accelerator]) -> None:
    calibration = resolve(AUTO, [], GPU).calibration
    assert keep_figures({"mm": Measured(seconds=1e-5, workspace=0)}, calibration) is None
    assert known_figures(calibration).keys() == {"mm"}
    assert known_figures() == {}
    assert figures_path(calibration) != figures_path()


def test_a_named_target_that_is_the_gpu_present_is_here(h100: list[Accelerator]) -> None:
    found = resolve("h100-sxm", [], GPU)
    named = load_target("h100-sxm")
    assert found.here
    assert found.target.name == "h100-sxm"
    assert found.target.peak_flops["bf16"] == 785e12, "measured, not of the data sheet"
    assert (found.target.cluster, found.target.watts, found.target.gains) == (
        named.cluster,
        named.watts,
        named.gains,
    )
    assert not resolve("h200", [], GPU).here
    assert not resolve("h100-sxm", [], torch.device("cpu")).here
    assert is_here(dataclasses.replace(named, name="mine"), GPU)


def test_a_slice_of_a_gpu_is_not_the_gpu(h100: list[Accelerator], monkeypatch: pytest.MonkeyPatch) -> None:
    """MIG: it has a part of the processors and of the memory, and what was the fastest on the whole is
    measured anew.
    """
    named = f"{H100.name} MIG 1g.10gb"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: named)
    small = Accelerator(
        **{
            **{f: getattr(H100, f) for f in H100.__struct_fields__},
            "name": named,
            "memory_bytes": 9_728 << 20,
        }
    )
    monkeypatch.setattr(module, "this_accelerator", lambda: small)
    monkeypatch.setattr(memory, "free_bytes", lambda device="cpu": 9 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 0)
    assert not resolve("h100-sxm", [], GPU).here
    assert resolve(AUTO, [], GPU).target.memory_bytes == 9 << 30
    offered = [
        candidates("dkdv", "sm_90", torch.bfloat16, 128, 128, here=f"{name}, triton 3.6.0")
        for name in (H100.name, named)
    ]
    tiles = [[one for one in found if not one.tma] for found in offered]
    assert len(tiles[0]) == 1 < len(tiles[1])


def test_gpus_have_the_names_that_torch_knows_them_by() -> None:
    names = [name for target in known_targets() for name in load_target(target).devices]
    assert "NVIDIA H200" in names
    assert len(set(names)) == len(names), "one GPU is one target"


@pytest.mark.parametrize("place", ["xpu:0", "mps:0"])
def test_what_is_not_measured_is_declined_in_words(place: str, h100: list[Accelerator]) -> None:
    """Not planned as the CPU beside it; for a machine that is named there is a plan all the same."""
    with pytest.raises(UsageError, match=f"lies on {place}.*target='h100-sxm'"):
        resolve(AUTO, [], torch.device(place))
    assert not h100, "and no GPU was asked for it"
    assert not resolve("h100-sxm", [], torch.device(place)).here
    assert resolve(AUTO, [], torch.device("meta")).here


@pytest.mark.parametrize(
    ("amd", "capability", "there"),
    [
        (None, (9, 0), True),
        (None, (8, 6), False),
        ("gfx942:sramecc+", (9, 4), True),
        ("gfx90a", (9, 0), False),
    ],
)
def test_float8_is_asked_of_amds_architecture(
    amd: str | None, capability: tuple[int, int], there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers of capability say nothing: MI200's 9.0 is no Hopper."""
    monkeypatch.setattr(torch.version, "hip", None if amd is None else "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(gcnArchName=amd or "")
    )
    reason = str(float8.unavailable("cuda") or "")
    assert ("float8 products need" not in reason) is there, reason
    assert amd is None or there or "gfx90a" in reason
