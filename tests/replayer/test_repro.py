"""Folders that run one recorded operator or collective: what they contain, what they compute, what is refused."""

from __future__ import annotations

import ast
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom.core.errors import EtloomError
from etloom.core.trace import Job
from etloom.replayer.repro.operators import measure_equal_calls
from support.small_traces import OperatorTraceBuilder

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

Outcome = tuple[int, str, str]


def find_event(job: Job, name: str, rank: int = 0) -> int:
    events = job[rank].events.filter(pl.col("name").cast(pl.String) == name)
    return int(events["id"][0])


def run_script(folder: Path, *arguments: str, processes: int = 0) -> Any:
    """Run a script, without etloom, from another folder; return the figures that it prints."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)] if processes else []
    script = folder / "repro.py"
    if not processes:  # an import of etloom would fail
        code = "import sys, runpy; sys.modules['etloom'] = None; sys.argv = sys.argv[1:]; "
        launcher = ["-c", code + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, *launcher, str(script), "--json", *arguments],
        capture_output=True, text=True, cwd="/", env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def load_script(folder: Path) -> dict[str, Any]:
    """Execute the definitions of a script in this process."""
    code = compile((folder / "repro.py").read_text(), "repro.py", "exec")
    names: dict[str, Any] = {"__name__": "repro"}
    exec(code, names)
    return names


@pytest.mark.slow
def test_an_operator_runs_with_torch_alone(own: Path, tmp_path: Path) -> None:
    job = etloom.open(own / "ddp_2")
    event = find_event(job, "aten::addmm")
    folder = etloom.repro(job, event, tmp_path / "addmm")
    figures = run_script(folder)
    arguments = job[0].arguments.with_columns(pl.exclude("event").cast(pl.String))
    row = arguments.filter(pl.col("event") == event).row(0, named=True)
    equal = arguments.filter(
        pl.col(name).eq_missing(pl.lit(value)) for name, value in row.items() if name != "event"
    )
    calls = job[0].events.filter(
        pl.col("id").is_in(equal["event"].implode()), pl.col("name") == "aten::addmm"
    )
    assert calls.height > 1
    recorded = round(statistics.median(calls["dur"]))
    assert figures["name"] == "aten::addmm.default"
    assert (figures["check"], figures["recorded_ns"], figures["device"]) == (True, recorded, "cpu")
    assert figures["median_ns"] > 0 and figures["calls"] >= 10
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "repro.py"]


@pytest.mark.slow
def test_a_script_has_the_recorded_shapes_strides_types_and_values(own: Path, tmp_path: Path) -> None:
    job = etloom.open(own / "ddp_2")
    event = find_event(job, "aten::addmm")
    names = load_script(etloom.repro(job, event, tmp_path / "x"))
    recorded = job[0].arguments.filter(pl.col("event") == event).row(0, named=True)
    shapes = [shape for shape in json.loads(recorded["dims"]) if shape]
    strides = [stride for stride in json.loads(recorded["strides"]) if stride]
    assert [list(tensor[3]) for tensor in names["TENSORS"]] == shapes
    assert [list(tensor[4]) for tensor in names["TENSORS"]] == strides
    assert {tensor[1] for tensor in names["TENSORS"]} == {torch.float32}
    cpu = torch.device("cpu")
    tensors = names["make_tensors"]([names["make_contents"](*storage) for storage in names["STORAGES"]], cpu)
    assert torch.equal(names["call"](tensors, cpu), torch.addmm(*tensors))


@pytest.mark.slow
def test_a_wrong_result_is_noticed(own: Path, tmp_path: Path) -> None:
    job = etloom.open(own / "ddp_2")
    names = load_script(etloom.repro(job, find_event(job, "aten::addmm"), tmp_path / "x"))
    cpu, right = torch.device("cpu"), names["call"]
    bases = [names["make_contents"](*storage) for storage in names["STORAGES"]]
    assert names["check"](bases, cpu)[0] is True
    names["call"] = lambda t, device: right(t, device) * (1.01 if t[0].dtype == torch.float32 else 1)
    is_equal, text = names["check"](bases, cpu)
    assert is_equal is False and "0.01" in text


@pytest.mark.slow
def test_every_operator_of_a_run_has_a_script_or_a_reason(own: Path, tmp_path: Path) -> None:
    """Of each name one: all of aten are written, parse, and name only operators of torch."""
    job = etloom.open(own / "ddp_2")
    operators = job[0].events.filter(pl.col("cat").cast(pl.String) == "cpu_op")
    by_name = (
        operators.with_columns(pl.col("name").cast(pl.String)).group_by("name").agg(pl.col("id").first())
    )
    written = set()
    for name, event in by_name.sort("name").iter_rows():
        try:
            folder = etloom.repro(job, event, tmp_path / "x")
        except EtloomError as error:
            assert "is not an operator of torch" in str(error), error
            continue
        written.add(name)
        ast.parse((folder / "repro.py").read_text())
    assert {name for name in by_name["name"] if name.startswith("aten::")} <= written


def is_autograd_excluded() -> bool:
    return bool(torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "caller", "is_below"),
    [
        ("aten::copy_", "aten::_to_copy", True),
        ("aten::addmm", "aten::linear", False),
    ],
)
def test_a_call_is_repeated_where_it_was_called(
    own: Path, tmp_path: Path, name: str, caller: str, is_below: bool
) -> None:
    """Below another operator's kernel, an operator does not pass autograd again, which takes as long as a copy."""
    job = etloom.open(own / "ddp_2")
    events = job[0].events.select("id", "parent", name=pl.col("name").cast(pl.String))
    above = events.select(parent="id", caller="name", grandparent="parent")
    tops = events.select(grandparent="id", top="name")
    calls = events.join(above, on="parent", how="left").join(tops, on="grandparent", how="left")
    calls = calls.filter(pl.col("name") == name, pl.col("caller") == caller)
    if not is_below:  # nor is the caller called by a kernel
        calls = calls.filter(~pl.col("top").str.starts_with("aten::").fill_null(False))
    script = load_script(etloom.repro(job, calls["id"][0], tmp_path / "x"))
    assert script["BELOW_AUTOGRAD"] is is_below
    states: list[bool] = []
    script["call"] = lambda *_: states.append(is_autograd_excluded())
    script["MAX_CALLS"], script["MAX_SECONDS"] = 10, 0.1
    bases = [script["make_contents"](*storage) for storage in script["STORAGES"]]
    script["run_calls"](bases, torch.device("cpu"), False)
    assert set(states) == {is_below} and not is_autograd_excluded()


def test_equal_calls_are_those_of_one_caller(tmp_path: Path) -> None:
    builder = OperatorTraceBuilder()
    for call, (caller, length) in enumerate([("aten::add_", 10), ("aten::add_", 12), ("aten::mul_", 40)] * 3):
        builder.operator(caller, 1000 * call, 90, [[4], [4]]).operator(
            "aten::to", 1000 * call + 5, length, [[4]]
        )
    job = builder.open(tmp_path)
    for caller, time, calls in (("aten::add_", 11.0, 6), ("aten::mul_", 40.0, 3)):
        events = job[0].events.with_columns(pl.col("name").cast(pl.String))
        parents = events.filter(name=caller)["id"]
        event = events.filter(pl.col("parent").is_in(parents.implode()))["id"][0]
        recorded = measure_equal_calls(job[0], event)
        assert (recorded.time_ns, recorded.calls) == (time * 1000, calls)


def run_kineto(folder: Path, name: str, dims: Any, **arguments: Any) -> Job:
    return OperatorTraceBuilder().operator(name, 0, 50, dims, **arguments).open(folder)


@pytest.mark.slow
def test_kineto_alone_suffices(tmp_path: Path) -> None:
    inputs = {
        "Input Dims": [[8, 4], [], [], []],
        "Input type": ["c10::BFloat16", "ScalarList", "Scalar", ""],
        "Input Strides": [[1, 8], [], [], []],
        "Concrete Inputs": ["", "[-1]", "True", ""],
    }
    job = OperatorTraceBuilder().operator("aten::sum", 0, 50, **inputs).open(tmp_path)
    names = load_script(etloom.repro(job, 0, tmp_path / "x"))
    assert names["NAME"] == "aten::sum.dim_IntList"
    assert names["TENSORS"] == ((0, torch.bfloat16, 0, (8, 4), (1, 8), False),)
    cpu = torch.device("cpu")
    tensors = names["make_tensors"]([names["make_contents"](*storage) for storage in names["STORAGES"]], cpu)
    assert names["call"](tensors, cpu).shape == (8, 1)


@pytest.mark.parametrize(
    ("name", "dims", "message"),
    [
        ("aten::mm", None, "shapes of aten::mm were not recorded"),
        (
            "aten::mm",
            [[2, 3]],
            r"no overload of aten::mm .* takes the recorded arguments \(1 were recorded\)",
        ),
        ("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3]], r"\(2 were recorded\)"),
        ("aten::nothing", [[2, 3]], "aten::nothing is not in this torch"),
        ("vllm::unified_attention", [[2, 3]], "not an operator of torch; running it needs the package vllm"),
        ("sgl_kernel::rmsnorm", [[2, 3]], "needs the package sgl-kernel"),
        ("AddmmBackward0", [[2, 3]], "'AddmmBackward0' is not an operator of torch"),
        ("aten::from_file", [[2]], "aten::from_file"),
        ("aten::mm(a); import os", [[2, 3]], "is not an operator of torch"),
    ],
)
def test_what_has_no_script_is_refused_in_one_line(
    name: str, dims: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(EtloomError, match=message) as error:
        etloom.repro(run_kineto(tmp_path, name, dims), 0, tmp_path / "x")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "x").exists()


def test_events_without_a_name_are_refused(tmp_path: Path) -> None:
    trace = (
        OperatorTraceBuilder().operator("aten::linear", 0, 90).operator("aten::mm", 5, 50).open(tmp_path)[0]
    )
    nameless = trace.replace(events=trace.events.with_columns(pl.lit(None, pl.Categorical).alias("name")))
    with pytest.raises(EtloomError, match=r"'' is not an operator of torch; it belongs to event 0 \(''\)"):
        etloom.repro(nameless, 1, tmp_path / "x")


def test_kernels_and_missing_events_are_refused(tmp_path: Path, call: Callable[..., Outcome]) -> None:
    builder = OperatorTraceBuilder().operator("aten::mm", 0, 50, [[4, 4], [4, 4]]).kernel("gemm", 5, 10, 20)
    job = builder.open(tmp_path)
    kernel = find_event(job, "gemm")
    with pytest.raises(
        EtloomError, match=r"is not an operator or collective; it belongs to event 0 \('aten::mm'\)"
    ):
        etloom.repro(job, kernel, tmp_path / "x")
    status, out, err = call("repro", tmp_path / "kineto_trace_0.json", "--event", 99, "--out", tmp_path / "x")
    assert (status, out) == (1, "") and "event 99: the trace has no such event" in err
    assert call("repro", tmp_path / "kineto_trace_0.json", "--event", 0, "--out", tmp_path / "x")[0] == 0
    names = load_script(tmp_path / "x")
    assert (names["RECORDED_NS"], names["RECORDED_ON"]) == (20_000, "device")


@pytest.mark.slow
def test_another_folder_is_not_replaced(own: Path, tmp_path: Path) -> None:
    job = etloom.open(own / "ddp_2")
    event = find_event(job, "aten::addmm")
    for _ in range(2):
        etloom.repro(job, event, tmp_path / "x")
    (tmp_path / "x" / "notes.txt").touch()
    with pytest.raises(EtloomError, match="not written by etloom"):
        etloom.repro(job, event, tmp_path / "x")


@pytest.mark.parametrize(
    ("dims", "values"),
    [
        ([[2, 3], []], ["", "1); import os; os.system('x')"]),
        ([[2, 3], []], ["", "[1, __import__('os')]"]),
        ([[2**60, 3], []], ["", "1"]),
        ([["a", 3], []], ["", "1"]),
    ],
)
def test_values_of_a_trace_do_not_become_code(dims: Any, values: list[str], tmp_path: Path) -> None:
    job = run_kineto(tmp_path, "aten::select", [*dims, []], **{"Concrete Inputs": [*values, "0"]})
    with pytest.raises(EtloomError):
        etloom.repro(job, 0, tmp_path / "x")


@pytest.mark.slow
def test_a_collective_runs_under_torchrun(data: Path, tmp_path: Path) -> None:
    job = etloom.open(data / "cpu" / "coll_4")
    comms = job[0].comms.drop_nulls("event").with_columns(pl.col("collective").cast(pl.String))
    event = comms.filter(pl.col("collective") == "reduce_scatter")["event"][0]
    figures = run_script(etloom.repro(job, event, tmp_path / "x"), processes=2)
    assert (figures["name"], figures["check"], figures["ranks"]) == ("reduce_scatter", True, 2)


@pytest.mark.slow
def test_every_kind_of_collective_has_a_script(data: Path, tmp_path: Path) -> None:
    job = etloom.open(data / "cpu" / "coll_4")
    kinds = {}
    for rank, trace in job.items():
        comms = trace.comms.drop_nulls("event").with_columns(pl.col("collective").cast(pl.String))
        for kind, event in comms.select("collective", "event").iter_rows():
            kinds.setdefault(kind, (rank, event))
    for kind, (rank, event) in kinds.items():
        names = load_script(etloom.repro(job, event, tmp_path / "x", rank=rank))
        assert (names["COLLECTIVE"], names["ELEMENTS"] > 0) == (kind, kind != "barrier")
    assert len(kinds) >= 11


@pytest.mark.slow
def test_another_reduction_is_noted(data: Path, tmp_path: Path) -> None:
    job = etloom.open(data / "cpu" / "coll_4")
    is_reduction = pl.col("collective").cast(pl.String) == "all_reduce"
    event = int(job[0].comms.drop_nulls("event").filter(is_reduction)["event"][0])
    bitwise = job[0].comms.with_columns(reduce_op=pl.lit("bor", pl.Categorical))
    changed = Job({**job, 0: job[0].replace(comms=bitwise)}, job.meta)
    folder = etloom.repro(changed, event, tmp_path / "x")
    assert "the reduce operation bor runs as sum" in (folder / "README.md").read_text()
