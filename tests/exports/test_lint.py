"""Each lint finding has a job that triggers only it; a clean job and everything that etloom writes have none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import etloom
from etloom.cli import app, main
from etloom.core.errors import ReadError
from etloom.exports.chakra_lint import lint
from etloom.exports.chakra_lint.lint_codes import ERROR, KINETO_CODES, LINT_CODES
from etloom.formats.chakra import protobuf as pb
from etloom.formats.chakra.et_files import find_rank_files, write_messages
from support import small_traces
from support.real_runs import open_run

KINDS = {bool: "bool_val", int: "int64_val", str: "string_val", float: "double_val"}
COMP, SEND, RECV, COLL = 4, 5, 6, 7


def node(one: int, name: str, type: int = COMP, on: tuple[int, ...] = (), **attrs: Any) -> Any:
    made = pb.Node(id=one, name=name, type=type, data_deps=on, duration_micros=5)
    for key, value in {"is_cpu_op": False, **attrs}.items():
        kind = KINDS[value.__class__]
        setattr(made.attr.add(name=key), kind, value)
    return made


class Draft:
    """A clean job of two ranks: an operator launches a kernel, two collectives follow, rank 0 sends to rank 1."""

    def __init__(self) -> None:
        self.metadata: dict[int, Any] = {}
        self.nodes: dict[int, list[Any]] = {}
        self.groups: dict[str, list[int]] = {"3": [0, 1]}
        for rank in (0, 1):
            self.metadata[rank] = pb.GlobalMetadata(version="0.0.4")
            message = {"comm_src": 0, "comm_dst": 1, "comm_tag": 0, "comm_size": 8}
            self.nodes[rank] = [
                node(1, "aten::mm", is_cpu_op=True),
                node(2, "gemm", on=(1,)),
                node(3, "reduce", COLL, (2,), comm_type=0, comm_size=64, pg_name="3"),
                node(4, "broadcast", COLL, (3,), comm_type=5, comm_size=64, root=0, pg_name="3"),
                node(5, "message", SEND if rank == 0 else RECV, (4,), **message),
                node(6, "aten::add", on=(5,), is_cpu_op=True),
            ]

    def at(self, rank: int, one: int) -> Any:
        return next(own for own in self.nodes[rank] if own.id == one)

    def say(self, rank: int, one: int, name: str, value: Any = None) -> None:
        """Set an attribute of a node; None removes it."""
        own = self.at(rank, one)
        kept = [attribute for attribute in own.attr if attribute.name != name]
        more = [a for a in node(0, "", **{name: value}).attr if a.name == name] if value is not None else []
        del own.attr[:]
        own.attr.extend([*kept, *more])

    def make_memory(self, rank: int, size: int | None = None) -> None:
        """Make node 2 a MEM_LOAD_NODE."""
        self.at(rank, 2).type = 2
        self.say(rank, 2, "tensor_size", size)

    def write(self, folder: Path) -> Path:
        for rank, nodes in self.nodes.items():
            metadata = self.metadata[rank]
            write_messages(
                folder / f"job.{rank}.et",
                nodes[0] if metadata is None else metadata,
                nodes[metadata is None :],
            )
        (folder / "job.comm_groups.json").write_text(json.dumps(self.groups))
        return folder


def both(change: Callable[[Draft, int], None]) -> Callable[[Draft], None]:
    def do(draft: Draft) -> None:
        for rank in (0, 1):
            change(draft, rank)

    return do


def no_nodes(draft: Draft, rank: int) -> None:
    draft.nodes[rank] = []


def described(draft: Draft, rank: int, ranks: list[int]) -> None:
    about = node(9, "## process_group:init ##", 1)
    about.inputs.values = "['" + json.dumps([{"pg_name": "4", "ranks": ranks}]) + "']"
    draft.nodes[rank].append(about)


def still(draft: Draft, rank: int) -> None:
    for own in draft.nodes[rank]:
        own.duration_micros = 0


def no_successor(draft: Draft, rank: int) -> None:
    for own in draft.nodes[rank][1:]:
        own.data_deps[:] = [1]


def single_rank(draft: Draft) -> None:
    draft.groups = {"3": [0]}
    del draft.nodes[1], draft.metadata[1]
    draft.nodes[0] = draft.nodes[0][:4]


def crossed(draft: Draft) -> None:
    """Two groups of the same ranks, in another order on each of them."""
    draft.groups["4"] = [0, 1]
    for rank, order in ((0, "34"), (1, "43")):
        for number, group in zip((7, 8), order, strict=True):
            draft.nodes[rank].append(
                node(number, "gather", COLL, (number - 1,), comm_type=2, comm_size=8, pg_name=group)
            )


def only_replayed(draft: Draft, rank: int) -> None:
    for number in (3, 4):
        draft.say(rank, number, "replayed", True)
        draft.say(rank, number, "comm_type", 5)
    draft.at(rank, 5).type = COMP


BREAKS: dict[str, Callable[[Draft], Any]] = {
    "no-metadata": lambda d: d.metadata.update({0: None}),
    "empty-metadata": lambda d: d.metadata.update({0: pb.GlobalMetadata()}),
    "no-nodes": both(no_nodes),
    "duplicate-id": lambda d: d.nodes[0].append(node(1, "again", is_cpu_op=True)),
    "dangling-data-dependency": lambda d: d.at(0, 2).data_deps.append(77),
    "dangling-control-dependency": lambda d: d.at(0, 2).ctrl_deps.append(77),
    "cycle": lambda d: d.at(0, 2).data_deps.append(4),
    "control-cycle": lambda d: d.at(0, 2).ctrl_deps.append(4),
    "no-start": lambda d: d.at(0, 1).ctrl_deps.append(2),
    "invalid-node": lambda d: setattr(d.at(0, 2), "type", 0),
    "memory-node": both(lambda d, rank: d.make_memory(rank, 4096)),
    "missing-tensor-size": both(lambda d, rank: d.make_memory(rank)),
    "negative-size": both(lambda d, rank: d.say(rank, 3, "comm_size", -64)),
    "unknown-node-type": lambda d: setattr(d.at(0, 2), "type", 9),
    "attribute-type": lambda d: d.say(0, 3, "comm_size", 64.0),
    "missing-is-cpu-op": lambda d: d.say(0, 2, "is_cpu_op"),
    "no-durations": lambda d: still(d, 0),
    "device-leads-nowhere": lambda d: no_successor(d, 0),
    "collective-on-cpu": lambda d: d.say(0, 3, "is_cpu_op", True),
    "missing-comm-type": both(lambda d, rank: d.say(rank, 3, "comm_type")),
    "unknown-comm-type": both(lambda d, rank: d.say(rank, 3, "comm_type", 10)),
    "unsupported-collective": both(lambda d, rank: d.say(rank, 3, "comm_type", 9)),
    "missing-comm-size": both(lambda d, rank: d.say(rank, 3, "comm_size")),
    "no-bytes": both(lambda d, rank: d.say(rank, 3, "comm_size", 0)),
    "empty-message": both(lambda d, rank: d.say(rank, 5, "comm_size", 0)),
    "empty-all-gather": both(
        lambda d, rank: d.say(rank, 3, "comm_size", 0) or d.say(rank, 3, "comm_type", 2)
    ),
    "missing-ends": both(lambda d, rank: d.say(rank, 5, "comm_dst" if rank == 0 else "comm_src")),
    "self-message": lambda d: d.say(1, 5, "comm_src", 1) or d.say(0, 5, "comm_dst", 0),
    "metadata-node": lambda d: d.nodes[0].append(node(9, "about", 1)),
    "missing-member": lambda d: d.groups.update({"3": [0, 1, 4]}),
    "single-rank-group": lambda d: single_rank(d),
    "never-ends": lambda d: crossed(d),
    "message-last": both(lambda d, rank: d.nodes[rank].pop() and None),
    "replayed": both(lambda d, rank: d.say(rank, 3, "replayed", True) or d.say(rank, 3, "comm_type", 5)),
    "nothing-simulated": both(only_replayed),
    "foreign-end": both(lambda d, rank: d.say(rank, 5, "comm_src" if rank == 0 else "comm_dst", 7)),
    "group-name": both(lambda d, rank: d.say(rank, 3, "pg_name", "tp")),
    "unknown-group": both(lambda d, rank: d.say(rank, 3, "pg_name", "5")),
    "not-a-member": lambda d: d.groups.update({"3": [0, 2]}),
    "groups-differ": both(lambda d, rank: described(d, rank, [0, rank])),
    "collectives-differ": lambda d: d.say(1, 3, "comm_type", 2),
    "sizes-differ": lambda d: d.say(1, 3, "comm_size", 32),
    "roots-differ": lambda d: d.say(1, 4, "root", 1),
    "root-outside": both(lambda d, rank: d.say(rank, 4, "root", 6)),
    "unmatched-message": lambda d: d.nodes[1].remove(d.at(1, 5)) or d.at(1, 6).data_deps.remove(5),
    "message-sizes-differ": lambda d: d.say(1, 5, "comm_size", 4),
    "missing-rank": lambda d: d.nodes.update({3: d.nodes[0][:4]}) or d.metadata.update({3: d.metadata[0]}),
}


VERDICTS = {
    "abort": "metadata-node unknown-node-type empty-message self-message missing-member message-last unknown-group "
    "not-a-member duplicate-id dangling-data-dependency dangling-control-dependency no-nodes no-start memory-node "
    "missing-rank",
    "hang": "single-rank-group sizes-differ message-sizes-differ collectives-differ never-ends empty-all-gather "
    "cycle control-cycle invalid-node missing-tensor-size negative-size unsupported-collective unknown-comm-type "
    "missing-comm-type missing-comm-size attribute-type group-name collective-on-cpu missing-ends foreign-end",
    "finish": "no-bytes replayed nothing-simulated missing-is-cpu-op no-durations unmatched-message",
}
"""What ASTRA-sim 518bd51 does with such files: measured, or where that was not done, read from its code.

It catches exceptions in its event loop, so that what raises one there (a collective that it lacks, a group that is not
a number, a size of a wrong type or none) hangs; what its reader of files refuses aborts.
"""
REPLAY_VERDICTS = {
    "abort": "metadata-node unknown-node-type duplicate-id dangling-data-dependency no-nodes no-start missing-rank",
    "hang": "cycle control-cycle",
    "finish": "memory-node missing-tensor-size negative-size invalid-node unsupported-collective self-message "
    "missing-member sizes-differ",
}


def codes(path: Path) -> set[str]:
    return {one.code for one in lint(path).findings}


def test_a_clean_job_is_clean(tmp_path: Path) -> None:
    assert codes(Draft().write(tmp_path)) == set()


@pytest.mark.parametrize("code", BREAKS)
def test_each_finding(code: str, tmp_path: Path) -> None:
    draft = Draft()
    BREAKS[code](draft)
    found = codes(draft.write(tmp_path))
    assert code in found
    allowed = {
        "device-leads-nowhere": {"message-last"},
        "foreign-end": {"unmatched-message"},
        "groups-differ": {"metadata-node"},
        "self-message": {"unmatched-message"},
        "not-a-member": {"missing-member"},
        "no-metadata": {"dangling-data-dependency"},
        "missing-rank": {"not-a-member", "foreign-end", "unmatched-message"},
        "attribute-type": {"sizes-differ", "never-ends"},
        "no-start": {"control-cycle"},
    }.get(code, set())
    assert found - allowed == {code}


@pytest.mark.parametrize(
    ("verdict", "code"), [(verdict, code) for verdict, codes in VERDICTS.items() for code in codes.split()]
)
def test_the_verdict_is_that_of_astra_sim(verdict: str, code: str, tmp_path: Path) -> None:
    draft = Draft()
    BREAKS[code](draft)
    assert lint(draft.write(tmp_path)).verdict == verdict


@pytest.mark.parametrize(
    ("verdict", "code"),
    [(verdict, code) for verdict, codes in REPLAY_VERDICTS.items() for code in codes.split()],
)
def test_the_verdict_of_a_replay(verdict: str, code: str, tmp_path: Path) -> None:
    draft = Draft()
    BREAKS[code](draft)
    assert lint(draft.write(tmp_path)).replay_verdict == verdict


def test_an_exception_outside_of_the_event_loop_aborts(tmp_path: Path) -> None:
    """At the start of the simulation, and after a message, nothing catches it."""
    draft = Draft()
    for rank in (0, 1):
        draft.nodes[rank].append(node(7, "reduce", COLL, (6,), comm_type=1, comm_size=8))
    assert lint(draft.write(tmp_path)).verdict == "hang"
    for rank in (0, 1):
        draft.at(rank, 7).data_deps[:] = [5]
    assert lint(draft.write(tmp_path)).verdict == "abort"
    for rank in (0, 1):
        draft.at(rank, 7).data_deps[:] = []
    assert lint(draft.write(tmp_path)).verdict == "abort"


def test_a_negative_message_aborts(tmp_path: Path) -> None:
    draft = Draft()
    for rank in (0, 1):
        draft.say(rank, 5, "comm_size", -8)
    result = lint(draft.write(tmp_path))
    assert result.verdict == "abort"
    assert {one.code for one in result.findings} == {"negative-size"}


def test_an_attribute_that_is_not_read_stops_nothing(tmp_path: Path) -> None:
    draft = Draft()
    draft.say(0, 2, "num_ops", "many")
    result = lint(draft.write(tmp_path))
    assert ({one.code for one in result.findings}, result.verdict) == ({"attribute-type"}, "finish")


def test_a_rank_whose_group_has_no_files_aborts(tmp_path: Path) -> None:
    """Of a job of four ranks, one file was dropped, or a single one was converted."""
    draft = Draft()
    for rank in (2, 3):
        draft.nodes[rank] = [node(1, "aten::mm", is_cpu_op=True), node(2, "gemm", on=(1,))]
        draft.metadata[rank] = draft.metadata[0]
    folder = draft.write(tmp_path)
    assert lint(folder).verdict == "finish"
    (folder / "job.1.et").unlink()
    dropped = lint(folder)
    assert dropped.verdict == "abort"
    assert {(one.rank, one.code) for one in dropped.findings} >= {(0, "missing-member")}
    alone = lint(folder / "job.0.et")
    assert (alone.verdict, alone.replay_verdict, alone.has_errors) == ("abort", "finish", False)
    assert [one.code for one in alone.findings] == ["missing-rank"]


def test_a_message_to_a_rank_that_the_job_lacks_aborts(tmp_path: Path) -> None:
    draft = Draft()
    draft.say(0, 5, "comm_dst", 6)
    draft.nodes[1].remove(draft.at(1, 5))
    draft.at(1, 6).data_deps.remove(5)
    result = lint(draft.write(tmp_path))
    assert (result.verdict, [(one.rank, one.code, one.node) for one in result.findings]) == (
        "abort",
        [(0, "missing-member", 5)],
    )


def test_the_error_of_differing_groups_names_the_difference(tmp_path: Path) -> None:
    draft = Draft()
    described(draft, 0, [0, 1])
    described(draft, 1, [1, *range(3, 2000)])
    (one,) = [one for one in lint(draft.write(tmp_path)).findings if one.code == "groups-differ"]
    assert (one.rank, one.example) == (
        1,
        "group 4 is ranks 1, 3-1999 here and ranks 0, 1 on rank 0; they differ in ranks 0, 3-1999",
    )


def test_every_code_has_a_fixture() -> None:
    assert set(BREAKS) | {"truncated", "damaged-node"} == set(LINT_CODES) - set(KINETO_CODES)


def test_damage(tmp_path: Path) -> None:
    file = Draft().write(tmp_path) / "job.0.et"
    whole = file.read_bytes()
    file.write_bytes(whole[:-3])
    cut = lint(tmp_path)
    assert ({one.code for one in cut.findings}, cut.verdict) == ({"truncated"}, "finish"), (
        "the last node is lost"
    )
    file.write_bytes(whole + b"\x03\x12\xff\x01")
    assert {one.code for one in lint(tmp_path).findings} == {"damaged-node"}


def test_a_circle_is_shown(tmp_path: Path) -> None:
    draft = Draft()
    draft.at(0, 2).data_deps.append(4)
    (found,) = lint(draft.write(tmp_path)).findings
    assert (found.rank, found.node, found.example) == (0, 2, "2 -> 4 -> 3 -> 2")


def test_findings_are_counted_and_errors_come_first(tmp_path: Path) -> None:
    draft = Draft()
    draft.say(0, 1, "is_cpu_op")
    draft.at(1, 2).data_deps.extend([77, 78])
    found = lint(draft.write(tmp_path)).findings
    assert [(one.severity, one.rank, one.code, one.count) for one in found] == [
        ("error", 1, "dangling-data-dependency", 2),
        ("warning", 0, "missing-is-cpu-op", 1),
    ]


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="no file NAME"):
        find_rank_files(tmp_path)
    (tmp_path / "alone.et").write_bytes(b"")
    assert find_rank_files(tmp_path) == {0: tmp_path / "alone.et"}
    for name in ("a.0.et", "a.10.et.gz", "a.2.et"):
        (tmp_path / name).write_bytes(b"")
    assert {rank: path.name for rank, path in find_rank_files(tmp_path).items()} == {
        0: "a.0.et",
        2: "a.2.et",
        10: "a.10.et.gz",
    }
    (tmp_path / "b.1.et").write_bytes(b"")
    with pytest.raises(ReadError, match="several jobs: a, b"):
        find_rank_files(tmp_path)


def test_groups_that_are_not_json_are_refused(tmp_path: Path) -> None:
    folder = Draft().write(tmp_path)
    for text in ("{", "[]", "[" * 100_000, '{"3": [0, "1"]}', '{"3": [[0], {}]}', '{"3": 2}'):
        (folder / "job.comm_groups.json").write_text(text)
        with pytest.raises(ReadError, match=r"comm_groups\.json: (not valid JSON|expected an object)"):
            lint(folder)


@pytest.mark.parametrize(
    "name", ["stream", "comm_type", "comm_src", "comm_size", "root", "pg_name", "num_ops"]
)
def test_attributes_of_any_wrong_type_are_findings(name: str, tmp_path: Path) -> None:
    draft = Draft()
    for one in (2, 3, 5):
        draft.say(1, one, name)
        draft.at(1, one).attr.add(name=name).int64_list.values.extend([1, 2])
    found = {finding.code for finding in lint(draft.write(tmp_path)).findings}
    assert name in ("stream", "root") or "attribute-type" in found


def test_groups_and_ranks_of_a_file_are_not_trusted(tmp_path: Path) -> None:
    draft = Draft()
    draft.metadata[0].attr.add(name="world_size").int64_val = 1 << 62
    for number, text in enumerate(("[" * 100_000, '[{"pg_name": "4", "ranks": [0, "1", [2]]}]'), 7):
        made = node(number, "## process_group:init ##", 1)
        made.inputs.values = f"['{text}']"
        draft.nodes[0].append(made)
    about, found = lint(draft.write(tmp_path)).findings
    assert (about.code, about.count) == ("metadata-node", 2)
    assert (found.code, found.example) == (
        "missing-rank",
        f"rank 2, 3, 4, 5, 6, 7, 8, 9 ... of {1 << 62}",
    )


@pytest.mark.slow
def test_files_of_our_export_have_no_findings(own: Path, tmp_path: Path) -> None:
    etloom.export(etloom.open(own / "ddp_2", use_cache=False), tmp_path / "job.et")
    assert lint(tmp_path).findings == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nccl_ddp", "cpu/ddp_2", "simple_add", "tracelens/mi300_qwen.json.gz"])
def test_exports_of_recordings_have_no_findings(name: str, data: Path, tmp_path: Path) -> None:
    etloom.export(open_run(data / name), tmp_path / "job.et")
    assert lint(tmp_path).findings == []


@pytest.mark.slow
def test_findings_in_files_of_other_writers(data: Path) -> None:
    for name in ("all_reduce", "all_gather", "all_to_all", "reduce_scatter"):
        assert lint(data / "chakra" / "astra" / name).findings == []
    found = {one.code: one.count for one in lint(data / "chakra" / "chakra.0.et.gz").findings}
    # astra-sim issue 338, chakra issue 215
    assert found["dangling-control-dependency"] == 1277
    assert {"collective-on-cpu", "missing-comm-type", "device-leads-nowhere"} <= set(found)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Draft().write(tmp_path)
    assert main(["lint", str(folder)]) == 0
    assert capsys.readouterr().out == (
        "no problems in 2 files\nASTRA-sim finishes on all 2 ranks; its replay takes 0.030 ms; "
        "on a network without delay 0.020 ms\n"
    )
    clean = json.loads(CliRunner().invoke(app, ["lint", str(folder), "-f", "json"]).stdout)
    assert clean == {
        "ranks": [0, 1], "verdict": "finish", "replay_verdict": "finish",
        "replay_ns": 30_000, "recorded_ns": None, "ideal_ns": 20_002, "findings": [],
    }  # fmt: skip
    draft = Draft()
    draft.at(0, 2).data_deps.append(77)
    draft.say(1, 2, "is_cpu_op")
    draft.write(folder)
    done = CliRunner().invoke(app, ["lint", str(folder), "--format", "json"])
    assert done.exit_code == 1
    content = json.loads(done.stdout)
    times = content["replay_ns"], content["recorded_ns"], content["ideal_ns"]
    assert (content["verdict"], content["replay_verdict"], *times) == ("abort", "abort", None, None, None)
    first, second = content["findings"]
    assert (first["severity"], first["code"], first["node"], first["example"]) == (
        "error", "dangling-data-dependency", 2, "gemm: on node 77",
    )  # fmt: skip
    assert (second["severity"], second["code"], second["rank"]) == ("warning", "missing-is-cpu-op", 1)
    assert main(["lint", str(folder)]) == 1
    text = capsys.readouterr().out
    for one in ("dangling-data-dependency", "missing-is-cpu-op"):
        assert one in text
        assert LINT_CODES[one].meaning in text
    assert LINT_CODES["dangling-data-dependency"].severity == ERROR
    assert main(["lint", str(folder / "job.1.et")]) == 0, "warnings are no failure"
    assert main(["lint", str(folder / "job.comm_groups.json")]) == 1


@pytest.mark.slow
def test_an_export_without_sizes_has_nothing_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = small_traces.write_run(tmp_path / "run")
    (tmp_path / "sim").mkdir()
    assert main(["export", str(run), "--out", str(tmp_path / "sim" / "job.et")]) == 0
    printed = capsys.readouterr().err
    assert printed.endswith("job.0.et and 1 file of other ranks\n")
    # Neither trace has the sizes of the all-reduces: both say so.
    assert "warning: communications that take their recorded time: 2" in printed
    assert {one.code for one in lint(tmp_path / "sim").findings} == {"nothing-simulated"}
    assert main(["lint", str(tmp_path / "sim")]) == 1
    assert "ASTRA-sim finishes on all 2 ranks; its replay takes" in capsys.readouterr().out


def test_all_ranks_run_together(tmp_path: Path) -> None:
    assert lint(Draft().write(tmp_path)).verdict == "finish"
    draft = Draft()
    crossed(draft)
    result = lint(draft.write(tmp_path))
    assert result.verdict == "hang"
    assert {(one.rank, one.code, one.node) for one in result.findings} == {
        (0, "never-ends", 7),
        (1, "never-ends", 7),
    }
    draft.nodes[0].append(node(9, "about", 1))
    assert lint(draft.write(tmp_path)).verdict == "abort"


def test_all_ranks_as_group_0_next_to_another_group_hang(tmp_path: Path) -> None:
    """ASTRA-sim counts the tags of group 0 together with those of other groups."""
    draft = Draft()
    draft.groups = {"1": [0, 1]}
    draft.nodes[2], draft.metadata[2] = [], draft.metadata[0]
    for rank in (0, 1):
        draft.nodes[rank] = [node(1, "inner", COLL, comm_type=0, comm_size=8, pg_name="1")]
    for rank in (0, 1, 2):
        draft.nodes[rank].append(node(2, "all", COLL, comm_type=0, comm_size=8))
    assert lint(draft.write(tmp_path)).verdict == "hang"
    draft.groups["2"] = [0, 1, 2]
    for rank in (0, 1, 2):
        draft.say(rank, 2, "pg_name", "2")
    result = lint(draft.write(tmp_path))
    assert (result.verdict, result.findings) == ("finish", [])


def test_files_of_astra_sims_generator_are_accepted(tmp_path: Path) -> None:
    draft = Draft()
    for rank in (0, 1):
        draft.say(rank, 5, "comm_src" if rank == 0 else "comm_dst")
        for made in draft.nodes[rank]:
            for attribute in made.attr:
                if attribute.name == "is_cpu_op":
                    attribute.int32_val = int(attribute.bool_val)
    draft.write(tmp_path)
    (tmp_path / "job.comm_groups.json").rename(tmp_path / "workload.json")
    assert codes(tmp_path) == {"unknown-group"}
    assert lint(tmp_path, groups=tmp_path / "workload.json").findings == []
    assert main(["lint", str(tmp_path), "--groups", str(tmp_path / "workload.json")]) == 0
    with pytest.raises(ReadError, match="cannot be opened"):
        lint(tmp_path, groups=tmp_path / "none.json")


@pytest.mark.slow
def test_files_of_a_job_are_checked_together(data: Path, tmp_path: Path) -> None:
    etloom.export(open_run(data / "cpu/coll_4"), tmp_path / "job.et")
    paths = sorted(tmp_path.glob("job.*.et"))
    assert etloom.lint(*paths).table.equals(etloom.lint(tmp_path).table)
    assert list(etloom.lint(*paths[1:3]).files) == [1, 2]
    (tmp_path / "other").mkdir()
    copy = paths[0].rename(tmp_path / "other" / "copy.1.et")
    with pytest.raises(ReadError, match=r"is a second file of rank 1; the first is .*job\.1\.et"):
        etloom.lint(paths[1], copy)
