"""What a device can do at most: arithmetic by type, and memory. devices.json holds the known ones and their sources."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from etloom.core.errors import AnalysisError
from etloom.core.trace import Trace
from etloom.timeline.activity import describe_rank

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
_SPELLINGS = {
    "fp64": "double float64",
    "fp32": "float float32",
    "fp16": "half float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz",
    "int8": "char int8 signed_char unsigned_char byte uint8",
}
_PRECISION = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}


@dataclass(frozen=True)
class Peaks:
    """Of one device. TFLOP/s by precision (see PRECISIONS), GB/s (10^9 bytes); ``every``: of all precisions."""

    name: str
    bandwidth_gbs: float | None
    matrix_tflops: dict[str, float]
    vector_tflops: dict[str, float]
    every: float | None = None

    def tflops(self, precision: str) -> float | None:
        """precision: one of PRECISIONS, or "vector fp32", "vector fp64"; None where the device has none."""
        unit, _, of = precision.rpartition(" ")
        if unit == "vector":
            return self.vector_tflops.get(of, self.every)
        return self.every or self.matrix_tflops.get(of)


def infer_precision(dtype: str | None, matrix: bool, tf32: bool) -> str | None:
    """What is computed in, as `Peaks.tflops` names it; None for a type that no peak is of (complex)."""
    plain = re.sub(r"c10::|torch\.|_t$", "", (dtype or "").strip()).lower().replace(" ", "_")
    if not matrix:
        return "vector fp64" if plain in _SPELLINGS["fp64"].split() else "vector fp32"
    found = _PRECISION.get(plain)
    return "tf32" if found == "fp32" and tf32 else found


def find_peaks(
    trace: Trace,
    devices: list[int],
    *,
    device_peaks: str | None = None,
    peak_tflops: float | None = None,
    bandwidth_gbs: float | None = None,
    memory: bool = True,
) -> Peaks:
    """The peaks of the device that the trace ran on, as asked otherwise; devices: the indices it used, none on a trace
    of the host alone. device_peaks: a file as devices.json, whose entries come first. memory: whether the bandwidth
    matters.

    Raises AnalysisError for a device that is in no file, unless the numbers are given, and for a file that cannot be
    used.
    """
    for option, number in (("peak_tflops", peak_tflops), ("bandwidth_gbs", bandwidth_gbs)):
        if number is not None and not number > 0:
            raise AnalysisError(f"a peak of {number} is none", remedy="give a number above 0", option=option)
    give = "give --peak-tflops" + " and --bandwidth-gbs" * memory
    enough = peak_tflops is not None and (bandwidth_gbs is not None or not memory)
    given = Peaks("given", bandwidth_gbs, {}, {}, peak_tflops)
    if not devices:
        if not enough:
            raise AnalysisError(
                "the trace holds no device work, and the peaks of the processor are not known",
                where=describe_rank(trace),
                remedy=give,
            )
        return given
    name = find_device_name(trace, devices)
    known = _of_file(device_peaks) if device_peaks else []
    # A slice of a device (A100-SXM4-40GB MIG 3g.20gb) has a part of its peaks.
    known += [] if " MIG " in f"{name} " else _shipped()
    found = next((one for pattern, one in known if name and pattern.search(name)), None)
    if found is None:
        if not enough:
            raise AnalysisError(
                f"the peaks of {repr(name) if name else 'the device, which the trace does not name,'} are not known",
                where=describe_rank(trace),
                remedy=f"{give}, or a file of devices with --device-peaks (docs/flops.md)",
            )
        return given
    return Peaks(
        found.name,
        bandwidth_gbs or found.bandwidth_gbs,
        found.matrix_tflops,
        found.vector_tflops,
        peak_tflops,
    )


def find_device_name(trace: Trace, devices: list[int]) -> str | None:
    """What the file calls the device that the work ran on."""
    properties = [one for one in trace.meta.get("device_properties") or () if isinstance(one, dict)]
    fitting = [one for one in properties if one.get("id") in devices] or properties
    names = [name for one in fitting if isinstance(name := one.get("name"), str) and name.strip()]
    return names[0] if names else None


Known = list[tuple[re.Pattern[str], Peaks]]


@cache
def _shipped() -> Known:
    text = resources.files("etloom.analyses.flops").joinpath("devices.json").read_text(encoding="utf-8")
    return _devices(json.loads(text))


def _of_file(path: str) -> Known:
    try:
        return _devices(json.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise AnalysisError(f"the peaks cannot be read: {error.strerror}", where=path) from error
    except (ValueError, TypeError, KeyError, AttributeError, re.error) as error:
        raise AnalysisError(
            f"this is no file of peaks: {type(error).__name__}: {error}",
            where=path,
            remedy="write it as docs/flops.md shows",
        ) from error


def _devices(content: Any) -> Known:
    return [
        (
            re.compile(one["match"], re.IGNORECASE),
            Peaks(
                str(one["name"]),
                float(one["bandwidth_gbs"]),
                _numbers(one["matrix_tflops"]),
                _numbers(one.get("vector_tflops", {})),
            ),
        )
        for one in content["devices"]
    ]


def _numbers(given: dict[str, Any]) -> dict[str, float]:
    if unknown := set(given) - set(PRECISIONS):
        raise ValueError(f"{min(unknown)!r} is none of {', '.join(PRECISIONS)}")
    return {name: float(value) for name, value in given.items()}
