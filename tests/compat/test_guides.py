"""The chains of the collection guides: each snippet as it stands there, then the guide's next tool on its output.

Every chain runs with torch's observer and with etloom's, which only an import tells apart, and gives the same.
Where a guide leaves something open ("..."), a small training step stands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import etloom
from etloom.compat import chakra, chakra_converter, chakra_jsonizer
from etloom.formats.chakra.et_files import load_file
from support.processes import by_shell, ended, forked, free_port

pytestmark = [pytest.mark.torch, pytest.mark.slow]
pytest.importorskip("torch")
pytest.importorskip("pandas", reason="pandas is not installed")

from etloom.collector.observer import BuildError, build_library  # noqa: E402
from etloom.compat.hta import TraceAnalysis, execution_trace  # noqa: E402

OBSERVERS = ("torch.profiler", "etloom.collector.observer")
HEAD = """
import gzip, json, os, sys, tempfile
from pathlib import Path
import torch
from torch.profiler import profile, record_function
from {module} import ExecutionTraceObserver
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(20)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def payload(use_cuda=False):
    optimizer.zero_grad()
    model(torch.randn(8, 16)).sum().backward()
    optimizer.step()
"""
PARAM = """
et_ob = ExecutionTraceObserver()
fp = tempfile.NamedTemporaryFile("w+t", suffix=".et.json", delete=False)
fp.close()
et_ob.register_callback(fp.name)

def dump_execution_trace(tmp_et_path):
    et_dir.mkdir(exist_ok=True, parents=True)
    et_path = DUMP_DIR / f"rank-{global_rank}.et.json.gz"
    with open(tmp_et_path) as fin:
        with gzip.open(et_path, "wt") as fout:
            fout.writelines(fin)
    os.remove(tmp_et_path)
    print(f"Finished Rank {global_rank} ET collection at {et_path}")

while step < TRAINING_STEPS:
    payload()
    # Collect Execution Trace Logic

    # Start ET collection
    if et_ob and step == ET_START_ITER:
        et_ob.start()

        # First record process group(PG) mapping
        pg_config_info = (
            torch.distributed.distributed_c10d._world.pg_config_info
        )
        rf_handle = torch.autograd._record_function_with_args_enter(
            "## process_group:init ##", json.dumps(pg_config_info)
        )
        torch.autograd._record_function_with_args_exit(rf_handle)

    # Stop ET collection
    elif et_ob and state.step == ET_END_ITER:
        et_ob.stop()
        tmp_et_path = et_ob.get_output_file_path()
        et_ob.unregister_callback()
        dump_execution_trace(tmp_et_path)

    step += 1
    state.step = step
"""
PARAM_JOB = """
import types
import torch.distributed as dist
dist.init_process_group("gloo")
global_rank = dist.get_rank()
group = dist.new_group([0, 1])
et_dir = DUMP_DIR = Path("traces")
TRAINING_STEPS, ET_START_ITER, ET_END_ITER, step = 5, 1, 3, 0
state = types.SimpleNamespace(step=0)
def payload():
    gradients = torch.ones(100 + step)
    dist.all_reduce(gradients)
    dist.all_reduce(torch.ones(7), group=group)
    work = dist.broadcast(gradients, 1, async_op=True)
    work.wait()
"""
ALONE = """
et = ExecutionTraceObserver()
et.register_callback("pytorch_et.json")
et.start()
payload()
et.stop()
et.unregister_callback()
"""
BOTH = """
def trace_handler(prof):
    prof.export_chrome_trace("kineto_trace.json")

def main():
    et = ExecutionTraceObserver()
    et.register_callback("pytorch_et.json")
    et.start()

    with profile(
        activities=[
            torch.profiler.ProfilerActivity.CPU,
            torch.profiler.ProfilerActivity.CUDA,
        ],
        schedule=torch.profiler.schedule(wait=0, warmup=5, active=1),
        on_trace_ready=trace_handler
    ) as prof:
        for epoch in range(8):
            payload()
            if epoch == 6:
                et.stop()
            if epoch == 5:
                et.start()
            payload()
            prof.step()

    et.stop()
    et.unregister_callback()

main()
"""
LOOP = """
fp = tempfile.NamedTemporaryFile('w+t', suffix='.json', delete=False)
fp.close()

et = ExecutionTraceObserver()
et.register_callback(fp.name)

for idx in range(10):
    if idx == 3:
        et.start()
    elif idx == 5:
        et.stop()
        et.unregister_callback()
    with record_function(f"## LOOP {idx} ##"):
        payload(use_cuda=use_cuda)

assert fp.name == et.get_output_file_path()
"""
LOOP_WITH_PROFILER = f"""
use_cuda = False
with profile() as prof:
{LOOP.replace(chr(10), chr(10) + "    ")}
prof.export_chrome_trace("kineto_trace_0.json")
os.replace(fp.name, "et.json")
"""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"the observer cannot be built here: {error}")


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Run a snippet with an observer in a folder, on so many ranks, and return the folder."""

    def run(observer: str, snippet: str, ranks: int = 1) -> Path:
        folder = tmp_path_factory.mktemp(observer.partition(".")[0])
        (folder / "script.py").write_text(HEAD.format(module=observer) + snippet)
        command = [sys.executable, "script.py"]
        done = subprocess.run(
            by_shell(ranks, *command) if ranks > 1 else command,
            cwd=folder,
            env=os.environ | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return folder

    return run


def operators(path: Path) -> list[str]:
    """The operators of a file that any JSON parser reads, in the order in which they began; without torch's extras."""
    nodes: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    names = [node["name"] for node in sorted(nodes, key=lambda node: int(node["id"]))]
    return [name for name in names if not name.startswith("[pytorch")]


def test_param_replays_what_was_dumped(
    record: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tables = []
    for observer in OBSERVERS:
        folder = record(observer, PARAM_JOB + PARAM, ranks=2) / "traces"
        assert sorted(path.name for path in folder.iterdir()) == [
            f"rank-{rank}.et.json.gz" for rank in (0, 1)
        ]
        arguments = ["--trace-path", str(folder), "--trace-type", "et", "--master-port", str(free_port())]
        results = ended(forked(2, arguments, "mpirun", main="etloom.compat.comms_replay"))
        assert [status for status, *_ in results] == [0, 0], results
        tables.append([line.split()[:3] for line in results[0][1].splitlines() if "all_reduce" in line])
    assert len(tables[0]) > 0 and tables[0] == tables[1]


def test_the_observer_alone_writes_json(record: Callable[..., Path]) -> None:
    stock, own = (operators(record(observer, ALONE) / "pytorch_et.json") for observer in OBSERVERS)
    assert own == stock
    assert own.count("aten::addmm") == 20


def test_chakra_converts_what_was_linked(record: Callable[..., Path]) -> None:
    converted = []
    for observer in OBSERVERS:
        folder = record(observer, BOTH)
        files = {name: str(folder / name) for name in ("pytorch_et.json", "kineto_trace.json", "plus.json")}
        links = ["--chakra-host-trace", "--chakra-device-trace", "--output-file"]
        flags = [word for pair in zip(links, files.values(), strict=True) for word in pair]
        assert chakra.main([*flags, "--log-level", "INFO"]) == 0
        assert etloom.read(files["plus.json"]).meta["formats"] == ["etplus"]
        out, text = folder / "chakra.0.et", folder / "chakra.json"
        assert chakra_converter.main(["PyTorch", "--input", files["plus.json"], "--output", str(out)]) == 0
        arguments = ["--input_filename", str(out), "--output_filename", str(text)]
        assert chakra_jsonizer.main(arguments) == 0
        assert not etloom.lint(out).has_errors or {one.code for one in etloom.lint(out).findings} == {
            "nothing-simulated"
        }
        nodes = [node for node in load_file(out).nodes if not node.attributes.get("part")]
        assert text.read_text().count('"name": "aten::addmm"') >= 20
        assert sum(node.message.duration_micros for node in nodes) > 0
        converted.append([node.name for node in nodes])
    assert sorted(converted[0]) == sorted(converted[1])


def test_hta_correlates_what_was_recorded(record: Callable[..., Path]) -> None:
    columns = ("et_node_name", "op_schema", "input_shapes", "input_types", "output_shapes", "output_types")
    frames = []
    for observer in OBSERVERS:
        folder = record(observer, LOOP_WITH_PROFILER)
        loops = [name for name in operators(folder / "et.json") if "LOOP" in name]
        assert loops == ["## LOOP 3 ##", "## LOOP 4 ##"]
        analyzer = TraceAnalysis(trace_files={0: str(folder / "kineto_trace_0.json")})
        et = execution_trace.load_execution_trace(folder / "et.json")
        execution_trace.correlate_execution_trace(analyzer.t, 0, et)
        trace_df = analyzer.t.get_trace(0).copy()
        analyzer.t.symbol_table.add_symbols_to_trace_df(trace_df, col="name")
        for column in columns:
            execution_trace.add_et_column(trace_df, et, column)
        correlated = trace_df.dropna(subset="et_node")
        assert (correlated["et_node_name"] == correlated["name"]).all()
        frames.append(correlated.sort_values("ts")[["name", *columns]].astype(str).to_numpy().tolist())
    assert len(frames[0]) > 100
    assert frames[0] == frames[1]


def test_chakras_names_are_importable() -> None:
    linker = chakra.TraceLinker()
    assert isinstance(linker.chakra_host_trace_loader, chakra.ChakraHostTraceLoader)
    assert isinstance(linker.chakra_device_trace_loader, chakra.ChakraDeviceTraceLoader)
    ids = chakra.UniqueIdAssigner()
    assert isinstance(linker.id_assigner, chakra.UniqueIdAssigner)
    assert [ids.assign_or_retrieve_id(one) for one in (10, 7, 10)] == [0, 1, 0]
    assert (ids.generate_new_id(), ids.lookup_new_id(7), ids.lookup_new_id(99)) == (2, 1, 99)
