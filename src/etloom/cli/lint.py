"""etloom lint: checks Chakra files for problems before a simulator uses them, and Kineto files before analyses do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from etloom.cli.command import Flag, Positional, command
from etloom.cli.error_handling import make_printable
from etloom.core.text import count_noun

if TYPE_CHECKING:
    from etloom.api.files import LintResult


@command()
def lint(
    *,
    paths: Annotated[
        tuple[Path, ...],
        "Files NAME.RANK.et of a job, or files of Kineto; or a folder with them.",
        Positional("PATH..."),
    ],
    groups: Annotated[
        Path | None,
        "Ranks of the process groups, as ASTRA-sim's --comm-group-configuration; default: NAME.comm_groups.json.",
        Flag(metavar="FILE"),
    ] = None,
    format: Annotated[Literal["text", "json"], "Output format.", Flag("-f")] = "text",
) -> None:
    """Check Chakra traces for problems that keep a simulator such as ASTRA-sim from running them or make results wrong.

    Of Chakra: finds dependencies on missing nodes or in cycles, duplicate ids, missing attributes, groups and messages
    on which ranks disagree; explains each and how to fix it. Runs all ranks together by ASTRA-sim's rules, predicts if
    it finishes, hangs or aborts, and prints the time of its replay next to the recorded one, and that on a network
    without delay. Of Kineto: the rules of PyTorch's own validator. The exit status is 1 if there are errors.

    Examples:

    \b
      etloom export run/ --out sim/job.et && etloom lint sim/
      etloom lint job.0.et --format json
      etloom lint trace.pt.trace.json.gz
    """
    import etloom
    from etloom.cli.output import write_text

    result = etloom.lint(*paths, groups=groups)
    rows = result.table.to_dicts()
    if format == "json":
        write_text(_format_json(result, rows), None)
    else:
        count = len(result.files)
        texts = [_format_problem(row, result) for row in rows] or [
            f"no problems in {count_noun(count, 'file')}"
        ]
        texts += [_format_verdict(result)] if result.verdict else []
        write_text(
            "\n".join(make_printable(line) for text in texts for line in text.split("\n")) + "\n", None
        )
    if result.has_errors:
        raise click.exceptions.Exit(1)


def _format_json(result: LintResult, rows: list[dict[str, Any]]) -> str:
    content: dict[str, Any] = {
        "ranks": list(result.files),
        "verdict": result.verdict,
        "replay_verdict": result.replay_verdict,
        "replay_ns": result.simulated_ns if result.replay_verdict == "finish" else None,
        "recorded_ns": result.recorded_ns,
        "ideal_ns": result.ideal_ns if result.verdict == "finish" else None,
    }
    findings = ",\n  ".join(map(json.dumps, rows))
    return json.dumps(content)[:-1] + f',\n "findings": [{findings}]}}\n'


def _format_verdict(result: LintResult) -> str:
    ranks = f"all {len(result.files)} ranks" if len(result.files) > 1 else "the rank"
    recorded = "" if result.recorded_ns is None else f", recorded {result.recorded_ns / 1e6:,.3f} ms"
    time = f"takes {(result.simulated_ns or 0) / 1e6:,.3f} ms{recorded}"
    if result.verdict == "finish":
        ideal = f"on a network without delay {(result.ideal_ns or 0) / 1e6:,.3f} ms"
        return f"ASTRA-sim finishes on {ranks}; its replay {time}; {ideal}"
    stops = {"hang": "hangs", "abort": "aborts", "finish": time}
    verdict, replay = result.verdict or "", result.replay_verdict or ""
    return (
        f"ASTRA-sim {stops[verdict]} when it simulates the network; "
        f"replay-only, without a network, it {stops[replay]}"
    )


def _format_problem(row: dict[str, Any], result: LintResult) -> str:
    rank = row["rank"]
    file = "" if result.verdict else f" ({result.files[rank].name})"
    node = "" if row["node"] is None else f"node {row['node']}, "
    times = "" if row["count"] == 1 else f", {row['count']:,} times"
    example = " ".join(row["example"].split())
    return (
        f"{row['severity']}: rank {rank}{file}: {row['code']}{times} ({node}{example})\n"
        f"    {row['meaning']}: {row['remedy']}"
    )
