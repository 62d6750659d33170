"""What is printed of plans for many devices: golden texts of two, at every width nothing too wide."""

from dataclasses import replace
from functools import cache

import pytest
from parallel_models import model
from rich.cells import cell_len
from test_report_text import assert_golden, plan_text

from effcompile.core.goal import Goal
from effcompile.ir.plan import Plan
from effcompile.ir.strategy import StrategyFields
from effcompile.machine.machines import load_target
from effcompile.report import html_report
from effcompile.report.devices import strategy_text
from effcompile.search.many_devices import ManyDevices
from effcompile.search.parallel.plan import StrategySearch
from effcompile.search.request import Request

ASKED: dict[str, tuple[int, int, int, StrategyFields]] = {
    "devices": (16, 64, 32, {}),
    "devices_pipeline": (32, 64, 96, {"pp": 4, "tp": 2, "dp": 4, "cp": 1, "offload": "none"}),
    "devices_no": (2, 8, 96, {"offload": "none", "recompute": "full", "engine": "megatron"}),
}


@cache
def made(name: str) -> Plan:
    devices, batch, layers, asked = ASKED[name]
    target = load_target("h100-sxm")
    assert target.cluster is not None
    many = ManyDevices.of(devices, strategy=asked, global_batch=batch)
    request = Request(goal=Goal(mode="training"), target="h100-sxm", devices=many)
    work = StrategySearch(
        request=request, many=many, model=model(layers), target=target, links=target.cluster,
        limit=target.memory_bytes, batch=1
    )  # fmt: skip
    plan = work.plan()
    assert plan.distributed is not None
    return replace(plan, versions={}, distributed=replace(plan.distributed, search_seconds=1.0))


@pytest.mark.parametrize("name", ASKED)
def test_the_report_is_as_it_was_read(name: str) -> None:
    assert_golden(name, plan_text(made(name)))


@pytest.mark.parametrize("width", [44, 60, 80, 120])
@pytest.mark.parametrize("name", ASKED)
def test_no_line_is_wider_than_the_console_except_commands(name: str, width: int) -> None:
    for line in plan_text(made(name), width).splitlines():
        command = line.lstrip().startswith(("strategy  --", "launch", "slurm"))
        assert command or cell_len(line) <= width, line


@pytest.mark.parametrize("name", ASKED)
def test_a_plan_is_the_same_when_it_is_read_again(name: str) -> None:
    plan = made(name)
    again = Plan.from_dict(plan.to_dict())
    assert again.distributed == plan.distributed
    assert again.to_dict() == plan.to_dict()


def test_json_says_what_is_agreed() -> None:
    data = made("devices").to_dict()["distributed"]
    assert data["verdict"] == "fits"
    assert data["low_bytes"] <= data["peak_bytes"] <= data["high_bytes"] <= data["limit_bytes"]
    assert len(data["ranks"]) == 16
    assert (
        data["strategy"]["dp"] * data["strategy"]["tp"] * data["strategy"]["pp"] * data["strategy"]["cp"]
        == 16
    )
    assert made("devices_no").to_dict()["distributed"]["verdict"] == "no"


def test_the_html_report_has_the_same_figures() -> None:
    for name in ASKED:
        distributed = made(name).distributed
        assert distributed is not None
        text = html_report(made(name))
        assert strategy_text(distributed.strategy) in text
        assert f"{distributed.tokens_per_second:,.0f}" in text
        assert all(f"stage {stage.stage}" in text for stage in distributed.stages)
