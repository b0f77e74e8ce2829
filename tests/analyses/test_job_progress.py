"""What a watcher takes for a stall, and after which time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from etloom.analyses.hangs.progress import PATIENCE_S, JobProgress
from etloom.core.calls import CALL_COLUMNS, DumpedCalls

STEP_NS = 100_000_000
CHECKPOINT_FRAMES = ("save (/x/torch/serialization.py:3)", "train (/x/train.py:9)")
LOADER_FRAMES = ("__next__ (/x/torch/utils/data/dataloader.py:3)",)


def make_dumps(
    steps: int, now_ns: int, *, waits: bool = False, frames: Sequence[str] = (), silent: bool = False
) -> dict[int, DumpedCalls]:
    """The states of two ranks after so many steps of one call.

    ``waits``: rank 1 waits in the next call; ``frames``: of rank 0; ``silent``: rank 0 has not written for long.
    """
    call = {"group": "0", "is_p2p": False, "collective": "all_reduce", "state": "completed"}
    rows = [
        dict.fromkeys(CALL_COLUMNS) | call | {"seq": at, "created_ns": at * STEP_NS} for at in range(steps)
    ]
    process = {
        "interval_s": 0.5,
        "steps": steps,
        "step_ends_ns": [at * STEP_NS for at in range(steps)],
    }
    last = call | {"seq": steps, "created_ns": steps * STEP_NS, "state": "scheduled"}
    calls = [rows, [*rows, dict.fromkeys(CALL_COLUMNS) | last] if waits else rows]
    facts = [{"written_ns": 0 if silent else now_ns, "frames": list(frames)}, {"written_ns": now_ns}]
    return {
        rank: DumpedCalls([tuple(row.values()) for row in calls[rank]], {"0": (0, 1)}, process | facts[rank])
        for rank in range(2)
    }


@pytest.mark.parametrize(
    ("state", "limit_s"),
    [
        ({"waits": True}, 2),
        ({}, PATIENCE_S["host"]),  # all ranks in code of their own, as for validation
        ({"waits": True, "frames": CHECKPOINT_FRAMES}, PATIENCE_S["a checkpoint"]),
        ({"waits": True, "frames": LOADER_FRAMES}, PATIENCE_S["data loading"]),
        ({"waits": True, "frames": CHECKPOINT_FRAMES, "silent": True}, 2),
    ],
)
def test_usual_pauses_are_stalls_later(state: dict[str, Any], limit_s: float) -> None:
    begin = 20 * STEP_NS
    for seconds, stalls in ((limit_s - 0.5, False), (limit_s + 0.5, True)):
        progress = JobProgress(None, 1.5, 0)
        assert not progress.observe(make_dumps(20, begin, waits=bool(state.get("waits"))), begin).has_stalled
        now = begin + int(seconds * 1e9)
        seen = progress.observe(make_dumps(20, now, **state), now)
        assert seen.has_stalled is stalls
        assert (seen.cause is not None) is stalls
    asked = JobProgress(1, 1.5, begin)
    asked.observe(make_dumps(20, begin, **state), begin)
    assert asked.observe(make_dumps(20, now, **state), now).has_stalled


def test_a_state_from_before_the_stall_blames_no_rank_yet() -> None:
    """Rank 0 waits for rank 1, whose last state is older than the last step that the watcher saw."""
    begin = 20 * STEP_NS
    for age_s, stalls in ((0.0, True), (2.6, False)):
        progress = JobProgress(None, 1.5, 0)
        progress.observe(make_dumps(20, begin, waits=True), begin)
        now = begin + 2_500_000_000
        dumps = make_dumps(20, now, waits=True)
        process = {**dumps[0].process, "interval_s": 1.25, "written_ns": now - int(age_s * 1e9)}
        dumps[0] = replace(dumps[0], process=process)
        assert progress.observe(dumps, now).has_stalled is stalls
