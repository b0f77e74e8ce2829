"""Verdicts on Kineto traces equal those of PyTorch's own validator, on real and on damaged traces."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

import etloom
from etloom.cli import app
from etloom.core.errors import ReadError
from etloom.exports.chakra_lint.lint_codes import KINETO_CODES
from etloom.exports.kineto_lint import _find_running_kernels
from fuzzing.seeds import SEEDS, gpu_document

torch_rules = pytest.importorskip("torch.profiler._trace_validator", reason="torch 2.13 has it first")
RULES = {
    "_check_gpu_kernel_causality": "kernel-before-launch",
    "_check_stream_wait_corr_id_populated": "wait-without-record",
    "_check_stream_sync_overlap": "kernel-beyond-sync",
    "_check_stream_wait_corr_id_in_past": "record-after-wait",
    "_check_nccl_metadata": "incomplete-collective",
    "_check_backward_seq_id_uniqueness": "shared-sequence-number",
}
REAL = (
    "nccl_ddp/*.json*", "critical_path/**/*.json*", "dlrm/*.json*", "hta_multirank/*.json*", "hta_misc/*.json*",
    "simple_add/*.json*", "cpu/ddp_2/*.json*", "cpu/coll_4/*.json*", "kernels/standalone/*.json*",
)  # fmt: skip


READING = "reading-problem"
"""What etloom's reader reports, which has no counterpart in torch's validator."""


def compare(path: Path) -> Counter[str]:
    """Check a file with both validators; return the number of problems by code."""
    _, violations = torch_rules.validate_trace(str(path))
    expected = Counter(RULES[violation.rule_name] for violation in violations)
    findings = etloom.lint(path).findings
    found = Counter({finding.code: finding.count for finding in findings if finding.code != READING})
    assert found == expected, path
    return found


def test_each_rule_of_torch_has_a_code() -> None:
    assert {rule.__name__ for rule in torch_rules._RULES} == set(RULES)
    assert set(KINETO_CODES) == {READING, *RULES.values()}


@pytest.mark.slow
def test_real_traces(data: Path) -> None:
    found: Counter[str] = Counter()
    files = 0
    for pattern in REAL:
        for path in sorted(data.glob(pattern)):
            with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
                content = file.read(1 << 16)
            if '"traceEvents"' in content and path.stat().st_size < 20 << 20:
                found += compare(path)
                files += 1
    assert files > 20
    assert len(found) >= 2, found


def damage(events: list[dict[str, Any]], rng: random.Random) -> None:
    """Change times, ids and metadata of some events, as recorders have got them wrong."""
    for event in events:
        args = event.get("args", {})
        if event.get("ph") != "X" or rng.random() < 0.5:
            continue
        if event["cat"] == "kernel" and rng.random() < 0.5:
            event["ts"] -= rng.choice([0, 35, 400])
            args["External id"] = rng.choice([10, 11, 12])
        if event["name"] == "cudaLaunchKernel":
            args["External id"] = rng.choice([10, 11, 12])
        if event["cat"] == "cuda_sync":
            args["cuda_sync_kind"] = rng.choice(["Stream Sync", "Stream Wait Event", "Event Sync"])
            args["wait_on_cuda_event_record_corr_id"] = rng.choice([-1, 7, 500])
            event["ts"] -= rng.choice([0, 600, 900])
            if rng.random() < 0.3:
                del args["wait_on_cuda_event_record_corr_id"]
        if event["name"] == "record_param_comms":
            args.pop(rng.choice(["Collective name", "dtype", "In msg nelems", "Group size", "Seq"]), None)
        if "evaluate_function" in event["name"]:
            args["Sequence number"] = rng.choice([0, 1, 5])
            event["name"] = f"autograd::engine::evaluate_function: {rng.choice(['Mul', 'Addmm'])}Backward0"
        if event["name"].startswith("cudaMemset"):
            event["name"] = rng.choice(["cudaEventRecord", "cudaEventRecordWithFlags_ptsz"])
            args["correlation"] = rng.choice([7, 500])


@pytest.mark.slow
def test_damaged_traces(tmp_path: Path) -> None:
    rng = random.Random(0)
    found: Counter[str] = Counter()
    for number in range(60):
        document = gpu_document(0)
        damage(document["traceEvents"], rng)
        path = tmp_path / f"trace_{number}.json"
        path.write_text(json.dumps(document))
        found += compare(path)
    assert set(found) == set(RULES.values())


def test_problems_of_reading_are_findings(tmp_path: Path) -> None:
    document = gpu_document(0)
    for event in document["traceEvents"]:
        if event.get("cat") == "kernel":
            event["dur"] = -5
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(document))
    (finding,) = (finding for finding in etloom.lint(path).findings if finding.code == READING)
    assert "read.negative_duration" in finding.example


def kernel_row(start: int, length: int, name: str | None = "k") -> dict[str, Any]:
    args = {"External id": 3, "stream": 7, "device": 0}
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": start,
        "dur": length,
        "pid": 0,
        "tid": 7,
        "args": args,
    }


LAUNCH = {
    "ph": "X",
    "cat": "cuda_runtime",
    "name": "cudaLaunchKernel",
    "ts": 10,
    "dur": 1,
    "pid": 1,
    "tid": 1,
}
LAUNCH |= {"args": {"External id": 3}}


def write_trace(path: Path, rank: int, rows: list[dict[str, Any]]) -> Path:
    document = {"distributedInfo": {"rank": rank}, "schemaVersion": 1, "traceEvents": rows}
    path.write_text(json.dumps(document))
    return path


def test_files_that_state_the_same_rank_keep_their_findings(tmp_path: Path) -> None:
    rows = {"a": kernel_row(5, 5), "b": kernel_row(20, 5), "c": kernel_row(6, 5, None)}
    files = [write_trace(tmp_path / f"{name}.json", 1, [row, LAUNCH]) for name, row in rows.items()]
    result = etloom.lint(*files)
    assert list(result.files.values()) == files
    assert [(result.files[finding.rank].stem, finding.example) for finding in result.findings] == [
        ("a", "k starts 5.0 us before its launch"),
        ("c", "(no name) starts 4.0 us before its launch"),
    ]
    assert "(c.json): kernel-before-launch" in CliRunner().invoke(app, ["lint", *map(str, files)]).stdout


def test_running_kernels_are_counted_without_listing_pairs(tmp_path: Path) -> None:
    rows = [kernel_row(row, 1000) for row in range(200)]
    rows += [
        row
        | {"cat": "cuda_sync", "name": "Stream Sync", "args": row["args"] | {"cuda_sync_kind": "Stream Sync"}}
        for row in (kernel_row(4 * row + 1, 1) for row in range(320))
    ]
    for number, row in enumerate(rows):
        row["args"] = row["args"] | {"correlation": number, "External id": number}
    assert compare(write_trace(tmp_path / "trace.json", 0, rows))["kernel-beyond-sync"] > 5000
    events = etloom.open(tmp_path / "trace.json", use_cache=False)[0]
    waits = events.syncs.select("record_correlation", "kind", id="event")
    waits = waits.join(events.events, on="id").with_columns(pl.col("kind", "cat", "name").cast(pl.String))
    assert _find_running_kernels(waits, events.events).height == 300


@pytest.mark.slow
def test_a_mixture_with_chakra_is_refused(tmp_path: Path) -> None:
    SEEDS["chakra"].write(tmp_path)
    assert etloom.lint(tmp_path).verdict is not None
    path = write_trace(tmp_path / "trace.json", 0, [LAUNCH])
    for paths in ([tmp_path], [path, tmp_path / "missing.et"]):
        with pytest.raises(ReadError, match=r"is not a trace of Kineto, but .*trace\.json is"):
            etloom.lint(*paths)


@pytest.mark.parametrize("write", [json.dumps, lambda document: json.dumps(document["traceEvents"])])
def test_on_the_command_line(write: Callable[[Any], str], tmp_path: Path) -> None:
    document = gpu_document(1)
    for event in document["traceEvents"]:
        if event.get("cat") == "kernel" or event["name"] == "cudaLaunchKernel":
            event["args"]["External id"] = 3
        if event.get("cat") == "kernel":
            event["ts"] -= 500
    path = tmp_path / "trace.json"
    path.write_text(write(document))
    result = CliRunner().invoke(app, ["lint", str(path)])
    assert result.exit_code == 1
    assert "kernel-before-launch" in result.stdout and "record again" in result.stdout
    assert "ASTRA-sim" not in result.stdout
    answer = json.loads(CliRunner().invoke(app, ["lint", str(tmp_path), "--format", "json"]).stdout)
    assert "kernel-before-launch" in {finding["code"] for finding in answer["findings"]}
    assert answer["verdict"] is None
