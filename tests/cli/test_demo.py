"""`etloom demo`: the bundled recording, and what the verb shows of it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

import etloom
from etloom.cli.demo import RECORDING

MAX_BYTES = 300_000
PLANTED = {"stragglers", "small-collectives", "data-loading"}


@pytest.mark.slow
def test_the_three_largest_findings_are_the_planted_problems() -> None:
    findings = etloom.analyze(RECORDING, "findings")
    assert set(findings["pattern"][:3]) == PLANTED
    assert findings.row(0, named=True)["pattern"] == "stragglers"
    assert findings.row(0, named=True)["rank"] == 1


def test_the_recording_is_small_and_names_no_machine() -> None:
    total = 0
    for file in RECORDING.iterdir():
        content = file.read_bytes()
        total += len(content)
        if file.suffix == ".zst":
            content = zstandard.ZstdDecompressor().stream_reader(content).read()
        hosts = re.findall(rb'"(?:host|host_name)": "([^"]*)"', content)
        assert set(hosts) <= {b"demo-host"}
        assert not re.search(rb'"/\w|/(?:tmp|home|root|usr)/', content), file
    assert total <= MAX_BYTES


@pytest.mark.slow
def test_the_demo_writes_a_report_and_names_the_commands(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    out = tmp_path / "demo"
    for _ in range(2):  # again into the same folder
        status, text, messages = call("demo", "--out", out)
        assert status == 0
        assert [line for line in text.splitlines() if line.startswith("$ etloom ")] == [
            f"$ etloom report {out}",
            f"$ etloom findings {out} --min-pct 5",
            f"$ etloom simulate {out} --like-peers 1",
        ]
        assert all(pattern in text for pattern in PLANTED)
        assert str(out / "report.html") in messages
    assert (out / "report.html").stat().st_size > 50_000


def test_the_demo_does_not_mix_its_files_with_others(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    (tmp_path / "kineto_trace_2.json").write_text("{}")
    status, text, messages = call("demo", "--out", tmp_path)
    assert (status, text) == (1, "")
    assert "contains other files, such as kineto_trace_2.json" in messages and "--out" in messages


@pytest.mark.slow
def test_the_demo_needs_no_torch(tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules["torch"] = None
from etloom.cli import main
assert main(["demo", "--out", {str(tmp_path / "demo")!r}]) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
