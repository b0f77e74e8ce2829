"""Every flag of PARAM's communication replay: what it becomes here, and that the page lists it as it is."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest

from etloom.compat import comms_replay
from etloom.replayer.plan import Plan
from support.paths import ROOT

PAGE = ROOT / "docs" / "coming-from-param.md"
ACTIONS = [one for one in comms_replay.make_parser()._actions if one.dest != "help"]
FLAGS = {flag: action for action in ACTIONS for flag in action.option_strings}
PRESENT = """
    --master-ip --master-port --nw-stack --dtype --num-tpu-cores --log --log-level --device --init-device --backend
    -b --blocking --bitwidth --quant-a2a-embedding-dim --quant-threshold --c --use-ext-dist --use-ext-pg --init-method
    --pg-init-method --enable-local-report --enable-profiler --use-perf-logger --use-custom-perf-logger --init-only
    --trace-path --trace-type --use-one-trace --disable-parallel-read --dry-run --auto-shrink --max-msg-cnt
    --warmup-iter --reuse-tensors --allow-ops --allow-list --output-path --output-ranks --colls-per-batch
    --use-timestamp --rebalance-policy --num-replays --profiler-num-replays-start --profiler-num-replays
    --data-accuracy-mode --data-accuracy-savemodepath --data-accuracy-checkmodepath --data-accuracy-uploadpath
    --data-accuracy-rtol --data-accuracy-atol --data-accuracy-dtype --data-accuracy-numelems
"""
BEFORE = "--z --do-warm-up --use-nvshmem --ibv-devices --eager-init --enable-torch-nccl-timing"


def test_all_flags_of_both_tools_are_taken_and_no_other() -> None:
    assert set(FLAGS) == {*PRESENT.split(), *BEFORE.split()}


def asked(monkeypatch: pytest.MonkeyPatch, *given: str, world: int = 1) -> tuple[Any, Plan, Any]:
    """What the flags become: the options of the replay, its plan, and where processes meet."""
    from etloom.replayer.comms import session

    found: list[Any] = []

    def run_session(make: Any, options: Any, process: Any, rendezvous: Any, callbacks: Any) -> None:
        found.extend((options, make(world), rendezvous))

    monkeypatch.setattr(session, "run_session", run_session)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert comms_replay.main(given) == 0
    return found[0], found[1], found[2]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("flags", "becomes"),
    [
        ("--num-replays 7", {"repeats": 7}),
        ("--warmup-iter 0", {"warmup": 0}),
        ("--do-warm-up", {"warmup": 1}),
        ("--blocking", {"blocking": True}),
        ("-b", {"blocking": True}),
        ("--blocking 0", {"blocking": False}),
        ("--z 1", {"blocking": True}),
        ("--use-timestamp", {"timing": "recorded"}),
        ("--c 1", {"verify": True}),
        ("--data-accuracy-mode check", {"verify": True}),
        ("--data-accuracy-mode save", {"verify": False}),
        ("--backend gloo", {"backend": "gloo", "device": "cpu"}),
        ("--backend nccl", {"backend": "nccl", "device": "cuda"}),
        ("--device cpu", {"backend": "gloo", "device": "cpu"}),
        ("--device rocm", {"backend": "nccl", "device": "cuda"}),
        ("--backend gloo --device cuda", {"backend": "gloo", "device": "cuda"}),
    ],
)
@pytest.mark.slow
def test_flags_of_the_run(
    data: Path, monkeypatch: pytest.MonkeyPatch, flags: str, becomes: dict[str, Any]
) -> None:
    import torch

    gpu = torch.cuda.is_available()
    defaults = {
        "backend": "nccl" if gpu else "gloo", "device": "cuda" if gpu else "cpu", "timing": "fast", "blocking": False,
        "repeats": 5, "warmup": 2, "verify": False,
    }  # fmt: skip
    options, _, rest = asked(monkeypatch, "--trace-path", str(data / "dlrm"), *flags.split(), world=4)
    assert {name: getattr(options, name) for name in defaults} == {**defaults, **becomes}
    assert (rest.address, rest.port) == (None, None)


@pytest.mark.slow
@pytest.mark.torch
def test_the_rendezvous_of_processes(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("--trace-path", str(data / "dlrm"), "--master-ip", "10.0.0.1", "--master-port", "29500")
    _, _, rest = asked(monkeypatch, *given, world=4)
    assert (rest.address, rest.port) == ("10.0.0.1", 29_500)


def kinds(plan: Plan) -> list[str]:
    return [call.collective for call in plan.calls[0]]


@pytest.mark.slow
@pytest.mark.torch
def test_flags_of_the_plan(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = str(data / "dlrm")

    def planned(*flags: str, path: str = run, world: int = 4) -> Plan:
        return asked(monkeypatch, "--trace-path", path, *flags, world=world)[1]

    assert len(kinds(planned())) == 8
    assert kinds(planned("--max-msg-cnt", "2")) == ["all_to_all"] * 2
    assert kinds(planned("--allow-ops", "all_to_allv,wait")) == ["all_to_all"] * 5
    assert kinds(planned("--allow-list", "allreduce_coalesced")) == ["all_reduce"] * 3
    assert planned("--auto-shrink", world=2).world_size == 2
    assert planned("--trace-type", "kineto").world_size == 4
    assert planned("--use-one-trace", world=3).calls[2][0].group == (0, 1, 2)
    assert planned(path=f"{data}/none,{run}").world_size == 4
    uneven = planned("--allow-ops", "all_to_all").calls
    equal = planned("--allow-ops", "all_to_all", "--rebalance-policy", "equal").calls
    shares = sum(sum(own[1].inputs) for own in uneven) / 16
    assert [own[1].inputs for own in equal] == [(round(shares) * 4,)] * 4
    assert all(not own[1].in_split for own in equal)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--allow-ops wait", "'wait' selects nothing to replay"),
        ("--allow-ops all_redcue", "'all_redcue' is not a collective"),
        ("--output-ranks 1:x", "expected a list of ranks"),
        ("--num-replays 0", "expected an integer of at least 1"),
        ("--warmup-iter -1", "argument --warmup-iter"),
        ("--blocking 2", "invalid choice: 2"),
        ("--trace-type nsys", "invalid choice: 'nsys'"),
        ("--device tpu", "invalid choice: 'tpu'"),
        ("--backend nonsense", "unknown backend 'nonsense'; expected one of gloo, nccl"),
        ("--rebalance-policy fair", "invalid choice: 'fair'"),
        ("--num-replay 3", "unrecognized arguments: --num-replay 3"),
    ],
)
def test_a_misspelled_flag_is_one_line(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        comms_replay.main(flags.split())
    err = capsys.readouterr().err
    assert (end.value.code, said in err, err.count("\n")) == (2, True, 1), err


def test_contradictory_flags(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for flags, said in (
        ("--trace-path http://host/run", "traces are read from files; download them and pass their path"),
        ("--output-ranks 0", "add --output-path FOLDER"),
        ("--output-path out --output-ranks 1:2", "unknown rank 2 of 2"),
        ("--trace-path nowhere --dry-run", "nowhere"),
    ):
        assert comms_replay.main(flags.split()) == 1
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, err


@pytest.mark.parametrize("flags", comms_replay.WITHOUT_EFFECT, ids=lambda flags: flags[0])
def test_a_flag_without_effect_is_reported(flags: tuple[str, ...]) -> None:
    parser = comms_replay.make_parser()
    assert comms_replay.describe_ignored_flags(parser.parse_args([])) == []
    for flag in flags:
        value = ["1"] if flags in comms_replay.IGNORED_FLAGS else []
        (line,) = comms_replay.describe_ignored_flags(parser.parse_args([flag, *value]))
        assert line == f"{flags[0]} has no effect: {comms_replay.WITHOUT_EFFECT[flags]}"


def rows() -> dict[tuple[str, ...], list[str]]:
    """The page's table of flags: flags -> the other cells."""
    found = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        flags = tuple(re.findall(r"`(--?[a-z0-9-]+)`", cells[0]))
        if flags and cells[0] == ", ".join(f"`{flag}`" for flag in flags) and len(cells) == 3:
            found[flags] = cells[1:]
    return found


def shown(action: argparse.Action) -> str:
    """The default as the page shows it; a switch is off, and -1 and nothing stand for none."""
    return "–" if action.default in (None, "", -1) or action.default is False else f"`{action.default}`"


def test_the_page_lists_every_flag_as_it_is() -> None:
    page = rows()
    assert {frozenset(flags) for flags in page} == {frozenset(action.option_strings) for action in ACTIONS}
    for flags, (default, meaning) in page.items():
        assert default == shown(FLAGS[flags[0]]), flags
        idle = comms_replay.WITHOUT_EFFECT.get(flags)
        assert (meaning == f"no effect: {idle}") == (idle is not None), flags
