"""Findings as SARIF and Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.cli.demo import RECORDING
from etloom.exports.markdown import escape
from etloom.exports.sarif import _describe_result, _escape, _locate

LEVELS = {"none", "note", "warning", "error"}


def export_sarif(tmp_path: Path, **options: Any) -> dict[str, Any]:
    path = tmp_path / "findings.sarif"
    etloom.export(RECORDING, path, **options)
    log: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return log


@pytest.mark.slow
def test_sarif_has_what_its_schema_requires(tmp_path: Path) -> None:
    """The file was also validated with the whole schema; these are the rules for the properties that it has."""
    log = export_sarif(tmp_path, script="train.py")
    assert set(log) == {"$schema", "version", "runs"} and log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "etloom" and run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    rules = [rule["id"] for rule in driver["rules"]]
    assert len(set(rules)) == len(rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in LEVELS and result["message"]["text"]
        assert -1 <= result.get("rank", -1) <= 100
        assert all(isinstance(value, str) for value in result["partialFingerprints"].values())
        (location,) = result["locations"]
        assert location["physicalLocation"]["artifactLocation"] == {"uri": "train.py"}
        assert location["physicalLocation"]["region"]["startLine"] >= 1


@pytest.mark.slow
def test_sarif_has_the_findings_in_their_order(tmp_path: Path) -> None:
    results = export_sarif(tmp_path)["runs"][0]["results"]
    findings = etloom.analyze(RECORDING, "findings")
    assert [result["ruleId"] for result in results] == findings["pattern"].to_list()
    assert results[0]["level"] == "warning" and "medium confidence" in results[0]["message"]["text"]
    assert results[0]["rank"] == pytest.approx(findings["job_gain_pct"][0])
    low = [result["level"] for result in results if result["properties"]["confidence"] == "low"]
    assert set(low) <= {"note"}


def test_a_share_that_is_unknown_is_not_stated() -> None:
    unknown = {
        "job_gain_ns": None,
        "job_gain_pct": None,
        "pct": None,
        "step_cost_ns": None,
        "step_gain_ns": None,
    }
    row = {
        "title": "late",
        "confidence": "high",
        "advice": "wait less",
        "rank": 1,
        "cost_ns": 2_000_000,
        **unknown,
    }
    row |= dict.fromkeys(("pattern", "operator", "module", "frame", "name", "step", "count"), None) | {
        "pattern": "x"
    }
    result = _describe_result(row, ["x"], None, None)
    assert result["level"] == "note" and "rank" not in result
    assert result["message"]["text"] == "late: up to 2 ms in total (high confidence). To do: wait less."


@pytest.mark.parametrize(
    ("frame", "uri"),
    [
        ("train.py(12): main", "train.py"),
        ("/job/my code/train.py(12): main", "my%20code/train.py"),
        ("/elsewhere/a.py(12): <module>", "file:///elsewhere/a.py"),
        ("../../secret.py(1): f", None),
        ("<built-in function max>", None),
        (f"train.py({'1' * 5000}): main", None),
    ],
)
def test_a_frame_is_a_location_without_leaving_the_sources(frame: str, uri: str | None) -> None:
    place = _locate(frame, None, "/job")
    assert (place and place["artifactLocation"]["uri"]) == uri
    if place is not None:
        assert place["region"] == {"startLine": 12}


def test_names_of_a_trace_do_not_format_a_comment() -> None:
    assert escape("a|b\n<img> @someone __x__ [l](u)") == (r"a\|b \<img\> &#64;someone \_\_x\_\_ \[l\](u)")


@pytest.mark.parametrize("scheme", ["https://", "HTTP://", "ftp://", "www."])
def test_an_address_in_a_name_is_no_link(scheme: str) -> None:
    text = escape(f"kernel {scheme}example.com/x")
    assert scheme not in text and text.replace("<!-- -->", "") == f"kernel {scheme}example.com/x"


def test_a_message_of_sarif_has_no_arguments_and_links() -> None:
    assert _escape("Lambda{0} [l](u) x") == r"Lambda{{0}} \[l\](u) x"


@pytest.mark.slow
def test_markdown_lists_the_largest(tmp_path: Path) -> None:
    etloom.export(RECORDING, tmp_path / "a.md", top=2)
    lines = (tmp_path / "a.md").read_text().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["- **stragglers**", "- **small-collectives**"]
    with pytest.raises(etloom.EtloomError, match="expected 1 or more, got 0"):
        etloom.export(RECORDING, tmp_path / "a.md", top=0)
