import pytest

from effcompile.core.errors import FormatError, UsageError
from effcompile.ir.strategy import Strategy
from effcompile.machine.cluster import Cluster, Links
from effcompile.machine.machines import TARGETS, known_targets, load_target

LINKS = Links(inside=450e9, adapter=50e9, inside_efficiency=1.0, between_efficiency=1.0)


@pytest.mark.parametrize("name", [name for name in known_targets() if load_target(name).cluster])
def test_every_figure_of_a_cluster_has_a_source(name):
    links = load_target(name).cluster
    assert {f for f in links.__slots__ if f != "sources" and len(links.sources.get(f, "")) < 10} == set()
    assert links.adapter * links.adapters_per_node / links.devices_per_node <= links.inside


def test_nodes_are_taken_from_the_links_or_as_they_are_given():
    assert (Cluster.of(LINKS, 64).nodes, Cluster.of(LINKS, 64).per_node) == (8, 8)
    assert (Cluster.of(LINKS, 4).nodes, Cluster.of(LINKS, 4).per_node) == (1, 4)
    assert Cluster.of(LINKS, 64, "16x4").per_node == 4


@pytest.mark.parametrize(
    ("devices", "nodes", "said"),
    [
        (0, None, "whole number"),
        (12, None, "multiple of 8"),
        (64, "8x4", "are 32 devices, not 64"),
        (64, "eight", "Write it like 8x8"),
    ],
)
def test_devices_that_cannot_stand_so_are_refused(devices, nodes, said):
    with pytest.raises(UsageError, match=said):
        Cluster.of(LINKS, devices, nodes)


def test_a_group_has_the_adapters_of_its_ranks_on_a_node():
    """FSDP over whole nodes gets all eight adapters; a dp group beside tp 8 gets one (both were measured as 8
    : 1).
    """
    cluster, fsdp, beside = Cluster.of(LINKS, 64), Strategy(dp=64), Strategy(dp=8, tp=8)
    assert cluster.on_one_node(fsdp, "dp") == 8
    assert cluster.bandwidth(8, 64) == 400e9
    assert cluster.on_one_node(beside, "dp") == 1
    assert cluster.bandwidth(1, 8) == 50e9
    assert cluster.bandwidth(cluster.on_one_node(beside, "tp"), 8) == 450e9


@pytest.mark.parametrize(
    ("figure", "said"),
    [
        ("adapter = -1.0", "adapter = -1"),
        ("adapter = inf", "adapter = inf"),
        ("adapter = nan", "adapter = nan"),
        ("adapter = 'x'", "adapter"),
        ("adapter = 50e9\nadapters = 3", "unknown field 'adapters'"),
    ],
)
def test_a_section_of_a_target_file_is_checked(figure, said, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((TARGETS / "h100-sxm.toml").read_text().replace("adapter = 50e9", figure))
    with pytest.raises(FormatError, match=said):
        load_target(path)
