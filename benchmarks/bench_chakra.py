"""From recordings to Chakra nodes as a process, compared with json.load of the same files.

    python benchmarks/bench_chakra.py --rounds 5

The recording is nccl_ddp of ETLOOM_DATA, else that of `etloom demo`. Then, for each
recording, the makespan of its nodes as a simulator runs them: by dependencies alone, and with one operator, computation
and communication at a time.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _measure import IMPORTS, Comparison, arguments, machine, note_comparisons, table, touch_memory, warm
from make import FILES, SOURCES, format_name, list_recordings

import etloom
from etloom.exports.chakra_lint.list_schedule import schedule_nodes
from etloom.formats.chakra.et_files import load_file

RECORDINGS = (
    *("nccl_ddp", "dlrm", "simple_add", "linear/kineto_trace_0.json.gz", "critical_path/alexnet.json.gz"),
    *("cpu/coll_4", "cpu/pp_4", "cpu/ddp_2", "tracelens/b200_eager.json.gz", "tracelens/h100_qwen.json.gz"),
    *("tracelens/mi300_qwen.json.gz", "tracelens/mi300_vllm_graph_execution.json.gz"),
)
JSON_LOAD = """
import gzip, json, sys
for path in sys.argv[1:]:
    json.load(gzip.open(path))
"""


def time_process(command: list[str], rounds: int) -> tuple[float, float]:
    """Return the median and the shortest time of a process, s."""
    times = []
    for _ in range(rounds):
        touch_memory()
        start = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times), min(times)


def compare_speed(rounds: int) -> None:
    host, device = (SOURCES / FILES[kind] for kind in ("et", "kineto"))
    for path in (host, device):
        warm(path)
    with tempfile.TemporaryDirectory() as folder:
        plus = f"{folder}/x.etplus.json"
        link = [sys.executable, "-m", "etloom", "link", "--host", str(host), "--device", str(device), "--out"]
        convert = "from etloom.compat.chakra_converter import main; raise SystemExit(main())"
        words = ["PyTorch", "--input", plus, "--output", f"{folder}/y.et"]
        ours = time_process([*link, f"{folder}/x.et"], rounds)
        subprocess.run([*link, plus], check=True, capture_output=True)
        rows = [
            ("etloom link --out x.et", ours),
            ("chakra_converter of an ET+", time_process([sys.executable, "-c", convert, *words], rounds)),
            (
                "json.load of both files",
                time_process([sys.executable, "-c", JSON_LOAD, str(host), str(device)], rounds),
            ),
            (
                "limit: imports of polars and numpy",
                time_process([sys.executable, "-c", IMPORTS], rounds),
            ),
        ]
    note_comparisons(
        Comparison(
            f"{SOURCES.name} to .et, a process",
            ours[0],
            "s",
            baseline="json.load of both files",
            ratio=rows[2][1][0] / ours[0],
            limit="imports of polars and numpy",
            distance=ours[0] / rows[3][1][0],
        )
    )
    table(
        f"{SOURCES.name} to Chakra nodes, {rounds} runs",
        ("", "median s", "least s", "times ours"),
        [
            (name, f"{median:.2f}", f"{least:.2f}", f"{median / ours[0]:.2f}x")
            for name, (median, least) in rows
        ],
    )


def compare_makespans() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for recording in list_recordings(RECORDINGS):
            for rank, trace in etloom.open(recording, use_cache=False).items():
                shares: list[str] = []
                count = 0
                for delays in (True, False):
                    path = etloom.export(trace, Path(folder) / "x.et", delays=delays)
                    nodes = load_file(path).nodes
                    count = count if shares else len(nodes)
                    timed = [node.attributes for node in nodes if "start_ns" in node.attributes]
                    first = min(one["start_ns"] for one in timed)
                    recorded = max(one["start_ns"] + one["duration_ns"] for one in timed) - first
                    for limited in (False, True):
                        makespan = schedule_nodes(nodes, limited=limited).makespan_ns
                        shares.append(f"{100 * (makespan / recorded - 1):+.2f}")
                rows.append(
                    (
                        f"{format_name(recording)} {rank}",
                        f"{count:,}",
                        f"{recorded / 1e6:.3f}",
                        *shares,
                    )
                )
    header = (
        "recording, rank",
        "nodes",
        "recorded ms",
        "dependencies %",
        "resources %",
        "no delays %",
        "both %",
    )
    table("Makespan of the nodes relative to the recording", header, rows)


def main() -> None:
    options = arguments(__doc__ or "")
    machine()
    compare_speed(max(3, options.rounds))
    compare_makespans()


if __name__ == "__main__":
    main()
