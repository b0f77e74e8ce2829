"""Hash every output of etloom on every run of ../shared/data and tests/data, to compare two versions of the code.

    python benchmarks/outputs.py before.json                  # on the old version
    python benchmarks/outputs.py after.json --before before.json
    python benchmarks/outputs.py part.json --only cpu/ --before before.json

Outputs are the tables as Parquet, `.et`, ET+, Chrome and folded files, every analysis as JSON, and the figures of the
report. What fails has its message instead of a hash. The exit status is 1 if an output differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(os.environ.get("ETLOOM_DATA", ROOT.parent / "shared" / "data"))
MAX_BYTES = 40 << 20
"""Larger runs are left out: they take minutes."""
FORMATS = {
    "parquet": "run.parquet",
    "chakra": "et/run.et",
    "etplus": "et/run.etplus.json",
    "chrome": "run.json",
    "folded": "a.folded",
}
_RUNS = (
    "cpu/*", "critical_path/*.gz", "dlrm", "hta_misc/*", "hta_multirank",
    "kernels/standalone/*", "linear", "memory/*.gz",
    "nccl_ddp", "nsys/*", "resnet_mismatch", "serving/*", "simple_add", "tracelens/*", "xplane/*", "flight_recorder/*",
    "cases/turn3/*",
)  # fmt: skip


def list_runs(only: str) -> Iterator[tuple[str, Path]]:
    """Yield name and path of each run whose name contains ``only``."""
    paths = [(str(path.relative_to(DATA)), path) for pattern in _RUNS for path in sorted(DATA.glob(pattern))]
    paths += [(f"tests/{path.name}", path) for path in sorted((ROOT / "tests" / "data").iterdir())]
    for name, path in paths:
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        if (
            only in name
            and path.suffix not in (".py", ".md")
            and sum(f.stat().st_size for f in files) < MAX_BYTES
        ):
            yield name, path


def hash_run(name: str, path: Path) -> dict[str, str]:
    """Return the hash of each output of a run, or why there is none."""
    import etloom
    from etloom.core import registry

    outputs: dict[str, str] = {}

    def record(output: str, compute: Callable[[], bytes]) -> None:
        try:
            outputs[f"{name}: {output}"] = hashlib.sha256(compute()).hexdigest()[:16]
        except Exception as error:
            outputs[f"{name}: {output}"] = _describe(error)

    try:
        job = etloom.open(path, use_cache=False)
    except etloom.EtloomError as error:
        return {f"{name}: open": _describe(error)}
    for format, target in FORMATS.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / target
            file.parent.mkdir(exist_ok=True)
            record(format, lambda file=file, format=format: _export(job, file, format))  # type: ignore[misc]
    for analysis in registry.list_plugins("analyses"):
        record(analysis, lambda analysis=analysis: etloom.analyze(job, analysis).write_json().encode())  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        record("report", lambda: _report(job, Path(folder) / "report.html"))
    return outputs


def _describe(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    return re.sub(r"/tmp/tmp\w+", "/tmp", text.replace(str(ROOT), "").replace(str(DATA), ""))[:200]


def _export(job: object, file: Path, format: str) -> bytes:
    import etloom

    etloom.export(job, file, to=format)
    files = sorted(path for path in file.parent.rglob("*") if path.is_file())
    return b"".join(str(path.relative_to(file.parent)).encode() + path.read_bytes() for path in files)


def _report(job: object, file: Path) -> bytes:
    import etloom

    etloom.report(job, file)
    return re.sub(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?", "", file.read_text(encoding="utf-8")).encode()


def main() -> None:
    parser = argparse.ArgumentParser(description="Hash the outputs of etloom on all recorded runs")
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path, help="compare with the hashes of this file")
    parser.add_argument("--only", default="", help="only runs with this in their names")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    runs = list(list_runs(options.only))
    outputs: dict[str, str] = {}
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for result in pool.map(hash_run, *zip(*runs, strict=True)):
            outputs |= result
    options.out.write_text(json.dumps(outputs, indent=0, sort_keys=True))
    print(f"{len(outputs):,} outputs of {len(runs)} runs")
    if options.before:
        before = json.loads(options.before.read_text())
        differing = [name for name in outputs if before.get(name) != outputs[name]]
        for name in differing:
            print(f"differs: {name}: {before.get(name)} -> {outputs[name]}")
        print(f"{len(differing)} of {len(outputs):,} outputs differ")
        sys.exit(bool(differing))


if __name__ == "__main__":
    main()
