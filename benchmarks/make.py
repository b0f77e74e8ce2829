"""Build traces of any size from one real trace: its text repeated, with ids and times shifted.

    python benchmarks/make.py kineto 300       # benchmarks/.data/kineto_300MB.json
    python benchmarks/make.py et 300           # benchmarks/.data/et_300MB.json
    python benchmarks/make.py ranks 64         # benchmarks/.data/ranks_64/, one file of 100,000 events per rank

Each copy is one trace length later and has its own ids: record-function ids, correlations, flows, sequence numbers,
steps, and in the execution trace nodes, tensors and storages. Events that occur once per process (names, spans, the
roots of the execution trace) are written once. The text between the numbers remains as the profiler wrote it, white
space included. The first n copies of one trace link with the first n of the other.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator
from itertools import compress, islice
from pathlib import Path

import zstandard

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "benchmarks" / ".data"
DATA = Path(os.environ.get("ETLOOM_DATA", ROOT.parent / "shared" / "data"))
GPU_RECORDING = ROOT / "tests" / "data" / "gpu_small" / "kineto_trace_0.json.gz"
RECORDING = ROOT / "src" / "etloom" / "cli" / "demo" / "recording"
FILES = {"kineto": "kineto_trace_0.json.gz", "et": "torch_et_0.json.gz"}

# Kineto takes External ids and correlations from one counter.
KINETO_IDS = re.compile(
    r'"(?P<key>ts|External id|correlation|Record function id|Ev Idx|Sequence number|Python(?: parent)? id)": '
    r"(?P<n>\d+)"
    r'|(?<="ph": "[sft]", )"id": (?P<flow>\d+)'
    r"|ProfilerStep#(?P<step>\d+)"
)
COUNTERS = {"correlation": "External id", "flow": "External id", "Python parent id": "Python id"}
NODE_IDS = re.compile(
    r'"(?P<key>id|ctrl_deps)": (?P<n>\d+)'
    r'|"name": "(?P<attr>rf_id|fw_parent|seq_id)", "type": "u?int64", "value": (?P<value>\d+)'
    r'|(?<=\[)(?P<tensor>\d+), ?(?P<storage>\d+)(?=(?:, ?\d+){3}, ?"[a-z]+(?::\d+)?"\])'
)


def find_sources() -> Path:
    """Return the folder of nccl_ddp, or without it a folder with the recording of `etloom demo`, compressed alike."""
    if (DATA / "nccl_ddp").is_dir():
        return DATA / "nccl_ddp"
    folder = CACHE / "demo"
    for recorded in sorted(RECORDING.glob("*_[01].json.zst")):
        target = folder / recorded.with_suffix(".gz").name
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            content = zstandard.ZstdDecompressor().stream_reader(recorded.read_bytes()).read()
            target.write_bytes(gzip.compress(content))
    return folder


def list_recordings(names: Iterable[str]) -> list[Path]:
    """Return the recordings of ETLOOM_DATA with these names, or without any of them the one of `find_sources`."""
    return [DATA / name for name in names if (DATA / name).exists()] or [SOURCES]


def format_name(recording: Path) -> str:
    """Return the name of a recording: its path in ETLOOM_DATA, else that of its file or folder, without suffix."""
    name = recording.relative_to(DATA) if recording.is_relative_to(DATA) else recording.name
    return str(name).removesuffix(".json.gz")


def find_device_trace() -> Path:
    """Return negative_queue_a100, or without it 20 MB that repeat this project's own recording of a GPU."""
    file = DATA / "hta_misc" / "negative_queue_a100.json.gz"
    return file if file.is_file() else _make_missing("kineto", "gpu_20MB", GPU_RECORDING, size=20_000_000)


SOURCES = find_sources()


class Template:
    """The text of one copy, and the numbers in it that change from copy to copy."""

    def __init__(
        self, text: str, pattern: re.Pattern[str], counters: dict[str, str], fixed: Container[int] = ()
    ) -> None:
        """``counters`` maps kinds to the kind whose counter they share; ``fixed``: node ids shared by all copies."""
        self.numbers: list[int] = []
        self.kinds: list[str] = []
        parts: list[str] = []
        end = 0
        for match in pattern.finditer(text):
            for group, digits in match.groupdict().items():
                if digits is None or group in ("key", "attr"):
                    continue
                kind = match["key"] if group == "n" else match.groupdict().get("attr") or group
                kind = counters.get(kind, kind)
                number = int(digits)
                # Zero means none.
                if (number == 0 and kind not in ("Ev Idx", "step")) or (kind == "node" and number in fixed):
                    continue
                parts += [text[end : match.start(group)].replace("%", "%%"), "%d"]
                end = match.end(group)
                self.numbers.append(number)
                self.kinds.append(kind)
        self.text = "".join(parts) + text[end:].replace("%", "%%")

    def strides(self, **fixed: int) -> list[int]:
        """Return the increment of each number per copy: ``fixed``, or the range of its kind."""
        low: dict[str, int] = {}
        high: dict[str, int] = {}
        for kind, number in zip(self.kinds, self.numbers, strict=True):
            low[kind] = min(number, low.get(kind, number))
            high[kind] = max(number, high.get(kind, number))
        # Steps are consecutive; ids need not be.
        size = {kind: high[kind] + 1 - (low[kind] if kind == "step" else 0) for kind in high} | fixed
        return [size[kind] for kind in self.kinds]

    def copies(self, strides: list[int]) -> Iterator[str]:
        """Yield copy after copy, endlessly."""
        numbers = self.numbers
        while True:
            yield self.text % tuple(numbers)
            numbers = [number + stride for number, stride in zip(numbers, strides, strict=True)]


def items(text: str, key: str, boundary: str) -> tuple[str, list[str], list[dict], str]:
    """Split at the list ``key``: the text before its objects, the text of each, the parsed objects, the text after."""
    start = text.index("[", text.index(f'"{key}"')) + 1
    parsed, end = json.JSONDecoder().raw_decode(text, start - 1)
    cuts = [match.start() + 1 for match in re.compile(boundary).finditer(text, start, end)]
    objects = [
        text[a:b].strip(", \n")
        for a, b in zip([start, *cuts], [*cuts, text.rindex("]", start, end)], strict=True)
    ]
    assert len(objects) == len(parsed), f"{key}: {len(objects)} texts, {len(parsed)} objects"
    return text[:start], objects, parsed, text[end - 1 :]


def write(target: Path, head: str, copies: Iterator[str], count: int, tail: str) -> None:
    """Write ``count`` copies, each followed by a comma. The file appears when it is complete."""
    part = target.with_suffix(".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(head)
        for copy in islice(copies, count):
            file.write(copy + ",\n")
        file.write(tail)
    part.rename(target)


def make_kineto(text: str, target: Path, size: int, copies: int | None = None) -> None:
    """Write a Kineto trace of about ``size`` bytes, or of ``copies`` copies."""
    head, texts, events, tail = items(text, "traceEvents", r'\},\s*\{\s*"(?:ph|name)": ')
    moving = [event.get("ph") not in ("M", "i") and event.get("cat") != "Trace" for event in events]
    timed = [event for event, moves in zip(events, moving, strict=True) if moves and event["ph"] == "X"]
    # Times are shifted by whole microseconds, so that their decimals remain.
    span = (
        int(max(event["ts"] + event["dur"] for event in timed) - min(event["ts"] for event in timed)) + 1000
    )
    template = Template(",\n  ".join(compress(texts, moving)), KINETO_IDS, COUNTERS)
    count = copies or max(1, round(size / len(template.text)))

    # The mark of the end of the recording moves with the last copy, and its span grows.
    def stretch(match: re.Match[str]) -> str:
        return str(int(match.group()) + span * (count - 1))

    once = []
    for text, moves in zip(texts, moving, strict=True):
        if '"Record Window End"' in text:
            text = re.sub(r'(?<="ts": )\d+', stretch, text)
        elif '"cat": "Trace"' in text:
            text = re.sub(r'(?<="dur": )\d+', stretch, text)
        if not moves:
            once.append(text)
    texts = template.copies(template.strides(ts=span))
    write(target, f"{head}\n  ", texts, count, "  " + ",\n  ".join(once) + "\n  " + tail)


def make_et(text: str, target: Path, size: int, copies: int | None = None) -> None:
    """Write a PyTorch execution trace of about ``size`` bytes, or of ``copies`` copies."""
    head, texts, nodes, tail = items(text, "nodes", r'\},\s*\{\s*"id": \d+, "name": ')
    moving = [
        not node["name"].startswith("[pytorch|") and "process_group" not in node["name"] for node in nodes
    ]
    once = [text for text, moves in zip(texts, moving, strict=True) if not moves]
    fixed = {node["id"] for node, moves in zip(nodes, moving, strict=True) if not moves}
    counters = dict.fromkeys(("id", "ctrl_deps", "fw_parent", "tensor", "storage"), "node")
    template = Template(",\n    ".join(compress(texts, moving)), NODE_IDS, counters, fixed)
    count = copies or max(1, round(size / len(template.text)))
    tail = "    " + ",\n    ".join(once) + "\n  " + tail
    write(target, f"{head}\n    ", template.copies(template.strides()), count, tail)


def read_text(path: Path) -> str:
    """Return the text of a file, plain or gzip."""
    raw = path.read_bytes()
    return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()


def make(kind: str, megabytes: float, source: Path | None = None) -> Path:
    """Return the file of a kind ("kineto", "et") and size (1 MB = 10^6 bytes), created if missing."""
    return _make_missing(kind, f"{megabytes:g}MB", source, size=int(megabytes * 1e6))


def make_copies(kind: str, copies: int, source: Path | None = None) -> Path:
    """Return the file of a kind with ``copies`` copies of the trace, created if missing."""
    return _make_missing(kind, f"x{copies}", source, size=0, copies=copies)


def make_ranks(count: int, source: Path | None = None) -> Path:
    """Return a folder of ``count`` ranks, equal apart from their rank and the size of their group, created if
    missing."""
    stored = DATA / "hta_misc" / "negative_queue_a100.json.gz"
    source = source or (stored if stored.is_file() else SOURCES / FILES["kineto"])
    folder = CACHE / f"{source.parent.name}_ranks_{count}"
    if not folder.exists():
        text = re.sub(r'("Group size": )(?!1\b)\d+', rf"\g<1>{count}", read_text(source))
        ranks = ", ".join(map(str, range(count)))
        text = re.sub(r'("Process Group Ranks": "\[)\d+, [^"]*(?=\]")', rf"\g<1>{ranks}", text)
        start = text.index('"distributedInfo"')
        end = text.index("}", start)
        part = folder.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        for rank in range(count):
            info = re.sub(r'("rank": ?)\d+', rf"\g<1>{rank}", text[start:end])
            info = re.sub(r'("(?:world|pg)_size": ?)\d+', rf"\g<1>{count}", info)
            info = re.sub(r'("ranks": ?\[)[^\]]*', rf"\g<1>{ranks}", info)
            content = (text[:start] + info + text[end:]).encode()
            (part / f"rank_{rank}.json.gz").write_bytes(gzip.compress(content, compresslevel=3))
        part.rename(folder)
    return folder


def make_small_ranks(count: int) -> Path:
    """Return a folder of ``count`` small ranks, copies of dlrm's (else of SOURCES), created if missing."""
    folder = CACHE / f"small_ranks_{count}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        stored = [DATA / "dlrm" / f"kineto_trace_{rank}.json.gz" for rank in range(4)]
        sources = [path for path in stored if path.is_file()] or [SOURCES / FILES["kineto"]]
        traces = [json.loads(read_text(source)) for source in sources]
        infos = [trace.pop("distributedInfo") for trace in traces]
        texts = [json.dumps(trace).removeprefix("{") for trace in traces]
        for rank in range(count):
            info = json.dumps(infos[rank % len(infos)] | {"rank": rank, "world_size": count})
            text = f'{{"distributedInfo": {info}, {texts[rank % len(texts)]}'
            (part / f"kineto_trace_{rank}.json").write_text(text)
        part.rename(folder)
    return folder


def _make_missing(kind: str, name: str, source: Path | None, **extent: int) -> Path:
    source = source or SOURCES / FILES[kind]
    target = CACHE / f"{kind}_{name}.json"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        print(f"making {target.relative_to(ROOT)} from {source.name}", file=sys.stderr)
        maker = {"kineto": make_kineto, "et": make_et}[kind]
        maker(read_text(source), target, **extent)
    return target


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in (*FILES, "ranks"):
        sys.exit("usage: python benchmarks/make.py kineto|et MEGABYTES, or ranks COUNT")
    kind, size = sys.argv[1:]
    print(make_ranks(int(size)) if kind == "ranks" else make(kind, float(size)))
