"""Reading a trace file: etloom, HTA's default backend, a Chakra-like loader, orjson and json.

    python benchmarks/bench_read.py --sizes 50 300 --rounds 3

Each program reads the same file in its own process. Times are without imports; the peak is the memory above that
after the imports. json and orjson only parse into Python objects. Speed is in MB of plain text, also for a
compressed file.
"""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _measure import (
    PEERS,
    Comparison,
    Figure,
    Outcome,
    Task,
    arguments,
    compare,
    machine,
    measure,
    note_comparisons,
    peer_version,
    run_once,
    warm,
)
from make import make

# A loader that creates an object per event, as Chakra's linker does.
OBJECTS = """
import json
class Event:
    def __init__(self, raw):
        self.name = raw.get("name")
        self.cat = raw.get("cat")
        self.ph = raw.get("ph")
        self.ts = raw.get("ts")
        self.dur = raw.get("dur")
        self.pid = raw.get("pid")
        self.tid = raw.get("tid")
        args = raw.get("args", {})
        self.external_id = args.get("External id")
        self.rf_id = args.get("Record function id")
        self.correlation = args.get("correlation")
        self.stream = args.get("stream")
class Node:
    def __init__(self, raw):
        self.id = raw["id"]
        self.name = raw["name"]
        self.parent = raw["ctrl_deps"]
        self.inputs = raw["inputs"]
        self.outputs = raw["outputs"]
        self.attrs = {item["name"]: item["value"] for item in raw["attrs"]}
"""
HTA = """
import logging; logging.disable(logging.CRITICAL)
from hta.common.trace_parser import parse_trace_dataframe
from hta.configs.parser_config import ParserConfig
"""


# The readers are imported beforehand, because the time of imports is not part of reading.
OURS = """
import etloom
from etloom.core import registry
etloom.read
for name in registry.list_plugins("readers"): registry.get("readers", name)
import etloom.loading.cache, etloom.loading.executor
"""


def make_tasks(kind: str, path: Path, with_peers: bool) -> list[Task]:
    """Return the tasks, etloom first; ``with_peers`` adds the peers and reading the gzip of the file."""
    key, rows, record = {"kineto": ("traceEvents", "events", "Event"), "et": ("nodes", "nodes", "Node")}[kind]

    def ours(name: str, file: Path) -> Task:
        return Task(name, OURS, f"trace = etloom.read({str(file)!r})", f"trace.{rows}.height")

    if not with_peers:
        return [ours("etloom.read", path)]
    quoted = repr(str(path))
    tasks = [
        ours("etloom.read", path),
        ours("etloom.read, gzip", compress_file(path)),
        Task("limit: read the bytes", "", f"with open({quoted}, 'rb') as f: data = f.read()", "len(data)"),
        Task(
            "orjson.loads",
            "import orjson",
            f"with open({quoted}, 'rb') as f: data = orjson.loads(f.read())",
            f"len(data[{key!r}])",
            PEERS,
        ),
        Task(
            "json.load",
            "import json",
            f"with open({quoted}) as f: data = json.load(f)",
            f"len(data[{key!r}])",
        ),
        Task(
            f"json.load + {record} objects (as Chakra)",
            OBJECTS,
            f"with open({quoted}) as f: data = [{record}(raw) for raw in json.load(f)[{key!r}]]",
            "len(data)",
        ),
    ]
    if kind == "kineto":
        read = f"meta, frame, symbols = parse_trace_dataframe({quoted}, ParserConfig.get_default_cfg())"
        tasks.append(Task("HTA, default backend", HTA, read, "len(frame)", PEERS))
    return tasks


def compress_file(path: Path) -> Path:
    """Return the gzip of a file, created if missing."""
    target = path.with_name(path.name + ".gz")
    if not target.exists():
        part = target.with_suffix(".part")
        with path.open("rb") as plain, gzip.open(part, "wb", compresslevel=6) as file:
            shutil.copyfileobj(plain, file, 1 << 20)
        part.rename(target)
    return target


def make_cache_tasks(path: Path, folder: str) -> list[Task]:
    """Open (read and link) a file without and with the cache."""
    env = {"ETLOOM_CACHE": folder}
    first = f"job = etloom.open({str(path)!r}, use_cache=False)"
    answer = "sum(trace.events.height for trace in job.values())"
    again = Task("etloom.open, again", OURS, f"job = etloom.open({str(path)!r})", answer, env=env)
    run_once(again, 600)  # fills the cache
    return [Task("etloom.open", OURS, first, answer, env=env), again]


def make_spill_tasks(path: Path, folder: str) -> list[Task]:
    """Convert a file that is read in parts."""
    convert = f"etloom.convert({str(path)!r}, {folder + '/spilled.parquet'!r})"
    return [Task("etloom.convert to Parquet", OURS, convert)]


RANKS = 4


def make_job_tasks(path: Path, folder: str) -> list[Task]:
    """Open a run of several ranks, one at a time and one per processor."""
    for rank in range(RANKS):
        Path(folder, f"kineto_trace_{rank}.json").symlink_to(path.resolve())
    answer = "sum(trace.events.height for trace in job.values())"
    tasks = []
    for jobs in (1, os.cpu_count() or 1):
        opened = f"job = etloom.open({folder!r}, jobs={jobs}, use_cache=False)"
        # As `etloom --jobs` sets it.
        tasks.append(Task(f"--jobs {jobs}", OURS, opened, answer, env={"POLARS_MAX_THREADS": str(jobs)}))
    return tasks


MAX_ET = 2000  # MB; a larger file needs too much memory
MIN_CACHED = 250  # MB; smaller files are not kept in the cache


def note_speeds(kind: str, size: float, outcomes: Sequence[Outcome]) -> None:
    """Note the speed of reading plain text and gzip, next to the peers' and to reading the bytes."""
    by_name = {outcome.name: outcome for outcome in outcomes if isinstance(outcome, Figure)}
    name = f"read {'Kineto' if kind == 'kineto' else 'execution trace'}, {size:.0f} MB"
    limit = by_name.get("limit: read the bytes")
    peers = ["HTA, default backend"] if kind == "kineto" else []
    for label, program in ((name, "etloom.read"), (f"{name}, gzip", "etloom.read, gzip")):
        ours = by_name.get(program)
        if ours is None:
            continue
        for peer in (*peers, "json.load", "orjson.loads"):
            other = by_name.get(peer)
            note_comparisons(
                Comparison(
                    label,
                    size / ours.seconds,
                    "MB/s",
                    baseline=peer,
                    ratio=None if other is None else other.seconds / ours.seconds,
                    limit="reading the bytes",
                    distance=None if limit is None else ours.seconds / limit.seconds,
                )
            )


def main() -> None:
    options = arguments(__doc__ or "")
    machine()
    peers = {name: peer_version(name) for name in ("traceinsight", "orjson")}
    print(
        "peers: "
        + ", ".join(f"{name} {version or 'not installed: make bench'}" for name, version in peers.items())
    )
    for kind, title in (("kineto", "Kineto"), ("et", "Execution trace")):
        for size in options.sizes:
            if kind == "et" and size > MAX_ET:
                continue
            path = make(kind, size)
            with_peers = size <= options.peer_limit
            megabytes = path.stat().st_size / 1e6
            heading = f"{title}, {megabytes:.1f} MB, median of {options.rounds}"
            for file in (path, compress_file(path)) if with_peers else (path,):
                warm(file)
            with tempfile.TemporaryDirectory(prefix="etloom-bench-") as folder:
                if with_peers or kind == "et":
                    outcomes = measure(make_tasks(kind, path, with_peers), options.rounds)
                    compare(heading, outcomes, megabytes)
                    note_speeds(kind, megabytes, outcomes)
                if kind == "kineto" and megabytes <= MIN_CACHED:
                    runs = measure(make_job_tasks(path, folder), options.rounds)
                    compare(f"{RANKS} ranks of {megabytes:.1f} MB, read and linked", runs, RANKS * megabytes)
                if kind == "kineto" and MIN_CACHED < megabytes <= options.peer_limit:
                    outcomes = measure(make_cache_tasks(path, folder), options.rounds)
                    compare(f"{heading}: opened twice", outcomes, megabytes)
                elif kind == "kineto" and not with_peers:
                    outcomes = measure(make_spill_tasks(path, folder), 1)
                    compare(f"{title}, {megabytes:.1f} MB, in parts", outcomes, megabytes)


if __name__ == "__main__":
    main()
