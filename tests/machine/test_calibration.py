import json
import math
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effcompile.core.cost import Provenance
from effcompile.core.errors import FormatError, UsageError
from effcompile.machine import calibration as module
from effcompile.machine.calibration import (
    Calibration,
    calibrate,
    calibration_path,
    load,
    load_or_none,
    save,
    save_if_dirty,
)
from effcompile.machine.grid import grid
from effcompile.machine.here import this_machine
from effcompile.machine.target import KERNELS, KernelCall, Law

OVERHEAD, RATE, BANDWIDTH = 2e-6, 1e11, 2e10


def roofline(call: KernelCall) -> float:
    return OVERHEAD + max(call.flops / RATE, call.bytes / BANDWIDTH)


class Fake:
    """A backend that times kernels by formula, has no 4-bit ones, and counts what it was asked."""

    def __init__(self, absent=("linear/w4",), factor=1.0):
        self.asked: list[KernelCall] = []
        self.absent, self.factor = absent, factor

    def __call__(self, call):
        self.asked.append(call)
        return None if call.kernel in self.absent else self.factor * roofline(call)


@pytest.fixture(autouse=True)
def _isolated(tmp_path, monkeypatch):
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "read_bandwidth", lambda: 27e9)
    monkeypatch.setattr(module, "matmul_peak", lambda: 5e9)


@pytest.fixture
def calibrated():
    fake = Fake()
    found = calibrate({"torch": fake}, quick=True)
    fake.asked.clear()
    return found, fake


def test_grid_holds_every_kernel_with_dimensions_that_fit():
    for calls in (grid(), grid(quick=True)):
        assert {c.kernel for c in calls} == set(KERNELS)
        assert all(len(c.dims) == len(c.spec.dims.split()) and min(c.dims) > 0 for c in calls)
        assert len(set(calls)) == len(calls)
    assert {c.dims for c in grid() if c.kernel == "linear/fp32"} >= {
        (1, 4096, 4096),
        (128, 768, 3072),
        (1024, 3072, 768),
    }


def test_calibrate_times_each_kernel_once_and_reports_progress():
    fake, seen = Fake(), []
    found = calibrate({"torch": fake, "other": Fake()}, quick=True, progress=lambda *step: seen.append(step))
    assert len(fake.asked) == len(set(fake.asked))
    count = len(grid(quick=True))
    assert seen == [(name, i, count) for name in ("torch", "other") for i in range(1, count + 1)]
    points = found.backends["torch"]
    assert points.overhead == roofline(KernelCall("pointwise/fp32", (1,)))
    assert points.missing == {"linear/w4"}
    assert "linear/w4" not in points.points
    assert found.memory_bandwidth == 27e9
    assert found.peak_flops["int8"] == pytest.approx(
        max(c.flops / roofline(c) for c in fake.asked if c.kernel == "linear/int8_static")
    )


def test_a_kernel_absent_at_two_shapes_is_not_tried_at_the_others():
    fake = Fake()
    calibrate({"torch": fake})
    assert sum(c.kernel == "linear/w4" for c in fake.asked) == 2


def test_a_kernel_absent_at_one_shape_only_is_kept():
    class Picky(Fake):
        def __call__(self, call):
            return (
                None
                if call.kernel == "linear/w4"
                and call.dims[0] == 1
                and call.dims[1] == 768
                and call.dims[2] == 768
                else super().__call__(call)
            )

    found = calibrate({"torch": Picky(absent=())}).backends["torch"]
    assert found.absent == {"linear/w4": [(1, 768, 768, 32)]}
    assert found.missing == set()
    assert len(found.points["linear/w4"]) == 15


def test_a_measurement_that_raises_is_absent_and_says_why():
    def broken(call):
        if call.kernel.startswith("linear/int8"):
            raise RuntimeError("no such instruction")
        return math.nan if call.kernel == "linear/bf16" else roofline(call)

    found = calibrate({"torch": broken}, quick=True).backends["torch"]
    of_bytes = {f"linear/int8_{each}" for each in ("dynamic", "channel", "token", "static", "groups")}
    assert found.missing == {*of_bytes, "linear/bf16"}
    assert {"no such instruction" in reason for reason in found.failures.values()} == {True}
    assert len(found.failures) == 5


def test_peaks_without_any_linear_are_torchs_own():
    found = calibrate({"none": lambda call: None}, quick=True)
    assert found.peak_flops == {"fp32": 5e9}


def test_this_machine_prices_from_laws_then_probes_once(calibrated):
    found, fake = calibrated
    target = this_machine(found, {"torch": fake})
    known, new = KernelCall("linear/fp32", (8, 64, 64)), KernelCall("linear/fp32", (9, 64, 64))
    found.dirty = False
    assert target.price("torch", known) == (roofline(known), Provenance.MEASURED)
    assert (fake.asked, found.dirty) == ([], False)
    assert target.price("torch", new) == target.price("torch", new) == (roofline(new), Provenance.MEASURED)
    assert (fake.asked, found.dirty) == ([new], True)
    assert this_machine(found, {}).price("torch", new) == (roofline(new), Provenance.MEASURED)


def test_a_kernel_that_is_another_backends_is_timed_and_kept_as_that_ones(calibrated):
    found, fake = calibrated
    others = Fake()
    alike = lambda backend, call: "torch" if call.kernel == "linear/fp32" else backend  # noqa: E731
    call = KernelCall("linear/fp32", (9, 64, 64))
    target = this_machine(found, {"torch": fake, "compiled": others}, priced_as=alike)
    assert (
        target.price("compiled", call) == target.price("torch", call) == (roofline(call), Provenance.MEASURED)
    )
    assert (fake.asked, others.asked) == ([call], [])
    # known, though the other one does not take part
    alone = this_machine(found, {"compiled": others}, priced_as=alike)
    assert alone.price("compiled", call) == (roofline(call), Provenance.MEASURED) and others.asked == []
    # nobody timed it, and nobody will but itself
    more = KernelCall("linear/fp32", (10, 64, 64))
    assert alone.price("compiled", more) == (roofline(more), Provenance.MEASURED) and others.asked == [more]


def test_absence_is_remembered_too(calibrated):
    found, fake = calibrated
    target = this_machine(found, {"torch": fake})
    missing = KernelCall("linear/w4", (9, 64, 64))
    assert target.price("torch", missing) is None
    assert fake.asked == []  # the grid already showed that there is no such kernel
    fake.absent = ("linear/bf16",)
    gone = KernelCall("linear/bf16", (9, 64, 64))
    assert target.price("torch", gone) is None
    assert target.price("torch", gone) is None
    assert fake.asked == [gone]


def test_a_spent_budget_interpolates_but_still_measures_the_unknown(calibrated):
    found, fake = calibrated
    other = Fake(factor=2.0)
    target = this_machine(found, {"torch": fake, "other": other}, budget_seconds=0.0)
    new = KernelCall("linear/fp32", (16, 64, 64))
    law = found.backends["torch"].law("linear/fp32")
    assert target.price("torch", new) == (law.seconds(new), Provenance.MEASURED)
    assert fake.asked == []
    assert target.price("other", new) == (2 * roofline(new), Provenance.MEASURED)
    assert other.asked == [new]


def test_one_backends_slow_kernels_leave_another_its_budget(calibrated):
    """What is interpolated for one alone may have the other chosen."""
    found, fake = calibrated
    slow = Fake(factor=2.0)

    def taking_its_time(call: KernelCall) -> float | None:
        time.sleep(0.02)
        return slow(call)

    target = this_machine(found, {"slow": taking_its_time, "torch": fake}, budget_seconds=0.01)
    calls = [KernelCall("linear/fp32", (size, 64, 64)) for size in (16, 17, 18)]
    for call in calls:
        target.price("slow", call)
    assert slow.asked == calls[:1]
    target.price("torch", calls[0])
    assert fake.asked == calls[:1]


def test_a_spent_budget_does_not_scale_a_launch_to_a_million_elements(calibrated):
    """What three elements take is the launch alone; scaled by work it said minutes for a prompt."""
    found, _ = calibrated
    other = Fake(factor=2.0)
    target = this_machine(found, {"other": other}, budget_seconds=0.0)
    few, many, more = (KernelCall("pointwise/fp32", (size,)) for size in (3, 1 << 20, 1 << 21))
    for call in (few, many, more):
        target.price("other", call)
    assert other.asked == [few, many]  # twice a million is scaled


def test_an_unmeasured_backend_of_which_nothing_is_known_has_no_price(calibrated):
    found, _ = calibrated
    assert this_machine(found, {}).price("nobody", KernelCall("linear/fp32", (8, 64, 64))) is None


def test_description_names_the_machine(calibrated):
    found, _ = calibrated
    target = this_machine(found, {})
    assert target.name == "this machine"
    assert "27 GB/s" in target.description
    assert "GFLOP/s fp32" in target.description
    assert f"calibrated {found.date}" in target.describe()
    assert target.memory_bytes > 2**28


def test_saved_and_loaded_again(calibrated):
    found, fake = calibrated
    this_machine(found, {"torch": fake}).price("torch", KernelCall("gelu/erf", (77,)))
    assert found.dirty
    assert save_if_dirty(found) is None
    assert not found.dirty
    assert "dirty" not in json.loads(calibration_path().read_text())
    again = load()
    assert again == found
    assert load_or_none() == (found, None)
    fake.asked.clear()
    this_machine(again, {"torch": fake}).price("torch", KernelCall("gelu/erf", (77,)))
    assert fake.asked == []
    before = calibration_path().stat().st_mtime_ns
    assert save_if_dirty(again) is None
    assert calibration_path().stat().st_mtime_ns == before


def test_two_processes_calibrate_at_once(calibrated):
    """Whoever reads meanwhile finds the figures of one of them, whole, and no temporary file stays."""
    save(calibrated[0])
    fastest = {}

    def calibrating(factor):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for _ in range(12):
                    save(calibrate({"torch": Fake(factor=factor)}, quick=True))
                status = 0
            finally:
                os._exit(status)
        return child

    children = [calibrating(2.0), calibrating(4.0)]
    while children:
        found, note = load_or_none()
        assert note is None
        fastest[found.peak_flops["fp32"]] = found
        ended = {child: os.waitpid(child, os.WNOHANG) for child in children}
        assert all(status == 0 for _, status in ended.values())
        children = [child for child, (number, _) in ended.items() if not number]
    assert set(fastest) <= {
        calibrate({"torch": Fake(factor=f)}, quick=True).peak_flops["fp32"] for f in (1.0, 2.0, 4.0)
    }
    assert os.listdir(calibration_path().parent) == [calibration_path().name]


def test_not_calibrated_yet():
    with pytest.raises(UsageError, match="effcompile calibrate"):
        load()
    assert load_or_none() == (None, None)


def edit(change):
    data = json.loads(calibration_path().read_text())
    change(data)
    calibration_path().write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:100]), "cut off"),
        (lambda p: p.write_bytes(b"\xff\x00\xfe"), "not valid JSON"),
        (lambda p: p.write_bytes(b""), "not valid JSON"),
        (lambda p: p.write_text("[1, 2]"), "not an effcompile calibration"),
        (lambda p: p.write_text('{"format": 1, "format": 2}'), "'format' twice"),
        (lambda p: p.write_text('{"format": "other"}'), "not an effcompile calibration"),
        (lambda p: edit(lambda d: d.update(version=99)), "version 99"),
        (lambda p: edit(lambda d: d.update(memory_bandwidth="fast")), "memory_bandwidth"),
        (
            lambda p: edit(
                lambda d: d["backends"]["torch"]["points"].update({"linear/fp32": [[[8, 64, 64], -1.0]]})
            ),
            "points",
        ),
        (
            lambda p: edit(
                lambda d: d["backends"]["torch"]["points"].update({"linear/fp99": [[[8, 64, 64], 1.0]]})
            ),
            "linear/fp99",
        ),
        (
            lambda p: edit(
                lambda d: d["backends"]["torch"]["points"].update({"linear/fp32": [[[8, 64], 1.0]]})
            ),
            "linear/fp32",
        ),
        (lambda p: edit(lambda d: d["machine"].update(cpu="Z80")), "another machine"),
    ],
)
def test_a_bad_file_is_named_and_mended_or_ignored(calibrated, damage, named):
    save(calibrated[0])
    path = calibration_path()
    damage(path)
    with pytest.raises(FormatError, match=named) as caught:
        load()
    assert str(path) in str(caught.value)
    assert "effcompile calibrate" in str(caught.value)
    nothing, note = load_or_none()
    assert nothing is None
    assert str(path) in str(note)
    save(calibrated[0])
    assert load() == calibrated[0]


def test_an_unreadable_path_is_ignored_with_a_note():
    calibration_path().mkdir(parents=True)
    nothing, note = load_or_none()
    assert nothing is None
    assert "Cannot read" in str(note)


def test_another_package_version_empties_only_its_backend(monkeypatch):
    monkeypatch.setattr(module, "package_versions", lambda: {"torch": "2.13", "onnxruntime": "1.31"})
    found = calibrate({"torch": Fake(), "onnxruntime": Fake()}, quick=True)
    save(found)
    monkeypatch.setattr(module, "package_versions", lambda: {"torch": "2.13", "onnxruntime": "1.32"})
    again, note = load_or_none()
    assert "onnxruntime" in str(note)
    assert "torch" not in str(note)
    assert again.backends["torch"] == found.backends["torch"]
    assert (again.backends["onnxruntime"].points, again.dirty) == ({}, True)
    fake = Fake()
    call = KernelCall("linear/fp32", (8, 64, 64))
    assert this_machine(again, {"onnxruntime": fake}).price("onnxruntime", call) == (
        roofline(call),
        Provenance.MEASURED,
    )
    assert fake.asked == [call]


def test_calibrating_one_backend_keeps_the_others():
    first = calibrate({"torch": Fake()}, quick=True)
    second = calibrate({"other": Fake(factor=0.5)}, quick=True, keep=first)
    assert second.backends["torch"] == first.backends["torch"]
    assert second.peak_flops["fp32"] > first.peak_flops["fp32"]


def test_an_unwritable_folder_is_a_note_and_an_error_for_the_cli(calibrated, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("EFFCOMPILE_CACHE", str(tmp_path / "file" / "folder"))
    with pytest.raises(UsageError):
        save(calibrated[0])
    assert "not kept" in str(save_if_dirty(calibrated[0]))
    assert calibrated[0].dirty
    assert load_or_none()[0] is None


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("EFFCOMPILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert calibration_path().parent == tmp_path / "effcompile"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert calibration_path().parent == tmp_path / "home" / ".cache" / "effcompile"


# ------------------------------------------------------------------ the law between the points

linears = st.tuples(st.integers(1, 2048), st.integers(1, 4096), st.integers(1, 4096))
seconds = st.floats(1e-7, 10.0)


@given(st.dictionaries(linears, seconds, min_size=1, max_size=8), st.floats(0, 1e-5))
def test_law_is_exact_at_its_points(points, overhead):
    law = Law(points=tuple(points.items()), overhead=overhead)
    assert {dims: law.seconds(KernelCall("linear/fp32", dims)) for dims in points} == points


@given(linears, seconds, st.floats(0, 1e-5), linears, st.integers(0, 2), st.integers(1, 1000))
def test_law_of_one_point_never_falls_with_work_nor_below_the_overhead(
    at, measured, overhead, dims, axis, more
):
    law = Law(points=((at, max(measured, overhead)),), overhead=overhead)
    larger = tuple(d + more * (i == axis) for i, d in enumerate(dims))
    first, second = (law.seconds(KernelCall("linear/fp32", d)) for d in (dims, larger))
    assert overhead <= first <= second * (1 + 1e-12)


@given(st.lists(linears, min_size=1, max_size=6, unique=True), linears)
def test_law_reproduces_a_compute_bound_machine_everywhere(points, dims):
    def truth(d):
        return 1e-6 + 2 * math.prod(d) / 1e11

    law = Law(points=tuple((p, truth(p)) for p in points), overhead=1e-6)
    assert law.seconds(KernelCall("linear/fp32", dims)) == pytest.approx(truth(dims), rel=1e-6)


def test_calibration_round_trips_through_json(calibrated):
    import msgspec

    found, _ = calibrated
    assert msgspec.json.decode(msgspec.json.encode(found), type=Calibration) == found


class Noisy(Fake):
    """The same, where a machine was busy: `late` times as long at the first time a call is asked for."""

    def __init__(self, late):
        super().__init__()
        self.late = dict(late)

    def __call__(self, call):
        return super().__call__(call) * self.late.pop(call, 1.0)


def _asked_in_turn(late, calls):
    """What is kept of calls that were timed one after the other, with nothing known before."""
    noisy, found = Noisy(late), calibrate({}, quick=True)
    target = this_machine(found, {"torch": noisy})
    told = [target.price("torch", call)[0] for call in calls]
    return noisy, told, dict(found.backends["torch"].points["linear/fp32"])


SMALL, LARGE = KernelCall("linear/fp32", (64, 512, 512)), KernelCall("linear/fp32", (64, 512, 2048))


def test_a_time_that_contradicts_its_neighbour_is_taken_again():
    noisy, told, kept = _asked_in_turn({LARGE: 9.0}, [SMALL, LARGE])
    assert noisy.asked == [SMALL, LARGE, LARGE]
    assert told == [roofline(SMALL), roofline(LARGE)] and kept[LARGE.dims] == roofline(LARGE)


def test_a_neighbour_that_is_contradicted_is_taken_again_once():
    calls = [LARGE, SMALL, KernelCall("linear/fp32", (64, 512, 1024))]
    noisy, told, kept = _asked_in_turn({LARGE: 99.0}, calls)
    assert noisy.asked == [LARGE, SMALL, LARGE, calls[2]]
    assert told[1:] == [roofline(call) for call in calls[1:]] and kept[LARGE.dims] == roofline(LARGE)


def test_what_stays_long_is_believed():
    """A kernel that has none of the neighbour's tricks at this shape."""
    noisy, found = Fake(factor=9.0), calibrate({}, quick=True)
    target = this_machine(found, {"torch": Fake()})
    target.price("torch", SMALL)
    slow = this_machine(found, {"torch": noisy})
    assert slow.price("torch", LARGE)[0] == 9.0 * roofline(LARGE)
    assert noisy.asked == [LARGE, LARGE]


@settings(max_examples=30)
@given(
    st.lists(st.tuples(*[st.integers(1, 4096)] * 3), min_size=2, max_size=6, unique=True),
    st.sampled_from(["linear/fp32", "linear/int8_token", "matmul/fp32"]),
)
def test_times_that_agree_are_taken_once(shapes, kernel):
    """Of whatever grows with bytes or with FLOPs."""
    fake, more = Fake(), (7,) if kernel.startswith("matmul") else ()
    found = Calibration(
        machine=module.this_hardware(), date="", memory_bandwidth=BANDWIDTH, peak_flops={"fp32": RATE}
    )
    target = this_machine(found, {"torch": fake})
    for shape in shapes:
        target.price("torch", KernelCall(kernel, (*more, *shape)))
    assert len(fake.asked) == len(shapes)
