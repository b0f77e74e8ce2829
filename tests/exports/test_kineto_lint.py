"""Verdicts on Kineto traces equal those of PyTorch's own validator, on real and on damaged traces."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import etloom
from etloom.cli import app
from etloom.exports.chakra_lint.lint_codes import KINETO_CODES
from fuzzing.seeds import gpu_document

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


def compare(path: Path) -> Counter[str]:
    """Check a file with both validators; return the number of problems by code."""
    _, violations = torch_rules.validate_trace(str(path))
    expected = Counter(RULES[violation.rule_name] for violation in violations)
    found = Counter({finding.code: finding.count for finding in etloom.lint(path).findings})
    assert found == expected, path
    return found


def test_each_rule_of_torch_has_a_code() -> None:
    assert {rule.__name__ for rule in torch_rules._RULES} == set(RULES)
    assert set(KINETO_CODES) == set(RULES.values())


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


def test_damaged_traces(tmp_path: Path) -> None:
    rng = random.Random(0)
    found: Counter[str] = Counter()
    for number in range(60):
        document = gpu_document(0)
        damage(document["traceEvents"], rng)
        path = tmp_path / f"trace_{number}.json"
        path.write_text(json.dumps(document))
        found += compare(path)
    assert set(found) == set(KINETO_CODES)


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
