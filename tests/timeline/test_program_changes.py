"""Changes of a recorded program: checkpointing of a module, and another batch."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import numpy as np
import pytest

import etloom
from etloom.core.errors import AnalysisError, EtloomError, InvalidValue
from etloom.core.trace import Job
from etloom.timeline.memory.program import find_programs
from etloom.timeline.memory.what_if import _Call, _find_held
from support.allocator_snapshots import SnapshotWriter

MIB = 1 << 20
LINE = "model.py:12"
OUTER = f"forward ({LINE}); <module> (train.py:5)"


def save(writer: SnapshotWriter, path: Path) -> Job:
    path.write_bytes(pickle.dumps(writer.snapshot()))
    return etloom.open(path, use_cache=False)


def train(batch: int = 1, *, steps: int = 1, has_backward: bool = True) -> SnapshotWriter:
    """Steps of three layers: 20 and 30 MiB for the backward pass, 10 MiB in between, and a result of 5 MiB."""
    writer = SnapshotWriter()
    writer.alloc(100 * MIB, "load (train.py:1)")
    for _ in range(steps):
        layers = []
        for _ in range(3):
            inside = [f"forward (layer.py:{line}); {OUTER}" for line in (3, 4, 5)]
            between = writer.alloc(10 * MIB * batch, inside[0])
            held = [writer.alloc(size * MIB * batch, inside[1]) for size in (20, 30)]
            writer.free(between)
            layers.append([*held, writer.alloc(5 * MIB * batch, inside[2])])
        loss = writer.alloc(MIB * batch, "loss (train.py:6)")
        gradient = writer.alloc(5 * MIB * batch, "")
        writer.free(loss)
        for held_20, held_30, result in reversed(layers):
            if not has_backward:
                break
            next_gradient = writer.alloc(5 * MIB * batch, "")
            for request in (held_30, gradient, held_20, result):
                writer.free(request)
            gradient = next_gradient
        writer.free(gradient)
    return writer


@pytest.mark.parametrize("steps", [1, 2])
def test_checkpointing_frees_what_a_call_holds_until_its_backward_pass(tmp_path: Path, steps: int) -> None:
    job = save(train(steps=steps), tmp_path / "a.pickle")
    recorded, changed = etloom.simulate_memory(job, f"checkpoint={LINE}").rows(named=True)
    # Three layers of 55 MiB, the gradient of the last result and the next one.
    assert recorded["peak_allocated_bytes"] == (100 + 3 * 55 + 5 + 5) * MIB
    # Three results, a gradient, and all of one layer but its result.
    assert changed["peak_allocated_bytes"] == (100 + 3 * 5 + 5 + 60) * MIB
    assert changed["repeated_requests"] == 3 * 3 * steps and recorded["repeated_requests"] == 0
    # Entries are 1 us apart: three requests of a call, and the segments that they take.
    assert 3 * steps * 2_000 <= changed["repeated_ns"] <= 3 * steps * 4_000
    assert changed["needed_bytes"] < recorded["needed_bytes"]


def test_checkpointing_keeps_the_memory_at_the_end(tmp_path: Path) -> None:
    save(train(steps=2), tmp_path / "a.pickle")
    etloom.export(tmp_path / "a.pickle", tmp_path / "b.pickle", settings=f"checkpoint={LINE}")
    table = etloom.analyze(tmp_path / "b.pickle", "allocator", rows=2)
    assert table["requested_bytes"].to_list()[-1] == 100 * MIB


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("checkpoint=model.py:13", InvalidValue, "in the recording: model.py:12"),
        ("batch=2", InvalidValue, "expected a factor such as x2"),
        ("batch=x0", InvalidValue, "expected a factor such as x2"),
        ("batch=x2", AnalysisError, "name that snapshot with --other-batch"),
    ],
)
def test_what_a_recording_does_not_contain_is_refused(
    tmp_path: Path, text: str, error: type[EtloomError], words: str
) -> None:
    with pytest.raises(error, match=words):
        etloom.simulate_memory(save(train(), tmp_path / "a.pickle"), text)


def test_a_forward_pass_alone_has_nothing_to_compute_again(tmp_path: Path) -> None:
    job = save(train(has_backward=False), tmp_path / "a.pickle")
    with pytest.raises(AnalysisError, match="no backward pass"):
        etloom.simulate_memory(job, f"checkpoint={LINE}")


@pytest.mark.parametrize(("factor", "batch"), [("x0.5", 1), ("x2", 4), ("x3", 6)])
def test_sizes_that_grow_with_the_batch_are_those_that_differ(
    tmp_path: Path, factor: str, batch: int
) -> None:
    job, other = save(train(2), tmp_path / "2.pickle"), save(train(3), tmp_path / "3.pickle")
    predicted = etloom.simulate_memory(job, f"batch={factor}", other_batch=other).row(1, named=True)
    recorded = etloom.simulate_memory(save(train(batch), tmp_path / "b.pickle")).row(0, named=True)
    for name in ("peak_reserved_bytes", "peak_allocated_bytes", "needed_bytes"):
        assert predicted[name] == recorded[name]


def test_recordings_of_other_programs_tell_nothing_about_the_batch(tmp_path: Path) -> None:
    job = save(train(2), tmp_path / "a.pickle")
    with pytest.raises(AnalysisError, match="the same sizes"):
        etloom.simulate_memory(job, "batch=x2", other_batch=save(train(2), tmp_path / "b.pickle"))
    other = save(train(3, steps=2), tmp_path / "c.pickle")
    with pytest.raises(AnalysisError, match="no counterpart"):
        etloom.simulate_memory(job, "batch=x2", other_batch=other)


def test_many_calls_are_searched_in_little_time(tmp_path: Path) -> None:
    (program,) = find_programs(next(iter(save(train(), tmp_path / "a.pickle").values())))
    count = 30_000
    calls = [_Call([number], number, number + 1) for number in range(count)]
    start = time.process_time()
    _find_held(program, calls, np.arange(count + 1), np.full(count, -1))
    assert time.process_time() - start < 5  # a search of all calls for each takes a minute
