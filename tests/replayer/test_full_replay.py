"""Computation and communication replayed together, on real processes, and what becomes of operators that end one."""

from __future__ import annotations

import json
import math
import platform
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import etloom
from etloom import cli
from support.processes import ended, processes, wait_for_calls
from support.replays import all_reduce_call, et_tensor, operator_node, relu_node, write_calls

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def deadly(at: int) -> dict[str, Any]:
    """Divides an integer by its number of heads, 0."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("only x86 ends a process that divides by 0")
    schema = (
        "aten::_native_multi_head_attention(Tensor query, Tensor key, Tensor value, int embed_dim, int num_head, "
        "Tensor qkv_weight, Tensor qkv_bias, Tensor proj_weight, Tensor proj_bias) -> (Tensor, Tensor)"
    )
    shapes: list[list[int]] = [[2, 3, 4]] * 3 + [[], [], [12, 4], [12], [4, 4], [4]]
    values: list[Any] = [[one, 100 + one, 0, math.prod(of), 4, "cpu"] for one, of in enumerate(shapes, 10)]
    values[3:5] = [4, 0]
    types = [*["Tensor(float)"] * 3, "Int", "Int", *["Tensor(float)"] * 4]
    return operator_node(at, schema, values, types, shapes)


def test_computation_and_communication_together(data: Path) -> None:
    found = ended(processes(2, data / "cpu" / "ddp_2", "--repeats", "1", "--format", "json", part="full"))
    assert [status for status, _, _ in found] == [0, 0], found
    (row,) = json.loads(found[0][1])
    assert (row["collective"], row["count"], row["bytes"]) == ("all_reduce", 4, 799_744)
    assert "1,950 of 1,950 operators of rank 0 run" in found[0][2]
    assert "skipped" not in found[0][2]
    assert "ms for communication" in found[0][2]


def test_an_operator_that_ends_a_process_ends_no_rank(tmp_path: Path) -> None:
    run = write_calls(
        tmp_path,
        {
            0: [relu_node(2, et_tensor(12, 102), et_tensor(13, 103)), all_reduce_call(64)],
            1: [deadly(2), all_reduce_call(64), relu_node(4, et_tensor(12, 102), et_tensor(13, 103))],
        },
    )
    found = ended(processes(2, run, "--repeats", "2", "--format", "json", part="full"))
    assert [status for status, _, _ in found] == [0, 0], found
    (row,) = json.loads(found[0][1])
    assert (row["collective"], row["count"]) == ("all_reduce", 4)
    assert "1 of 1 operators of rank 0 run" in found[0][2]
    assert found[1][2] == (
        "etloom: rank 1 skips 1 call of aten::_native_multi_head_attention: it crashed the process: SIGFPE\n"
    )


def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    own = [relu_node(2, et_tensor(12, 102), et_tensor(13, 103)), all_reduce_call(64)]
    running = processes(2, write_calls(tmp_path, {0: own, 1: own}), "--repeats", "10000000", part="full")
    wait_for_calls(running)
    assert [one.poll() for one in running] == [None, None]
    running[1].send_signal(signal.SIGKILL)
    since = time.monotonic()
    found = ended(running, timeout=400)
    assert time.monotonic() - since < 300
    status, _, err = found[0]
    assert status == 1
    assert err.strip().count("\n") <= 1
    assert "rank 1" in err and "gone" in err


def test_an_operator_that_ends_the_process_is_an_outcome(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_calls(tmp_path, {0: [deadly(2), relu_node(3, et_tensor(12, 102), et_tensor(13, 103))]})
    assert cli.main(["replay", "compute", str(tmp_path), "--repeats", "1", "--format", "json"]) == 0
    rows = {row["name"]: (row["result"], row["reason"]) for row in json.loads(capfd.readouterr().out)}
    assert rows["aten::relu"][0] == "replayed"
    assert rows["aten::_native_multi_head_attention"] == ("skipped", "it crashed the process: SIGFPE")


def test_an_operator_that_crashes_does_not_end_a_notebook(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_calls(tmp_path, {0: [deadly(2), relu_node(3, et_tensor(12, 102), et_tensor(13, 103))]})
    replay = etloom.replay(tmp_path, "compute", repeats=1)
    rows = {name: (result, reason) for name, result, reason, *_ in replay.coverage.rows()}
    assert rows["aten::relu"][0] == "replayed"
    assert rows["aten::_native_multi_head_attention"] == ("skipped", "it crashed the process: SIGFPE")
    assert len(replay.repeats_ns) == 1 and replay.trace is not None
    assert capfd.readouterr().out == ""


def test_a_rank_reports_its_current_operator(tmp_path: Path) -> None:
    from support.replays import prepare_trace

    write_calls(tmp_path, {0: [relu_node(2, et_tensor(12, 102), et_tensor(13, 103))]})
    (trace,) = etloom.open(tmp_path, use_cache=False).values()
    tried: list[str] = []
    machine = prepare_trace(trace, on_step=lambda step: tried.append(step.name))
    assert tried == ["aten::relu"] and machine.describe_position() is None
    seen: list[str | None] = []
    (ready,) = machine._prepared
    run, ready.call = ready.call, lambda *given: (seen.append(machine.describe_position()), run(*given))[1]
    machine.run()
    node = trace.nodes.filter(trace.nodes["et_id"] == 2)["id"].item()
    assert seen == [f"aten::relu (node {node})"] and machine.describe_position() is None
