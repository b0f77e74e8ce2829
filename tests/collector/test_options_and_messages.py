"""Messages of the collector: invalid options, why nothing was recorded, contents of a ring."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import polars as pl
import pytest

from etloom.api import recording
from etloom.collector import diagnosis, run_folder
from etloom.collector import options as recording_options
from etloom.collector.launcher import collection
from etloom.collector.observer import native_build
from etloom.collector.options import SOURCES, CollectOptions, RecordingOptions, RecordKeywords
from etloom.collector.session import messages, on_demand
from etloom.collector.session.messages import MessageLog
from etloom.collector.session.recording import record
from etloom.collector.text import count_noun, format_ranges
from etloom.core.errors import CollectError, InvalidOption
from etloom.formats.observer import notes

Call = Callable[..., tuple[int, str, str]]


# Options


@pytest.mark.parametrize(
    ("typed", "flag", "words"),
    [
        ("--steps 5:3", "--steps", "expected a range of steps, got '5:3'; write FIRST:LAST"),
        ("--ranks x", "--ranks", "expected rank numbers and ranges, got 'x'"),
        ("--max-size 0", "--max-size", "expected at least 1 MiB, got 0 bytes"),
        ("--for 3", "--for", "requires --every"),
        ("--every 0", "--every", "expected at least 1 step, got 0"),
        ("--every 5 --for 5", "--every", "overlap"),
        ("--every 5 --on-demand 2", "--every", "cannot be combined with --on-demand"),
        ("--on-demand 0", "--on-demand", "expected at least 1 step, got 0"),
        ("--on-demand 2 --steps 4:6", "--steps", "cannot be combined with --on-demand"),
        ("--max-windows 3", "--max-windows", "requires --every or --on-demand"),
        ("--every 9 --max-windows 0", "--max-windows", "expected at least 1 window, got 0"),
        ("--step-by 1ms", "--step-by", "expected at least 10ms, got 1ms"),
        ("--step-by profiler --step-name x", "--step-by", "cannot be combined with --step-name"),
        ("--step-by profiler --with kineto,et", "--with", "leave out kineto"),
        ("--step-by profiler --stack", "--stack", "leaves Kineto to the job's own torch.profiler"),
        ("--step-name (", "--step-name", "invalid regular expression '('"),
        ("--with tea", "--with", "unknown source 'tea'; expected one of kineto, et"),
        ("--stack --with et", "--stack", "cannot be combined with --with"),
        ("--no-shapes --with et", "--shapes", "cannot be combined with --with"),
        ("--memory --with kineto", "--memory", "cannot be combined with --with"),
        ("--ring --with kineto", "--with", "leave out kineto"),
        ("--ring --with kineto,et", "--with", "has no size limit"),
        ("--ring --memory", "--memory", "has no size limit"),
        ("--ring --with flight-recorder", "--ring", "add et to --with"),
        ("--ring --observer stock", "--ring", "leave out --observer stock"),
        ("--max-size 9 --observer stock", "--max-size", "leave out --observer stock"),
        ("--max-size 9 --with kineto", "--max-size", "add et to --with"),
        ("--observer stock --with kineto", "--observer", "add et to --with"),
        ("--observer fast", "--observer", "expected one of native, stock"),
        ("--print-command --report", "--print-command", "cannot be combined with --report"),
        ("--build", "--build", "cannot be combined with a command"),
        ("--trigger other", "--trigger", "cannot be combined with a command"),
    ],
)
def test_wrong_options_are_reported_by_their_flag(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, flag: str, words: str
) -> None:
    monkeypatch.setattr("etloom.collector.observer.find_library", lambda: None)
    monkeypatch.setattr("etloom.collector.observer.build_library", lambda: tmp_path)
    ran = tmp_path / "ran"
    status, out, err = call("collect", "--out", tmp_path / "run", *shlex.split(typed), "--", "touch", ran)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"etloom: {flag}: ") and words in err
    assert not ran.exists() and not (tmp_path / "run").exists()


def test_resolve_sources() -> None:
    def of(sources: str | None = None, **options: Any) -> list[str]:
        fields = recording_options.resolve_sources(CollectOptions(sources=sources, **options))
        return sorted(name for name, is_recorded in fields.items() if is_recorded)

    assert of() == ["et", "kineto", "shapes"]
    assert of(shapes=False, stack=True) == ["et", "kineto", "source_lines", "stack"]
    assert of("kineto,stacks", source_lines=False) == ["kineto", "stack"] and of(ring=True) == [
        "et",
        "shapes",
    ]
    assert of(step_by="profiler", shapes=False) == ["et"] and of("et,shapes", ring=True) == ["et", "shapes"]
    assert len(recording_options.resolve_sources(CollectOptions())) == len(SOURCES) + 1
    with pytest.raises(InvalidOption, match="requires Python stacks"):
        of(source_lines=True)


def test_a_ring_without_the_native_observer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        native_build, "build_if_native", lambda requested, *_: ("stock", ["no compiler here"])
    )
    with pytest.raises(CollectError, match="--ring requires the native observer: no compiler here"):
        collection.collect(["true"], tmp_path / "run", CollectOptions(ring=True, sources="et"))
    with pytest.raises(CollectError, match="--ring requires the native observer: no compiler here"):
        record(tmp_path / "loop", ring=True, sources="et")
    assert not (tmp_path / "loop").exists()
    bounded = collection.collect(["true"], tmp_path / "run", CollectOptions(max_bytes=1 << 20, sources="et"))
    assert bounded.warnings[:2] == ("no compiler here", "--max-size has no effect on torch's observer")


def test_the_observer_is_built_only_if_used(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    monkeypatch.setattr(
        native_build, "build_if_native", lambda requested, *_: (built.append(requested), (requested, []))[1]
    )
    call("collect", "--out", tmp_path / "run", "--with", "kineto", "--", "true")
    record(tmp_path / "loop", sources="kineto,stacks")
    assert built == []
    call("collect", "--out", tmp_path / "run", "--with", "shapes, et", "--", "true")
    record(tmp_path / "loop", sources="et", overwrite=True)
    assert built == ["native"] * 2


def test_the_build_of_the_observer_is_announced(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etloom.collector.observer.find_library", lambda: None)
    monkeypatch.setattr("etloom.collector.observer.find_failure", lambda: None)
    monkeypatch.setattr("etloom.collector.observer.build_library", lambda: tmp_path)
    for what, announced in (("et", True), ("kineto", False)):
        err = call("collect", "--out", tmp_path / what, "--with", what, "--", "true")[2]
        assert err.startswith("etloom: building the native observer") == announced


def test_several_paths_suggest_their_folder(call: Call, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.json", "b.json", "c.json")]
    for path in paths:
        path.touch()
    status, _, err = call("info", *paths)
    assert status == 2 and "name the folder that contains them" in err
    assert "unexpected extra argument" in call("info", paths[0], "nonsense")[2]


# Why nothing was recorded


ONE: dict[str, Any] = {"began": True, "rank": 0, "steps": 6, "ended": True}


@pytest.mark.parametrize(
    ("options", "processes", "said"),
    [
        ({}, [], "no Python of the command imported torch.optim; was PYTHONPATH lost"),
        ({}, [{"ended": True}], "no torch.optim.Optimizer was created in the process with torch; for a loop without"),
        ({}, [{}, {}], "no torch.optim.Optimizer was created in 2 processes with torch"),
        ({"first": 10, "last": 12}, [ONE], "ended after 6 steps, before step 10 began (steps 10:12); choose earlier"),
        ({"first": 3}, [ONE | {"steps": 0, "optimizer": "SGD"}], "the SGD that was created made no step"),
        ({"first": 3}, [ONE | {"ended": False}], "was killed, or ended by os._exit, before step 3 began"),
        ({"first": 3}, [ONE | {"missed": ["torch.profiler is in use"]}], "torch.profiler is in use"),
        ({"ranks": (5, 6, 7)}, [ONE | {"excluded": True, "rank": r} for r in (1, 0)],
         "--ranks 5-7 excludes all ranks of the job, 0-1"),
        ({"ranks": (1,)}, [ONE | {"excluded": True}, ONE | {"rank": 1}, {}], "ended after 6 steps, before"),
        ({"step_name": "^decode"}, [{"names": [["forward", 120], ["prefill", 1]]}, {"names": [["forward", 3]]}],
         "--step-name '^decode' matches no record_function in 2 processes with torch "
         "(most frequent: 'forward' 123 times, 'prefill' 1 time)"),
        ({"step_name": "x"}, [{}], "matches no record_function in the process with torch (none was entered)"),
        ({"step_name": "^P", "job_marks_steps": True}, [{}], "no ProfilerStep#N was recorded"),
        ({"step_ns": 20_000_000}, [{}], "no torch.nn.Module was created"),
        ({"step_ns": 20_000_000, "first": 50}, [ONE], "the job ended after 6 steps of 20 ms, before step 50 began"),
        ({"on_demand": 2}, [ONE], "no window was requested: the job ended after 6 steps"),
        ({"on_demand": 2}, [ONE | {"requested": [7, 9]}], "ended after 6 steps, before requested step 7 began"),
    ],
)  # fmt: skip
def test_explain_empty_run(options: dict[str, Any], processes: list[dict[str, Any]], said: str) -> None:
    told = diagnosis.explain_empty_run(RecordingOptions("out", "scratch", **options), processes)
    assert said in told and "\n" not in told and "above" not in told


def test_a_failed_command_is_reported_first() -> None:
    options = RecordingOptions("out", "scratch", first=3)
    assert diagnosis.explain_empty_run(options, [], 2).startswith(
        "the command ended with status 2 before a Python imported torch.optim, or PYTHONPATH was lost"
    )
    said = diagnosis.explain_empty_run(options, [{"ended": True}], 1)
    assert said.startswith(
        "the command ended with status 1; no torch.optim.Optimizer was created in the process"
    )


def test_on_demand_takes_a_number_of_steps(call: Call) -> None:
    status, _, err = call("collect", "--on-demand", "--", "python", "train.py")
    assert status == 2 and err.startswith(
        "etloom: --on-demand: expected a number of steps, as in --on-demand 2, got '--'"
    )


def test_a_ring_runs_to_the_end_unless_steps_are_named() -> None:
    assert recording_options.parse_window(None, None, None, None, ring=True) == (3, None)
    assert recording_options.parse_window("4:9", None, None, None, ring=True) == (4, 9)
    assert recording_options.parse_window(None, 100, None, None, ring=True) == (100, 102)
    assert recording_options.parse_window(None, None, None, 2, ring=True) == (3, 5)
    assert recording_options.parse_window(None, None, None, None) == (3, 5)


def test_request_files_do_not_follow_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, own = tmp_path / "run", tmp_path / "own"
    run.mkdir()
    own.write_text("mine")
    (run / on_demand.REQUEST_FILE).symlink_to(tmp_path / "made")
    with pytest.raises(CollectError, match="cannot request a recording"):
        on_demand.request_recording(run, timeout_s=0)
    assert not (tmp_path / "made").exists()
    monkeypatch.setattr(os, "urandom", bytes)  # a stranger who guesses
    link = run / f".etloom-start.{'00' * 6}"
    link.symlink_to(own)
    assert on_demand.agree_on_start_ns(run) > 10**18 and own.read_text() == "mine"
    on_demand.clear_requests(run)
    assert not link.exists() and list(run.iterdir()) == [] and own.read_text() == "mine"


def test_process_status_round_trip(tmp_path: Path) -> None:
    facts = messages.ProcessStatus(str(tmp_path))
    for number in range(3000):
        facts.count_name("forward")
        facts.count_name(f"request {number}")
    facts.facts["rank"] = 3
    assert facts.write() and len(facts.names) == 1000
    (found,) = messages.read_statuses(tmp_path)
    assert found["rank"] == 3 and found["names"][0] == ["forward", 3000]
    assert list(tmp_path.iterdir()) == []
    assert not messages.ProcessStatus(str(tmp_path / "gone")).write()


# What is held


def test_describe_ring() -> None:
    def rank(number: int, steps: list[int], lost: int) -> dict[str, Any]:
        ring = {"overwritten_operators": lost, "whole_since_ns": 9_000_000_000}
        return {"rank": number, "steps": steps, "start_ns": 0, "end_ns": 10_500_000_000, "ring": ring}

    assert diagnosis.describe_ring([rank(0, [7, 8], 0), {"rank": 1, "steps": []}]) is None
    assert diagnosis.describe_ring([rank(0, [7, 8], 1_234_567)]) == (
        "the ring holds 2 complete steps (7-8) of the last 1.5 s; 1,234,567 operators of the 9 s before are "
        "overwritten (a larger --max-size keeps more)"
    )
    said = diagnosis.describe_ring([rank(0, [7, 8], 5), rank(1, [], 1)])
    assert said is not None and said.startswith(
        "the ring holds 0 complete steps of the last 1.5 s of rank 1, the shortest one; 1 operator of the 9 s"
    )


def test_describe_recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks: list[dict[str, Any]] = [
        {"steps": [3, 4], "operators": 900},
        {"steps": [3, 4, 6], "operators": 335},
    ]
    monkeypatch.setattr(run_folder, "read_rank_records", lambda folder: ranks)
    assert recording.describe_window(tmp_path) == ", steps 3, 4, 6, 1,235 operators"
    ranks[:] = [{"steps": [], "operators": None}]
    assert recording.describe_window(tmp_path) == ", no whole step"
    ranks[:] = [{"steps": None}, {"steps": [3], "operators": 9}]
    assert recording.describe_window(tmp_path) == ""
    cut = {"ended": {"how": "killed", "in_window": True}, "sources": ["et"], "steps_asked": "3:400"}
    ranks[:] = [{"rank": 0, "steps": [3, 4], **cut}, {"rank": 1, "steps": [3, 4, 5], **cut}]
    assert recording.describe_window(tmp_path) == ", steps 3, 4 of 3-399"
    ranks[:] = [{"steps": [3], "operators": 0}]
    where = tmp_path / "my run"
    one = collection.CollectResult(where, 0, (0,), (where,))
    assert recording.describe_recording(one, where) == (
        f"nothing ran while rank 0 recorded, step 3, 0 operators: the traces in {where} are empty"
    )
    ranks[0]["operators"] = 10
    assert recording.describe_recording(one, where) == (
        f"recorded rank 0, step 3, 10 operators in {where}; next: etloom report '{where}'"
    )
    two = collection.CollectResult(where, 0, (0, 1), (where / "step_1", where / "step_5"))
    assert recording.describe_recording(two, where / "step_5") == (
        f"recorded 2 windows of 2 ranks in {where}; next: etloom report '{where}/step_5'"
    )
    ranks.clear()
    assert recording.describe_window(tmp_path) == ""


def test_text_helpers() -> None:
    assert format_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8" and format_ranges([]) == ""
    assert format_ranges(list(range(0, 40, 2))).endswith("12, 14, ...")
    assert (count_noun(1, "step"), count_noun(1234, "step")) == ("1 step", "1,234 steps")


def test_a_remark_is_printed_once_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    words = MessageLog()
    words.remark("two optimizers")
    assert words.take_for_record(has_several_windows=True) == ["two optimizers"]
    words.remark("two optimizers")
    words.warn_once("full\ndisk")
    words.warn_once("full\ndisk")
    assert words.take_for_record(has_several_windows=False) == ["full disk"]
    assert capsys.readouterr().err == "etloom: two optimizers\netloom: full disk\n"


def test_partially_overwritten_steps_are_renamed() -> None:
    operators = pl.DataFrame(
        {
            "name": [
                "ProfilerStep#7",
                "aten::add",
                "ProfilerStep#8",
                "ProfilerStep#9",
                "ProfilerStep#10",
            ],
            "start": [90, 95, 100, 101, 111],
            "end": [100, 96, 101, 111, None],  # its process was killed in step 10
        }
    )
    counters = [0] * 24
    counters[14] = 55
    # Of what the ring lost the last was at 20 by the monotonic clock, 100 since the epoch; a window opened at 5.
    header = {"overwritten_ns": 20, "first_ns": 5, "wall_ns": 1080, "mono_ns": 1000, "counters": counters}
    records: Any = SimpleNamespace(header=header)
    named, ring = notes.summarize_ring_buffer(operators, records)
    assert named["name"].cast(pl.String).to_list() == [
        "etloom:overwritten step 7", "aten::add", "etloom:overwritten step 8", "ProfilerStep#9", "ProfilerStep#10",
    ]  # fmt: skip
    assert ring == {
        "overwritten_operators": 55, "overwritten_ns": 15, "whole_since_ns": 100, "whole_steps": [9],
    }  # fmt: skip
    header["overwritten_ns"] = 0
    assert notes.summarize_ring_buffer(operators, records) == (operators, None)


def test_record_names_the_nearest_option(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match=r"etloom\.record has no option 'shape'; did you mean 'shapes'"):
        record(tmp_path, shape=False)  # type: ignore[call-arg]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sources": ("et", "kineto")}, "expected str or None, got tuple"),
        ({"steps": 5}, "expected str or None, got int 5"),
        ({"ring": 1}, "expected bool, got int 1"),
        ({"max_bytes": "1 GB"}, "expected int or None, got str '1 GB'"),
    ],
)
def test_an_option_of_another_type_is_one_line(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(CollectError, match=re.escape(text)):
        record(tmp_path / "run", **options)


def test_keywords_of_record_are_options_of_collect() -> None:
    types = get_type_hints(CollectOptions)
    assert {name: types.get(name) for name in RecordKeywords.__annotations__} == get_type_hints(
        RecordKeywords
    )
