"""Analyses, what-if and differences of memory snapshots with known answers."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from click.testing import CliRunner

import etloom
from etloom import cli
from etloom.analyses.helpers.memory_changes import describe_fit, simulate_memory
from etloom.cli import app
from etloom.core.errors import AnalysisError, InvalidValue
from etloom.core.trace import Job
from support.allocator_snapshots import SnapshotWriter
from support.small_traces import write_run

MIB = 1 << 20
KEPT, GONE = "keep (model.py:7)", "forward (model.py:9)"


def save(writer: SnapshotWriter, path: Path) -> Job:
    path.write_bytes(pickle.dumps(writer.snapshot()))
    return etloom.open(path, use_cache=False)


def fragment(**settings: int) -> SnapshotWriter:
    """Four blocks of 12 MiB next to gaps of 60 MiB in segments of 72 MiB, then a request of 90 MiB."""
    writer = SnapshotWriter(**settings)
    for request in [writer.alloc(72 * MIB, GONE) for _ in range(4)]:
        writer.free(request)
    pairs = [(writer.alloc(60 * MIB, GONE), writer.alloc(12 * MIB, KEPT)) for _ in range(4)]
    for gone, _ in pairs:
        writer.free(gone)
    writer.alloc(90 * MIB, "grow (model.py:11)")
    return writer


def test_allocator_states_reserved_used_and_split_bytes(tmp_path: Path) -> None:
    table = etloom.analyze(save(fragment(), tmp_path / "a.pickle"), "allocator", rows=3)
    row = table.filter(pl.col("event") == "peak_reserved").row(0, named=True)
    assert row["reserved_bytes"] == (4 * 72 + 90) * MIB and row["allocated_bytes"] == (48 + 90) * MIB
    assert row["free_bytes"] == row["split_bytes"] == 240 * MIB and row["releasable_bytes"] == 0
    assert row["requested_bytes"] == row["allocated_bytes"]


def test_holders_and_the_free_bytes_that_they_split(tmp_path: Path) -> None:
    table = etloom.analyze(save(fragment(), tmp_path / "a.pickle"), "memory-holders", at="end")
    assert table.select("place", "blocks", "bytes", "split_bytes").rows() == [
        ("grow (model.py:11)", 1, 90 * MIB, 0),
        (KEPT, 4, 48 * MIB, 240 * MIB),
    ]


def test_what_a_change_of_settings_needs(tmp_path: Path) -> None:
    job = save(fragment(), tmp_path / "a.pickle")
    table = etloom.simulate_memory(
        job, "expandable_segments:True", "capacity=300MiB", "capacity=400MiB,empty_cache=end"
    )
    recorded, expandable, small, large = table.rows(named=True)
    assert recorded["change"] == "recorded" and recorded["peak_reserved_bytes"] == 378 * MIB
    assert expandable["fits"] and expandable["peak_reserved_bytes"] == 380 * MIB
    assert (
        not small["fits"]
        and small["failed_bytes"] == 90 * MIB
        and small["needed_bytes"] == 378 * MIB
        and expandable["needed_bytes"] <= 300 * MIB
    )
    assert large["fits"] and large["retries"] == 0


@pytest.mark.slow
def test_the_sentence_names_a_rank_that_does_not_fit(tmp_path: Path) -> None:
    """The rank that fits has the higher peak: that of the other ends at its failure. Needed bytes may be unknown."""
    fitting = SnapshotWriter()
    fitting.alloc(296 * MIB)
    ranks = {0: save(fitting, tmp_path / "a.pickle"), 1: save(fragment(), tmp_path / "b.pickle")}
    job = Job({rank: next(iter(each.values())) for rank, each in ranks.items()})
    table = simulate_memory(job, ["capacity=300MiB"]).with_columns(needed_bytes=pl.lit(None, pl.Int64))
    (sentence,) = describe_fit(job, ["capacity=300MiB"], table)
    assert sentence.startswith("capacity=300MiB, rank 1: does not fit, it needs more")


@pytest.mark.slow
def test_an_out_of_memory_error_is_explained(tmp_path: Path) -> None:
    job = save(fragment(capacity=300 * MIB), tmp_path / "oom.pickle")
    row = etloom.analyze(job, "memory-findings").row(0, named=True)
    assert row["pattern"] == "out-of-memory" and row["bytes"] == 90 * MIB and row["confidence"] == "high"
    assert "251.66 MB are free in segments that live blocks split" in row["title"]
    assert "expandable_segments:True lets it pass" in row["advice"]
    assert json.loads(row["parts"]) == [{"place": KEPT, "bytes": 48 * MIB}]
    assert etloom.analyze(job, "memory-holders", at="oom")["bytes"].to_list() == [48 * MIB]
    assert not etloom.simulate_memory(job)["fits"][0]


@pytest.mark.slow
def test_a_request_that_no_setting_satisfies_needs_more_memory(tmp_path: Path) -> None:
    writer = SnapshotWriter(capacity=100 * MIB)
    writer.alloc(60 * MIB, KEPT)
    writer.alloc(50 * MIB, GONE)
    (row,) = etloom.analyze(save(writer, tmp_path / "a.pickle"), "memory-findings").rows(named=True)
    assert "none of the settings" in row["advice"] and "10.49 MB more memory" in row["advice"]


def train(steps: int, *, leak: bool) -> SnapshotWriter:
    writer = SnapshotWriter()
    writer.alloc(100 * MIB, "load (model.py:1)")
    for _ in range(steps):
        activations = [writer.alloc(40 * MIB, GONE) for _ in range(4)]
        if leak:
            writer.alloc(12 * MIB, KEPT)
        for request in reversed(activations):
            writer.free(request)
    writer.alloc(160 * MIB, "evaluate (model.py:20)")
    return writer


@pytest.mark.slow
def test_a_leak_is_growth_in_each_cycle(tmp_path: Path) -> None:
    leaking = etloom.analyze(
        save(train(6, leak=True), tmp_path / "a.pickle"), "memory-findings", pattern="leak"
    )
    (row,) = leaking.rows(named=True)
    assert row["bytes"] == 12 * MIB and json.loads(row["parts"])[0]["place"] == KEPT
    for steps, leak in ((6, False), (2, True)):
        job = save(train(steps, leak=leak), tmp_path / "b.pickle")
        assert etloom.analyze(job, "memory-findings", pattern="leak").is_empty()


@pytest.mark.slow
def test_a_release_before_an_allocation_is_a_retry_and_that_of_the_program_is_not(tmp_path: Path) -> None:
    writer = SnapshotWriter(capacity=100 * MIB)
    writer.free(writer.alloc(60 * MIB, GONE))
    writer.alloc(80 * MIB, GONE)
    (row,) = etloom.analyze(save(writer, tmp_path / "a.pickle"), "memory-findings").rows(named=True)
    assert row["pattern"] == "allocator-retries" and row["bytes"] == 60 * MIB
    writer = SnapshotWriter()
    writer.free(writer.alloc(60 * MIB, GONE))
    writer.empty_cache()
    writer.alloc(80 * MIB, GONE)
    assert etloom.analyze(save(writer, tmp_path / "b.pickle"), "memory-findings").is_empty()


@pytest.mark.slow
def test_the_difference_of_two_snapshots(tmp_path: Path) -> None:
    save(train(2, leak=False), tmp_path / "a.pickle"), save(train(2, leak=True), tmp_path / "b.pickle")
    result = CliRunner().invoke(
        app, ["diff", *(str(tmp_path / f"{n}.pickle") for n in "ab"), "--format", "json"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert rows[0]["place"] == "(peak of reserved memory)"
    assert rows[1]["place"] == KEPT and rows[1]["change_bytes"] == 24 * MIB


def test_a_snapshot_with_annotations_is_compared_as_a_snapshot(tmp_path: Path) -> None:
    """PyTorch annotates the steps of optimizers: the only events with a duration."""
    snapshot = train(2, leak=True).snapshot()
    times = [entry["time_us"] for entry in snapshot["device_traces"][0]]
    snapshot["external_annotations"] = [
        {"stage": stage, "name": "Optimizer.step#SGD.step", "device": 0, "time_us": time}
        for stage, time in zip(("START", "END"), (times[0], times[-1]), strict=True)
    ]
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(snapshot))
    job = etloom.open(tmp_path / "a.pickle", use_cache=False)
    assert job[0].events["dur"].drop_nulls().len() == 1
    result = CliRunner().invoke(app, ["diff", *[str(tmp_path / "a.pickle")] * 2, "--top", "1"])
    assert result.exit_code == 0 and "peak of reserved memory" in result.output


@pytest.mark.parametrize("is_freed", [True, False])
def test_state_of_the_optimizer_is_no_waste(is_freed: bool, tmp_path: Path) -> None:
    writer, step = SnapshotWriter(), "step (torch/optim/adamw.py:7)"
    writer.alloc(100 * MIB, KEPT)
    state, temporary = writer.alloc(60 * MIB, step), writer.alloc(40 * MIB, step)
    if is_freed:
        writer.free(temporary)
    writer.free(writer.alloc(10 * MIB, KEPT))
    writer.free(state)  # at the end of the program
    rows = etloom.analyze(save(writer, tmp_path / "a.pickle"), "memory-findings", pattern="optimizer-peak")
    assert rows["bytes"].to_list() == ([40 * MIB] if is_freed else [])


@pytest.mark.slow
def test_what_a_program_needs_does_not_depend_on_the_capacity_asked_about(tmp_path: Path) -> None:
    """The recording begins after the first requests: their 288 MiB are cached then."""
    writer = fragment()
    del writer.history[:16]
    job = save(writer, tmp_path / "a.pickle")
    table = etloom.simulate_memory(job, "capacity=100MiB", "capacity=200MiB", "capacity=1GiB")
    assert table["needed_bytes"].n_unique() == 1 and table["fits"].to_list()[1:] == [False, False, True]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("", "no setting; write --memory"),
        ("capacity=40", "a capacity of 40 B is less than a segment of 2 MiB; write a unit"),
        ("garbage_collection_threshold:0.8", "has no effect without a limit; add capacity"),
        ("max_split_size_mb:5", "it must exceed 20 MiB"),
        ("empty_cache=99s", "empty_cache=99s: the recording ends before 99s"),
        ("empty_cache=oom", "empty_cache=oom: no request failed in the recording"),
    ],
)
def test_a_change_without_effect_is_refused(change: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((InvalidValue, AnalysisError), match=message):
        etloom.simulate_memory(save(fragment(), tmp_path / "a.pickle"), "capacity=1GiB", change)


def test_simulate_memory_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(fragment(), tmp_path / "a.pickle")
    arguments = ["simulate", str(tmp_path / "a.pickle"), "--memory", "capacity=40GiB", "--format", "json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert [row["fits"] for row in json.loads(result.stdout)] == [True, True]
    assert CliRunner().invoke(app, [*arguments, "--set", "comm x0"]).exit_code == 2
    assert cli.main([*arguments, "--other-batch", str(tmp_path / "a.pickle")]) == 2
    assert "--other-batch: no change has a batch" in (err := capsys.readouterr().err) and err.count("\n") == 1


def test_the_answer_is_a_sentence_for_each_capacity(tmp_path: Path) -> None:
    save(fragment(), tmp_path / "a.pickle")
    arguments = [
        "simulate",
        str(tmp_path / "a.pickle"),
        "--memory",
        "capacity=300MiB",
        "--memory",
        "capacity=756MiB",
    ]
    lines = CliRunner().invoke(app, arguments).stderr.splitlines()
    assert lines[-2].startswith(
        "etloom: capacity=300MiB: does not fit, it needs 396.36 MB; with expandable_segments:True "
    )
    assert lines[-1] == "etloom: capacity=756MiB: fits with 50 % to spare"


@pytest.mark.parametrize(
    "text", ["nothing:1", "capacity=-1", "capacity=1e999", "max_split_size_mb:5", "expandable"]
)
def test_unknown_settings_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidValue):
        etloom.simulate_memory(save(fragment(), tmp_path / "a.pickle"), text)


@pytest.mark.slow
def test_a_run_without_snapshot_names_how_to_record_one(tmp_path: Path) -> None:
    write_run(tmp_path)
    for question in ("allocator", "memory-holders", "memory-findings"):
        with pytest.raises(AnalysisError, match="no history"):
            etloom.analyze(tmp_path, question)


def test_backward_nodes_and_operators_hold_memory_without_python_frames(data: Path) -> None:
    path = data / "cases" / "turn3" / "mem_cpp.pickle"
    if not path.exists():
        pytest.skip("needs the cases of turn 3")
    for by, place in (("line", "forward (model.py:10)"), ("operator", "at::_ops::bmm")):
        table = etloom.analyze(etloom.open(path, use_cache=False), "memory-holders", by=by)
        assert table["place"].to_list() == ["BmmBackward0", place]
        assert table["requested_bytes"].to_list() == [599_999_488, 400_000_000]


def test_a_history_that_does_not_match_the_segments_is_refused(tmp_path: Path) -> None:
    content = fragment().snapshot()
    content["segments"] = content["segments"][:1]
    content["device_traces"][0] = content["device_traces"][0][-12:]
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(content))
    with pytest.raises(AnalysisError, match="does not match the segments"):
        etloom.simulate_memory(tmp_path / "a.pickle", "capacity=40GiB")


@pytest.mark.slow
def test_a_history_that_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    sound = fragment().snapshot()

    def refused(damage: Callable[[dict[str, Any]], object], words: str) -> None:
        content = copy.deepcopy(sound)
        damage(content)
        (tmp_path / "a.pickle").write_bytes(pickle.dumps(content))
        for question in ("allocator", "memory-holders", "memory-findings"):
            with pytest.raises(AnalysisError, match=words):
                etloom.analyze(etloom.open(tmp_path / "a.pickle", use_cache=False), question)

    older = {**sound["segments"][0], "address": 1 << 40, "blocks": []}
    refused(lambda content: content["segments"].extend([older, older]), "does not match the segments")
    huge = {**older, "total_size": 1 << 55}
    refused(lambda content: content["segments"].append(huge), "has no size, or no address")
    refused(lambda content: content["device_traces"][0].pop(1), "does not match the segments")
    refused(lambda content: content["device_traces"].clear(), "contains no history")
