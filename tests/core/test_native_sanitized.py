"""What works on arrays of times, built with the sanitizer of undefined behaviour: a file may put its times anywhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import nanobind
import pytest

from support.paths import ROOT

SOURCES = (
    "allocator",
    "codes",
    "contraction",
    "graph",
    "nesting",
    "order",
    "parse/snapshot_pickle",
    "parse/worker",
    "quality",
    "snapshot",
    "tour",
)
FLAGS = ["-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing", "-DNDEBUG"]
SANITIZED = ["-fsanitize=undefined", "-fno-sanitize-recover=all"]
ASKED = """
import importlib.machinery, importlib.util, sys
import numpy as np

loader = importlib.machinery.ExtensionFileLoader("_native", sys.argv[1])
native = importlib.util.module_from_spec(importlib.util.spec_from_loader("_native", loader))
loader.exec_module(native)
import pickle
frames = [{"name": "f", "filename": "a.py", "line": 1}] * 3
entry = {"action": "alloc", "addr": 1 << 40, "size": 1 << 20, "stream": 0, "time_us": 1 << 50, "frames": frames}
SNAPSHOT = pickle.dumps({"segments": [{"blocks": [entry], "x": 1.5}], "device_traces": [[entry, {**entry}], []]})
ends = np.iinfo(np.int64)
chosen = np.array([ends.min, ends.min + 1, -(2**62), -1, 0, 1, 2**62, ends.max - 1, ends.max])
for seed in range(200):
    draw = np.random.default_rng(seed)
    n, m = draw.integers(2, 12), draw.integers(1, 20)
    times = draw.choice(chosen, n)
    source, target = draw.integers(0, n, (2, m)).astype(np.int32)
    kind = draw.integers(0, 8, m).astype(np.uint8)
    columns = [source], [target], [draw.choice(chosen, m)], [kind], [source]
    number = native.number_points([times], *columns[:2], columns[3], [False])
    time = native.numbered([times], number)
    first, source, floor, kind, _, _ = native.order_edges(number, time, *columns, [False])
    lag = draw.choice(chosen, len(source))
    for lags in (floor, lag):
        native.schedule(first, source, lags, time.copy())
        native.latest(first, source, lags, None, time.copy())
        native.latest(first, source, lags, time, time.copy())
        native.residual(first, source, time, lags)
        native.excess(first, source, time, lags)
        native.walk_back(first, source, lags, lags, time, kind, n - 1)
        native.residual_sum(first, source, time, lags)
        points, _, heads, last, chain = native.contract(first, source, draw.random(n) < 0.5)
        sums, near = np.zeros((2, len(last)), np.int64)
        native.change_chains(chain, last, None, lags, lags, sums, near)
        edges = np.arange(len(source), dtype=np.int32)
        for change in ((2.5, None, 0), (None, 7, 0), (None, None, -3), (None, None, ends.max)):
            native.scale_chains(
                chain, last, edges, lags, lag, kind, np.full(8, 5), *change, sums, near, sums.copy()
            )
        rows = draw.integers(-2, 9, len(edges)).astype(np.int32)
        *groups, _ = native.group_edges(chain, last, edges, np.abs(lags), np.minimum(lags, 0), rows)
        for marked in (None, draw.random(5) < 0.5):
            native.scale_groups(*groups, marked, 1e6, sums, near, sums.copy())
        for path in range(len(last)):
            native.expand_chains(first, source, points, heads, last, np.array([path], np.int32))
        native.mark_extremes(first, source, lags >= 0, draw.integers(-1, 2, n).astype(np.int32))
        launches = int((kind == 5).sum())
        native.explained_starts(
            first, source, time, lags, kind, np.ones(n, bool), *draw.choice(chosen, (2, launches)), 4, 5, 7, 5000,
            [23_000, -17_000, ends.max, ends.min],
        )
    start, end = np.sort(draw.choice(chosen, (2, n)), axis=0)
    start, end = (column[np.argsort(start, kind="stable")] for column in (start, end))
    lane = draw.integers(0, 2, n)
    native.stack_tracks(lane, start, end, draw.integers(0, 8, n).astype(np.uint8), draw.integers(0, 4, n), 1000)
    parent, depth, _ = native.nest(lane, start, end, 1000)
    calls = np.flatnonzero(draw.random(n) < 0.5).astype(np.int32)
    native.tour(
        np.ones(n, bool), lane.astype(np.int32), start, end, depth, parent.astype(np.int32), calls,
        draw.choice(chosen, len(calls)),
    )
    codes = draw.integers(0, 3, (2, n)).astype(np.uint32)
    native.number_pairs(start, end)
    native.sums_of_pairs(np.ones(n, bool), lane.astype(np.int32), time, *codes, times, np.ones(3, bool))
    value, stream = draw.choice(chosen, (2, 40))
    value[::2] = draw.integers(0, 2**26, 20)
    native.run_allocator(
        draw.integers(0, 5, 40).astype(np.uint8), value, stream, np.zeros(40, np.int32), (times[:0],) * 6,
        (times[:0],) * 3, (times, times),
        (int(draw.integers(2)) << 28, 2**62, 2**20, 20 << 20, int(draw.integers(2))), 0.5, (4,) * 16, 40,
    )
    data = bytearray(SNAPSHOT)
    for at in draw.integers(0, len(data), 3):
        data[at] = draw.integers(256)
    parser = native.SnapshotParser()
    try:
        for at in range(0, len(data), 50):
            parser.feed(bytes(data[at : at + 50]))
        parser.finish()
    except (RuntimeError, ValueError):
        pass
print("no fault")
"""


@pytest.mark.slow
def test_times_anywhere_in_64_bits_cause_no_undefined_behaviour(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    probe = [compiler, "-x", "c++", *SANITIZED, "-", "-o", str(tmp_path / "probe")]
    if subprocess.run(probe, input="int main() {}", text=True, capture_output=True).returncode:
        pytest.skip("needs the compiler's sanitizer of undefined behaviour")
    package = Path(nanobind.include_dir()).parent
    folders = [
        package / "include",
        package / "ext/robin_map/include",
        sysconfig.get_path("include"),
        ROOT / "native",
    ]
    include = [f"-I{folder}" for folder in folders]
    sources = [
        package / "src/nb_combined.cpp",
        ROOT / "fuzz/sweeps.cpp",
        *(ROOT / f"native/{name}.cpp" for name in SOURCES),
    ]
    built = tmp_path / "_native.so"
    # nanobind itself is not what is asked about.
    objects = []
    for at, path in enumerate(sources):
        objects.append(str(tmp_path / f"{path.stem}.o"))
        sanitized = SANITIZED if at else []
        command = [compiler, *FLAGS, *include, *sanitized, "-c", str(path), "-o", objects[-1]]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
    link = [compiler, *FLAGS, *SANITIZED, *objects, "-o", str(built)]
    done = subprocess.run(link, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    done = subprocess.run([sys.executable, "-c", ASKED, str(built)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "no fault\n", done.stderr[-4000:]
