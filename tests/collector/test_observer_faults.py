"""Faults of torch's ExecutionTraceObserver (2.13) that the native observer does not have: one script per fault.

`stock` says what is wrong in what torch's observer left, `ours` that it is right in ours. A torch that mends a fault
fails its row here, which then may go.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import etloom
from support.paths import ROOT

pytestmark = [pytest.mark.torch, pytest.mark.slow]
pytest.importorskip("torch")

from etloom.collector.observer import BuildError, build_library  # noqa: E402

STOCK = "from torch.profiler import ExecutionTraceObserver as Observer\n"
OWN = "from etloom.collector.observer import ExecutionTraceObserver as Observer\n"
HEAD = """
import os, signal, sys, threading, torch
from torch.profiler import record_function
torch.set_num_threads(1)
path = sys.argv[1]
x = torch.ones(4, 5, requires_grad=True)
def say(*values):
    handle = torch.autograd._record_function_with_args_enter("said", *values)
    torch.autograd._record_function_with_args_exit(handle)
observer = Observer()
"""
START = "observer.register_callback(path); observer.start()\n"
STOP = "\nobserver.stop(); observer.unregister_callback()\n"


@dataclass(frozen=True)
class Left:
    """What an observer left: the exit status, its stderr and its file."""

    path: Path
    status: int = 0
    stderr: str = ""

    @property
    def text(self) -> str:
        return self.path.read_text(errors="surrogateescape")

    @property
    def nodes(self) -> list[dict[str, Any]]:
        """Of torch's file."""
        return list(json.loads(self.text)["nodes"])

    def named(self, name: str) -> list[dict[str, Any]]:
        return [node for node in self.nodes if node["name"] == name]

    @property
    def trace(self) -> etloom.Trace:
        return etloom.read(self.path)

    def parents(self, name: str) -> list[str]:
        """Of the operators called so in ours, the names of what encloses them."""
        nodes = self.trace.nodes.with_columns(pl.col("name").cast(pl.String))
        above = nodes.select(parent="id", above="name")
        return nodes.filter(pl.col("name") == name).join(above, on="parent")["above"].to_list()

    def said(self) -> list[Any]:
        nodes = self.trace.nodes.filter(pl.col("name").cast(pl.String) == "said")
        return [json.loads(text)[0] for text in nodes["inputs"]]

    def stat(self, name: str) -> int:
        return int(self.trace.stats.filter(pl.col("name") == name)["count"].sum())


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def orphans(left: Left) -> int:
    ids = {node["id"] for node in left.nodes}
    return sum(node["ctrl_deps"] not in ids for node in left.nodes)


def above(left: Left, name: str) -> list[str]:
    """As Left.parents, of torch's file."""
    names = {node["id"]: node["name"] for node in left.nodes}
    return [names[node["ctrl_deps"]] for node in left.named(name)]


def attribute(node: dict[str, Any], name: str) -> Any:
    return next((item["value"] for item in node["attrs"] if item["name"] == name), None)


@dataclass(frozen=True)
class Fault:
    script: str
    stock: Callable[[Left], bool]
    ours: Callable[[Left], bool]
    alone: bool = False  # it may take its process, or the observers after it, along


GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
FAULTS = {
    "a name is not escaped": Fault(
        START + "with record_function('a \"q\"'): pass" + STOP,
        lambda left: not is_json(left.text),
        lambda left: 'a "q"' in set(left.trace.nodes["name"].cast(pl.String)),
    ),
    "text beyond ASCII is garbled": Fault(
        START + "say('näme €')" + STOP,
        lambda left: left.named("said")[0]["inputs"]["values"] != ["näme €"],
        lambda left: left.said() == ["näme €"],
    ),
    "doubles have six decimals": Fault(
        START + "say(1e-12); say(1 / 3)" + STOP,
        lambda left: [node["inputs"]["values"][0] for node in left.named("said")] == [0, 0.333333],
        lambda left: left.said() == [1e-12, 1 / 3],
    ),
    "a list is cut and nothing says so": Fault(
        START + "say(list(range(5000)))" + STOP,
        lambda left: len(left.named("said")[0]["inputs"]["values"][0]) < 5000,
        lambda left: left.stat("read.observer_lists_truncated") == 1,
    ),
    "an operator that raises leaves its mark on the stack": Fault(
        START
        + """
for _ in range(3):
    try: x.matmul(x)
    except RuntimeError: pass
x * 2
"""
        + STOP,
        lambda left: orphans(left) > 0 and not left.named("aten::matmul"),
        lambda left: (
            left.stat("read.missing_parent") == 0
            and len(left.parents("aten::matmul")) == 3
            and "thread" in left.parents("aten::mul")[0]
        ),
    ),
    "nested tensors are lost": Fault(
        """
nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
"""
        + START
        + "with record_function('outer'): nested + nested\nx * 2"
        + STOP,
        lambda left: above(left, "aten::add") == ["outer"],  # of the parts, not of the whole
        lambda left: left.parents("aten::add") == ["outer", "aten::add"],
    ),
    "a scope left open at stop hangs over the next window": Fault(
        START
        + """
scope = record_function("open"); scope.__enter__()
observer.stop(); scope.__exit__(None, None, None); observer.start()
x * 2
"""
        + STOP,
        lambda left: orphans(left) > 0,
        lambda left: "thread" in left.parents("aten::mul")[0] and left.stat("read.open_operators") == 1,
    ),
    "windows run into one another": Fault(
        START + "x + 1; observer.stop(); x - 1; observer.start(); x * 2" + STOP,
        lambda left: is_json(left.text) and "window" not in left.text,
        lambda left: left.trace.meta["header"]["observer"]["windows"] == 2,
    ),
    "a backward of a forward it did not see ends the process": Fault(
        """
def forward(): global loss; loss = (x @ x.t()).sum()
thread = threading.Thread(target=forward); thread.start(); thread.join()
"""
        + START
        + "loss.backward()"
        + STOP,
        lambda left: left.status == -signal.SIGSEGV,
        lambda left: left.status == 0 and "MmBackward0" in set(left.trace.nodes["name"].cast(pl.String)),
        alone=True,
    ),
    "a second observer says it records": Fault(
        START
        + """
second = Observer().register_callback(path + ".second")
try: second.start()
except RuntimeError: pass
observer.stop(); second.start(); x * 2; second.stop(); second.unregister_callback()
"""
        + STOP,
        lambda left: not Path(f"{left.path}.second").exists(),
        lambda left: "aten::mul" in set(etloom.read(f"{left.path}.second").nodes["name"].cast(pl.String)),
        alone=True,
    ),
    "a path that fails spoils all later ones": Fault(
        "try: Observer().register_callback('/proc/none/such.json')\nexcept OSError: pass\n"
        + START
        + "x * 2"
        + STOP,
        lambda left: not left.path.exists(),
        lambda left: "aten::mul" in set(left.trace.nodes["name"].cast(pl.String)),
        alone=True,
    ),
    "a full disk goes unnoticed": Fault(
        """
try:
    observer.register_callback("/dev/full"); observer.start(); x * 2; observer.stop(); observer.unregister_callback()
except OSError: open(path, "w").write("said")
""",
        lambda left: not left.path.exists(),
        lambda left: left.text == "said",
        alone=True,
    ),
    "a kill cuts the file": Fault(
        START
        + "for _ in range(3000): x * 2\nwith record_function('last'): pass\nos.kill(os.getpid(), signal.SIGKILL)",
        lambda left: not is_json(left.text),
        lambda left: "last" in set(left.trace.nodes["name"].cast(pl.String)),
        alone=True,
    ),
    "a child of fork writes into it": Fault(
        START
        + """
pid = os.fork()
if pid == 0:
    for _ in range(3000): x.detach() * 2
    observer.stop(); observer.unregister_callback(); os._exit(0)
os.waitpid(pid, 0)
x - 1
"""
        + STOP,
        lambda left: not is_json(left.text),
        lambda left: {"aten::sub", "aten::mul"} & set(left.trace.nodes["name"].cast(pl.String)) == {"aten::sub"},
        alone=True,
    ),
    "an address is a tensor": Fault(
        START + "for _ in range(50): torch.zeros(1000)" + STOP,
        lambda left: len({node["outputs"]["values"][0][0] for node in left.named("aten::zeros")}) < 50,
        lambda left: (
            left.trace.tensors.filter(pl.col("io") == 1)
            .join(left.trace.nodes.select(node="id", name=pl.col("name").cast(pl.String)), on="node")
            .filter(pl.col("name") == "aten::zeros")["tensor_id"]
            .n_unique()
            == 50
        ),
    ),
    "there are no times": Fault(
        START + "x * 2" + STOP,
        lambda left: not {"ts", "start", "dur"} & set(left.named("aten::mul")[0]),
        lambda left: left.trace.events["dur"].min() > 0,
    ),
    "what communicates asynchronously takes others as children": Fault(
        """
import datetime, time, torch.distributed as dist
store, ranks = dist.HashStore(), {}
def join(rank): ranks[rank] = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=60))
threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
        + START
        + """
waiting = ranks[0].allreduce([torch.ones(4)])
for _ in range(20): time.sleep(0.02); x * 2
ranks[1].allreduce([torch.ones(4)]).wait(); waiting.wait()
"""
        + STOP,
        lambda left: "gloo:all_reduce" in above(left, "aten::mul"),
        lambda left: all("thread" in name for name in left.parents("aten::mul")),
    ),
    "gloo's group is an object": Fault(
        GROUP + START + "dist.all_reduce(torch.ones(4))" + STOP + "dist.destroy_process_group()",
        lambda left: (
            left.named("c10d::allreduce_")[0]["inputs"]["values"][1] == "<Object>"
            and attribute(left.named("c10d::allreduce_")[0], "pg_name") is None
        ),
        lambda left: left.trace.comms["pg_name"].cast(pl.String).to_list() == ["0"],
        alone=True,
    ),
}  # fmt: skip

# A fault may take its process along, or the observers after it: those are run first, in children of one that has only
# loaded torch.
RUNNER = """
import json, os, pathlib, sys, torch
folder = pathlib.Path(sys.argv[1])
ended = {}
for name, script, alone in json.loads((folder / "scripts.json").read_text()):
    sys.argv[1] = str(folder / name)
    if not alone:
        exec(compile(script, name, "exec"), {})
    elif (child := os.fork()) == 0:
        os.dup2(os.open(sys.argv[1] + ".stderr", os.O_CREAT | os.O_WRONLY), 2)
        exec(compile(script, name, "exec"), {})
        os._exit(0)
    else:
        ended[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
(folder / "ended.json").write_text(json.dumps(ended))
"""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Left]:
    """What an observer left of a fault."""
    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"the observer cannot be built here: {error}")
    places, ended = {}, {}
    for kind, imports in (("stock", STOCK), ("ours", OWN)):
        places[kind] = place = tmp_path_factory.mktemp(kind)
        scripts = [
            (file_of(name, kind), imports + HEAD + fault.script, fault.alone)
            for name, fault in FAULTS.items()
        ]
        (place / "scripts.json").write_text(json.dumps(sorted(scripts, key=lambda script: not script[2])))
        command = [sys.executable, "-c", RUNNER, str(place)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        ended[kind] = json.loads((place / "ended.json").read_text())

    def one(kind: str, name: str) -> Left:
        path = places[kind] / file_of(name, kind)
        said = Path(f"{path}.stderr").read_text() if FAULTS[name].alone else ""
        return Left(path, ended[kind].get(path.name, 0), said)

    return one


def file_of(name: str, kind: str) -> str:
    """The native observer writes its own format, unless the name asks for JSON."""
    return name.replace(" ", "_") + (".json" if kind == "stock" else ".etob")


def is_pinned_torch() -> bool:
    """Return whether the installed torch is the one whose faults are listed."""
    import torch

    return f"torch=={torch.__version__.partition('+')[0]}" in (ROOT / "constraints.txt").read_text().split()


@pytest.mark.parametrize("name", FAULTS)
def test_the_native_observer_has_none_of_torchs_faults(left: Callable[[str, str], Left], name: str) -> None:
    if is_pinned_torch():
        assert FAULTS[name].stock(left("stock", name)), "torch's observer does not have this fault any more"
    found = left("ours", name)
    assert FAULTS[name].ours(found), found.stderr
