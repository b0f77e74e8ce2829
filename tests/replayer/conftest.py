"""Replays of computation in this process."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command without a process of its own, which takes seconds to start."""

    from etloom.cli.replay.compute_worker import work
    from etloom.replayer.compute import isolation

    def run(command: list[str], **_options: object) -> tuple[int, dict[int, str]]:
        try:
            work(json.loads(command[1]))
        except SystemExit as ended:
            assert isinstance(ended.code, int)
            return ended.code, {}
        return 0, {}

    monkeypatch.setattr(isolation, "run_isolated", run)
    monkeypatch.setenv("KINETO_LOG_LEVEL", "5")  # which work sets
