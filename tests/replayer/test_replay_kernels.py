"""Computation replay of kernels that torch.compile made: whose source is run, and what is said of all others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

import etloom
from etloom import cli
from etloom.core.errors import EtloomError

torch = pytest.importorskip("torch")
from torch.profiler import ExecutionTraceObserver, profile  # noqa: E402

from etloom.replayer.compute import compiled_kernels  # noqa: E402
from etloom.replayer.compute.compiled_kernels import ON_META, Kernels  # noqa: E402
from etloom.replayer.compute.executor import Executor, Outcome  # noqa: E402
from etloom.replayer.compute.operator_replay import prepare_executor, replay_operators  # noqa: E402
from etloom.replayer.compute.operators import Operator  # noqa: E402
from etloom.replayer.compute.saved_tensors import resources_folder  # noqa: E402

pytestmark = pytest.mark.torch
NAME = "triton_poi_fused_add_0"
RUNS = """
seen = []
def run(a, b, out, times):
    out.copy_(a + times * b)
    seen.append([one.clone() for one in (a, b, out)])
"""
BESIDE = "a triton kernel: its Python source lies beside the trace; --allow-code runs it"


def launch(*given: Any, file: str = "/home/her/cache/c1.py", backend: str = "triton") -> None:
    """As Inductor tells the profiler of a launch."""
    told = {"kernel_file": file, "kernel_backend": backend, "kernel_hash": "c1", "stream": 140_000}
    with torch._C._profiler._RecordFunctionFast(NAME, given, told):
        pass


def record(folder: Path, step: Callable[[], Any], source: str | None = None) -> Path:
    observer = ExecutionTraceObserver().register_callback(str(folder / "torch_et_0.json"))
    with profile(execution_trace_observer=observer, record_shapes=True):
        step()
    if source is not None:
        resources = folder / "torch_et_0_resources"
        resources.mkdir()
        (resources / "c1.py").write_text(source)
    return folder


def rehearsed(run: Path, device: str = "cpu", allow_code: bool = True) -> Executor:
    (trace,) = etloom.open(run, use_cache=False).values()
    return prepare_executor(trace, device, resources=resources_folder(run, trace), allow_code=allow_code)


def outcome(machine: Executor) -> Outcome:
    """Of the first kernel."""
    return next(
        one for one, step in zip(machine.outcomes, machine.program.steps, strict=True) if step.name == NAME
    )


def added() -> None:
    a, b, out, last = torch.rand(3, 4), torch.rand(3, 4), torch.empty(3, 4), torch.empty(3, 4)
    launch(a.mul(b), b, out, 3)
    launch(out.neg(), b, last, 0.5)


def seen(machine: Executor) -> list[list[torch.Tensor]]:
    """What calls of the kernel found and left."""
    call: Any = next(step.operator.call for step in machine.program.steps if step.name == NAME)
    found: list[list[torch.Tensor]] = call._launch.__globals__["seen"]
    return found


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of Triton's: kernels whose file is Python with a function ``run``."""
    plain = compiled_kernels._Backend(
        lambda device: None, lambda: None, lambda path: compiled_kernels._module(path).run
    )
    monkeypatch.setitem(compiled_kernels._BACKENDS, "triton", plain)


@pytest.mark.usefixtures("known")
def test_a_kernel_is_run_where_that_is_allowed(tmp_path: Path) -> None:
    """It gets what operators gave, its readers what it wrote, and nothing is written beside its source."""
    machine = rehearsed(record(tmp_path, added, RUNS))
    assert {one.result for one in machine.outcomes} == {"replayed"} and not machine.program.left_out
    machine.run()
    calls = seen(machine)
    assert len(calls) == 4  # in each pass two, by one run of the source
    for first, second in (calls[:2], calls[2:]):
        assert first[2].equal(first[0] + 3 * first[1]) and first[2].any()
        assert second[0].equal(-first[2])
        assert second[2].equal(second[0] + 0.5 * second[1])
    assert [one.name for one in (tmp_path / "torch_et_0_resources").iterdir()] == ["c1.py"]


def test_a_trace_of_kernels_alone_says_why_none_runs(tmp_path: Path) -> None:
    one = torch.ones(2)
    run = record(tmp_path, lambda: launch(one, 2), RUNS)
    with pytest.raises(EtloomError, match=f"no recorded operator can be replayed: {BESIDE}"):
        rehearsed(run, allow_code=False)
    assert outcome(rehearsed(run, "meta")).result == "substituted"


@pytest.mark.usefixtures("known")
def test_a_source_that_fails_is_run_once(tmp_path: Path) -> None:
    marked = tmp_path / "marked"
    (tmp_path / "run").mkdir()
    source = f"open({str(marked)!r}, 'a').write('x')\nraise SystemExit('enough')"
    machine = rehearsed(record(tmp_path / "run", added, source))
    why = {(one.result, one.reason) for one in machine.outcomes if one.reason}
    assert why == {("skipped", "its source failed: SystemExit: enough")}
    assert marked.read_text() == "x"


@pytest.mark.usefixtures("known")
def test_the_source_runs_after_its_kernel_was_told(tmp_path: Path) -> None:
    """Who ends the process is known by what was told last."""
    marked = tmp_path / "marked"
    (tmp_path / "run").mkdir()
    source = f"open({str(marked)!r}, 'a').write('x')\ndef run(*_): pass"
    run = record(tmp_path / "run", added, source)
    (trace,) = etloom.open(run, use_cache=False).values()
    told: list[tuple[str, bool]] = []
    prepare_executor(
        trace,
        progress=lambda step: told.append((step.name, marked.exists())),
        resources=resources_folder(run, trace),
        allow_code=True,
    )
    assert told[-4:] == [("aten::mul", False), (NAME, False), ("aten::neg", True), (NAME, True)]


@pytest.mark.usefixtures("known")
def test_integers_that_a_kernel_writes_begin_each_pass_anew(tmp_path: Path) -> None:
    counts = torch.zeros(4, dtype=torch.int64)
    source = "seen = []\ndef run(count):\n    count.add_(1)\n    seen.append([count.clone()])\n"
    machine = rehearsed(record(tmp_path, lambda: (launch(counts), torch.ones(2).neg()), source))
    machine.run()
    machine.run()
    assert [one.tolist() for (one,) in seen(machine)] == [[1] * 4] * 3


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("allow_code", [False, True])
def test_on_meta_no_source_is_run(tmp_path: Path, allow_code: bool) -> None:
    machine = rehearsed(record(tmp_path, added, "raise ValueError"), "meta", allow_code)
    assert outcome(machine) == Outcome("substituted", ON_META) and not machine.program.left_out
    assert {one.result for one in machine.outcomes} == {"replayed", "substituted"}


def test_a_recorded_gpu_trace_is_covered_on_meta(data: Path) -> None:
    run = data / "et_schemas/pt2_triton.json.gz"
    done = replay_operators(etloom.open(run)[0], "meta")
    assert done.coverage.select("name", "result", "count").rows() == [
        ("aten::mm", "replayed", 2),
        ("triton_poi_fused_add_cos_neg_sin_0", "substituted", 2),
    ]
    assert done.covered() == 1.0
    left = replay_operators(etloom.open(run)[0], "cpu", allow_code=True, repeats=1, warmup=0)
    assert left.covered() == 0.5
    assert (
        left.coverage["reason"]
        .to_list()[1]
        .startswith("a triton kernel: its source is not beside the trace; ")
    )


def node(inputs: str, file: str = "c1.py", backend: str = "triton") -> dict[str, str]:
    return {"kernel_backend": backend, "kernel_file": file, "inputs": inputs}


@pytest.mark.parametrize(
    ("inputs", "file", "given"),
    [
        ("[null, null, 16, 140000]", "c1.py", "012"),  # torch's observer ends with the stream
        ('[null, null, 16, "grid(16,)", 140000]', "c1.py", "012"),  # and before torch 2.7 with the grid
        ("[null, null, 16]", "/home/her/cache/c1.py", "012"),  # ours with neither, and it keeps the path
        ('[null, "<None>", 0.5, true, "inf", 140000]', "c1.py", "01234"),
    ],
)
def test_a_kernel_gets_its_arguments_alone(inputs: str, file: str, given: str) -> None:
    found = Kernels("meta").resolve(node(inputs, file))
    assert isinstance(found, Operator)
    assert "".join(one.name for one in found.order) == given
    assert len(found.arguments) == len(json.loads(inputs))
    assert [one.writes for one in found.arguments] == [one is None for one in json.loads(inputs)]


def test_what_is_no_kernel_to_run_is_told() -> None:
    for device in ("cpu", "meta"):
        known = Kernels(device, allowed=True)
        assert (
            known.resolve(node("[null, 1]", backend="cutlass"))
            == "a cutlass kernel: no way to run one is known"
        )
        assert known.resolve(node("[]")) == "a triton kernel: its arguments were not recorded"


def test_triton_needs_a_gpu_or_its_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c1.py").write_text(RUNS)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found: dict[tuple[str, bool], Any] = {}
    for there in (False, True):
        monkeypatch.setattr(
            compiled_kernels.importlib.util, "find_spec", lambda name, there=there: there or None
        )
        for device in ("cpu", "cuda"):
            found[device, there] = Kernels(device, tmp_path, allowed=True).resolve(node("[null, 0]"))
    missing = "a triton kernel: Triton is not installed here; pip install triton"
    assert found["cpu", False] == found["cuda", False] == missing
    assert found["cpu", True].startswith("a triton kernel: it needs a GPU, --device cuda; ")
    assert found["cuda", True].instead is None
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    again = Kernels("cpu", tmp_path, allowed=True).resolve(node("[null, 0]"))
    assert isinstance(again, Operator) and again.instead == "by Triton's interpreter"


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("named", "there", "reason"),
    [
        ("c1.py", lambda at: (at / "c1.py").write_text(RUNS), None),
        ("/elsewhere/c1.py", lambda at: (at / "c1.py").write_text(RUNS), None),  # whatever folder it names
        ("../c2.py", lambda at: (at.parent / "c2.py").write_text(RUNS), "its source is not in "),
        ("/etc/c2.py", lambda at: None, "its source is not in "),
        ("", lambda at: None, "its file was not recorded"),
        ("..", lambda at: None, "the name of its file is no plain NAME.py"),
        ("c1.so", lambda at: (at / "c1.so").write_text(RUNS), "the name of its file is no plain NAME.py"),
        (".c1.py", lambda at: (at / ".c1.py").write_text(RUNS), "the name of its file is no plain NAME.py"),
        ("c1.py", lambda at: (at / "c1.py").symlink_to(at / "real.py"), "is no plain file"),
        ("c1.py", lambda at: (at / "c1.py").mkdir(), "is no plain file"),
        (
            "c1.py",
            lambda at: os.truncate(_touched(at / "c1.py"), (1 << 24) + 1),
            "is no plain file, or too large",
        ),
    ],
)
def test_only_a_plain_file_of_the_folder_is_run(
    tmp_path: Path, named: str, there: Callable[[Path], Any], reason: str | None
) -> None:
    resources = tmp_path / "torch_et_0_resources"
    resources.mkdir()
    (resources / "real.py").write_text(RUNS)
    there(resources)
    recorded = node("[null, null, null, 2, 140000]", named)
    found = Kernels("cpu", resources, allowed=True).resolve(recorded)
    if reason is not None:
        assert isinstance(found, str) and reason in found
        return
    assert Kernels("cpu", resources).resolve(recorded) == BESIDE
    alone = Kernels("cpu", None, allowed=True).resolve(recorded)
    assert str(alone).startswith("a triton kernel: its source is not beside the trace; ")
    out = torch.zeros(2)
    assert isinstance(found, Operator)
    found.call(torch.ones(2), torch.ones(2), out, 2)
    assert out.tolist() == [3, 3]


def _touched(path: Path) -> Path:
    path.touch()
    return path


@pytest.mark.usefixtures("known")
def test_a_link_that_takes_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "c1.py").write_text(RUNS)
    found = Kernels("cpu", tmp_path, allowed=True).resolve(node("[null, null, null, 2, 140000]"))
    (tmp_path / "c1.py").rename(tmp_path / "c2.py")
    (tmp_path / "c1.py").symlink_to(tmp_path / "c2.py")
    assert isinstance(found, Operator)
    with pytest.raises(RuntimeError, match="its source failed: OSError"):
        found.call(torch.ones(2), torch.ones(2), torch.zeros(2), 2)


INDUCTOR = ROOT / "tests" / "data" / "inductor_triton_kernel.txt"
"""What Inductor of torch 2.13 made for an A100 of (x + y).cos() and -(x + y).sin()."""
FILE_OF_PT2 = "cm742fnyrs4e65orusgacb3ex55efiixw4flktezbgqlge5nvorn.py"
VALUES = """
import sys, torch, etloom
from pathlib import Path
from etloom.replayer.compute.operator_replay import prepared
machine = prepared(etloom.open(sys.argv[1])[0], resources=Path(sys.argv[2]), allow_code=True)
for _ in range(2):
    machine.run()
    for step in machine.program.steps:
        if step.name.startswith("triton"):
            x, y, cos, sin = (machine._slots[machine._slot_of[step.inputs[at]]] for at in range(4))
            assert torch.allclose(cos, (x + y).cos()) and torch.allclose(sin, -(x + y).sin()) and cos.any()
            cos.zero_(), sin.zero_()
            print("right")
"""


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed")
def test_inductor_kernels_of_a_gpu_trace_run_in_the_interpreter(data: Path, tmp_path: Path) -> None:
    """The kernels of the recording had two inputs and two outputs of 4 x 4, as this source has."""
    run = data / "et_schemas/pt2_triton.json.gz"
    (tmp_path / FILE_OF_PT2).write_text(INDUCTOR.read_text())
    given = [sys.executable, "-c", VALUES, str(run), str(tmp_path)]
    done = subprocess.run(given, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.stdout.split() == ["right"] * 4, done.stderr


@pytest.mark.slow
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter would run the stub")
def test_the_flag(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = str(record(tmp_path, added, "raise ValueError"))
    found = []
    for flags in ([], ["--allow-code"]):
        assert (
            cli.main(
                ["replay", "compute", run, *flags, "--repeats", "1", "--warmup", "0", "--format", "json"]
            )
            == 0
        )
        rows = {row["name"]: row for row in json.loads(capfd.readouterr().out)}
        found.append(rows[NAME]["reason"])
    assert found[0] == BESIDE
    assert "Triton is not installed here" in found[1] or "it needs a GPU" in found[1]
