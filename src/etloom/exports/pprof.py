"""Write a pprof profile (gzip), for `go tool pprof`, Pyroscope, Parca and other stores of continuous profiles.

One sample per call stack, with two values: the time of the host (exclusive time of the innermost call) and that of the
device (kernels, memcpys and memsets below the calls that launched them). The outermost call is the thread; for several
ranks, the label ``rank`` has the rank.

Format: https://github.com/google/pprof/blob/main/proto/profile.proto
"""

from __future__ import annotations

import gzip
from os import PathLike
from pathlib import Path
from typing import Annotated

import polars as pl

from etloom.core.errors import EtloomError
from etloom.core.trace import Job, Trace
from etloom.exports.folded import format_stacks
from etloom.formats.chakra.protobuf import encode_varint
from etloom.formats.chakra.writing import encode_field, encode_key
from etloom.formats.io.atomic_file import open_atomic

SUFFIX = (".pb.gz", ".pprof")
_TIMES = ("host", "device")
_SAMPLE_TYPE, _SAMPLE, _LOCATION, _FUNCTION, _STRING, _TIME, _DURATION = 1, 2, 4, 5, 6, 9, 10


def write(
    trace: Trace | Job,
    path: str | PathLike[str],
    *,
    joined: Annotated[bool, "Put backward operators below their forward operators."] = False,
) -> None:
    """Write the call stacks of a Trace or a Job as a pprof profile.

    Raises:
        EtloomError: There are no call stacks, or the trace is not linked.
    """
    traces = dict(trace) if isinstance(trace, Job) else {trace.rank or 0: trace}
    profile = _Profile()
    for rank, rank_trace in traces.items():
        for place, time in enumerate(_TIMES):
            for line in format_stacks(rank_trace, "", time, joined):
                stack, _, duration = line.decode().rstrip("\n").rpartition(" ")
                profile.add(rank if len(traces) > 1 else None, stack.split(";"), place, int(duration))
    if not profile.samples:
        raise EtloomError(
            "the trace contains no events of threads, from which call stacks are made", where=path
        )
    times = pl.concat([part.events.select("ts", "dur") for part in traces.values()]).drop_nulls("ts")
    start, end = times.select(pl.col("ts").min(), end=(pl.col("ts") + pl.col("dur").fill_null(0)).max()).row(
        0
    )
    is_absolute = all(part.meta.get("clock") == "epoch" for part in traces.values())
    content = profile.encode(start if is_absolute else 0, end - start)
    with open_atomic(Path(path)) as file:
        file.write(gzip.compress(content, 6, mtime=0) if Path(path).suffix != ".gz" else content)


class _Profile:
    """Samples by rank and stack, and the texts that they refer to by number."""

    def __init__(self) -> None:
        self.samples: dict[tuple[int | None, tuple[str, ...]], list[int]] = {}

    def add(self, rank: int | None, stack: list[str], place: int, duration: int) -> None:
        self.samples.setdefault((rank, tuple(stack)), [0] * len(_TIMES))[place] += duration

    def encode(self, start: int, duration: int) -> bytes:
        texts = {text: number for number, text in enumerate(("", *_TIMES, "nanoseconds", "rank"))}
        functions: dict[str, int] = {}
        samples = []
        for (rank, stack), values in self.samples.items():
            # Locations begin with the innermost call.
            places = [functions.setdefault(name, len(functions) + 1) for name in reversed(stack)]
            number = 0 if rank is None else texts.setdefault(str(rank), len(texts))
            label = b"" if rank is None else encode_field(3, _integers({1: texts["rank"], 2: number}))
            samples.append(encode_field(_SAMPLE, _pack(1, places) + _pack(2, values) + label))
        types = [
            encode_field(_SAMPLE_TYPE, _integers({1: texts[time], 2: texts["nanoseconds"]}))
            for time in _TIMES
        ]
        locations = []
        for name, number in functions.items():
            line = encode_field(4, _integers({1: number}))
            locations.append(encode_field(_LOCATION, _integers({1: number}) + line))
            text = texts.setdefault(name, len(texts))
            locations.append(encode_field(_FUNCTION, _integers({1: number, 2: text})))
        strings = [encode_field(_STRING, text.encode()) for text in texts]
        return b"".join(
            (*types, *samples, *locations, *strings, _integers({_TIME: start, _DURATION: duration}))
        )


def _integers(values: dict[int, int]) -> bytes:
    return b"".join(encode_key(number, 0) + encode_varint(value) for number, value in values.items() if value)


def _pack(number: int, values: list[int]) -> bytes:
    return encode_field(number, b"".join(map(encode_varint, values)))
