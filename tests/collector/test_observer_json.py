"""The observer under a name that ends in .json: PyTorch's JSON, ranges and contents of integer tensors, resources."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import etloom

pytestmark = [pytest.mark.torch, pytest.mark.slow]
pytest.importorskip("torch")

from etloom.collector.observer import BuildError, build_library  # noqa: E402

STOCK = "from torch.profiler import ExecutionTraceObserver as Observer\n"
OWN = "from etloom.collector.observer import ExecutionTraceObserver as Observer\n"
HEAD = "import os, signal, sys, torch\nw = torch.randn(100, 4)\n"
RANGE = "ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_RANGE"
DATA = "ENABLE_PYTORCH_EXECUTION_TRACE_SAVE_INTEGRAL_TENSOR_DATA"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    try:
        build_library()
    except BuildError as error:
        pytest.skip(f"the observer cannot be built here: {error}")


def run(script: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def read_json(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    document: dict[str, Any] = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return document


def names(document: dict[str, Any]) -> list[str]:
    return [node["name"] for node in document["nodes"] if not node["name"].startswith("[pytorch")]


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("et.json", "o.stop(); o.unregister_callback()"),
        ("rank-0.et.json.gz", "o.unregister_callback()"),
        ("et.json", "del o"),
        ("et.json.gz", ""),
        ("et.json", "sys.exit(3)"),
    ],
)
def test_the_file_is_pytorchs_json_however_the_recording_ends(tmp_path: Path, name: str, end: str) -> None:
    script = f"o = Observer(); o.register_callback('{name}'); o.start(); w + 1\n{end}"
    done = run(OWN + HEAD + script, tmp_path)
    assert (done.returncode, done.stderr) == (3 if "exit" in end else 0, "")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    document = read_json(tmp_path / name)
    assert document["schema"].startswith("1.1.1")
    assert names(document)[-1] == "aten::add"


def test_a_recording_without_operators_is_valid_json(tmp_path: Path) -> None:
    script = "o = Observer().register_callback('et.json'); o.unregister_callback(); print(o.get_output_file_path())"
    done = run(OWN + HEAD + script, tmp_path)
    assert done.stdout == "et.json\n", done.stderr
    assert len(read_json(tmp_path / "et.json")["nodes"]) == 1


def test_a_killed_process_leaves_the_recording_next_to_the_name(tmp_path: Path) -> None:
    script = (
        "o = Observer().register_callback('et.json'); o.start(); w + 1; os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert run(OWN + HEAD + script, tmp_path).returncode == -signal.SIGKILL
    assert "aten::add" in etloom.read(tmp_path / "et.json.etob").nodes["name"].cast(str).to_list()


def test_json_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    script = "o = Observer().register_callback('et.json'); o.start(); w + 1; os.mkdir('et.json')"
    done = run(OWN + HEAD + script, tmp_path)
    assert done.returncode == 0
    assert "et.json was not written" in done.stderr and "et.json.etob" in done.stderr
    assert etloom.read(tmp_path / "et.json.etob").nodes.height > 1


VALUES = """
o = Observer(); o.register_callback("et.json"); o.set_extra_resource_collection(True); o.start()
i = torch.tensor([7, 3, 99, 5]); torch.nn.functional.embedding(i, w); w[i]; w[:, i % 4]
x = torch.arange(12).reshape(3, 4).t(); torch.cat([x, x * 2]); torch.cat([torch.tensor([1]), torch.tensor([4, 5])])
torch.gather(w, 0, torch.tensor([[1, 2, 3, 4]])); torch.tensor([1, 250], dtype=torch.uint8) + 1
torch.tensor(5, dtype=torch.int32) * 2; torch.tensor([-3, 8], dtype=torch.int16).sum(); torch.tensor([True]) & True
torch.empty(0, dtype=torch.int64) + 1
with torch.no_grad(): torch.nn.functional.embedding(i[1:3], w)
o.stop(); print(o.get_resources_dir()); o.unregister_callback()
"""


COMPARED = {
    "aten::embedding",
    "aten::cat",
    "aten::gather",
    "aten::index",
    "aten::mul",
    "aten::sum",
    "aten::add",
}


def ranges(document: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for node in document["nodes"]:
        if node["name"] not in COMPARED:  # others may read memory that was not initialized
            continue
        values = [a["value"] for a in node["attrs"] if a["name"] == "tensor_range" and a["value"]]
        found += [(node["name"], value) for value in values]
    return found


def saved_places(document: dict[str, Any], folder: Path) -> list[tuple[str, str]]:
    """The operator and the place of each saved tensor."""
    operators = {str(node["id"]): node["name"] for node in document["nodes"]}
    parts = [path.stem.split("_") for path in (folder / "et_resources").iterdir()]
    return sorted((operators[node], place) for _, node, _, place in parts)


def test_ranges_and_contents_of_integer_inputs_are_torchs(tmp_path: Path) -> None:
    folders = {}
    for name, imports in (("stock", STOCK), ("own", OWN)):
        folders[name] = tmp_path / name
        folders[name].mkdir()
        done = run(imports + HEAD + VALUES, folders[name], **{RANGE: "1", DATA: "aten::embedding,aten::cat"})
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "et_resources"
    stock, own = (read_json(folder / "et.json") for folder in folders.values())
    assert names(own) == names(stock)
    assert ranges(own) == ranges(stock)
    assert ("aten::embedding", '{"1":[3,99]}') in ranges(own)
    assert saved_places(own, folders["own"]) == saved_places(stock, folders["stock"])
    embeddings = [node["id"] for node in own["nodes"] if node["name"] == "aten::embedding"]
    saved = [folders["own"] / f"et_resources/nid_{node}_tid_1.dat" for node in embeddings]
    assert [np.fromfile(path, np.int64).tolist() for path in saved] == [[7, 3, 99, 5], [3, 99]]


def test_a_replay_uses_the_contents_next_to_an_observer_file(tmp_path: Path) -> None:
    done = run(OWN + HEAD + VALUES.replace("et.json", "et.etob"), tmp_path, **{DATA: "aten::embedding"})
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "etloom", "replay", "compute", str(tmp_path / "et.etob")]
    replay = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    assert "2 tensors have values that were saved" in replay.stderr


def test_without_the_variables_nothing_is_saved(tmp_path: Path) -> None:
    done = run(OWN + HEAD + VALUES, tmp_path)
    assert done.returncode == 0, done.stderr
    assert ranges(read_json(tmp_path / "et.json")) == []
    assert list((tmp_path / "et_resources").iterdir()) == []


def test_the_observer_from_the_environment(tmp_path: Path) -> None:
    script = """
assert Observer.build_execution_trace_obs_from_env() is None
os.environ["ENABLE_PYTORCH_EXECUTION_TRACE"] = os.environ["ENABLE_PYTORCH_EXECUTION_TRACE_EXTRAS"] = "1"
o = Observer.build_execution_trace_obs_from_env()
with torch.profiler.profile(execution_trace_observer=o): w + 1
print(o.get_output_file_path()); print(o.get_resources_dir())
"""
    done = run(OWN + HEAD + script, tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    path, resources = map(Path, done.stdout.splitlines())
    assert path.name.endswith(".et.json") and resources.is_dir()
    assert "aten::add" in names(read_json(path))
