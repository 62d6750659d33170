import subprocess
import sys

import pytest
import torch

import effcompile
from effcompile.core.cost import Provenance
from effcompile.core.errors import FormatError, UnknownNameError, UsageError
from effcompile.machine.machines import TARGETS, known_targets, load_target
from effcompile.machine.target import KernelCall

FIGURES = (
    "cores",
    "memory_bytes",
    "memory_bandwidth",
    "link_bandwidth",
    "peak_flops",
    "efficiency",
    "launch_seconds",
)


def test_the_promised_machines_are_there():
    gpus = {
        "h100-sxm",
        "h200",
        "b200",
        "a100-80gb",
        "v100-32gb",
        "rtx4090",
        "l40s",
        "mi300x",
        "mi355x",
        "gb200",
    }
    processors = {"cpu-generic", "epyc-9654", "grace", "graviton4"}
    assert gpus | processors | {"ipu-mk2", "gaudi3", "tpu-v5e", "tpu-v5p", "tpu-v6e"} <= set(known_targets())


@pytest.mark.parametrize("name", known_targets())
def test_every_figure_has_a_source_and_prices_a_linear(name):
    target = load_target(name)
    assert target.name == name
    assert {f for f in FIGURES if len(target.sources.get(f, "")) < 10} == set()
    assert target.efficiency <= 1
    priced = target.price("torch", KernelCall("linear/fp32", (128, 768, 3072)))
    assert priced is not None
    seconds, provenance = priced
    assert provenance is Provenance.MODELLED
    assert seconds >= 2 * 128 * 768 * 3072 / target.peak_flops["fp32"]


@pytest.mark.parametrize("name", known_targets())
def test_narrower_arithmetic_is_never_slower(name):
    peaks = load_target(name).peak_flops
    order = [peaks[d] for d in ("fp32", "tf32", "bf16", "fp8", "int8") if d in peaks]
    assert order == sorted(order)


def test_a_machine_without_an_arithmetic_declines_to_price_it():
    assert load_target("v100-32gb").price("torch", KernelCall("linear/bf16", (1, 8, 8))) is None


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'h100-sxm'"):
        load_target("h100sxm")


def test_a_users_own_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((TARGETS / "h200.toml").read_text().replace("cores = 132", "cores = 7"))
    target = load_target(path)
    assert (target.name, target.cores) == ("mine", 7)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("cores = 132", "cores = 'many'"), "cores"),
        (("memory_bandwidth = 4.8e12", "memory_bandwidth = -1.0"), "memory_bandwidth"),
        (("efficiency = 0.79", "efficiency = 1.5"), "efficiency"),
        (("bf16 = 989.4e12", "bf16 = 0.0"), "peak_flops"),
        (("cores = 132", "colour = 3"), "colour|cores"),
        (("[sources]", "[sources"), "TOML"),
    ],
)
def test_a_bad_file_names_the_field(tmp_path, change, named):
    path = tmp_path / "bad.toml"
    text = (TARGETS / "h200.toml").read_text()
    assert change[0] in text
    path.write_text(text.replace(*change))
    with pytest.raises(FormatError, match=named) as caught:
        load_target(path)
    assert "bad.toml" in str(caught.value)


def test_not_text_and_not_there(tmp_path):
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="TOML"):
        load_target(tmp_path / "binary.toml")
    with pytest.raises(UsageError, match="No such file"):
        load_target(tmp_path / "absent.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(UsageError, match="Cannot read"):
        load_target(tmp_path / "folder.toml")


def test_targets_are_listed_without_torch():
    code = (
        "import sys; from effcompile.machine.machines import *; load_target(known_targets()[0]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("kernel", ["linear/int8_token", "linear/int8_groups", "linear/int4_groups"])
def test_kernels_of_ours_for_processors_are_offered_on_no_gpu(kernel: str) -> None:
    dims = (16, 512, 512, 32) if "groups" in kernel else (16, 512, 512)
    call = KernelCall(kernel, dims)
    assert load_target("h100-sxm").price("torch-inductor", call) is None
    assert load_target("cpu-generic").price("torch-inductor", call) is not None


def test_the_roof_of_a_product_is_its_arithmetic_and_of_anything_else_nothing() -> None:
    target = load_target("h100-sxm")
    product, norm = KernelCall("linear/bf16", (128, 256, 512)), KernelCall("norm/layer", (128, 256))
    assert target.roof(product) == 2 * 128 * 256 * 512 / target.peak_flops["bf16"]
    assert target.roof(norm) == 0
    assert target.roof(KernelCall("linear/bf16", (128, 256, 512))) < target.roofline(product)[0]


def test_a_plan_adds_up_the_roofs_of_what_it_takes() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 32)).eval()
    plan = effcompile.plan(model, (torch.randn(16, 64),), target="epyc-9654")
    flops = 2 * 16 * (64 * 128 + 128 * 32)
    assert plan.predicted.roof_seconds == pytest.approx(flops / load_target("epyc-9654").peak_flops["fp32"])
