"""Peak performance of devices by data type, and memory bandwidth; devices.json lists known devices and sources."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import polars as pl

from etloom.core.errors import AnalysisError, InvalidValue, UnknownName
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank, select_device_events

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
_SPELLINGS = {
    "fp64": "double float64",
    "fp32": "float float32",
    "fp16": "half float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz",
    "int8": "char int8 signed_char unsigned_char byte uint8",
}
_VENDORS = {"MI": "AMD", "Gaudi": "Intel", "Ascend": "Huawei", "TPU": "Google"}
"""Begin of the names of a vendor's devices in devices.json; NVIDIA's have no common one."""
_PRECISION = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}


@dataclass(frozen=True)
class Peaks:
    """Peak performance of a device: TFLOP/s by precision (``every``: for all precisions), memory bandwidth in 10^9
    bytes/s; size of the memory, multiprocessors and architecture, if known."""

    name: str
    bandwidth_gbs: float | None
    matrix_tflops: dict[str, float]
    vector_tflops: dict[str, float]
    every: float | None = None
    memory_gib: float | None = None
    multiprocessors: int | None = None
    architecture: str | None = None

    @property
    def vendor(self) -> str:
        """The vendor of a device of devices.json."""
        return next((vendor for begin, vendor in _VENDORS.items() if self.name.startswith(begin)), "NVIDIA")

    def tflops(self, precision: str) -> float | None:
        """Return the peak TFLOP/s of a precision: one of PRECISIONS, vector fp32 or vector fp64; None if the device has
        none."""
        unit, _, scalar = precision.rpartition(" ")
        if unit == "vector":
            return self.vector_tflops.get(scalar, self.every)
        return self.every or self.matrix_tflops.get(scalar)


def infer_precision(dtype: str | None, matrix: bool, tf32: bool) -> str | None:
    """Return the precision of a computation as `Peaks.tflops` expects it; None for types without a peak (complex)."""
    plain = re.sub(r"c10::|torch\.|_t$", "", (dtype or "").strip()).lower().replace(" ", "_")
    if not matrix:
        return "vector fp64" if plain in _SPELLINGS["fp64"].split() else "vector fp32"
    name = _PRECISION.get(plain)
    return "tf32" if name == "fp32" and tf32 else name


def find_peaks(
    trace: Trace,
    devices: list[int],
    *,
    device: str | None = None,
    device_peaks: str | None = None,
    peak_tflops: float | None = None,
    bandwidth_gbs: float | None = None,
    memory: bool = True,
) -> Peaks:
    """Return the peak performance of the trace's device; options override its values.

    Args:
        trace: The trace of a rank.
        devices: Indices of the used devices; empty for a CPU-only trace.
        device: Name of the device, instead of the recorded one.
        device_peaks: A file like devices.json, whose entries take precedence.
        peak_tflops: Peak for any precision, TFLOP/s.
        bandwidth_gbs: Memory bandwidth, GB/s.
        memory: Whether the bandwidth is needed.

    Raises:
        AnalysisError: The device is in no file and the numbers are not specified, or the file is invalid.
    """
    for option, number in (("peak_tflops", peak_tflops), ("bandwidth_gbs", bandwidth_gbs)):
        if number is not None and not number > 0:
            raise InvalidValue(
                f"expected a positive number, got {number}", remedy="specify a number above 0", option=option
            )
    remedy = "specify --peak-tflops" + " and --bandwidth-gbs" * memory
    enough = peak_tflops is not None and (bandwidth_gbs is not None or not memory)
    specified = Peaks("given", bandwidth_gbs, {}, {}, peak_tflops)
    if not devices:
        if not enough:
            raise AnalysisError(
                "the trace contains no GPU activity, and the peaks of the CPU are unknown",
                where=describe_rank(trace),
                remedy=remedy,
            )
        return specified
    name = device or find_device_name(trace, devices)
    table = _load_file(device_peaks) if device_peaks else []
    # A MIG slice of a device (A100-SXM4-40GB MIG 3g.20gb) has only part of its peaks.
    table += [] if " MIG " in f"{name} " else _load_shipped_peaks()
    peaks = next((peaks for pattern, peaks in table if name and _matches(pattern, name)), None)
    if peaks is None:
        if not enough:
            raise AnalysisError(
                f"the peaks of {repr(name) if name else 'the device, which the trace does not name,'} are unknown",
                where=describe_rank(trace),
                remedy=f"{remedy}, or --device NAME, or a file of peaks with --device-peaks (docs/flops.md)",
            )
        return specified
    return Peaks(
        peaks.name,
        bandwidth_gbs or peaks.bandwidth_gbs,
        peaks.matrix_tflops,
        peaks.vector_tflops,
        peak_tflops,
    )


def check_device(device: str | None, device_peaks: str | None) -> None:
    """Raise UnknownName if a device is neither known nor in the file ``device_peaks``."""
    if device is not None:
        table = [*(_load_file(device_peaks) if device_peaks else []), *_load_shipped_peaks()]
        if not any(_matches(pattern, device) for pattern, _ in table):
            raise UnknownName("device", device, [peaks.name for _, peaks in table], option="device")


def lookup_peaks(device: str) -> Peaks:
    """Return the peaks of a known device by its name in devices.json, or by a part of it (h100).

    Raises:
        UnknownName: no device has this name.
    """
    table = [peaks for _, peaks in _load_shipped_peaks()]
    named = [peaks for peaks in table if peaks.name.lower() == device.strip().lower()]
    matching = [peaks for pattern, peaks in _load_shipped_peaks() if _matches(pattern, device)]
    if not named + matching:
        raise UnknownName("device", device, [peaks.name for peaks in table], option="device")
    return (named + matching)[0]


def find_fastest_peaks() -> Peaks:
    """Return the largest peak of each precision, and bandwidth, of all known devices: none of them needs less time."""
    return _combine_peaks("the fastest known device", [peaks for _, peaks in _load_shipped_peaks()], max)


def find_architecture_peaks(trace: Trace) -> Peaks | None:
    """Return the smallest peaks of the known devices of an architecture that kernels name; None if they name none.

    None of these devices needs more time. Kernels of older architectures run on newer devices, too, and say nothing. A
    device that has a name is left out: it may be a part of one of these devices (MIG).
    """
    if find_device_name(trace, []) is not None:
        return None
    names = select_device_events(trace)["name"].cast(pl.String).unique()
    texts = names.str.extract(_ARCHITECTURE, 1).drop_nulls().unique().to_list()
    architecture = max((_ARCHITECTURES[text] for text in sorted(texts)), key=len, default=None)
    devices = [peaks for _, peaks in _load_shipped_peaks() if peaks.architecture == architecture]
    if architecture is None or not devices:
        return None
    return _combine_peaks(f"the slowest of known devices with kernels of {architecture}", devices, min)


_ARCHITECTURES = {
    "sm90": "sm90", "sm100": "sm100", "sm103": "sm100", "gfx90a": "gfx90a", "ISA90a": "gfx90a", "gfx950": "gfx950",
    "ISA950": "gfx950",
}  # fmt: skip
"""As names of kernels spell it -> as devices.json does."""
_ARCHITECTURE = rf"(?:^|[^A-Za-z])({'|'.join(_ARCHITECTURES)})(?:[^0-9]|$)"


def _combine_peaks(name: str, devices: list[Peaks], choose: Callable[[list[float]], float]) -> Peaks:
    def combine(rates: list[dict[str, float]]) -> dict[str, float]:
        return {key: choose([rate[key] for rate in rates if key in rate]) for key in set().union(*rates)}

    return Peaks(
        name,
        choose([peaks.bandwidth_gbs for peaks in devices if peaks.bandwidth_gbs]),
        combine([peaks.matrix_tflops for peaks in devices]),
        combine([peaks.vector_tflops for peaks in devices]),
    )


def find_device_name(trace: Trace, devices: list[int]) -> str | None:
    """Return the recorded name of the device that was used."""
    properties = [device for device in trace.meta.get("device_properties") or () if isinstance(device, dict)]
    used = [device for device in properties if device.get("id") in devices] or properties
    names = [name for device in used if isinstance(name := device.get("name"), str) and name.strip()]
    return names[0] if names else None


PeakTable = list[tuple[re.Pattern[str], Peaks]]


def _matches(pattern: re.Pattern[str], device: str) -> bool:
    """Return whether the pattern matches the device's name, but not a part of a longer number: an RTX A1000 is not an
    A100."""
    match = pattern.search(device)
    return match is not None and not (
        match[0][-1:].isdigit() and device[match.end() : match.end() + 1].isdigit()
    )


@cache
def _load_shipped_peaks() -> PeakTable:
    text = resources.files("etloom.analyses.flops").joinpath("devices.json").read_text(encoding="utf-8")
    return _devices(json.loads(text))


def _load_file(path: str) -> PeakTable:
    try:
        return _devices(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise AnalysisError(f"cannot read the device peaks: {error.strerror}", where=path) from error
    except (ValueError, TypeError, KeyError, AttributeError, re.error) as error:
        raise AnalysisError(
            f"not a valid file of device peaks: {type(error).__name__}: {error}",
            where=path,
            remedy="see docs/flops.md for the format",
        ) from error


def _devices(content: Any) -> PeakTable:
    return [
        (
            re.compile(device["match"], re.IGNORECASE),
            Peaks(
                str(device["name"]),
                float(device["bandwidth_gbs"]),
                _numbers(device["matrix_tflops"]),
                _numbers(device.get("vector_tflops", {})),
                memory_gib=device.get("memory_gib"),
                multiprocessors=device.get("multiprocessors"),
                architecture=device.get("architecture"),
            ),
        )
        for device in content["devices"]
    ]


def _numbers(entries: dict[str, Any]) -> dict[str, float]:
    if unknown := set(entries) - set(PRECISIONS):
        raise ValueError(f"{min(unknown)!r} is not a precision; expected one of {', '.join(PRECISIONS)}")
    return {name: float(value) for name, value in entries.items()}
