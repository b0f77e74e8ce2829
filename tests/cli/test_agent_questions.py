"""The benchmark of questions to the MCP tools: its answers are right, and it notices a wrong one."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

from support.paths import ROOT


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "agents"))
    return import_module("run")


@pytest.mark.slow
def test_all_answers_are_right(questions: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert questions.main() == 0
    assert capsys.readouterr().out == f"{len(questions.QUESTIONS)}/{len(questions.QUESTIONS)} right\n"


def test_a_wrong_answer_counts(
    questions: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = questions.QUESTIONS[0]
    wrong = [replace(right, expected=lambda: [0]), replace(right, path=("absent",))]
    monkeypatch.setattr(questions, "QUESTIONS", [right, *wrong])
    assert questions.main() == 1
    assert capsys.readouterr().out.endswith("1/3 right\n")


def test_the_skill_names_tools_that_exist() -> None:
    from etloom.cli.mcp.tools import RunTools

    skill = (ROOT / "src" / "etloom" / "cli" / "mcp" / "skill" / "SKILL.md").read_text()
    tools = {tool.__name__ for tool in RunTools(None).list_tools()}  # type: ignore[arg-type]
    assert all(f"`{name}`" in skill for name in tools)
