"""A wrong value of any option of any verb is wrong usage, in one line: the flag, what is allowed, where to read on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
from click.testing import CliRunner

from etloom import cli
from etloom.cli.command import command
from etloom.cli.error_handling import as_usage_error
from etloom.core.errors import EtloomError, UnknownName
from etloom.simulator.network.topology import PRESETS

Outcome = tuple[int, str, str]

GRAMMAR = {
    "set": ("nonsense", "expected KEY=VALUE"),
    "webhook": ("nonsense", "expected a URL of http or https"),
    "at": ("nonsense", "expected peak, reserved-peak, end, oom"),
    "backend": ("nonsense", "expected one of "),
    "bandwidth": ("fast", "such as 2x"),
    "by": ("nonsense", "expected one of "),
    "cluster": ("nonsense", "unknown cluster 'nonsense'; expected one of "),
    "device": ("nonsense", "unknown device"),
    "iterations": ("some", "best, all or a number"),
    "latency": ("fast", "such as 20us"),
    "max_regression": ("much", "write it as 3%"),
    "memory": ("nonsense", "expected a setting as name:value"),
    "metric": ("speed", "expected one of step-time"),
    "on_demand": ("nonsense", "a number of steps, as in --on-demand 2"),
    "only": ("allreduce", "expected one of all_gather, all_reduce"),
    "option": ("nonsense", "NAME=VALUE"),
    "overlay": ("nonsense", "expected one of critical-path"),
    "pattern": ("nonsense", "unknown pattern 'nonsense'; expected one of "),
    "rack_pattern": ("(", "is not a regular expression"),
    "rank_pattern": ("(", "for example 'host-(\\d+)'"),
    "network": ("nonsense", "unknown network"),
    "parallel": ("nonsense", "such as tp=4"),
    "recorded_network": ("nonsense", "unknown network"),
    "observer": ("nonsense", "native, stock"),
    "ranks": ("abc", "0,8-15"),
    "set_": ("nonsense", "one of kernel, copy"),
    "step_by": ("nonsense", "expected optimizer, profiler or a duration"),
    "step_name": ("(", "invalid regular expression"),
    "steps": ("zz", "FIRST:LAST"),
    "straggler": ("nonsense", "expected the word none, got"),
    "time": ("nonsense", "write START:END"),
    "to": ("nonsense", "expected one of "),
    "sources": ("nonsense", "kineto, et"),
    "where": ("nonsense", "expected one of host, device"),
}
"""Options whose text has a grammar or is a choice: what is wrong, and words of the answer."""
FREE = {
    *(
        "annotation",
        "category",
        "counter",
        "name",
        "operator",
        "remove_sync",
    ),  # what is in the run is asked of it
    *("allow_namespace", "subgraph", "time_column"),
    *("device_peaks", "ncu"),  # files
    "master_addr",
}
"""Options for which any text is meant."""
AFTER = {
    "check": ["RUN", "--baseline", "RUN"],
    "collect": ["--out", "RUN", "--", "true"],
    "convert": ["RUN", "x.parquet"],
    "diff": ["RUN", "RUN"],
    "export": ["RUN", "--out", "x.json"],
    "link": ["RUN", "--out", "x.parquet"],
    "plan": ["llama3-8b"],
    "query": ["RUN", "select * from stats"],
    "repro": ["RUN", "--out", "x", "--event", "0"],
    "simulate": ["RUN", "--set", "comm x0"],
    "replay comms": ["RUN", "--dry-run"],
    "store add": ["RUN", "--to", "store"],
}


def options(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """(verb, option) of each option that takes a value."""
    for name in command.list_commands(None) if hasattr(command, "list_commands") else ():
        yield from options(command.get_command(None, name), (*path, name))
    for one in command.params:
        if path and one.param_type_name == "option" and not one.is_flag and one.name != "help":
            yield " ".join(path), one


def wrong(option: Any) -> Iterator[tuple[str, str]]:
    """(a wrong value of the option, words of the answer)."""
    kind = type(option.type).__name__.lower().removeprefix("finite")
    if hasattr(option.type, "choices"):
        names = [getattr(choice, "name", choice) for choice in option.type.choices]
        yield "nonsense", "is not one of " + ", ".join(map(repr, names))
    elif kind.startswith(("int", "float", "mebibytes")):
        yield "nonsense", "expected a size in MiB" if kind == "mebibytes" else "'nonsense' is not a valid "
        if (least := getattr(option.type, "min", None)) is not None:
            yield (
                str(least - 1),
                f"x>{'=' * (not option.type.min_open)}{least}"
                if option.type.max is None
                else f"{least}<{'=' * (not option.type.min_open)}x<={option.type.max}",
            )
        if kind.startswith("float"):
            yield "nan", "expected a finite number, got nan"
            yield (
                "inf",
                "expected a finite number"
                if getattr(option.type, "max", None) is None
                else "is not in the range",
            )
    elif kind.startswith(("str", "stepcount")):
        assert option.name in GRAMMAR or option.name in FREE, f"say what {option.opts} takes"
        if option.name in GRAMMAR:
            yield GRAMMAR[option.name]
    else:
        assert "path" in kind, kind


def verbs() -> list[str]:
    return sorted({verb for verb, _ in options(cli.app)})


@pytest.mark.parametrize("verb", verbs())
@pytest.mark.slow
def test_the_error_of_a_wrong_value_names_its_flag(
    verb: str, own: Path, call: Callable[..., Outcome]
) -> None:
    after = [str(own / "ddp_2") if one == "RUN" else one for one in AFTER.get(verb, ["RUN"])]
    for its, option in options(cli.app):
        flag = max(option.opts, key=len)
        for value, words in wrong(option) if its == verb else ():
            rest = after[:-2] if after[-2:-1] == [flag] else after  # else its right value would be the last
            status, out, err = call(*verb.split(), flag, value, *rest)
            assert (status, out, err.count("\n")) == (2, "", 1), (flag, value, err)
            assert err.startswith(f"etloom: {flag}: "), err
            assert words in err and err.endswith(f"; see etloom {verb} --help\n"), err


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["analyze", "top-ops", "RUN", "--top", 0], "--top"),
        (["analyze", "call-stacks", "RUN", "--min-pct", 200], "--min-pct"),
        (["analyze", "queue-summary", "RUN", "--limit", 0], "--limit"),
        (["export", "RUN", "-o", "x.folded", "-O", "time=never"], "--option"),
        (["export", "RUN", "-o", "x.folded", "-O", "nothing=1"], "--option"),
        (["export", "RUN", "-o", "x.nothing"], "--out"),
        (["simulate", "RUN", "--set", "comm x0", "-o", "x.nothing"], "--out"),
        (["predict", "RUN", "-o", "x.nothing"], "--out"),
        (["predict", "RUN", "--recorded-network", "nothing"], "--recorded-network"),
        (["replay", "full", "RUN", "-o", "x.nothing"], "--out"),
        (["collect", "--out", "RUN", "--max-size", 0, "--", "true"], "--max-size"),
        (["collect", "--out", "RUN", "--for", 0, "--every", 5, "--", "true"], "--for"),
        (["info", "RUN", "-o", "x.nothing"], "--out"),
        (["convert", "RUN", "x", "--to", "nothing"], "--to"),
        (["replay", "comms", "RUN", "--dry-run", "--master-port", "70000"], "--master-port"),
        (["replay", "comms", "RUN", "-o", "x.nothing"], "--out"),
    ],
)
def test_the_error_of_an_unfitting_value_names_its_flag(
    arguments: list[Any], flag: str, own: Path, call: Callable[..., Outcome]
) -> None:
    status, out, err = call(*(own / "ddp_2" if one == "RUN" else one for one in arguments))
    assert (status, out, err.count("\n")) == (2, "", 1), err
    assert err.startswith(f"etloom: {flag}: ") and err.endswith(" --help\n"), err


@pytest.mark.parametrize(
    "verb", [["predict"], ["simulate", "--set", "comm x0"], ["replay", "full"], ["replay", "comms"]]
)
def test_an_output_that_cannot_be_written_is_reported_before_the_work(
    verb: list[str], own: Path, tmp_path: Path, call: Callable[..., Outcome]
) -> None:
    (tmp_path / "file").touch()
    status, out, err = call(*verb, own / "ddp_2", "--out", tmp_path / "file" / "run.parquet")
    assert (status, out, err.count("\n")) == (1, "", 1), err
    assert "cannot be written" in err and err.endswith("choose another path with --out\n"), err


def test_the_help_of_predict_lists_the_presets(call: Callable[..., Outcome]) -> None:
    words = call("predict", "--help")[1].replace(",", " ").replace(".", " ").split()
    assert set(PRESETS) <= set(words)


def verb(raised: EtloomError, **renamed: str) -> click.Command:
    """A command with the option --max-size, which raises."""

    @command(click.Option(["--max-size"], type=int, default=1), renamed=renamed)
    def record(max_size: int) -> None:
        raise raised

    return record


def outcome(app: click.Command, capsys: pytest.CaptureFixture[str]) -> tuple[int | str | None, str]:
    with pytest.raises(SystemExit) as left:
        app(args=[], prog_name="tool", standalone_mode=False)
    return left.value.code, capsys.readouterr().err


def test_other_spellings_of_an_option_become_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    error = EtloomError("3 bytes are too few", remedy="allow 1 MiB", option="max_bytes")
    assert str(error) == "max_bytes: 3 bytes are too few; allow 1 MiB"
    assert outcome(verb(error, max_bytes="max_size"), capsys) == (
        2, "etloom: --max-size: 3 bytes are too few; allow 1 MiB; see tool --help\n",
    )  # fmt: skip
    # Of a parameter that the command does not have, the name that it has in Python.
    assert outcome(verb(error), capsys)[1].startswith("etloom: max_bytes: 3 bytes are too few; ")
    nowhere = EtloomError("is no run", where="here")
    assert outcome(verb(nowhere), capsys) == (1, "etloom: here: is no run\n")


def test_the_error_lists_all_choices_of_an_option_in_order() -> None:
    assert str(UnknownName("order", "totl", ["own", "total"], option="by")) == (
        "by: unknown order 'totl'; did you mean 'total'? (expected one of own, total)"
    )


def test_usage_blames_an_option_that_the_error_does_not_name() -> None:
    for named, blamed in ((None, "to"), ("out", "out")):
        with pytest.raises(EtloomError) as raised, as_usage_error("to"):
            raise EtloomError("no", option=named)
        assert raised.value.option == blamed


def test_a_path_in_place_of_an_analysis_is_explained(own: Path, call: Callable[..., Outcome]) -> None:
    status, _, err = call("analyze", str(own / "ddp_2"), "top-ops")
    assert status == 2
    assert "is a path; the name of the analysis comes before it" in err


def test_a_repeatable_option_has_its_default() -> None:
    def verb(
        *,
        words: Annotated[tuple[str, ...], "Words."] = ("a", "b"),
        none: Annotated[tuple[str, ...], "None."] = (),
    ) -> None:
        click.echo(f"{words} {none}")

    run = CliRunner()
    assert run.invoke(command()(verb), []).output == "('a', 'b') ()\n"
    assert run.invoke(command()(verb), ["--words", "c", "--none", "d"]).output == "('c',) ('d',)\n"
