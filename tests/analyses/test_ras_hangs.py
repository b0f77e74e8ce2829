"""The cause of a hang from reports of NCCL's RAS, in both forms, alone and next to Flight Recorder dumps."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

import etloom
from etloom.cli import main
from etloom.core.communicators import STATUS, RasReport
from etloom.core.errors import EtloomError, ReadError
from etloom.formats import detect_format
from etloom.formats.nccl_ras import read_report
from support.ras_reports import Communicator, Member, make_world, write_json, write_text

FORMS: dict[str, Callable[[list[Communicator]], str]] = {
    "json": write_json,
    "json-2.28.9": lambda job: write_json(job, without_comma=True, version="2.28.9"),
    "text": write_text,
    "text-v": lambda job: write_text(job, verbose=True),
    "text-2.24": lambda job: write_text(job, old=True),
}


def make_equal() -> list[Communicator]:
    return [make_world(8)]


def make_one_behind() -> list[Communicator]:
    job = [make_world(8)]
    job[0].members[7].counts["AllReduce"] = 60
    return job


def make_one_ahead() -> list[Communicator]:
    job = [make_world(8)]
    job[0].members[2].counts["AllReduce"] = 65
    return job


def make_not_launched() -> list[Communicator]:
    job = [make_world(8)]
    job[0].members[4].counts["AllReduce"] = 0
    return job


def make_silent() -> list[Communicator]:
    job = [make_world(8)]
    job[0].members[5].status = "unresponsive"
    return job


def make_dead() -> list[Communicator]:
    job = [make_world(16)]
    job[0].members[3].status = job[0].members[9].status = "dead"
    return job


def make_dead_and_silent() -> list[Communicator]:
    job = make_silent()
    job[0].members[2].status = "dead"
    return job


def make_error() -> list[Communicator]:
    job = [make_world(8)]
    for member in job[0].members:
        member.async_error = 6
    job[0].members[1].async_error = 2
    return job


def make_left() -> list[Communicator]:
    job = [make_world(8)]
    job[0].members[6].status = "NOCOMM"
    return job


def make_finalizing() -> list[Communicator]:
    job = [make_world(16)]
    for rank in (4, 11):
        job[0].members[rank].status = "FINALIZE"
    return job


def make_two_communicators() -> list[Communicator]:
    world = make_world(8)
    pair = Communicator(0xABC, [Member(0, {"AllGather": 5}), Member(1, {"AllGather": 4})])
    return [pair, world]


def make_nothing() -> list[Communicator]:
    return []


CASES = {
    "equal": (make_equal, None, ()),
    "one behind": (make_one_behind, "not arrived", (7,)),
    "one ahead": (make_one_ahead, "ahead", (2,)),
    "nothing launched": (make_not_launched, "not arrived", (4,)),
    "no answer": (make_silent, "unresponsive", (5,)),
    "dead": (make_dead, "crashed", (3, 9)),
    "dead and no answer": (make_dead_and_silent, "crashed", (2,)),
    "error": (make_error, "nccl error", (1,)),
    "left": (make_left, "other status", (6,)),
    "finalizing": (make_finalizing, "other status", (4, 11)),
    "no communicator": (make_nothing, None, ()),
}


def save(folder: Path, text: str, name: str = "ras.out") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_the_minority_is_named(case: str, form: str, tmp_path: Path) -> None:
    make, kind, ranks = CASES[case]
    path = save(tmp_path, FORMS[form](make()))
    assert detect_format(path) == "nccl-ras"
    report = etloom.hangs(path)
    assert report.problems == (
        ("read.missing_comma: " + report.problems[0].partition(": ")[2],) if report.problems else ()
    )
    if case == "dead and no answer" and form == "text-2.24":  # it does not state which process a rank is of
        assert report.cause is not None
        assert (report.cause.kind, report.cause.ranks) == ("crashed", ())
        assert "whose ranks are among ranks 2, 5: process 1002 on 10.0.0.0, GPU 2" in report.sentence
        return
    assert (report.cause and report.cause.kind, report.cause.ranks if report.cause else ()) == (
        kind,
        ranks,
    ), report.sentence
    assert len(report.sentence.splitlines()) == 1


@pytest.mark.parametrize("form", ["json", "text-v"])
def test_the_sentence_states_the_counts_and_what_is_unknown(form: str, tmp_path: Path) -> None:
    report = etloom.hangs(save(tmp_path, FORMS[form](make_one_behind())))
    assert report.sentence == (
        "rank 7 is behind in communicator 78db921d1c117b4a (8 ranks): AllReduce 64 on ranks 0-6, 60 on rank 7; "
        "7 ranks wait for it directly; one report does not show whether it hangs, make a second one; "
        "the line of code is unknown to RAS"
    )
    assert report.cause is not None
    assert report.cause.evidence.rows() == [(7, "process 1007 on 10.0.0.0, GPU 7")]
    row = report.table.row(0, named=True)
    assert (row["collective"], row["seq"], row["ranks"], row["others"]) == (
        "all_reduce",
        61,
        [7],
        [0, 1, 2, 3, 4, 5, 6],
    )


def test_ranks_of_several_communicators_are_ranks_of_the_job(tmp_path: Path) -> None:
    """Rank 1 of the pair, which is rank 5 of the job, is late there; the world waits in a later collective."""
    world = make_world(8)
    pair = Communicator(0xABC, [Member(4, {"AllGather": 5}), Member(5, {"AllGather": 4})])
    for rank in (4, 5):
        world.members[rank].counts["AllReduce"] = 63
    report = etloom.hangs(save(tmp_path, write_json([world, pair])))
    assert report.cause is not None
    assert (report.cause.kind, report.cause.ranks) == ("not arrived", (5,))
    assert "1 rank waits for it directly" not in report.sentence
    assert "7 ranks wait for it directly" in report.sentence


@pytest.mark.parametrize("form", FORMS)
def test_ranks_of_a_small_communicator_are_named_with_it(form: str, tmp_path: Path) -> None:
    report = etloom.hangs(save(tmp_path, FORMS[form](make_two_communicators())))
    assert report.cause is not None
    assert report.cause.kind == "not arrived"
    if form.startswith("json"):
        assert report.cause.ranks == (1,)
    else:
        assert report.sentence.startswith("rank 1 of communicator 0000000000000abc (2 ranks) is behind: ")
        assert report.cause.ranks == ()


def test_ranks_without_a_communicator_of_the_job_stay_ranks_of_theirs(tmp_path: Path) -> None:
    pairs = [
        Communicator(9, [Member(0), Member(1)]),
        Communicator(8, [Member(2), Member(3, {"AllReduce": 1})]),
    ]
    report = etloom.hangs(save(tmp_path, write_json(pairs)))
    assert report.cause is not None
    assert report.cause.ranks == ()
    assert report.sentence.startswith(
        "rank 1 of communicator 0000000000000008 (2 ranks) is behind: AllReduce 64 on rank 0, 1"
    )
    assert report.cause.evidence["evidence"][0].startswith("of communicator 0000000000000008: process 1003")


def test_a_rank_that_launched_another_collective_is_named(tmp_path: Path) -> None:
    job = make_world(8, AllReduce=10, AllGather=5)
    job.members[3].counts = {"AllReduce": 9, "AllGather": 6}
    for write in (write_json, write_text):
        report = etloom.hangs(save(tmp_path, write([job])))
        assert report.cause is not None
        assert (report.cause.kind, report.cause.ranks) == ("other collective", (3,)), report.sentence


def test_two_reports_show_whether_the_job_makes_progress(tmp_path: Path) -> None:
    save(tmp_path, write_text(make_one_behind()), "ras-9.txt")
    save(tmp_path, write_text(make_one_behind()), "ras-10.txt")
    stuck = etloom.hangs(tmp_path)
    assert stuck.cause is not None
    assert "unchanged since the earlier report" in stuck.sentence
    job = make_one_behind()
    for member in job[0].members:
        member.counts["AllReduce"] += 3
    save(tmp_path, write_text(job), "ras-10.txt")
    moving = etloom.hangs(tmp_path)
    assert moving.cause is None
    assert moving.sentence == "no hang: the counts of NCCL's RAS have changed since the earlier report"


def test_a_truncated_report_names_what_is_read(tmp_path: Path) -> None:
    job = make_one_behind()
    job[0].members[2].counts["AllReduce"] = 59
    text = write_json(job)
    cut = text[: text.index('"rank": 5')]
    report = etloom.hangs(save(tmp_path, cut))
    assert report.cause is not None
    assert "59 on rank 2" in report.sentence
    assert [problem.partition(":")[0] for problem in report.problems] == ["read.truncated"]
    equal = etloom.hangs(save(tmp_path, write_json(make_equal())[: text.index('"rank": 5')]))
    assert "the file ends early, 3 ranks are unknown" in equal.sentence
    half = write_text(job)
    shortened = etloom.hangs(save(tmp_path, half[: half.index("Warnings")]))
    assert shortened.cause is None
    assert shortened.sentence.endswith("the file ends early, so that more is unknown")


@pytest.mark.parametrize(
    "content", ['{"communicators_count": 1, "communicators": 3}', "NCCL version 2\nJob summary\n", "[1, 2]"]
)
def test_bad_input_is_one_line(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, content)
    status = main(["hangs", str(path)])
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    assert (status == 0 and out) or len(err.strip().splitlines()) <= 3


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ({"size": 1 << 40}, 1), ({"size": "8"}, 1), ({"size": None}, 1), ({"hash": 7}, 1),
        ({"hash": "0x" + "f" * 30}, 1), ({"ranks": 3}, 0), ({"ranks": [3, None, {"rank": -1}, {"rank": 1 << 70}]}, 4),
        ({"missing_ranks": [{"rank": 0, "status": {}}] * 3}, 3),
    ],
)  # fmt: skip
def test_values_of_other_types_are_skipped_and_counted(damage: dict, expected: int, tmp_path: Path) -> None:
    document = json.loads(write_json(make_one_behind()))
    document["communicators"].append(document["communicators"][0] | damage)
    path = save(tmp_path, json.dumps(document))
    report = etloom.hangs(path)
    assert report.cause is not None
    trace = etloom.read(path)
    counts = dict(trace.stats.select("name", "count").iter_rows())
    assert counts.get("read.damaged_entry", 0) == expected


@pytest.mark.parametrize("form", FORMS)
def test_a_report_may_end_after_any_line(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = make_error()
    job[0].members[5].status, job[0].members[7].counts["AllReduce"] = "unresponsive", 60
    lines = FORMS[form](job).splitlines(keepends=True)
    for end in range(1, len(lines)):
        status = main(["hangs", str(save(tmp_path, "".join(lines[:end]))), "--format", "json"])
        assert status in (0, 1), (end, lines[end - 1], capsys.readouterr().err)


def test_deep_json_ends_the_report(tmp_path: Path) -> None:
    path = save(tmp_path, '{"communicators_count": 1, "communicators": [' + "[" * 100_000)
    report = etloom.hangs(path)
    assert report.cause is None
    assert "unknown" in report.sentence
    with pytest.raises(EtloomError):
        etloom.hangs(save(tmp_path, '{"communicators_count": 1, "x": ' + "[" * 100_000))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["json", "text"])
def test_ten_thousand_ranks_take_less_than_two_seconds(form: str, tmp_path: Path) -> None:
    world = make_world(10_000)
    pairs = [Communicator(place, [Member(2 * place), Member(2 * place + 1)]) for place in range(1, 5000)]
    world.members[1234].counts["AllReduce"] = 60
    path = save(tmp_path, FORMS[form]([world, *pairs]))
    etloom.hangs(save(tmp_path, FORMS[form](make_one_behind()), "small"))  # imports
    before = resource.getrusage(resource.RUSAGE_SELF)
    report = etloom.hangs(path)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert report.cause is not None
    assert report.cause.ranks == (1234,)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def make_random_job(rng: random.Random) -> list[Communicator]:
    """Return communicators of one job: at most two ranks of each differ in each way."""
    size = rng.choice((4, 8, 16, 40))
    job = [make_world(size, AllReduce=rng.randrange(1, 100), AllGather=rng.randrange(3))]
    for number in range(rng.randrange(3)):
        places = rng.sample(range(size), rng.choice((2, 4)))
        job.append(Communicator(number + 1, [Member(place, {"AllGather": 7}) for place in sorted(places)]))
    broken = {
        place: rng.choice(("dead", "unresponsive"))
        for place in rng.sample(range(size), rng.choice((0, 0, 1, 2)))
    }
    for communicator in job:
        for member in communicator.members:
            member.status = broken.get(member.place, member.status)
        for member in rng.sample(communicator.members, rng.choice((0, 1, 2))):
            name = rng.choice(("AllReduce", "AllGather"))
            member.counts[name] = max(0, member.count(name) + rng.choice((-1, 1, -5)))
        for member in rng.sample(communicator.members, rng.choice((0, 0, 1))):
            if member.status == "RUNNING":
                member.status = rng.choice(("FINALIZE", "NOCOMM", "INIT"))
        for member in rng.sample(communicator.members, rng.choice((0, 0, 1))):
            member.async_error = rng.choice((2, 6))
    return job


def describe_differences(report: RasReport) -> dict[str, dict[str, list]]:
    """Return communicator -> property -> value, number and ranks, where ranks differ."""
    found = {}
    for state in report.communicators:
        # In the text form an error is the only value of its property.
        properties = {
            name: [(group.value, group.count, group.ranks) for group in groups]
            for name, groups in state.groups.items()
            if len(groups) > 1
            or "error" in name
            or (name == STATUS and groups[0].value in ("dead", "unresponsive"))
        }
        if properties:
            found[state.name] = properties
    return found


@pytest.mark.parametrize("seed", range(150))
def test_both_forms_of_a_state_give_the_same_answer(seed: int, tmp_path: Path) -> None:
    job = make_random_job(random.Random(seed))
    reports = {
        name: read_report(save(tmp_path, FORMS[name](job)))
        for name in ("json", "json-2.28.9", "text", "text-v")
    }
    reference = describe_differences(reports.pop("json"))
    for name, report in reports.items():
        found = describe_differences(report)
        assert found.keys() == reference.keys(), name
        for communicator, properties in found.items():
            expected = reference[communicator]
            assert properties.keys() == expected.keys(), (name, communicator)
            for key, groups in properties.items():
                assert [group[:2] for group in groups] == [group[:2] for group in expected[key]]
                pairs = zip(groups, expected[key], strict=True)
                assert all(mine[2] in (None, other[2]) for mine, other in pairs), (name, key)
                assert name != "json-2.28.9" or groups == expected[key]


@pytest.mark.parametrize("seed", range(60))
def test_both_forms_of_one_communicator_give_the_same_sentence(seed: int, tmp_path: Path) -> None:
    job = make_random_job(random.Random(seed))[:1]
    if len(job[0].members) < 16:  # the text form names at most a quarter of the ranks
        return
    answers = [
        etloom.hangs(save(tmp_path, FORMS[form](job))) for form in ("json", "json-2.28.9", "text", "text-v")
    ]
    assert len({answer.sentence for answer in answers}) == 1, [answer.sentence for answer in answers]
    assert len({answer.cause.ranks if answer.cause else () for answer in answers}) == 1


def test_a_report_next_to_dumps_states_what_happened_to_ranks_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    entry = {"collective_seq_id": 1, "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce",
             "input_dtypes": ["Float"], "input_sizes": [[10]], "output_sizes": [[10]], "state": "started",
             "is_p2p": False, "time_created_ns": 1_700_000_000_000_000_000}  # fmt: skip
    for rank in (0, 3):
        (tmp_path / f"_dump_{rank}").write_text(
            json.dumps({"entries": [entry], "pg_config": config, "pg_status": {}})
        )
    without = etloom.hangs(tmp_path)
    job = make_world(4)
    job.members[1].status = "dead"
    save(tmp_path, write_json([job]), "ras.json")
    report = etloom.hangs(tmp_path)
    assert report.sentence == without.sentence
    assert report.remarks == (
        "rank 2 left no dump; NCCL's RAS: answers, like the others",
        "rank 1 left no dump; NCCL's RAS: dead",
    )
    assert main(["hangs", str(tmp_path)]) == 0
    assert "rank 1 left no dump; NCCL's RAS: dead" in capsys.readouterr().out


def test_the_command_prints_the_communicators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, write_text(make_dead()))
    assert main(["hangs", str(path)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == "ranks 3, 9 are considered dead by NCCL's RAS (unreachable for 60 s)"
    assert any("78db921d1c117b4a" in line and "dead" in line for line in rest)
    assert main(["hangs", str(path), "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["kind"], answer["ranks"]) == ("crashed", [3, 9])
    assert {row["property"] for row in answer["communicators"]} == {"status"}


def test_info_names_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in (write_json(make_dead(), without_comma=True), write_text(make_dead())):
        assert main(["info", str(save(tmp_path, text))]) == 0
        out = capsys.readouterr().out
        assert "nccl_ras 2.2" in out
    assert main(["info", str(save(tmp_path, write_json(make_dead(), without_comma=True)))]) == 0
    assert "read.missing_comma" in capsys.readouterr().out


def test_the_table_of_calls_refers_to_the_verb(tmp_path: Path) -> None:
    with pytest.raises(EtloomError, match="etloom hangs FILE"):
        etloom.analyze(save(tmp_path, write_text(make_dead())), "hangs")


def test_a_report_next_to_traces_is_not_a_rank(tmp_path: Path) -> None:
    for rank in range(2):
        trace = {
            "schemaVersion": 1,
            "traceEvents": [{"ph": "X", "name": "f", "cat": "cpu_op", "pid": 1, "tid": 1, "ts": 1, "dur": 2}],
        }
        (tmp_path / f"kineto_trace_{rank}.json").write_text(json.dumps(trace))
    save(tmp_path, write_json(make_equal()), "ras.json")
    job = etloom.open(tmp_path, use_cache=False)
    assert job.ranks == [0, 1]
    assert "ras.json is a report of NCCL's RAS" in " ".join(job.stats["example"].drop_nulls())


def test_a_folder_with_neither_dumps_nor_a_report_is_an_error(tmp_path: Path) -> None:
    save(tmp_path, "NCCL version 2.28.9 compiled with CUDA 13.0\n", "job.log")
    with pytest.raises(ReadError):
        etloom.hangs(tmp_path)
