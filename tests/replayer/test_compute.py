"""Computation replay: what was recorded runs again, with the shapes, types and data flow that were recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from etloom import cli
from etloom.core.errors import EtloomError
from support.models import bags, mlp, record, resnet, transformer
from support.replays import et_tensor, operator_node, read_nodes, relu_node

torch = pytest.importorskip("torch")
from torch.profiler import ExecutionTraceObserver, profile  # noqa: E402

from etloom.replayer.compute.executor import Executor  # noqa: E402
from etloom.replayer.compute.operator_replay import ComputeReplay, coverage_table  # noqa: E402
from etloom.replayer.compute.operators import Operator, resolve_operator  # noqa: E402
from etloom.replayer.compute.program import build_program  # noqa: E402
from etloom.replayer.compute.program_steps import TensorView, convert_value  # noqa: E402
from support.replays import prepare_trace, replay_trace  # noqa: E402

pytestmark = pytest.mark.torch
ATEN = frozenset({"aten"})


@pytest.mark.slow
@pytest.mark.parametrize("step", [mlp, transformer, resnet, bags])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_recorded_steps_replay_completely(tmp_path: Path, step: Callable[[], Any], device: str) -> None:
    trace = record(tmp_path, step())
    done = replay_trace(trace, device, repeats=1)
    rest = done.coverage.filter(pl.col("result") != "replayed")
    # On meta, torch gives no numbers and other shapes of what embedding bags keep for their backward.
    allowed = {"aten::item", "aten::embedding_bag"} if device == "meta" else set()
    assert set(rest["name"]) <= allowed and set(rest["result"]) <= {"substituted"}, rest
    assert done.covered() == done.covered("recorded_ns") == 1.0
    assert done.coverage["share_of_time_pct"].sum() == pytest.approx(100)
    assert done.peak_bytes > 0 and done.recorded_ns
    assert (done.trace is None) == (device == "meta")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_under_autocast_replay_in_their_types(tmp_path: Path, dtype: Any) -> None:
    layers = [torch.nn.Linear(32, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 8)]
    model, values = torch.nn.Sequential(*layers), torch.rand(16, 32)
    labels = torch.arange(16) % 8

    def step() -> None:
        with torch.autocast("cpu", dtype):
            loss = torch.nn.functional.cross_entropy(model(values), labels)
        loss.backward()

    done = replay_trace(record(tmp_path, step), "cpu", repeats=1)
    rest = done.coverage.filter(pl.col("result") != "replayed")
    assert rest.is_empty(), rest
    assert len(done.repeats_ns) == 1


@pytest.mark.slow
def test_the_replay_is_a_trace_that_compares_with_the_recording(tmp_path: Path) -> None:
    trace = record(tmp_path, transformer())
    done = replay_trace(trace, repeats=2)
    assert done.trace is not None and len(done.repeats_ns) == 2
    table = etloom.diff(trace, done.trace).table("operator")
    both = table.filter(pl.col("operator").cast(pl.String) == "aten::addmm")
    counts = [
        one.events.filter(pl.col("name").cast(pl.String) == "aten::addmm").height
        for one in (trace, done.trace)
    ]
    assert both.height == 1 and counts[0] == counts[1] > 0


@pytest.mark.slow
def test_a_consumer_gets_the_result_of_its_producer(tmp_path: Path) -> None:
    """Values flow: of what is made up only the first input is, and the rest follows from it."""
    x = torch.rand(4, 4)

    def step() -> None:
        with torch.no_grad():
            y = torch.zeros_like(x)  # whatever x holds
            z = y.view(2, 8).t()  # a view of a view
            z.fill_(3.0)  # in place, through the view
            y.sum(0)  # so 12 everywhere

    made = build_program(record(tmp_path, step))
    machine = Executor(made, torch.device("cpu"))
    seen: dict[str, Any] = {}
    take = machine._store_results
    machine._store_results = lambda step, ready, given: (
        seen.update({step.name: given}),
        take(step, ready, given),
    )[1]  # type: ignore[assignment,func-returns-value]
    machine.trial_run()
    assert [one.result for one in machine.outcomes] == ["replayed"] * len(made.steps)
    assert seen["aten::sum"].tolist() == [12.0] * 4
    seen.clear()
    run = machine._prepared[-1].call
    machine._prepared[-1].call = lambda *args, **named: seen.setdefault("sum", run(*args, **named))
    machine.run()
    assert seen["sum"].tolist() == [12.0] * 4


@pytest.mark.slow
def test_a_reused_storage_id_is_a_new_tensor_and_tensors_are_freed_after_their_last_read(
    tmp_path: Path,
) -> None:
    x = torch.rand(1 << 18)

    def step() -> None:
        y = x
        for _ in range(20):  # each result dies as the next is made: torch gives its place to a later one
            y = y.cos()

    trace = record(tmp_path, step)
    assert trace.tensors.filter(pl.col("io") == 1)["storage_id"].n_unique() < 20
    made = build_program(trace)
    outs = [one.results[0].storage for one in made.steps if one.name == "aten::cos"]
    assert len(set(outs)) == 20
    assert sorted(storage for one in made.steps for storage in one.frees) == sorted(outs)
    machine = Executor(made, torch.device("cpu"))
    machine.trial_run()
    assert machine.peak_bytes == 3 * 4 << 18  # x, and one result while the next is made


@pytest.mark.slow
def test_operators_may_return_other_shapes_if_these_depend_on_values(tmp_path: Path) -> None:
    x = torch.tensor([0.0, 1.0, 0.0, 2.0])

    def step() -> None:
        x.nonzero().add(1)

    coverage = replay_trace(record(tmp_path, step), repeats=1).coverage
    by_name = {
        name: (result, reason) for name, result, reason in coverage.select("name", "result", "reason").rows()
    }
    assert by_name["aten::nonzero"] == ("substituted", "returned shape [4, 1], recorded [2, 1]")
    assert by_name["aten::add"] == ("replayed", None)  # on a tensor made as it was recorded


def test_steps_are_chosen_by_number(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    observer = ExecutionTraceObserver().register_callback(str(tmp_path / "torch_et_0.json"))
    with profile(
        execution_trace_observer=observer, schedule=torch.profiler.schedule(wait=0, warmup=1, active=3)
    ) as prof:
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            prof.step()
    trace = etloom.open(tmp_path, use_cache=False)[0]
    whole, one = build_program(trace), build_program(trace, step=2)
    assert sum(step.name == "aten::linear" for step in whole.steps) == 3
    assert sum(step.name == "aten::linear" for step in one.steps) == 1
    assert any(step.name == "aten::mm" for step in one.steps)  # of the backward thread
    with pytest.raises(EtloomError, match="the execution trace has no step 9; its steps are: 1, 2, 3"):
        build_program(trace, step=9)
    part = build_program(trace, step=2, subgraph="autograd::engine::evaluate_function: AddmmBackward0")
    assert {step.name for step in part.steps} < {step.name for step in one.steps}
    assert any(step.name == "aten::mm" for step in part.steps)
    assert not any(step.name == "aten::linear" for step in part.steps)
    linears = build_program(trace, subgraph="aten::linear")
    assert [step.name for step in linears.steps] == ["aten::linear"] * 3
    with pytest.raises(ValueError, match=r"no node 'aten::linea'; did you mean 'aten::linear'\?"):
        build_program(trace, subgraph="aten::linea")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("aten::from_file(str filename) -> Tensor", "not run for traces of unknown origin"),
        ("mine::add(Tensor a) -> Tensor", "namespace mine is not allowed; --allow-namespace adds one"),
        ("aten::no_such(Tensor a) -> Tensor", "not in this torch"),
        (
            "aten::add.Tensor(Tensor self, Tensor other, *, Scalar beta=1) -> Tensor",
            "this torch's operator has no argument beta",
        ),
        ("aten::relu(Tensor self -> Tensor", "the schema of the operator was not recorded completely"),
        ("os::system(str command) -> ()", "namespace os is not allowed; --allow-namespace adds one"),
        (
            "aten::_unsafe_index.Tensor(Tensor self, Tensor?[] indices) -> Tensor",
            "not run for traces of unknown origin",
        ),
    ],
)
def test_operators_refused_in_an_untrusted_trace_have_a_reason(schema: str, reason: str) -> None:
    assert resolve_operator(schema, ATEN) == reason


def test_no_operator_of_aten_that_opens_files_or_loads_code_is_allowed() -> None:
    names = {
        one.name.partition("::")[2]
        for one in torch._C._jit_get_all_schemas()
        if one.name.startswith("aten::")
    }
    files = {name for name in names if re.search(r"file|save|load|path|url|open$", name)}
    for one in torch._C._jit_get_all_schemas():
        if one.name.partition("::")[2] in files and one.name.startswith("aten::"):
            assert isinstance(resolve_operator(str(one), ATEN), str), one
    takes_path = [
        one
        for one in torch._C._jit_get_all_schemas()
        if one.name.startswith("aten::") and any("file" in str(argument.name) for argument in one.arguments)
    ]
    assert takes_path and all(isinstance(resolve_operator(str(one), ATEN), str) for one in takes_path)


@pytest.mark.parametrize(
    ("recorded", "kind", "name", "expected"),
    [
        (6, "Optional[ScalarType]", "dtype", torch.float32),
        (15, "ScalarType", "dtype", torch.bfloat16),
        (24, "ScalarType", "dtype", torch.float8_e4m3fn),
        (2, "Optional[MemoryFormat]", "memory_format", torch.channels_last),
        ("<None>", "Optional[int]", "dim", None),
        ("cuda:3", "Optional[Device]", "device", torch.device("cpu")),
        ("-inf", "number", "value", float("-inf")),
        ([1, 2], "List[int]", "size", [1, 2]),
        ("trunc", "Optional[str]", "rounding_mode", "trunc"),
        (True, "bool", "train", True),
    ],
)
def test_values_as_torch_takes_them(recorded: Any, kind: str, name: str, expected: Any) -> None:
    from etloom.replayer.compute.operators import Argument

    assert convert_value(recorded, Argument(name, kind, False, None), torch.device("cpu")) == expected


def stranger(
    folder: Path, schema: str, name: str, inputs: list[Any], types: list[str], shapes: list[Any]
) -> etloom.Trace:
    """A trace of one operator that nobody recorded."""
    attrs = [
        {"name": key, "type": kind, "value": given}
        for key, kind, given in (
            ("rf_id", "uint64", 1), ("fw_parent", "uint64", 0), ("seq_id", "int64", -1), ("scope", "uint64", 0),
            ("tid", "uint64", 1), ("fw_tid", "uint64", 0), ("op_schema", "string", schema),
            ("kernel_backend", "string", ""), ("kernel_file", "string", ""),
        )
    ]  # fmt: skip
    node = {
        "id": 2, "name": name, "ctrl_deps": 1, "inputs": {"values": inputs, "shapes": shapes, "types": types},
        "outputs": {"values": [], "shapes": [], "types": []}, "attrs": attrs,
    }  # fmt: skip
    file = folder / "torch_et_0.json"
    file.write_text(
        json.dumps({"schema": "1.1.0-chakra.0.0.4", "pid": 1, "time": "", "start_ts": 0, "nodes": [node]})
    )
    read = etloom.read(file)
    assert isinstance(read, etloom.Trace)
    return read


HUGE = 1 << 40


@pytest.mark.parametrize(
    ("schema", "inputs", "types", "shapes"),
    [
        ("aten::zeros(SymInt[] size) -> Tensor", [[HUGE]], ["GenericList[Int]"], [[[]]]),
        ("aten::relu(Tensor self) -> Tensor", [[1, 2, 0, HUGE, 4, "cpu"]], ["Tensor(float)"], [[HUGE]]),
        ("aten::relu(Tensor self) -> Tensor", [[1, 2, -4, 1, 4, "cpu"]], ["Tensor(float)"], [[-1]]),
        ("aten::relu(Tensor self) -> Tensor", [[1, 2, 0, 1, 4, "cpu"]], ["Tensor(what)"], [[1]]),
        ("aten::relu(Tensor self) -> Tensor", [1, 2, 3], ["Int", "Int", "Int"], [[], [], []]),
    ],
)
def test_sizes_in_an_untrusted_trace_are_bounded_and_reported(
    tmp_path: Path, schema: str, inputs: list[Any], types: list[str], shapes: list[Any]
) -> None:
    trace = stranger(tmp_path, schema, schema.partition("(")[0], inputs, types, shapes)
    done = replay_trace(trace, repeats=1, max_bytes=1 << 30)
    (result,) = done.coverage["result"]
    assert result in ("skipped", "substituted")
    assert done.coverage["reason"][0]


@pytest.mark.slow
def test_the_command(data: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given, out = str(data / "cpu" / "ddp_2"), tmp_path / "replay.parquet"
    once = ["--repeats", "1", "--warmup", "0", "--format", "json", "--out", str(out)]
    assert cli.main(["replay", "compute", given, "--rank", "1", *once]) == 0
    said = capfd.readouterr()
    rows = json.loads(said.out)
    assert {row["name"] for row in rows if row["result"] != "replayed"} == {"c10d::allreduce_"}
    assert "covered: 100.00% of operators, 100.00% of their recorded time" in said.err
    assert re.search(
        r"best of \d repeats?: .* ms with \d+ threads? per operator, recorded .* ms \(the recording does not state",
        said.err,
    )
    assert etloom.open(out)[1].events.height > 1000


@pytest.mark.usefixtures("in_process")
def test_the_command_reports_what_it_cannot_replay(
    data: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given, out = str(data / "cpu" / "ddp_2"), str(tmp_path / "replay.parquet")
    assert (
        cli.main(["replay", "compute", given, "--device", "meta", "--min-coverage", "100", "--out", out]) == 1
    )
    assert "a replay on meta has no trace" in capfd.readouterr().err
    assert cli.main(["replay", "compute", given, "--rank", "7"]) != 0
    assert "unknown rank 7" in capfd.readouterr().err
    assert cli.main(["replay", "compute", given, "--device", "tpu"]) == 2
    assert "tpu" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("dlrm", 0.97),
        ("linear", 1.0),
        ("et_schemas/hf_gpt2.json.gz", 1.0),
        ("nccl_ddp", 1.0),
        ("simple_add", 1.0),
    ],
)
def test_shapes_of_recorded_gpu_traces(data: Path, name: str, least: float) -> None:
    job = etloom.open(data / name)
    done: ComputeReplay = replay_trace(job[min(job)], "meta")
    assert (done.covered() or 0) >= least, done.coverage.filter(pl.col("result") == "skipped")
    wrong = done.coverage.filter(pl.col("reason").str.contains("returned (shape|torch)"))
    assert not wrong.height, wrong


@pytest.mark.slow
def test_compiled_code_is_a_row_with_its_time(data: Path) -> None:
    """Of 832.5 us in two compiled graphs, 546.6 us are operators that were recorded and run."""
    done = replay_trace(etloom.open(data / "cpu/compile")[0], repeats=1, warmup=0)
    left = done.coverage.filter(pl.col("result") == "skipped")
    (reason,) = left["reason"].unique()
    assert reason.startswith("its kernels were not recorded (those in C++ never are, ")
    assert left["count"].to_list() == [1, 1]
    trace = etloom.open(data / "cpu/compile")[0]
    times = trace.events.select("dur", name=pl.col("name").cast(pl.String))
    graphs = times.filter(pl.col("name").str.starts_with("## Call CompiledFxGraph"))["dur"].sum()
    inside = done.coverage.filter(pl.col("name").is_in(["aten::addmm", "aten::mm"]))["recorded_ns"].sum()
    assert (graphs, inside, left["recorded_ns"].sum()) == (832_481, 546_604, 285_877)
    assert (
        done.covered("recorded_ns") == pytest.approx(1 - left["share_of_time_pct"].sum() / 100)
        and done.covered() == 25 / 27
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dlrm", "simple_add", "cpu/coll_4", "cpu/pp_4", "cpu/mt_bwd"])
def test_recorded_traces_run_on_a_cpu(data: Path, name: str) -> None:
    job = etloom.open(data / name)
    skipped = coverage_table(prepare_trace(job[min(job)])).filter(pl.col("result") == "skipped")
    assert skipped["share_of_count_pct"].sum() <= 3, skipped


def test_the_storage_of_a_view_is_large_enough() -> None:
    assert TensorView(0, "float", 2, (3, 4), (8, 1), True).bytes == 4 * (2 + 2 * 8 + 3 + 1)
    assert TensorView(0, "double", 5, (3, 0), (1, 1), True).bytes == 0
    assert isinstance(resolve_operator("aten::relu(Tensor self) -> Tensor", ATEN), Operator)


def test_operators_that_raised_in_the_recording_are_omitted_with_their_parts(tmp_path: Path) -> None:
    made = read_nodes(
        tmp_path,
        relu_node(2, et_tensor(10, 100), et_tensor(11, 101)),
        {**relu_node(3, et_tensor(11, 101), et_tensor(12, 102)), "ctrl_deps": 2},
        relu_node(4, et_tensor(13, 103), et_tensor(14, 104)),
    )
    first = made.nodes["id"].min()
    ended = pl.when(pl.col("id") == first).then(pl.lit('{"raised": true}'))  # as our observer tells
    todo = build_program(made.replace(nodes=made.nodes.with_columns(attrs=ended)))
    assert [made.nodes["et_id"][step.node] for step in todo.steps] == [4]
    assert [(one.name, one.reason) for one in todo.omitted] == [
        ("aten::relu", "it raised an exception in the recording")
    ]


def test_results_of_omitted_operators_do_not_keep_older_tensors_under_their_ids(tmp_path: Path) -> None:
    made = build_program(
        read_nodes(
            tmp_path,
            relu_node(2, et_tensor(10, 100), et_tensor(11, 101)),
            relu_node(3, et_tensor(10, 100), et_tensor(12, 101, 8), schema="mine::op(Tensor a) -> Tensor"),
            relu_node(4, et_tensor(12, 101, 8), et_tensor(13, 102, 8)),
        )
    )
    first, last = made.steps
    assert last.values[0].storage not in {first.results[0].storage}
    assert made.bytes[first.results[0].storage] == 16 and made.bytes[last.values[0].storage] == 32


def test_outputs_of_a_skipped_step_are_created_by_the_next(tmp_path: Path) -> None:
    """The failing step is first to take a view of a result; the next takes the same view."""
    view = [14, 101, 0, 2, 4, "cpu"]
    made = build_program(
        read_nodes(
            tmp_path,
            relu_node(2, et_tensor(10, 100), et_tensor(11, 101)),
            operator_node(
                3,
                "aten::mm(Tensor self, Tensor mat2) -> Tensor",
                [view, view],
                ["Tensor(float)"] * 2,
                [[2], [2]],
            ),
            relu_node(4, view, et_tensor(15, 103, 2)),
        )
    )
    machine = Executor(made, torch.device("cpu"))
    machine.trial_run()
    assert [outcome.result for outcome in machine.outcomes] == ["replayed", "skipped", "replayed"]
    for _ in range(2):
        machine.run()
    assert all(
        tensor is None for slot, tensor in enumerate(machine._slots) if slot in machine._prepared[-1].frees
    )
    assert sorted(slot for ready in machine._prepared for slot in ready.frees)


def test_integers_written_by_steps_are_reset_in_each_pass(tmp_path: Path) -> None:
    ids, table = torch.tensor([0, 1]), torch.rand(4, 2)

    def step() -> None:
        with torch.no_grad():
            torch.nn.functional.embedding(ids, table)
            ids.add_(1)

    machine = Executor(build_program(record(tmp_path, step)), torch.device("cpu"))
    machine.trial_run()
    for _ in range(20):
        machine.run()  # the second pass would read beyond the table, were they not


@pytest.mark.slow
def test_recorded_ranges_of_integers_apply_within_valid_values(tmp_path: Path) -> None:
    schema = "aten::embedding(Tensor weight, Tensor indices) -> Tensor"

    def drawn(told: str) -> torch.Tensor:
        weight, ids = [10, 100, 0, 20, 4, "cpu"], [11, 101, 0, 64, 8, "cpu"]
        types = ["Tensor(float)", "Tensor(long int)"]
        trace = read_nodes(
            tmp_path, operator_node(2, schema, [weight, ids], types, [[10, 2], [64]], tensor_range=told)
        )
        machine = Executor(build_program(trace), torch.device("cpu"))
        machine.trial_run()
        assert (
            machine.outcomes[0].result == "replayed"
            or machine.outcomes[0].reason == "returned 1 tensors, recorded 0"
        )
        (found,) = (one for one in machine._slots if one is not None and one.dtype == torch.int64)
        return found

    within = drawn('{"1":[3,5]}')
    assert (int(within.min()), int(within.max())) == (3, 5)
    beyond = drawn('{"1":[8,999999999999]}')
    assert (int(beyond.min()), int(beyond.max())) == (8, 9)
    for nonsense in ('{"1":[5]}', '{"7":[0,1]}', "[", '{"1":["a",2]}', '{"1":[-9,-3]}'):
        assert 0 <= int(drawn(nonsense).min()) <= int(drawn(nonsense).max()) < 10


@pytest.mark.parametrize(
    ("schema", "runs"),
    [
        ("aten::_unsafe_view(Tensor self, SymInt[] size) -> Tensor", True),
        ("aten::_foreach_add_.List(Tensor(a!)[] self, Tensor[] other, *, Scalar alpha=1) -> ()", True),
        ("aten::_chunk_cat(Tensor[] tensors, int dim, int num_chunks) -> Tensor", False),
        ("aten::_remove_batch_dim(Tensor self, int level, SymInt batch_size, int out_dim) -> Tensor", False),
        ("aten::_embedding_bag_sparse_backward(Tensor grad) -> Tensor", False),
    ],
)
def test_private_operators_run_only_if_known(schema: str, runs: bool) -> None:
    found = resolve_operator(schema, ATEN)
    assert isinstance(found, Operator) if runs else found == "not run for traces of unknown origin"


def test_an_alias_beyond_its_storage_is_refused() -> None:
    found = resolve_operator(
        "aten::_reshape_alias(Tensor(a) self, SymInt[] size, SymInt[] stride) -> Tensor(a)", ATEN
    )
    assert isinstance(found, Operator)
    assert found.call(torch.arange(6.0), [2, 3], [3, 1]).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    with pytest.raises(RuntimeError, match="out of bounds"):
        found.call(torch.zeros(4), [1 << 20], [1])


@pytest.mark.slow
def test_mutated_traces_end_in_outcomes_or_one_line(tmp_path: Path) -> None:
    import random

    record(tmp_path, mlp())
    whole = json.loads((tmp_path / "torch_et_0.json").read_text())
    file = tmp_path / "mutated.json"
    odd = [None, -1, 0, 1 << 62, "x", "", [], [[]], {}, True, 1.5, [1, 2], "Tensor(float)", "<None>"]
    ended = 0
    for seed in range(25):
        chance = random.Random(seed)
        trace = json.loads(json.dumps(whole))
        for _ in range(12):
            at: Any = chance.choice(trace["nodes"])
            while True:
                key = chance.choice(list(at) if isinstance(at, dict) else range(len(at)))
                inside = at[key]
                if isinstance(inside, dict | list) and inside and chance.random() < 0.9:
                    at = inside
                else:
                    at[key] = chance.choice(odd)
                    break
        file.write_text(json.dumps(trace))
        try:
            read = etloom.read(file)
            assert isinstance(read, etloom.Trace)
            machine = Executor(build_program(read), torch.device("meta"))
            machine.trial_run()
            assert len(machine.outcomes) == len(machine.program.steps)
        except EtloomError as error:
            assert "\n" not in str(error)
            ended += 1
    assert ended < 25


def test_outputs_of_parts_of_an_operator_are_not_older_tensors(tmp_path: Path) -> None:
    """A part's result, of which the operator itself tells nothing, has the address of a tensor that died before."""
    inner = relu_node(5, et_tensor(13, 103), et_tensor(14, 101))  # 101 was the first operator's result
    inner["ctrl_deps"] = 4
    outer = {**relu_node(4, et_tensor(13, 103), et_tensor(15, 104)), "ctrl_deps": 1}
    made = build_program(
        read_nodes(
            tmp_path,
            relu_node(2, et_tensor(10, 100), et_tensor(11, 101)),
            outer,
            inner,
            relu_node(6, et_tensor(14, 101), et_tensor(16, 105)),
        )
    )
    first, _, last = made.steps
    assert last.values[0].storage != first.results[0].storage
    assert first.frees == (first.results[0].storage,) and last.values[0].storage in made.external


def test_a_rank_without_operators_is_named(tmp_path: Path) -> None:
    trace = record(tmp_path, mlp())
    bare = trace.replace(nodes=trace.nodes.head(0), meta={**trace.meta, "rank": 3})
    with pytest.raises(EtloomError, match=r"^rank 3: has no execution trace"):
        build_program(bare)


def test_tensors_that_are_not_strided_are_reported_and_replaced_by_plain_ones(tmp_path: Path) -> None:
    """As sparse gradients of an embedding, which have no storage."""
    table = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())

    def step() -> None:
        optimizer.zero_grad()
        table(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        torch.eye(3).to_mkldnn().to_dense()

    machine = Executor(build_program(record(tmp_path, step)), torch.device("cpu"))
    machine.trial_run()
    machine.run()
    found = {step.name: one for step, one in zip(machine.program.steps, machine.outcomes, strict=True)}
    for name, layout in (("embedding_backward", "sparse_coo"), ("to_mkldnn", "mkldnn")):
        outcome = found[f"aten::{name}"]
        reason = f"returned a {layout} tensor; its readers get a dense one"
        assert (outcome.result, outcome.reason) == ("substituted", reason)
    assert found["aten::to_dense"].result == "replayed"


def test_compiled_kernels_are_skipped_with_a_reason(data: Path) -> None:
    trace = etloom.open(data / "et_schemas/pt2_triton.json.gz")[0]
    for device in ("cpu", "meta"):
        coverage = replay_trace(trace, device, repeats=1, warmup=0).coverage
        assert coverage.select("name", "result", "reason", "count").rows() == [
            ("aten::mm", "replayed", None, 2),
            (
                "triton_poi_fused_add_cos_neg_sin_0",
                "skipped",
                "a triton kernel of torch.compile cannot be replayed",
                2,
            ),
        ]
