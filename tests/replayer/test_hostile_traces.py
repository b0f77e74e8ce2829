"""Execution traces that were written to break a replay end in an answer or one line."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from etloom.core.errors import EtloomError
from etloom.replayer.compute import isolation
from fuzzing.hostile_replays import SCHEMAS
from support import processes
from support.replays import operator_node, prepare_trace, read_nodes

pytestmark = pytest.mark.torch
MANY_CRASHES = """
from etloom.replayer.compute import isolation
report, skipped = isolation.connect_to_parent()
for node in range(100):
    report(node)
    if node not in skipped:
        {crash}
"""


def test_argument_names_are_those_that_torch_parses() -> None:
    torch = pytest.importorskip("torch")
    from etloom.replayer.compute.operators import _argument_names

    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("aten::")]
    assert len(schemas) > 1000
    for schema in schemas:
        assert _argument_names(str(schema)) == [argument.name for argument in schema.arguments]


def test_no_recorded_schema_reaches_the_parser_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from etloom.replayer.compute.operators import Operator, resolve_operator

    monkeypatch.delattr(torch._C, "parse_schema")  # nested types and long lists of defaults end its process
    start = time.process_time()
    for schema in SCHEMAS:
        resolved = resolve_operator(schema)
        assert isinstance(resolved, Operator) or "\n" not in resolved
    assert time.process_time() - start < 5


def test_a_tensor_among_inputs_that_were_not_recorded(tmp_path: Path) -> None:
    good, bad = (
        operator_node(
            number, "aten::relu(Tensor self) -> Tensor", [[1, 1, 0, 4, 4, "cpu"]], ["Tensor(float)"], [[4]]
        )
        for number in (2, 3)
    )
    nested: list[object] = []
    for _ in range(1200):
        nested = [nested]
    bad["inputs"] = {name: [*values, nested] for name, values in bad["inputs"].items()}
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    try:
        trace = read_nodes(tmp_path, good, bad)
    finally:
        sys.setrecursionlimit(limit)
    executor = prepare_trace(trace)
    assert [operator.name for operator in executor.program.omitted] == ["aten::relu"]
    assert [outcome.result for outcome in executor.outcomes] == ["substituted"]  # its result was not recorded


@pytest.mark.slow
def test_random_hostile_traces() -> None:
    """A small part of `make fuzz-replays`."""
    words = ["--inputs", "4", "--first", "18", "--seconds", "15"]
    ((status, output, _),) = processes.ended(processes.forked(1, words, main="fuzzing.replays"))
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crash", "limit", "message"),
    [
        ("import os; os.abort()", "MAX_CRASHES", "more than 1 operators crashed the process"),
        (
            "import time; time.sleep(60)",
            "MAX_TIMEOUTS",
            "operators 0 and 1 did not end within 0.3 s each",
        ),
    ],
)
def test_a_trace_in_which_nothing_runs_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crash: str, limit: str, message: str
) -> None:
    monkeypatch.setattr(isolation, limit, 1)
    monkeypatch.setattr(isolation, "OPERATOR_TIMEOUT_S", 0.3)
    (tmp_path / "many_crashes.py").write_text(MANY_CRASHES.format(crash=crash))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    with pytest.raises(EtloomError, match=message):
        isolation.run_isolated(["many_crashes"])


def test_a_crash_outside_of_operators_is_not_blamed_on_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crash_at_once.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    with pytest.raises(EtloomError, match="was ended by SIGABRT") as raised:
        isolation.run_isolated(["crash_at_once"])
    assert "memory" not in str(raised.value)
