"""The cell magic, with a shell that has the methods of IPython's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import etloom

pytestmark = [pytest.mark.slow, pytest.mark.torch]
CELL = """
import torch
weight = torch.ones(64, 64)
for _ in range(50):
    result = weight @ weight
"""


class Shell:
    """What the magic uses of IPython.core.interactiveshell.InteractiveShell."""

    def __init__(self) -> None:
        self.magics: dict[str, Callable[[str, str], Any]] = {}
        self.namespace: dict[str, Any] = {}

    def register_magic_function(self, function: Callable[[str, str], Any], kind: str, name: str) -> None:
        assert kind == "cell"
        self.magics[name] = function

    def run_cell(self, cell: str) -> SimpleNamespace:
        try:
            exec(cell, self.namespace)
        except ZeroDivisionError:
            return SimpleNamespace(success=False)
        return SimpleNamespace(success=True)


@pytest.fixture
def shell() -> Shell:
    pytest.importorskip("torch")
    shell = Shell()
    etloom.load_ipython_extension(shell)
    return shell


def test_a_cell_is_recorded_in_the_namespace_of_the_notebook(
    shell: Shell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = shell.magics["etloom"](str(tmp_path / "run"), CELL)
    assert {"pattern", "title", "advice"} <= set(findings.columns)
    assert shell.namespace["result"][0, 0] == 64
    assert "Top operator: aten::mm" in capsys.readouterr().out
    assert etloom.open(tmp_path / "run").events.filter(name="aten::mm").height == 50


def test_a_cell_that_raises_shows_no_findings(shell: Shell) -> None:
    assert shell.magics["etloom"]("", "1 / 0") is None
