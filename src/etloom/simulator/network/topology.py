"""Topologies: the levels of a network, read from YAML, a preset, or a rate.

    name: 4 hosts of 8 GPUs
    levels:                                     # innermost first
      - {name: nvlink, size: 8, kind: switch, bandwidth: 450GB/s, latency: 1us}
      - {name: infiniband, size: 4, kind: switch, bandwidth: 50GB/s, latency: 5us}

A level joins ``size`` units of the level below it (devices at the first level). ``bandwidth`` is that of one device in
one direction, over all its links of the level; ``latency`` that of one message. With ``cards: 4``, four network cards
per host, a group with fewer members in a host has a larger part of the rate of the host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etloom.core.errors import EtloomError
from etloom.simulator.changes import parse_duration_ns, parse_network
from etloom.simulator.yaml_input import (
    MAX_COUNT,
    check_keys,
    parse_count,
    parse_positive,
    parse_text,
    read_yaml,
    show_value,
)

KINDS = ("switch", "ring", "fully-connected")
_LEVEL_KEYS = {"name", "size", "kind", "bandwidth", "latency", "efficiency", "cards"}
_REQUIRED_KEYS = ("size", "bandwidth")
MAX_RANKS = MAX_COUNT
ANY_SIZE = 1 << 24
"""Size of a level that joins any number of units."""


@dataclass(frozen=True)
class Level:
    """A level of a network topology: number of joined units, kind, bandwidth, latency and efficiency.

    Attributes:
        size: units that the level joins.
        kind: one of KINDS.
        bytes_per_second: of one device, in one direction.
        latency_ns: of one message.
        efficiency: share of the bandwidth that transfers reach.
        cards: network cards of each joined unit, which its devices share evenly; 0: one per device.
    """

    name: str
    size: int
    kind: str = "switch"
    bytes_per_second: float = 0.0
    latency_ns: float = 0.0
    efficiency: float = 1.0
    cards: int = 0


@dataclass(frozen=True)
class Topology:
    """A network topology: its name, and its levels from the innermost to the outermost."""

    name: str
    levels: tuple[Level, ...]

    @property
    def size(self) -> int:
        """The number of devices: the product of the sizes of all levels."""
        return math.prod(level.size for level in self.levels)

    def count_devices(self, level: int) -> int:
        """Return the number of devices of each unit that ``level`` joins (level 0: 1)."""
        return math.prod(lower.size for lower in self.levels[:level])

    def count_card_devices(self, level: int) -> int:
        """Return the number of devices that share a network card of ``level``."""
        cards = self.levels[level].cards
        return max(self.count_devices(level) // cards, 1) if cards else 1


def _preset(name: str, *levels: tuple[str, int, str, str]) -> Topology:
    return Topology(
        name,
        tuple(
            Level(level, size, "switch", _parse_rate(rate), parse_duration_ns(latency), 0.8)
            for level, size, rate, latency in levels
        ),
    )


def _parse_rate(text: str) -> float:
    """Parse a bandwidth such as 50GB/s or 400Gbit/s to bytes/s. Raises EtloomError, also for a factor."""
    rate = parse_network(text, None).bytes_per_second
    if rate is None:
        raise EtloomError(
            f"expected a bandwidth with a unit, got {text!r}", remedy="such as 50GB/s or 400Gbit/s"
        )
    return rate


PRESETS: Mapping[str, tuple[tuple[str, int, str, str], ...]] = {
    "dgx-a100": (("nvlink", 8, "300GB/s", "2us"), ("infiniband", 128, "25GB/s", "5us")),
    "dgx-h100": (("nvlink", 8, "450GB/s", "2us"), ("infiniband", 128, "50GB/s", "5us")),
    "dgx-b200": (("nvlink", 8, "900GB/s", "2us"), ("infiniband", 128, "50GB/s", "5us")),
    "gb200-nvl72": (("nvlink", 72, "900GB/s", "2us"), ("infiniband", 128, "50GB/s", "5us")),
    "mi300x": (("infinity-fabric", 8, "448GB/s", "2us"), ("ethernet", 128, "50GB/s", "6us")),
    "aws-p4d": (("nvlink", 8, "300GB/s", "2us"), ("efa", 128, "6.25GB/s", "15us")),
    "aws-p5": (("nvlink", 8, "450GB/s", "2us"), ("efa", 128, "50GB/s", "15us")),
    "ethernet-1g": (("ethernet", 1024, "1Gbit/s", "50us"),),
    "ethernet-10g": (("ethernet", 1024, "10Gbit/s", "30us"),),
    "ethernet-25g": (("ethernet", 1024, "25Gbit/s", "20us"),),
    "ethernet-100g": (("ethernet", 1024, "100Gbit/s", "10us"),),
}
"""Name -> levels (name, size, nominal bandwidth of a device in one direction, latency of a message)."""


def get_preset(name: str) -> Topology:
    """Return the preset topology ``name``, such as dgx-h100. Raises KeyError."""
    return _preset(name, *PRESETS[name])


def read_topology(path: Path) -> Topology:
    """Read a topology from a YAML file. Raises EtloomError."""
    document = read_yaml(path, "topology", f"expected a YAML file, or one of {', '.join(PRESETS)}")
    try:
        return parse_topology(document)
    except EtloomError as error:
        raise EtloomError(f"{path}: {error.what}", remedy=error.remedy) from None


def parse_topology(document: Any) -> Topology:
    """Convert a topology, as read from YAML, to `Topology`. Raises EtloomError that names the wrong key and value."""
    check_keys(document, {"name", "hosts", "devices_per_host", "levels"}, "topology")
    entries = document.get("levels")
    if not isinstance(entries, list) or not 1 <= len(entries) <= 8:
        raise EtloomError(f"levels: expected a list of 1 to 8 levels, got {show_value(entries)}")
    levels = [_parse_level(entry, f"levels[{index}]") for index, entry in enumerate(entries)]
    topology = Topology(parse_text(document.get("name") or "topology"), tuple(levels))
    for number, level in enumerate(levels):
        if level.cards and topology.count_devices(number) % level.cards:
            raise EtloomError(
                f"levels[{number}].cards: {level.cards} does not divide the {topology.count_devices(number)} devices "
                "of a unit"
            )
    if topology.size > MAX_RANKS:
        raise EtloomError(f"levels: {topology.size:,} devices; expected at most {MAX_RANKS:,}")
    hosts, devices = (
        parse_count(document[key], key) if key in document else None for key in ("hosts", "devices_per_host")
    )
    if devices is not None and levels[0].size != devices and len(levels) > 1:
        raise EtloomError(
            f"devices_per_host: {devices} differs from the size of the first level, {levels[0].size}"
        )
    if hosts is not None and devices is not None and hosts * devices != topology.size:
        raise EtloomError(
            f"hosts x devices_per_host = {hosts * devices} differs from the product of the sizes of the levels, "
            f"{topology.size}"
        )
    return topology


def _parse_level(entry: Any, path: str) -> Level:
    check_keys(entry, _LEVEL_KEYS, path, _REQUIRED_KEYS)
    kind = entry.get("kind", "switch")
    if kind not in KINDS:
        raise EtloomError(f"{path}.kind: unknown kind {show_value(kind)}; expected one of {', '.join(KINDS)}")
    efficiency = parse_positive(entry.get("efficiency", 1.0), f"{path}.efficiency", 1.0)
    try:
        rate = _parse_rate(parse_text(entry["bandwidth"]))
        latency = parse_duration_ns(parse_text(entry.get("latency", "0us")))
    except EtloomError as error:
        raise EtloomError(f"{path}: {error.what}", remedy=error.remedy) from None
    return Level(
        parse_text(entry.get("name") or path),
        parse_count(entry["size"], f"{path}.size"),
        kind,
        rate,
        latency,
        efficiency,
        parse_count(entry["cards"], f"{path}.cards") if "cards" in entry else 0,
    )
