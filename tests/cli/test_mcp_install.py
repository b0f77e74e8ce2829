"""`etloom mcp --install`: the server in the file of a client."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from etloom.cli.mcp import CLIENTS

Outcome = tuple[int, str, str]


@pytest.mark.parametrize("client", CLIENTS)
def test_other_servers_stay(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Outcome]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, key = CLIENTS[client]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(json.dumps({"inputs": [1], key: {"other": {"command": "x"}}}))
    for run in ("first", "second"):  # again: replaced
        status, out, err = call("mcp", run, "--install", client)
        assert (status, out) == (0, "") and f"added etloom to {name}" in err
    settings = json.loads((tmp_path / name).read_text())
    assert settings["inputs"] == [1] and settings[key]["other"] == {"command": "x"}
    assert settings[key]["etloom"] == {
        "command": sys.executable,
        "args": ["-m", "etloom", "mcp", str(tmp_path / "second")],
    }


@pytest.mark.parametrize("content", ["{", "[]", '{"mcpServers": []}', '"text"'])
def test_a_file_of_another_form_is_kept(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Outcome]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".mcp.json").write_text(content)
    status, out, err = call("mcp", "run", "--install", "claude")
    assert (status, out, err.count("\n")) == (1, "", 1) and ".mcp.json: not a JSON object" in err
    assert (tmp_path / ".mcp.json").read_text() == content


def test_a_missing_file_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Outcome]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("mcp", "run", "--install", "vscode")[0] == 0
    assert list(json.loads((tmp_path / ".vscode" / "mcp.json").read_text())["servers"]) == ["etloom"]
    assert call("mcp", "run", "--install", "vscode", "--http", "8000")[0] == 2
