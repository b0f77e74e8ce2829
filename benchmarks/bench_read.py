"""Reading a trace file: etloom beside HTA's default backend, a Chakra-like loader, orjson and json.

    python benchmarks/bench_read.py --sizes 50 300 --rounds 3

Each contestant reads the same file in a process of its own; the times leave the imports out, the peak is the memory
above them. json and orjson only parse: what they give is Python objects, not a table. Speed is in MB of plain text,
also where the file is compressed. The last table puts the figures beside those asked for.
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
    Figure,
    Outcome,
    Task,
    arguments,
    compare,
    machine,
    measure,
    peer_version,
    run_once,
    table,
    warm,
)
from make import make

# What a loader does that makes an object of every event, as Chakra's linker does.
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


# Every reader is imported, as reading would; what that costs is not part of reading.
OURS = """
import etloom
from etloom import registry
etloom.read
for name in registry.names("readers"): registry.get("readers", name)
from etloom import cache, opening
"""


def contestants(kind: str, path: Path, with_peers: bool) -> list[Task]:
    """Us first; ``with_peers`` also reads the gzip of the file, which is made beside it."""
    key, rows, record = {"kineto": ("traceEvents", "events", "Event"), "et": ("nodes", "nodes", "Node")}[kind]

    def ours(name: str, file: Path) -> Task:
        return Task(name, OURS, f"trace = etloom.read({str(file)!r})", f"trace.{rows}.height")

    if not with_peers:
        return [ours("etloom.read", path)]
    quoted = repr(str(path))
    tasks = [
        ours("etloom.read", path),
        ours("etloom.read, gzip", packed(path)),
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


def packed(path: Path) -> Path:
    """The gzip of a file, made unless it is there."""
    target = path.with_name(path.name + ".gz")
    if not target.exists():
        part = target.with_suffix(".part")
        with path.open("rb") as plain, gzip.open(part, "wb", compresslevel=6) as file:
            shutil.copyfileobj(plain, file, 1 << 20)
        part.rename(target)
    return target


def through_the_cache(path: Path, folder: str) -> list[Task]:
    """Opening (reading and linking) a file as for the first time, and again."""
    env = {"ETLOOM_CACHE": folder}
    first = f"job = etloom.open({str(path)!r}, use_cache=False)"
    answer = "sum(trace.events.height for trace in job.values())"
    again = Task("etloom.open, again", OURS, f"job = etloom.open({str(path)!r})", answer, env=env)
    run_once(again, 600)  # fills the cache
    return [Task("etloom.open", OURS, first, answer, env=env), again]


def spilled(path: Path, folder: str) -> list[Task]:
    """A file that is read in parts."""
    convert = f"etloom.convert({str(path)!r}, {folder + '/spilled.parquet'!r})"
    return [Task("etloom.convert to Parquet", OURS, convert)]


RANKS = 4


def side_by_side(path: Path, folder: str) -> list[Task]:
    """A run of some ranks, read one after the other and as many at a time as there are processors."""
    for rank in range(RANKS):
        Path(folder, f"kineto_trace_{rank}.json").symlink_to(path.resolve())
    answer = "sum(trace.events.height for trace in job.values())"
    tasks = []
    for jobs in (1, os.cpu_count() or 1):
        opened = f"job = etloom.open({folder!r}, jobs={jobs}, use_cache=False)"
        # What `etloom --jobs` says to polars.
        tasks.append(Task(f"--jobs {jobs}", OURS, opened, answer, env={"POLARS_MAX_THREADS": str(jobs)}))
    return tasks


MOST_ET = 2000  # MB; what is larger needs more memory than it says of reading
LONG_TO_READ = 250  # MB; what takes less is not kept in the cache
Row = tuple[str, str, str, str, str]


def row(what: str, size: float, found: float | None, asked: float, unit: str, most: bool = False) -> Row:
    """A line of the last table: found beside asked, which is the least, or with ``most`` the most."""
    if found is None:
        return what, f"{size:.0f} MB", "-", f"{asked:g} {unit}", ""
    met = found <= asked if most else found >= asked
    shown = f"{found:.0f}" if found >= 100 else f"{found:.2g}" if found < 1 else f"{found:.1f}"
    bound = f"{'at most' if most else 'at least'} {asked:g} {unit}"
    return what, f"{size:.0f} MB", f"{shown} {unit}", bound, "yes" if met else "no"


def figures(kind: str, size: float, outcomes: Sequence[Outcome]) -> list[Row]:
    """What was found beside what was asked for."""
    by_name = {outcome.name: outcome for outcome in outcomes if isinstance(outcome, Figure)}
    ours = by_name.get("etloom.read")
    if ours is None:
        return []

    def times(name: str) -> float | None:
        return by_name[name].seconds / ours.seconds if name in by_name else None

    title = {"kineto": "Kineto", "et": "execution trace"}[kind]
    rows = [row(f"{title}: speed", size, size / ours.seconds, 450, "MB/s")]
    if kind == "kineto":
        rows += [
            row("  HTA's default backend takes", size, times("HTA, default backend"), 30, "times as long"),
            row(
                "  a Chakra-like loader takes",
                size,
                times("json.load + Event objects (as Chakra)"),
                20,
                "times as long",
            ),
            row("  orjson.loads alone takes", size, times("orjson.loads"), 4, "times as long"),
        ]
    else:
        rows.append(row("  json.load takes", size, times("json.load"), 25, "times as long"))
    packed_too = by_name.get("etloom.read, gzip")
    if packed_too:
        rows.append(
            row("  gzip's share of that speed", size, 100 * ours.seconds / packed_too.seconds, 80, "%")
        )
    if LONG_TO_READ < size <= 400:
        rows.append(row("  peak above the imports", size, ours.peak / 1e6, 300, "MB", most=True))
    return rows


def main() -> None:
    options = arguments(__doc__ or "", (50, 300, 5000))
    machine()
    peers = {name: peer_version(name) for name in ("traceinsight", "orjson")}
    print(
        "peers: "
        + ", ".join(f"{name} {found or 'not installed: make bench'}" for name, found in peers.items())
    )
    rows: list[Row] = []
    for kind, title in (("kineto", "Kineto"), ("et", "Execution trace")):
        for size in options.sizes:
            if kind == "et" and size > MOST_ET:
                continue
            path = make(kind, size)
            with_peers = size <= options.peer_limit
            megabytes = path.stat().st_size / 1e6
            heading = f"{title}, {megabytes:.1f} MB, median of {options.rounds}"
            for file in (path, packed(path)) if with_peers else (path,):
                warm(file)
            with tempfile.TemporaryDirectory(prefix="etloom-bench-") as folder:
                if with_peers or kind == "et":
                    outcomes = measure(contestants(kind, path, with_peers), options.rounds)
                    compare(heading, outcomes, megabytes)
                    rows += figures(kind, megabytes, outcomes)
                if kind == "kineto" and megabytes <= LONG_TO_READ:
                    runs = measure(side_by_side(path, folder), options.rounds)
                    compare(f"{RANKS} ranks of {megabytes:.1f} MB, read and linked", runs, RANKS * megabytes)
                    alone, together = (run.seconds if isinstance(run, Figure) else None for run in runs)
                    gain = alone / together if alone and together else None
                    what = f"{RANKS} ranks: with {runs[-1].name} faster than alone"
                    rows.append(row(what, RANKS * megabytes, gain, 1, "times"))
                if kind == "kineto" and LONG_TO_READ < megabytes <= options.peer_limit:
                    outcomes = measure(through_the_cache(path, folder), options.rounds)
                    compare(f"{heading}: opened twice", outcomes, megabytes)
                    first, again = outcomes
                    if isinstance(first, Figure) and isinstance(again, Figure):
                        ratio = first.seconds / again.seconds
                        rows.append(row("  opening it again is faster", megabytes, ratio, 5, "times"))
                elif kind == "kineto" and not with_peers:
                    outcomes = measure(spilled(path, folder), 1)
                    compare(f"{title}, {megabytes:.1f} MB, in parts", outcomes, megabytes)
                    if isinstance(outcomes[0], Figure):
                        rows.append(
                            row(
                                "Kineto in parts: peak",
                                megabytes,
                                outcomes[0].peak / 1e6,
                                1500,
                                "MB",
                                most=True,
                            )
                        )
    table("What was asked for", ["", "size", "found", "asked", "met"], rows)


if __name__ == "__main__":
    main()
