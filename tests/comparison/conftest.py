from __future__ import annotations

from pathlib import Path

import pytest

from support.small_traces import write_stepped_run


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path, Path]:
    times = [1000.0, 1004, 1002, 1008, 1006, 1001]
    slow = [1.05 * time for time in times]
    return (
        write_stepped_run(tmp_path / "a", times),
        write_stepped_run(tmp_path / "b", times[::-1]),
        write_stepped_run(tmp_path / "slow", slow),
    )
