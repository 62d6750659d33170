"""The machines we know: target files shipped in `effcompile/targets/*.toml`, or a user's own file of that
form.

A file gives, in SI units: description, device, cores, memory_bytes, memory_bandwidth, link_bandwidth,
[peak_flops] by dtype (dense), and optionally efficiency, shares, launch_seconds, host_bandwidth,
host_memory_bytes, watts, hourly_price, devices (names that torch has for it: a GPU of such a name that is
here is this machine), [gains] by form ("2:4", for sparse tensor cores), [cluster] (what joins several of
them: the fields of `Links`), and [sources], which says where each figure was read.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import msgspec

from effcompile.core.errors import FormatError, UnknownNameError, UsageError, clipped
from effcompile.core.files import read_bounded
from effcompile.machine.cluster import Links
from effcompile.machine.target import HOST_BANDWIDTH, Target

TARGETS = Path(__file__).parent / "targets"
_MOST_BYTES = 1 << 20

#: Above any machine, and any cluster of them; and no infinity, which TOML can write.
_MOST = 1 << 62
_Positive = Annotated[float, msgspec.Meta(gt=0, le=float(1 << 80))]
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class _TargetFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a target file may say; the same figures as `Target`, less what only a calibration can know."""

    description: str
    device: str
    cores: _Count
    memory_bytes: _Count
    memory_bandwidth: _Positive
    link_bandwidth: _Positive
    peak_flops: Annotated[dict[str, _Positive], msgspec.Meta(min_length=1)]
    efficiency: _Share = 0.75
    shares: dict[str, _Share] = {}
    launch_seconds: Annotated[float, msgspec.Meta(ge=0, le=1)] = 5e-6
    gains: dict[str, Annotated[float, msgspec.Meta(ge=1, le=1000)]] = {}
    host_bandwidth: _Positive = HOST_BANDWIDTH
    host_memory_bytes: _Count | None = None
    watts: _Positive | None = None
    hourly_price: _Positive | None = None
    devices: tuple[str, ...] = ()
    cluster: Links | None = None
    sources: dict[str, str] = {}


def known_targets() -> list[str]:
    """Names of the machines shipped with effcompile, sorted."""
    return sorted(path.stem for path in TARGETS.glob("*.toml"))


def load_target(name_or_path: str | os.PathLike[str]) -> Target:
    """A target by its shipped name, or from a user's file (any path that ends in .toml).

    Raises:
        UnknownNameError: no such name.
        UsageError: the file cannot be read.
        FormatError: the file is not a target; names the field.
    """
    given = str(name_or_path)
    if given.endswith(".toml"):
        path = Path(given).expanduser()
    elif given in known_targets():
        path = TARGETS / f"{given}.toml"
    else:
        raise UnknownNameError("target", given, ["auto", *known_targets()])
    return _from_file(path)


def _from_file(path: Path) -> Target:
    try:
        data = tomllib.loads(read_bounded(path, _MOST_BYTES, "the target").decode())
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:  # also numbers of more digits than Python converts
        raise FormatError(f"The target {str(path)!r} is not valid TOML: {error}.") from error
    try:
        parsed = msgspec.convert(data, _TargetFile)
        if unknown := set(data.get("cluster", ())) - {field.name for field in fields(Links)}:
            raise msgspec.ValidationError(f"[cluster] has the unknown field {min(unknown)!r}")
    except (msgspec.ValidationError, UsageError, RecursionError) as error:
        raise FormatError(
            f"The target {str(path)!r} is not valid: {clipped(error)}. Compare it with "
            f"{TARGETS / 'cpu-generic.toml'}."
        ) from error
    return Target(name=path.stem, **msgspec.structs.asdict(parsed))
