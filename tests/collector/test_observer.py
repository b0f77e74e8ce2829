"""The native observer: what it records, compared with torch's observer, and its robustness.

Each script runs in a process of its own, for an observer that fails may take its process along.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import polars as pl
import pytest

import etloom
from etloom.exports import execution_trace

pytestmark = pytest.mark.torch
pytest.importorskip("torch")

from etloom.collector.observer import BuildError, build_library, native_build  # noqa: E402

T = TypeVar("T")
STOCK = "from torch.profiler import ExecutionTraceObserver as Observer\n"
OWN = "from etloom.collector.observer import ExecutionTraceObserver as Observer\n"
HEAD = """
import os, sys, threading, torch
from torch.profiler import record_function
torch.set_num_threads(1); torch.manual_seed(0)
path = sys.argv[1]
x = torch.randn(4, 5, requires_grad=True)
observer = Observer()
observer.register_callback(path)
"""
TAIL = "\nobserver.stop(); observer.unregister_callback()\n"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"the observer cannot be built here: {error}")


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=400, check=False
    )


def top(trace: etloom.Trace) -> list[str]:
    """Of the operators that no other encloses."""
    nodes = trace.nodes.with_columns(pl.col("name").cast(pl.String))
    roots = nodes.filter(pl.col("name").str.contains(r"\|thread\]")).select(parent="id")
    return nodes.join(roots, on="parent", how="semi")["name"].to_list()


SCRIPTS: dict[str, str] = {}
RUNNER = """
import json, os, pathlib, sys, traceback
folder, errors = pathlib.Path(sys.argv[1]), {}
os.chdir(folder)
for name, script in json.loads((folder / "scripts.json").read_text()).items():
    sys.argv[1] = str(folder / (name + ".etob"))
    try: exec(compile(script, name, "exec"), {})
    except BaseException: errors[name] = traceback.format_exc()
(folder / "errors.json").write_text(json.dumps(errors))
"""


def scenario(script: str, head: str = HEAD, tail: str = TAIL) -> Callable[[T], T]:
    """The test gets, as `trace`, what our observer recorded of the script; all scripts run in one process."""

    def mark(test: T) -> T:
        SCRIPTS[test.__name__] = OWN + head + script + tail  # type: ignore[attr-defined]
        return test

    return mark


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("observer")
    (place / "scripts.json").write_text(json.dumps(SCRIPTS))
    done = python(RUNNER, str(place))
    assert done.returncode == 0, done.stderr
    return place


@pytest.fixture
def trace(request: pytest.FixtureRequest, folder: Path) -> etloom.Trace:
    name = request.function.__name__
    error = json.loads((folder / "errors.json").read_text()).get(name)
    assert error is None, error
    return etloom.read(folder / f"{name}.etob")


def names(trace: etloom.Trace) -> list[str]:
    """Of the operators, in the order they began, without the roots."""
    return [name for name in trace.nodes["name"].cast(pl.String) if not name.startswith("[pytorch")]


def count(trace: etloom.Trace, stat: str) -> int:
    return int(trace.stats.filter(pl.col("name") == stat)["count"].sum())


def parent_of(trace: etloom.Trace, name: str) -> list[str]:
    nodes = trace.nodes.with_columns(pl.col("name").cast(pl.String))
    above = nodes.select(parent="id", above="name")
    found = nodes.filter(pl.col("name") == name).join(above, on="parent", maintain_order="left")
    return found["above"].to_list()


STEP = """
def step():
    with record_function("args", "hello"): pass
    handle = torch.autograd._record_function_with_args_enter("withargs", "a", 1, 2.5, x)
    torch.autograd._record_function_with_args_exit(handle)
    torch.nn.functional.layer_norm(x, [5]).matmul(x.t()).sum().backward()
    torch.cat([x, x]).split([3, 5])[1].contiguous()
    torch.rand(3, generator=torch.Generator()); torch.zeros(2, dtype=torch.bfloat16)
    torch.full((2,), 1j).abs(); torch.empty(0); torch.nn.LSTM(5, 5)(x[None]); x.max(dim=1); torch.where(x > 0)
step(); step(); x.grad = None
observer.start(); step()
"""


@pytest.mark.slow
def test_it_records_the_same_as_torchs_observer(tmp_path: Path) -> None:
    stock, own = tmp_path / "stock.json", tmp_path / "own.etob"
    for imports, path in ((STOCK, stock), (OWN, own)):
        done = python(imports + HEAD + STEP + TAIL, str(path))
        assert done.returncode == 0, done.stderr
    etloom.convert(own, tmp_path / "own.et.json")
    json.loads((tmp_path / "own.et.json").read_text())
    theirs, ours = etloom.read(stock), etloom.read(tmp_path / "own.et.json")
    direct = etloom.read(own)
    assert theirs.nodes.height > 150
    same = [
        "name",
        "op_schema",
        "scope",
        "tid",
        "fw_tid",
        "input_types",
        "output_types",
        "seq_id",
        "kernel_backend",
    ]
    for name in same:
        want = theirs.nodes.sort("et_id")[name].cast(pl.String).to_list()
        assert ours.nodes.sort("et_id")[name].cast(pl.String).to_list() == want, name
        assert direct.nodes.sort("et_id")[name].cast(pl.String).to_list() == want, name
    # Parents: the n-th operator of both.
    for trace in (ours, direct):
        assert trace.nodes.sort("et_id")["parent"].to_list() == parents_by_rank(theirs)
    # Values: exact here, six decimals there.
    for side in ("inputs", "outputs"):
        pairs = zip(theirs.nodes.sort("et_id")[side], ours.nodes.sort("et_id")[side], strict=True)
        for want, got in pairs:
            assert rounded(json.loads(got.replace('"1j"', '"<ComplexDouble>"'))) == rounded(json.loads(want))
    keys = ["node", "io", "index", "item"]
    for column in ("shape", "stride", "dtype", "device", "numel", "itemsize", "offset", "index", "item"):
        if column == "stride" and theirs.tensors[column].null_count() == theirs.tensors.height:
            continue  # torch 2.4 does not record it
        assert ours.tensors.sort(keys)[column].cast(pl.String).to_list() == (
            ordered(theirs)[column].cast(pl.String).to_list()
        ), column


def ordered(trace: etloom.Trace) -> pl.DataFrame:
    """Tensors with nodes numbered by the rank of their id in the file."""
    return trace.tensors.sort(["node", "io", "index", "item"])


def parents_by_rank(trace: etloom.Trace) -> list[int | None]:
    return trace.nodes.sort("et_id")["parent"].to_list()


def rounded(value: object) -> object:
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 5) if isinstance(value, float) else value


@pytest.mark.slow
@scenario(STEP)
def test_times_enclose_those_of_the_operators_inside(trace: etloom.Trace, folder: Path) -> None:
    events = trace.nodes.filter(pl.col("rf_id").is_not_null()).join(
        trace.events.select("rf_id", "ts", "dur"), on="rf_id", how="left"
    )
    assert events["dur"].null_count() == 0 and events["dur"].min() >= 0
    before = folder.stat().st_ctime_ns - 60_000_000_000
    assert before < events["ts"].min() < events["ts"].max() < time.time_ns()
    inside = events.join(
        events.select(parent="id", begin="ts", end=pl.col("ts") + pl.col("dur")), on="parent"
    )
    assert inside.height > 50
    assert (
        inside.filter(
            (pl.col("ts") < pl.col("begin")) | (pl.col("ts") + pl.col("dur") > pl.col("end"))
        ).height
        == 0
    )


ODD = ['a "q"', "new\nline", "tab\t", "back\\slash", "näme €"]


@scenario("observer.start()\n" + "".join(f"with record_function({name!r}, {name!r}): pass\n" for name in ODD))
def test_names_and_texts_of_any_kind(trace: etloom.Trace, tmp_path: Path) -> None:
    assert names(trace) == ODD
    said = trace.nodes.filter(pl.col("name").cast(pl.String).is_in(ODD))["inputs"]
    assert [json.loads(text) for text in said] == [[name] for name in ODD]
    target = tmp_path / "own.et.json"
    execution_trace.write(trace, target)
    assert [node["name"] for node in json.loads(target.read_text())["nodes"]][:5] == ODD


# Names of every length up to 20 that differ from each other in one letter only, at every place.
SIMILAR = [
    letter.join(("x" * i, "x" * (n - i - 1))) for n in range(1, 21) for i in range(n) for letter in "yz"
]


@scenario("observer.start()\n" + f"for name in 2 * {SIMILAR!r}:\n    with record_function(name): pass\n")
def test_similar_names_are_not_confused(trace: etloom.Trace) -> None:
    assert names(trace) == SIMILAR * 2


@scenario("""observer.start()
for value in (1e-12, 1 / 3, 1e300, float("nan"), float("inf"), -0.0, 2.0):
    h = torch.autograd._record_function_with_args_enter("it", value); torch.autograd._record_function_with_args_exit(h)
""")
def test_doubles_are_exact(trace: etloom.Trace) -> None:
    said = [json.loads(text)[0] for text in trace.nodes.filter(pl.col("name") == "it")["inputs"]]
    assert said == [1e-12, 1 / 3, 1e300, "nan", "inf", -0.0, 2.0]


@scenario("""observer.start()
with record_function("outer"):
    for _ in range(3):
        try: x.matmul(x)
        except RuntimeError: pass
    x + 1
x * 2
""")
def test_an_operator_that_raises_breaks_no_parents(trace: etloom.Trace) -> None:
    assert parent_of(trace, "aten::add") == ["outer"]
    assert parent_of(trace, "aten::mul")[0].startswith("[pytorch|profiler|execution_trace|thread")
    assert parent_of(trace, "aten::matmul") == ["outer"] * 3
    raised = trace.nodes.filter(pl.col("attrs").cast(pl.String) == '{"raised": true}')["name"].cast(pl.String)
    assert raised.to_list().count("aten::matmul") == 3
    assert count(trace, "read.observer_raised") == len(raised)


@scenario("""observer.start()
scope = record_function("open"); scope.__enter__()
x + 1
observer.stop()
x + 2
observer.start()
x * 2
scope.__exit__(None, None, None)
x - 1
""")
def test_a_scope_left_open_at_stop_and_one_closed_after(trace: etloom.Trace) -> None:
    assert top(trace) == ["open", "aten::mul", "aten::sub"]
    assert parent_of(trace, "aten::add") == ["open"]
    for name in ("aten::mul", "aten::sub"):
        assert parent_of(trace, name)[0].startswith("[pytorch|profiler|execution_trace|thread")
    assert count(trace, "read.open_operators") == 1
    assert count(trace, "read.observer_ended_outside") == 1
    assert trace.meta["header"]["observer"]["windows"] == 2


UNSEEN = """
def forward(): global loss; loss = (x @ x.t()).sum()
thread = threading.Thread(target=forward); thread.start(); thread.join()
observer.start()
loss.backward()
"""


@pytest.mark.slow
@scenario(UNSEEN)
def test_backward_of_an_unrecorded_forward(trace: etloom.Trace) -> None:
    assert "SumBackward0" in names(trace) and "MmBackward0" in names(trace)


@scenario("""observer.start()
with record_function("outer"):
    handle = torch.ops.profiler._record_function_enter_new("wandering", None)
    x + 1
    def end(): torch.ops.profiler._record_function_exit._RecordFunction(handle)
    thread = threading.Thread(target=end); thread.start(); thread.join()
    x * 2
x - 1
""")
def test_a_scope_that_ends_on_another_thread(trace: etloom.Trace) -> None:
    assert parent_of(trace, "aten::add") == ["wandering"]
    assert parent_of(trace, "aten::mul") == ["outer"]
    assert parent_of(trace, "aten::sub")[0].startswith("[pytorch|profiler|execution_trace|thread")
    assert count(trace, "read.observer_ended_elsewhere") == 1


@scenario("""
from torch._subclasses.fake_tensor import FakeTensorMode
nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
observer.start()
with record_function("outer"):
    nested + nested
x + 1
with FakeTensorMode(): torch.empty(7) + torch.empty(7)
sparse = torch.sparse_coo_tensor([[0], [1]], [1.0]) ; sparse.coalesce()
with torch.inference_mode(): torch.ones(3).add_(1)
torch.empty(3, device="meta") + 1
x * 2
""")
def test_nested_and_fake_tensors(trace: etloom.Trace) -> None:
    assert parent_of(trace, "aten::add")[0] == "outer"
    assert parent_of(trace, "aten::mul")[0].startswith("[pytorch|profiler|execution_trace|thread")
    assert count(trace, "read.observer_unsized") >= 3
    assert count(trace, "read.observer_failed") == 0


@pytest.mark.slow
@scenario("""observer.start()
for _ in range(50):
    torch.zeros(1000)
y = torch.zeros(10); y.add_(1); z = y.view(2, 5); z.mul_(2)
""")
def test_a_reused_address_is_another_tensor(trace: etloom.Trace) -> None:
    named = trace.nodes.select(node="id", name=pl.col("name").cast(pl.String))
    out = trace.tensors.filter(pl.col("io") == 1).join(named, on="node")
    zeros = out.filter(pl.col("name") == "aten::zeros")
    assert zeros["tensor_id"].n_unique() == 51 and zeros["storage_id"].n_unique() == 51
    # In place: the same tensor in a later version; a view: another tensor of the same storage.
    added = out.filter(pl.col("name") == "aten::add_").row(0, named=True)
    assert added["tensor_id"] == zeros["tensor_id"][-1] and added["version"] == 1
    view = out.filter(pl.col("name") == "aten::view").row(0, named=True)
    assert view["storage_id"] == added["storage_id"] and view["tensor_id"] != added["tensor_id"]
    both = trace.tensors.filter(pl.col("storage_id") == view["storage_id"])
    assert both["tensor_id"].n_unique() == 2


@scenario("""observer.start(); x + 1
pid = os.fork()
if pid == 0:
    for _ in range(1000): x.detach() * 2
    observer.stop(); observer.unregister_callback(); os._exit(3)
assert os.waitpid(pid, 0)[1] == 3 << 8
x - 1
""")
def test_a_child_of_fork_writes_nothing(trace: etloom.Trace) -> None:
    assert top(trace) == ["aten::add", "aten::sub"]


@scenario("""observer.start()
h = torch.autograd._record_function_with_args_enter("it", list(range(5000)))
torch.autograd._record_function_with_args_exit(h)
""")
def test_long_lists_are_cut_and_counted(trace: etloom.Trace) -> None:
    assert json.loads(trace.nodes.filter(pl.col("name") == "it")["inputs"][0])[0] == list(range(4096))
    assert count(trace, "read.observer_lists_truncated") == 1


MANY = """observer.start()
for i in range(30_000):
    with record_function(f"step {i // 1000}"): pass
"""


@scenario(MANY, HEAD.replace("Observer()", "Observer(max_bytes=1 << 20)"))
def test_the_size_limit_ends_recording(trace: etloom.Trace) -> None:
    assert names(trace)[0] == "step 0" and len(names(trace)) < 30_000
    # Of the one that was open when the cap was reached the end is missing too.
    lost = count(trace, "read.observer_no_space") - count(trace, "read.open_operators")
    assert count(trace, "read.open_operators") <= 1 and len(names(trace)) + lost == 30_000
    assert Path(trace.meta["files"][0]).stat().st_size < (1 << 20) + 5000


@scenario(MANY, HEAD.replace("Observer()", "Observer(max_bytes=1 << 20, ring=True)"))
def test_a_ring_keeps_the_newest_operators(trace: etloom.Trace) -> None:
    assert names(trace)[-1] == "step 29" and "step 0" not in names(trace)
    assert count(trace, "read.observer_no_space") == 0 and count(trace, "read.observer_overwritten") > 0
    assert Path(trace.meta["files"][0]).stat().st_size < (1 << 20) + 5000


@scenario("""
try: Observer().register_callback("/proc/none/such")
except OSError as error: assert "No such file" in str(error)
else: raise SystemExit(9)
try: Observer().register_callback("/dev/full")
except OSError: pass
observer.start(); x + 1
""")
def test_an_unwritable_path_has_no_effect(trace: etloom.Trace) -> None:
    assert top(trace) == ["aten::add"]


@scenario("""observer.start()
second = Observer().register_callback(path + ".2")
try: second.start()
except RuntimeError as error: assert "another observer" in str(error)
else: raise SystemExit(9)
observer.stop(); second.start(); x + 1; second.unregister_callback()
observer.start(); x * 2
""")
def test_a_second_observer_is_refused_while_one_records(trace: etloom.Trace) -> None:
    assert top(trace) == ["aten::mul"]
    assert top(etloom.read(trace.meta["files"][0] + ".2")) == ["aten::add"]


@scenario("""observer.start()
def work():
    y = torch.ones(3)
    for _ in range(2000): y.add(1)
threads = [threading.Thread(target=work) for _ in range(8)]
for t in threads: t.start()
for t in threads: t.join()
""")
def test_threads_record_concurrently(trace: etloom.Trace) -> None:
    added = trace.nodes.filter(pl.col("name") == "aten::add")
    assert added.height == 16_000 and added["rf_id"].n_unique() == 16_000
    assert added["tid"].n_unique() == 8
    assert count(trace, "read.duplicate_node_id") == 0


@pytest.mark.slow
@scenario(
    """
from torch.profiler import profile, schedule
profiler = profile(execution_trace_observer=observer, schedule=schedule(wait=1, warmup=0, active=2, repeat=1),
                   on_trace_ready=lambda p: p.export_chrome_trace(path + ".json"))
with profiler:
    for _ in range(4):
        (x @ x.t()).sum().backward(); profiler.step()
assert not observer.is_registered
""",
    tail="",
)
def test_profiler_and_observer_record_the_same(trace: etloom.Trace) -> None:
    linked = etloom.link(trace, etloom.read(trace.meta["files"][0] + ".json"))
    assert linked.links.height == len(names(trace)) > 30
    assert set(linked.links["how"].cast(pl.String)) == {"rf_id"}
    pairs = linked.links.join(
        linked.nodes.select(node="id", n=pl.col("name").cast(pl.String)), on="node"
    ).join(linked.events.select(event="id", e=pl.col("name").cast(pl.String)), on="event")
    assert pairs["n"].to_list() == pairs["e"].to_list()


@scenario("""
import json, time
from pathlib import Path
from torch.profiler import profile
from etloom.collector.observer.profiler_gate import export_chrome_trace
observer.start(); x + 1
profiler = profile(record_shapes=True); profiler.start()
for _ in range(5000): x * 2
profiler.stop()
ticks, done = [], threading.Event()
def tick():
    while not done.wait(0.0005): ticks.append(1)
thread = threading.Thread(target=tick); thread.start()
before = len(ticks)
export_chrome_trace(profiler, Path(path + ".json"))
during = len(ticks) - before
done.set(); thread.join()
from etloom.collector.observer.profiler_gate import _native_result
is_native = _native_result(profiler.profiler.kineto_results) is not None
assert is_native or torch.__version__ < "2.9"  # another interface between Python and C++
assert during > 3 or not is_native, during
assert not (is_native and profiler.profiler.kineto_results.events())
named = [event.get("name") for event in json.loads(Path(path + ".json").read_text())["traceEvents"]]
assert named.count("aten::mul") == 5000
profiler = profile(); profiler.start(); x - 1; profiler.stop()  # and it records again
export_chrome_trace(profiler, Path(path + ".json"))
assert '"aten::sub"' in Path(path + ".json").read_text()
""")
def test_a_profile_is_exported_while_the_job_runs(trace: etloom.Trace) -> None:
    assert "aten::add" in names(trace)


KILLED = """
import itertools, json, signal, time
x @ x.t()
told = {}
for moment in json.loads(sys.argv[2]):
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        observer.register_callback(f"{path}.{moment}"); observer.start()
        os.write(writing, b"go\\n")
        for i in itertools.count():
            with record_function("step", str(i)): (x @ x.t()).sum().backward()
            os.write(writing, b"%d\\n" % i)
    os.close(writing)
    output = os.fdopen(reading, "rb")
    assert output.readline() == b"go\\n"
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    told[moment] = [int(line) for line in output.read().split(b"\\n")[:-1]]
    os.waitpid(child, 0)
print(json.dumps(told))
"""


@pytest.mark.slow
def test_sigkill_loses_nothing_that_had_ended(tmp_path: Path) -> None:
    moments = [0.0, 0.001, 0.004, 0.013, 0.029, 0.05, 0.08, 0.11, 0.2]
    head = HEAD.replace("observer.register_callback(path)", "")
    done = python(OWN + head + KILLED, str(tmp_path / "own"), json.dumps(moments))
    assert done.returncode == 0, done.stderr
    for moment, told in json.loads(done.stdout).items():
        trace = etloom.read(f"{tmp_path / 'own'}.{moment}")
        steps = trace.nodes.filter(pl.col("name") == "step").join(
            trace.events.filter(pl.col("dur").is_not_null()).select("rf_id", "dur"), on="rf_id"
        )
        ended = [int(json.loads(text)[0]) for text in steps["inputs"]]
        assert ended[: len(told)] == told and len(ended) <= len(told) + 1
        assert count(trace, "read.unfinished_file") == 1
        assert count(trace, "read.missing_parent") == 0


@pytest.mark.slow
def test_garbage_collection_waits_for_no_lock(tmp_path: Path) -> None:
    """Any thread may collect the garbage: also one for which the holder of the lock waits, as for a thread to start."""
    from etloom.collector import fork_hold
    from etloom.collector.observer import ExecutionTraceObserver

    observer = ExecutionTraceObserver().register_callback(tmp_path / "lost.etob")
    observer.start()
    observer.itself = observer  # type: ignore[attr-defined]
    del observer
    with fork_hold.profiler_lock:
        collector = threading.Thread(target=gc.collect, daemon=True)
        collector.start()
        collector.join(120)
        waited = collector.is_alive()
    assert not waited
    trace = etloom.read(tmp_path / "lost.etob")
    assert isinstance(trace, etloom.Trace) and "read.unfinished_file" not in trace.stats["name"]


HALF = """#!/bin/sh
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
echo half > "$out"
[ -e "$CALM" ] && exit 0
touch "$CALM"; kill -INT $PPID; exec sleep 20
"""


@pytest.mark.slow
def test_a_library_that_crashes_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cc = tmp_path / "cc"
    cc.write_text(
        "#!/bin/sh\nfor out; do :; done\n"
        'echo "void etloom_open(void) { __builtin_trap(); }" | cc -shared -fPIC -x c - -o "$out"\n'
    )
    cc.chmod(0o755)
    monkeypatch.setenv("CXX", str(cc))
    monkeypatch.setenv("ETLOOM_OBSERVER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native_build, "_TRIAL", tmp_path / "trial.py")
    (tmp_path / "trial.py").write_text("import ctypes, sys\nctypes.CDLL(sys.argv[1]).etloom_open()\n")
    with pytest.raises(BuildError, match=r"compiled by \S+cc does not work \(exit status -\d+\); CXX="):
        native_build.build_library()
    kept = sorted(path.suffix for path in (tmp_path / "cache").rglob("*"))
    assert kept == ["", ".failure"]  # the lock, and the reason for the next process


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the linker's option is that of Linux")
def test_a_compiler_that_links_its_own_cxx_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++ -static-libstdc++")
    monkeypatch.setenv("ETLOOM_OBSERVER_CACHE", str(tmp_path / "cache"))
    library = native_build.build_library()
    assert b"libstdc++.so.6" in library.read_bytes()  # what it needs is resolved there


@pytest.mark.slow
def test_an_interrupted_build_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cc").write_text(HALF)
    (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "cc"))
    monkeypatch.setenv("CALM", str(tmp_path / "calm"))
    monkeypatch.setenv("ETLOOM_OBSERVER_CACHE", str(tmp_path / "cache"))
    calm = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    # The second file is not a library either, so the trial is left out.
    trial = "from etloom.collector.observer import native_build\nnative_build._TRIAL = Path('/dev/null')\n"
    script = calm + "from pathlib import Path\n" + trial + "print(native_build.build_library().name)"
    interrupted = python(script)
    assert "KeyboardInterrupt" in interrupted.stderr and not interrupted.stdout
    assert [path.name for path in (tmp_path / "cache").rglob("*")] == ["lock"]
    made = python(script).stdout.strip()
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*")) == sorted(["lock", made])
