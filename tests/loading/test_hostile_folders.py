"""What lies in the folder of a run may be anybody's: each verb answers, or says in one line why not."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from etloom.cli import main
from etloom.collector import record_validation, run_folder
from support.examples import examples

Call = Callable[..., tuple[int, str, str]]
Place = tuple[Any, ...]

JOB = {"batch": "X=1", "rendezvous": "r", "launch": "l", "supervised": True}
MODEL = {
    "parameters": 10,
    "embedding_parameters": 2,
    "class": "Net",
    "dtype": "float32",
    "layers": 2,
    "heads": None,
    "training": True,
    "parallel": {"tp": 2, "dp_shard": 1},
    "batch_of_rank": 4,
    "sequence": 8,
    "dataset": "d",
}
SEAL = {
    "rank": 0,
    "local_rank": 0,
    "local_world_size": 2,
    "world_size": 2,
    "backend": "nccl",
    "groups": [{"pg_name": "0", "pg_desc": "default", "ranks": [0, 1], "group_size": 2}],
    "environment": {"NCCL_DEBUG": "INFO"},
    "restart": 0,
    "job": JOB,
    "ended": {"how": "raised", "in_window": False, "error": "ValueError"},
    "host": "a",
    "pid": 5,
    "device_name": None,
    "versions": {"torch": "2.9", "nccl": "2.2", "driver": None},
    "steps": [3, 4],
    "operators": 7,
    "ring": {"overwritten_operators": 3, "whole_since_ns": 10**18},
    "start_ns": 10**18,
    "end_ns": 10**18 + 9,
    "model": MODEL,
    "files": ["torch_et_0.json"],
    "warnings": [],
}
RUN = {
    "schema": "etloom-run-1",
    "command": ["train", "--x"],
    "host": "a",
    "returncode": 1,
    "ended": "rank 0 ended by ValueError",
    "world_size": 2,
    "job": JOB,
    "hosts": ["a"],
    "ranks": [SEAL],
}
NOTE = {**SEAL, "rank": 1, "window": "step_3", "command": ["train"]}
WHOLE = {"rank_0.json": SEAL, "run.json": RUN, "killed.json": NOTE}


def places(value: Any, at: Place = ()) -> list[Place]:
    """Where in a document there is a value."""
    inside: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    return [at, *(place for key, part in inside for place in places(part, (*at, key)))]


def put(document: Any, at: Place, value: Any) -> Any:
    if not at:
        return value
    document = document.copy()
    if value is GONE and len(at) == 1:
        del document[at[0]]
        return document
    document[at[0]] = put(document[at[0]], at[1:], value)
    return document


GONE = object()
DEEP = json.loads("[" * 200 + "]" * 200)
ANY = st.one_of(
    st.sampled_from(
        [GONE, None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1.5, float("nan"), float("inf"), DEEP]
    ),
    st.sampled_from(["", "{x}", "{their}", "%s", "\n: [", "\ud800", "../..", "step_²", "a\x1b[31m"]),
    st.sampled_from([[], {}, [None], [[]], [{}], {"": None}, {"a\nb": {"c": 1}}, [1, "a"], [[1, 2]]]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda part: st.lists(part, max_size=3) | st.dictionaries(st.text(max_size=4), part, max_size=3),
        max_leaves=4,
    ),
)


def change(name: str) -> st.SearchStrategy[tuple[str, Place, Any]]:
    return st.tuples(st.just(name), st.sampled_from(places(WHOLE[name])), ANY)


def written(run: Path, changes: list[tuple[str, Place, Any]]) -> None:
    """The folder of a run of which rank 0 is sealed and rank 1 was killed, with the changes that fit."""
    shutil.rmtree(run, ignore_errors=True)
    killed = run / ".etloom-elsewhere-1-abc" / "77"
    killed.mkdir(parents=True)
    (run / "torch_et_0.json").write_text('{"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": []}')
    (killed / "et.etob").write_text("unfinished")
    for name, document in WHOLE.items():
        for _, at, value in [one for one in changes if one[0] == name]:
            if at in places(document) and not (at == () and value is GONE):
                document = put(document, at, value)
        (killed if name == "killed.json" else run).joinpath(name).write_text(json.dumps(document))
    for path in killed.iterdir():
        os.utime(path, (10**9, 10**9))


@pytest.mark.parametrize("verb", ["gather", "info", "salvage"])
def test_a_run_as_we_write_it(tmp_path: Path, call: Call, verb: str) -> None:
    """What the changes are made to is what the verbs do with a run of ours."""
    written(tmp_path / "run", [])
    more = ["--out", tmp_path / "out"] if verb == "gather" else []
    assert call(verb, tmp_path / "run", *more)[0] == 0
    if verb == "salvage":
        ranks = [facts["rank"] for facts in run_folder.read_rank_records(tmp_path / "run" / "step_3")]
        assert ranks == [1] and not list((tmp_path / "run").glob(".etloom-*"))
        assert json.loads((tmp_path / "run" / "run.json").read_text())["ranks"] == [{**SEAL, "lost": None}]


@settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(changes=st.lists(st.sampled_from(sorted(WHOLE)).flatmap(change), min_size=1, max_size=3))
@example(changes=[("rank_0.json", (), {})])
@example(changes=[("killed.json", ("start_ns",), GONE)])
@example(changes=[("rank_0.json", ("ended", "error"), "{x}")])
@example(changes=[("rank_0.json", ("steps",), DEEP)])
@pytest.mark.slow
def test_no_file_of_a_run_ends_a_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[tuple[str, Place, Any]]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    written(run, changes)
    verbs = [["gather", str(run), "--out", str(out), "--overwrite"], ["salvage", str(run)]]
    if any(name == "run.json" for name, _, _ in changes):
        verbs.insert(0, ["info", str(run)])
    for words in verbs:
        status = main(words)
        assert status in (0, 1), (words[0], capsys.readouterr().err)
        lines = capsys.readouterr().err.splitlines()
        assert all(line.startswith("etloom: ") for line in lines)
        assert status == 0 or len(lines) == 1
    assert main(["gather", str(run), "--out", str(out), "--overwrite"]) in (0, 1)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "5", '"x"', "[[1, 2]]", "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900, "\xff"],
)
def test_invalid_documents_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank_0.json").write_bytes(text.encode("latin-1"))
    assert run_folder.read_json(tmp_path / "rank_0.json") is None
    assert run_folder.read_rank_records(tmp_path) == []


def test_only_values_of_another_type_are_omitted() -> None:
    assert (
        record_validation.validate_rank_facts(SEAL, 0) == SEAL
        and record_validation.validate_rank_facts(SEAL, 1) is None
    )
    for name in ("rank", "world_size", "host", "start_ns"):
        assert record_validation.validate_rank_facts({**SEAL, name: None}) is None
    odd = {
        "steps": [3, "4"],
        "job": {**JOB, "batch": []},
        "model": {**MODEL, "parallel": {"tp": 0}},
        "pid": True,
    }
    found = record_validation.validate_rank_facts({**SEAL, **odd, "end_ns": None, "more": [1]})
    assert found is not None and not {"steps", "pid"} & found.keys()
    assert (found["end_ns"], found["more"], found["operators"]) == (None, [1], 7)
    assert found["job"] == {name: said for name, said in JOB.items() if name != "batch"}
    assert found["model"] == {name: said for name, said in MODEL.items() if name != "parallel"}
    assert record_validation.validate_run_facts({"command": "rm", "host": 5, "returncode": 3, "x": 1}) == {
        "returncode": 3,
        "x": 1,
    }


@pytest.mark.parametrize(
    "observer", ["x", None, 5, {"overwritten": {"a": 1}}, {"overwritten": "x"}, {"overwritten": [1]}]
)
def test_a_ring_is_recognized_only_in_files_of_our_observer(
    tmp_path: Path, call: Call, observer: Any
) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    trace = {"schemaVersion": 1, "observer": observer, "traceEvents": [event]}
    (tmp_path / "a.json").write_text(json.dumps(trace))
    status, out, _ = call("info", tmp_path / "a.json", "--format", "json")
    assert status == 0 and json.loads(out)["rings"] == []
    ring = {"overwritten_operators": 5, "overwritten_ns": 9, "whole_since_ns": 7, "whole_steps": [3, 4]}
    trace["observer"] = {"overwritten": ring}
    (tmp_path / "b.json").write_text(json.dumps(trace))
    assert json.loads(call("info", tmp_path / "b.json", "--format", "json")[1])["rings"] == []


@pytest.mark.slow
def test_a_ring_stated_by_a_file_of_tables_is_checked(tmp_path: Path, call: Call) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
    (tmp_path / "a.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event]}))
    assert call("convert", tmp_path / "a.json", tmp_path / "tables.parquet")[0] == 0
    meta = json.loads((tmp_path / "tables.parquet" / "meta.json").read_text())
    ring = {"overwritten_operators": 5, "overwritten_ns": 9, "whole_since_ns": 7, "whole_steps": [3, 4]}
    for said, told in ((ring, 1), ({**ring, "whole_steps": None}, 0), ({**ring, "whole_since_ns": "7"}, 0)):
        meta["meta"] |= {"formats": ["observer"], "header": {"observer": {"overwritten": said}}}
        (tmp_path / "tables.parquet" / "meta.json").write_text(json.dumps(meta))
        status, out, _ = call("info", tmp_path / "tables.parquet")
        assert status == 0 and out.count("overwritten: 5 operators") == told
        assert (
            len(json.loads(call("info", tmp_path / "tables.parquet", "--format", "json")[1])["rings"]) == told
        )
