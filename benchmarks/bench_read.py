"""Reading a trace file: etloom beside HTA's default backend, a Chakra-like loader, orjson and json.

    python benchmarks/bench_read.py --sizes 50 300 --rounds 3

Each contestant reads the same file in a process of its own; the times leave the imports out, the peak is the memory
above them. json and orjson only parse: what they give is Python objects, not a table. Speed is in MB of plain text,
also where the file is compressed.
"""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

from _measure import PEERS, Task, arguments, compare, machine, measure, peer_version, warm
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


def main() -> None:
    options = arguments(__doc__ or "")
    machine()
    peers = {name: peer_version(name) for name in ("traceinsight", "orjson")}
    print(
        "peers: "
        + ", ".join(f"{name} {found or 'not installed: make bench'}" for name, found in peers.items())
    )
    for kind, title in (("kineto", "Kineto"), ("et", "Execution trace")):
        for size in options.sizes:
            path = make(kind, size)
            with_peers = size <= options.peer_limit
            tasks = contestants(kind, path, with_peers)
            for file in (path, packed(path)) if with_peers else (path,):
                warm(file)
            outcomes = measure(tasks, options.rounds)
            megabytes = path.stat().st_size / 1e6
            compare(f"{title}, {megabytes:.1f} MB, median of {options.rounds}", outcomes, megabytes)


if __name__ == "__main__":
    main()
