"""Ratios of speed that no calm machine is needed for: CPU time on one thread, next to Python's, with wide margins.

`make bench` measures how fast etloom is; these hold what would make it slow by a factor: a reader, or a step of
linking, that has become a loop in Python or quadratic.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import etloom
from support import native_parsers, reference_parsers

pytestmark = pytest.mark.slow  # half a minute of CPU time

EVENT = """{{"ph": "X", "cat": "{cat}", "name": "{name}", "pid": 1, "tid": {tid}, "ts": {ts}.{ns:03}, "dur": 5.250,
 "args": {{"External id": {id}, "Record function id": 0, "correlation": {id}, "stream": 7, "device": 0,
 "Input Dims": [[32, {dim}], []], "Input type": ["float", "Scalar"]}}}}"""
CATEGORIES = (("cpu_op", "aten::mm", 1), ("cuda_runtime", "cudaLaunchKernel", 1), ("kernel", "gemm", 7))


def measure_cpu(work: Callable[[], object]) -> float:
    """Return the CPU seconds of all threads in the fastest of three runs."""
    seconds = []
    for _ in range(3):
        gc.collect()
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


@pytest.fixture(scope="module")
def document() -> str:
    """A Kineto file of 15,000 events, 4 MB: operators, their calls, their kernels."""
    events = [
        EVENT.format(cat=cat, name=name, tid=tid, ts=20 * i + 5 * place, ns=i % 1000, id=i + 1, dim=i % 16)
        for i in range(5000)
        for place, (cat, name, tid) in enumerate(CATEGORIES)
    ]
    return '{"schemaVersion": 1, "traceEvents": [' + ",\n".join(events) + "]}"


@pytest.fixture(scope="module")
def path(document: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speed") / "trace.json"
    path.write_text(document)
    return path


def test_reading_takes_a_fraction_of_json(path: Path, document: str) -> None:
    trace = etloom.read(path)
    assert trace.events.height == 3 * 5000
    ours, theirs = measure_cpu(lambda: etloom.read(path)), measure_cpu(lambda: json.loads(document))
    assert ours < theirs / 1.3, f"etloom.read {ours:.3f} s of CPU, json.loads {theirs:.3f} s"


def test_the_native_parser_is_many_times_faster_than_the_reference(document: str) -> None:
    part = (document[: document.rindex(",\n{", 0, 400_000)] + "]}").encode()
    ours = measure_cpu(lambda: native_parsers.parse_with("kineto", part, native_parsers.NEVER))
    theirs = measure_cpu(lambda: reference_parsers.kineto(part))
    assert ours < theirs / 8, f"native {ours:.4f} s of CPU, reference {theirs:.4f} s"


def test_linking_costs_about_as_much_as_reading(path: Path) -> None:
    trace = etloom.read(path)
    link, read = measure_cpu(lambda: etloom.link(trace)), measure_cpu(lambda: etloom.read(path))
    assert link < 6 * read, f"etloom.link {link:.3f} s of CPU, etloom.read {read:.3f} s"


def test_linking_grows_linearly(path: Path) -> None:
    whole = etloom.read(path)
    part = whole.replace(events=whole.events.head(whole.events.height // 4))
    times = [measure_cpu(lambda trace=trace: etloom.link(trace)) for trace in (part, whole)]
    assert times[1] < 8 * times[0], f"a quarter of the events {times[0]:.3f} s of CPU, all {times[1]:.3f} s"
