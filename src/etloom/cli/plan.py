"""etloom plan: ranks the layouts of a training job on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from etloom.cli.command import Flag, Positional, command
from etloom.cli.error_handling import as_usage_error, print_message
from etloom.cli.output import Format, choose_format, write_table
from etloom.core.text import count_noun

if TYPE_CHECKING:
    from etloom.simulator.planning import Plan

_MAX_ROWS = 10
_USUAL = {"ep": 1, "interval": "not calibrated"}
"""Column -> its value in all rows, with which the text leaves the column out."""


def _list_names() -> dict[str, str]:
    from etloom.simulator.training_jobs import list_clusters, list_jobs

    return {"jobs": ", ".join(list_jobs()), "clusters": ", ".join(list_clusters())}


@command(help_values=_list_names)
def plan(
    *,
    job: Annotated[
        str, "The job: a YAML file, an example, or a recording (also --fake-world).", Positional("JOB")
    ],
    cluster: Annotated[
        str, "The cluster: a YAML file, or nodes by name.", Flag(metavar="CLUSTER")
    ] = "dgx-h100",
    gpus: Annotated[int | None, "The number of GPUs; default: that of the cluster."] = None,
    parallel: Annotated[
        str | None,
        "Fixed sizes of axes: tp=8,pp=16 (or cp, dp, ep); vp: model chunks per stage; mb: micro-batches.",
        Flag(metavar="AXES"),
    ] = None,
    set: Annotated[
        str | None, "Replace values of the job: batch=512,optimizer=sgd.", Flag(metavar="VALUES")
    ] = None,
    describe: Annotated[bool, "Write how each value of a recorded job is known, instead of layouts."] = False,
    top: Annotated[
        int | None,
        f"Number of rows shown; default: {_MAX_ROWS} with --format table, else all. 0: all.",
        Flag(type=click.IntRange(min=0)),
    ] = None,
    format: Annotated[Format | None, "Format of the table on stdout.", Flag("-f")] = None,
    out: Annotated[Path | None, "Write the table to this file instead of stdout.", Flag("-o")] = None,
) -> None:
    """Rank the layouts of a training job on a cluster: step time, memory, and what limits each.

    Each row is a mesh (tp, cp, pp, dp, ep) with the fastest model chunks, micro-batch, recomputation and sharding
    (zero3 is FSDP) that fit into the memory. The truth lies between the bounds in 9 of 10 cases where the row says
    "calibrated"; elsewhere the bounds are assumptions. docs/plan.md describes the YAML.

    Examples of jobs: {jobs}.

    Clusters by name: {clusters}.

    Examples:

    \b
      etloom plan llama3-405b --gpus 16384 --parallel tp=8,pp=16
      etloom plan job.yaml --cluster cluster.yaml --top 0 --format json
      etloom plan run/ --describe                             # the transformer of a recording
      etloom plan run/ --gpus 256 --set batch=1024
    """
    import etloom
    from etloom.simulator.resizing import parse_parallel
    from etloom.simulator.training_jobs import parse_changes

    with as_usage_error("parallel"):
        sizes = None if parallel is None else parse_parallel(parallel)
    with as_usage_error("set"):
        changes = parse_changes(set) if set else None
    if describe:
        _print_job(job, changes, format, out)
    else:
        ranking = etloom.plan(job, cluster, gpus=gpus, parallel=sizes, changes=changes)
        _print_ranking(ranking, top, format, out)


def _print_job(job: str, changes: dict[str, Any] | None, format: Format | None, out: Path | None) -> None:
    """Print how each value of a recorded job is known."""
    from etloom.api.questions import describe_job
    from etloom.simulator.training_jobs import tabulate_values

    values = tabulate_values(describe_job(job, changes)[1])
    if values.is_empty():
        raise click.BadParameter("expected a recording; YAML states the values", param_hint="--describe")
    write_table(values, format, out)


def _print_ranking(ranking: Plan, top: int | None, format: Format | None, out: Path | None) -> None:
    """Print the description, the first ``top`` rows, and the remaining messages."""
    table = ranking.table
    is_text = choose_format(format, out) is Format.table
    if is_text:
        usual = [name for name, value in _USUAL.items() if (table[name] == value).all()]
        table = table.drop([f"{kind}_bytes" for kind in ranking.memory], *usual)
    if top is None:
        top = _MAX_ROWS if is_text else 0
    for line in ranking.description:
        print_message(line)
    write_table(table.head(top) if top else table, format, out)
    if 0 < top < table.height:
        print_message(f"{count_noun(table.height - top, 'more mesh', 'more meshes')}; --top 0 shows all")
    for line in ranking.reasons[len(ranking.description) :]:
        print_message(line)
