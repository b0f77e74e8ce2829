"""Computation replay: what tensors hold that no operator made, above all what was saved beside the trace."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etloom
from etloom import cli

torch = pytest.importorskip("torch")
from torch.profiler import ExecutionTraceObserver, profile  # noqa: E402

from etloom.replayer.compute.executor import Executor  # noqa: E402
from etloom.replayer.compute.program import build_program  # noqa: E402
from etloom.replayer.compute.saved_tensors import resources_folder  # noqa: E402
from etloom.replayer.compute.tensor_initialization import infer_bounds  # noqa: E402
from etloom.replayer.launch_environment import ranks_on_host  # noqa: E402

pytestmark = pytest.mark.torch
SAVED = "aten::embedding,aten::embedding_bag,aten::gather,aten::nonzero,aten::index_select,aten::nll_loss"


def record(folder: Path, step: Callable[[], Any]) -> Path:
    """The trace of one call, and beside it what torch saves of integers."""
    observer = ExecutionTraceObserver().register_callback(str(folder / "torch_et_0.json"))
    observer.set_extra_resource_collection(True)
    with profile(execution_trace_observer=observer):
        step()
    return folder


def rehearsed(run: Path) -> Executor:
    (trace,) = etloom.open(run, use_cache=False).values()
    machine = Executor(build_program(trace), torch.device("cpu"), resources_folder(run, trace))
    machine.trial_run()
    return machine


def integers(machine: Executor) -> list[list[int]]:
    """What the tensors of integers hold that stay."""
    return [one.flatten().tolist() for one in machine._slots if one is not None and one.dtype == torch.int64]


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA", SAVED)


@pytest.mark.slow
@pytest.mark.usefixtures("saving", "in_process")
def test_integers_have_their_saved_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table, bag = torch.rand(100, 4), torch.nn.EmbeddingBag(100, 4, mode="sum")
    ids, starts = torch.randint(100, (24,)), torch.tensor([0, 4, 9, 21])
    which, sparse = torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1, 0, 2, 0])

    def step() -> None:
        with torch.no_grad():
            torch.nn.functional.embedding(ids, table)
            bag(ids, starts)
            torch.rand(2, 2).gather(1, which.t())
            table.index_select(0, sparse.nonzero().flatten())  # as many as are not zero

    machine = rehearsed(record(tmp_path, step))
    assert {one.result for one in machine.outcomes} == {"replayed"}
    assert machine.saved.used >= 4 and not machine.saved.refused
    assert {tuple(one) for one in integers(machine)} >= {
        tuple(one.flatten().tolist()) for one in (ids, starts, which.t(), sparse)
    }
    assert cli.main(["replay", "compute", str(tmp_path), "--repeats", "1"]) == 0
    assert "tensors have values that were saved next to the trace" in capfd.readouterr().err


@pytest.mark.usefixtures("saving")
def test_tensors_changed_later_begin_with_their_first_values(tmp_path: Path) -> None:
    table, ids = torch.rand(9, 2), torch.tensor([5, 2, 0])

    def step() -> None:
        with torch.no_grad():
            torch.nn.functional.embedding(ids, table)
            ids.add_(3)
            torch.nn.functional.embedding(ids, table)

    machine = rehearsed(record(tmp_path, step))
    for _ in range(3):
        machine.run()
        assert integers(machine) == [[6, 3, 1]]  # a number that Python gave is 1


@pytest.mark.usefixtures("saving")
def test_bytes_that_torch_saves_wrong_are_ignored(tmp_path: Path) -> None:
    """Of a tensor with an offset, torch counts elements as bytes."""
    table, ids = torch.rand(9, 2), torch.tensor([7, 7, 7, 7, 5, 2, 0])[4:]
    machine = rehearsed(record(tmp_path, lambda: torch.nn.functional.embedding(ids, table)))
    assert machine.saved.used == 0
    assert dict(machine.saved.refused) == {
        "torch saves wrong bytes for a tensor that has an offset or gaps in its storage": 1
    }
    assert all(0 <= one < 9 for held in integers(machine) for one in held)


def embedded(folder: Path) -> tuple[Path, Path]:
    """A run of one embedding of 3 indices into 9 rows, and the file of its indices."""
    table, ids = torch.rand(9, 2), torch.tensor([5, 2, 0])
    record(folder, lambda: torch.nn.functional.embedding(ids, table))
    (file,) = [
        one for one in (folder / "torch_et_0_resources").iterdir() if one.name.endswith("_tid_1.dat")
        and np.fromfile(one, np.int64).tolist() == [5, 2, 0]
        and json.loads((folder / "torch_et_0.json").read_text())["nodes"]
        and f"nid_{outermost(folder)}_" in one.name
    ]  # fmt: skip
    return folder, file


def outermost(folder: Path) -> int:
    nodes = json.loads((folder / "torch_et_0.json").read_text())["nodes"]
    return int(next(node["id"] for node in nodes if node["name"] == "aten::embedding"))


@pytest.mark.usefixtures("saving")
@pytest.mark.parametrize(
    ("held", "taken"),
    [
        ([8, 0, 3], [8, 0, 3]),
        ([9, 1 << 62, -1], [8, 8, 0]),  # brought to what an embedding of 9 rows takes
        ([1, 2], None),
        ([1, 2, 3, 4], None),
        ([], None),
    ],
)
@pytest.mark.slow
def test_values_of_an_untrusted_trace_are_bounded(
    tmp_path: Path, held: list[int], taken: list[int] | None
) -> None:
    run, file = embedded(tmp_path)
    np.array(held, np.int64).tofile(file)
    machine = rehearsed(run)
    assert (machine.saved.used == 1) == (taken is not None)
    if taken is None:
        assert dict(machine.saved.refused) == {
            "the size of the file does not match the tensor that was saved in it": 1
        }
    else:
        assert integers(machine) == [taken]
    machine.run()


@pytest.mark.usefixtures("saving")
def test_no_saved_index_reaches_a_reader_that_does_not_look(tmp_path: Path) -> None:
    """An expanded table takes any index; what writes by the same indices has 9 rows, or trusts them."""
    ids, counts = torch.tensor([5, 2, 0]), torch.tensor([0, 0, 0])
    table, grad, empty = (
        torch.rand(1, 2).expand(1 << 40, 2),
        torch.rand(1, 2),
        torch.empty(0, dtype=torch.int64),
    )

    def step() -> None:
        torch.nn.functional.embedding(ids, table)
        torch.nn.functional.embedding(counts, table)
        torch.ops.aten._embedding_bag_dense_backward(grad, ids, counts, counts[:1], empty, 9, False, 0, None)

    run = record(tmp_path, step)
    for file in (run / "torch_et_0_resources").iterdir():
        np.full(file.stat().st_size // 8, 1 << 30, np.int64).tofile(file)
    machine = rehearsed(run)
    assert [one.result for one in machine.outcomes if one.result != "replayed"] == []
    assert dict(machine.saved.refused) == {
        "an operator that reads the saved tensor may not check its values": 1
    }
    assert [8, 8, 8] in integers(machine) and [0, 0, 0] in integers(machine)
    assert max(max(one, default=0) for one in integers(machine)) == 8


@pytest.mark.usefixtures("saving")
def test_integers_read_at_two_sizes_are_zero(tmp_path: Path) -> None:
    table, ids = torch.rand(9, 2), torch.tensor([5, 2, 0])

    def step() -> None:
        torch.nn.functional.embedding(ids, table)
        torch.nn.functional.embedding(ids.view(torch.int32), table)

    machine = rehearsed(record(tmp_path, step))
    assert dict(machine.saved.refused) == {"operators read the saved tensor as integers of several sizes": 2}
    assert [0, 0, 0] in integers(machine) and [5, 2, 0] not in integers(machine)


def test_labels_of_a_training_keep_their_bound(tmp_path: Path) -> None:
    """Their backward looks at none of them, but is known to take as many as there are classes."""
    out, labels = torch.rand(4, 9, requires_grad=True), torch.tensor([5, 2, 0, 8])
    run = record(tmp_path, lambda: torch.nn.functional.cross_entropy(out, labels).backward())
    made = build_program(etloom.open(run, use_cache=False)[0])
    (labels_,) = {
        one.storage for step in made.steps for one in step.inputs.values() if one.dtype == "long int"
    }
    known = infer_bounds(made)
    assert known.limits[labels_] == 9 and labels_ not in known.trusted | known.mixed


def test_memory_is_shared_with_the_processes_of_the_host() -> None:
    assert [ranks_on_host(one) for one in (
        {}, {"LOCAL_WORLD_SIZE": "8"}, {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "x"},
        {"SLURM_STEP_TASKS_PER_NODE": "4(x12),3"}, {"LOCAL_WORLD_SIZE": "0"},
    )] == [1, 8, 2, 1, 4, 1]  # fmt: skip


@pytest.mark.usefixtures("saving")
@pytest.mark.skipif(os.name == "nt", reason="links and pipes")
def test_no_link_is_followed(tmp_path: Path) -> None:
    run, file = embedded(tmp_path)
    secret = tmp_path / "secret"
    np.array([1, 1, 1], np.int64).tofile(secret)
    file.unlink()
    file.symlink_to(secret)
    assert dict(rehearsed(run).saved.refused) == {"the file of the tensor is not a regular file": 1}
    file.unlink()
    os.mkfifo(file)
    assert dict(rehearsed(run).saved.refused) == {"the file of the tensor is not a regular file": 1}
    resources = tmp_path / "torch_et_0_resources"
    resources.rename(tmp_path / "elsewhere")
    resources.symlink_to(tmp_path / "elsewhere")
    (trace,) = etloom.open(run, use_cache=False).values()
    assert resources_folder(run, trace) is None


def test_resources_are_searched_only_in_the_run(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        (folder / "et_0_resources").mkdir(parents=True)
    for files in ([str(other / "et_0.json")], [str(run / "et_0.json.gz")], ["/etc/../x/et_0.json.zst"]):
        assert resources_folder(run, etloom.Trace({}, {"files": files})) == run / "et_0_resources"
    assert resources_folder(run, etloom.Trace({}, {"files": [str(other / ".." / "..")]})) is None
    outside = [str(run / ".." / "other" / "et_0.json")]
    (run / "et_0_resources").rename(run / "et_1_resources")
    assert resources_folder(run, etloom.Trace({}, {"files": outside})) is None
    (run / "linked").symlink_to(other)
    assert resources_folder(run, etloom.Trace({}, {"files": [str(run / "linked" / "et_0.json")]})) is None
    (run / "et_1_resources").rename(run / "et_0_resources")
    (run / "et_0.json").touch()
    assert resources_folder(run / "et_0.json", etloom.Trace({}, {"files": []})) is None


@pytest.mark.slow
def test_bags_begin_at_existing_indices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA", SAVED)
    bag, ids, starts = torch.nn.EmbeddingBag(9, 2, mode="sum"), torch.arange(8), torch.tensor([0, 3, 6])
    record(tmp_path, lambda: bag(ids, starts))
    files = [
        one
        for one in (tmp_path / "torch_et_0_resources").iterdir()
        if np.fromfile(one, np.int64).tolist() == [0, 3, 6]
    ]
    for held, used in (([0, 2, 8], 2), ([0, 2, 9], 1), ([1, 2, 3], 1), ([0, 4, 2], 1), ([0, -1, 2], 1)):
        for file in files:
            np.array(held, np.int64).tofile(file)
        machine = rehearsed(tmp_path)
        assert machine.saved.used == used, held
        assert machine.outcomes[0].result == "replayed"
        assert (held in integers(machine)) == (used == 2)


def test_tensors_filled_by_python_are_filled_in_every_pass(tmp_path: Path) -> None:
    """torch.tensor([...]) is recorded as aten::empty, which would leave indices to chance."""
    table = torch.rand(5, 2)

    def step() -> None:
        with torch.no_grad():
            table.index_select(0, torch.tensor([4, 1]))
            chances = torch.tensor([0.25, 0.5])
            torch.nn.functional.binary_cross_entropy(chances, torch.tensor([0.0, 1.0]))
            torch.empty(3).fill_(1.0).add_(1)

    run = record(tmp_path, step)
    made = build_program(etloom.open(run, use_cache=False)[0])
    empties = [one.results[0].storage for one in made.steps if one.name == "aten::empty"]
    assert [one in made.unfilled for one in empties] == [True, True, True, False]
    taken: list[Any] = []
    held = [torch.full((1 << 12,), -1) for _ in range(8)]  # what a new tensor may find in its memory
    machine = Executor(made, torch.device("cpu"))
    machine.trial_run()
    assert {one.result for one in machine.outcomes} == {"replayed"}
    index = next(ready for ready in machine._prepared if ready.name == "aten::index_select")
    run_, index.call = index.call, lambda *given: (taken.append(given[2].clone()), run_(*given))[1]
    del held
    for _ in range(10):
        machine.run()
    assert len(taken) == 10 and all(0 <= int(one.min()) <= int(one.max()) < 5 for one in taken)
