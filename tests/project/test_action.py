"""The GitHub action: its bash steps are run as a runner does, with a stand-in for GitHub's command `gh`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from etloom.cli.demo import RECORDING
from support import small_traces
from support.paths import ROOT

ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
GH = """#!/bin/sh
echo "$@" >> "$LOG"
case "$1 $2" in
  "run list") echo 42 ;;
  "run download") [ -n "$STORED" ] && cp -r "$STORED" etloom-baseline ;;
  "pr comment") [ -z "$DENIED" ] && cp "$5" comment.md ;;
esac
"""


def run_action(folder: Path, inputs: dict[str, str], event: str, stored: Path | None) -> dict[str, Any]:
    """Run the bash steps of the action; returns the outputs of its steps, and whether it failed."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "gh").write_text(GH)
    (tools / "gh").chmod(0o755)
    (tools / "etloom").write_text(f'#!/bin/sh\nexec {sys.executable} -m etloom "$@"\n')
    (tools / "etloom").chmod(0o755)
    values = {name: fact.get("default", "") for name, fact in ACTION["inputs"].items()} | inputs
    known = {f"inputs.{name}": value for name, value in values.items()} | {
        "github.token": "none", "github.repository": "own/repository", "github.workflow": "perf",
        "github.event.repository.default_branch": "main", "github.event.pull_request.number": "7",
        "inputs.baseline || 'etloom-baseline'": values["baseline"] or "etloom-baseline",
    }  # fmt: skip
    outputs, conditions = (
        folder / "outputs",
        {
            "inputs.baseline == ''": not values["baseline"],
            "inputs.comment == 'true' && github.event_name == 'pull_request'": event == "pull_request",
        },
    )
    outputs.touch()
    for step in ACTION["runs"]["steps"]:
        verdict = dict(line.split("=") for line in outputs.read_text().splitlines())
        conditions["steps.check.outputs.verdict == 'failed'"] = verdict.get("verdict") == "failed"
        if (
            "run" not in step
            or step["name"] == "Install"
            or not conditions.get(step.get("if", ""), "if" not in step)
        ):
            continue
        assert "${{" not in step["run"], "values reach a script as variables, never as text of it"
        variables = {
            name: re.sub(r"\$\{\{ (.*?) \}\}", lambda match: known[match[1]], text)
            for name, text in step.get("env", {}).items()
        }
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder,
            env={
                **os.environ, **variables, "PATH": f"{tools}:{os.environ['PATH']}", "LOG": str(folder / "log"),
                "STORED": str(stored or ""), "GITHUB_OUTPUT": str(outputs),
                "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), "PYTHONPATH": str(ROOT / "src"),
            },
            capture_output=True,
            text=True,
        )  # fmt: skip
        if done.returncode:
            return {"failed": True, "step": step["name"], "stderr": done.stderr, **verdict}
    return {"failed": False, **dict(line.split("=") for line in outputs.read_text().splitlines())}


def write_steps(folder: Path, step_us: float) -> Path:
    """A run of one rank with GPU activity and 60 steps, whose times differ by some percent."""
    builder = small_traces.RankBuilder()
    start = 0.0
    for number in range(60):
        length = step_us * (1 + 0.01 * (number * 7 % 5))
        builder.step(number, start, length)
        builder.kernel(start + 1, start + 2, length - 5)
        start += length
    folder.mkdir()
    builder.trace(folder)
    return folder


@pytest.mark.slow
def test_without_a_baseline_the_comment_has_the_findings(tmp_path: Path) -> None:
    shutil.copytree(RECORDING, tmp_path / "run")
    outcome = run_action(tmp_path, {"run": "run", "script": "train.py"}, "pull_request", None)
    assert outcome == {"failed": False, "verdict": "no-baseline"}
    comment = (tmp_path / "comment.md").read_text()
    assert comment.startswith("### etloom: no baseline yet")
    assert (
        "- **stragglers**: rank 1 delays other ranks" in comment and "(medium confidence). To do: " in comment
    )
    assert (tmp_path / "summary.md").read_text() == comment
    assert '"uri": "train.py"' in (tmp_path / "etloom-results" / "findings.sarif").read_text()
    assert (tmp_path / "etloom-results" / "report.html").is_file()
    assert "run list --workflow perf --branch main --event push " in (tmp_path / "log").read_text()
    assert "pr comment 7 --body-file etloom-results/comment.md" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("step_us", "verdict"), [(10_000, "passed"), (12_000, "failed")])
def test_a_run_is_compared_with_the_stored_baseline(tmp_path: Path, step_us: float, verdict: str) -> None:
    stored = write_steps(tmp_path / "stored", 10_000)
    write_steps(tmp_path / "run", step_us)
    outcome = run_action(tmp_path, {"run": "run"}, "pull_request", stored)
    assert (outcome["failed"], outcome["verdict"]) == (verdict == "failed", verdict), outcome
    comment = (tmp_path / "comment.md").read_text()
    assert comment.startswith(f"### etloom: {verdict}") and "| step time | 10" in comment
    assert "**What changed**: " in comment
    assert "<testsuite" in (tmp_path / "etloom-results" / "junit.xml").read_text()


@pytest.mark.slow
def test_a_token_of_a_fork_costs_the_comment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DENIED", "1")
    shutil.copytree(RECORDING, tmp_path / "run")
    outcome = run_action(tmp_path, {"run": "run"}, "pull_request", None)
    assert outcome == {"failed": False, "verdict": "no-baseline"}
    assert not (tmp_path / "comment.md").exists() and (tmp_path / "summary.md").exists()
    steps = [step["name"] for step in ACTION["runs"]["steps"]]
    assert steps.index("Comment") > max(
        number for number, name in enumerate(steps) if name.startswith("Keep")
    )


def test_its_actions_are_pinned() -> None:
    for step in ACTION["runs"]["steps"]:
        assert "uses" not in step or re.search(r"@[0-9a-f]{40}$", step["uses"])
