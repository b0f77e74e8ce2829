"""Folders of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

import etloom
from etloom.core import paths
from support import small_traces


def test_without_a_home_folder_runs_open_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("ETLOOM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", find_no_home)
    with pytest.raises(OSError):
        paths.create_cache_folder()
    assert len(etloom.open(small_traces.write_run(tmp_path / "run"))) == 2
