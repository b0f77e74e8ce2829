"""Tests for the tables of names: those of etloom, and what they cost a process that opens a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from etloom.core import names
from etloom.core.errors import InvalidValue
from etloom.core.known_names import KNOWN_NAMES
from support.small_traces import write_run


def test_the_known_names_are_as_those_of_users(tmp_path: Path) -> None:
    file = tmp_path / "known.yaml"
    file.write_text(yaml.safe_dump(KNOWN_NAMES))
    assert names.read_names(file) == {section: list(names.list_names(section)) for section in KNOWN_NAMES}


def test_values_of_rows_are_text(tmp_path: Path) -> None:
    file = tmp_path / "names.yaml"
    file.write_text("iterations:\n- pattern: '^it_'\n  phase: 3\n")
    with pytest.raises(InvalidValue, match="row 1 of iterations: phase is not text"):
        names.read_names(file)


@pytest.mark.slow
def test_opening_a_run_imports_no_yaml_protobuf_or_pyarrow(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "notes.txt").write_text("of no format, so that every reader looks at it")
    (tmp_path / "values.json").write_text('{"a": ' + "1" * 200 + "}")
    program = (
        "import sys, etloom\n"
        "etloom.info(etloom.open(sys.argv[1]))\n"
        "print(*{'yaml', 'google.protobuf', 'pyarrow', 'torch', 'pandas'} & set(sys.modules))"
    )
    output = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == ""


def test_added_files_are_listed_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_user_files", {})
    file = tmp_path / "mine.yaml"
    file.write_text("captures:\n- pattern: mine\n")
    names.add_names(file)
    try:
        assert names.list_user_paths() == (file.resolve(),)
    finally:
        names.list_names.cache_clear()
