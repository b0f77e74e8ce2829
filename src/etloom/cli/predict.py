"""etloom predict: predicts the step time of a run on another network, number of ranks, or device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from etloom.cli.command import Flag, command
from etloom.cli.error_handling import as_usage_error, print_message
from etloom.cli.output import Format, choose_format, write_table
from etloom.cli.output_files import check_export, write_run
from etloom.cli.run_arguments import RunOptions, RunPath, open_job
from etloom.core.text import count_noun

if TYPE_CHECKING:
    from etloom.simulator.pipelines.relay import RelaidPipeline
    from etloom.simulator.prediction import Prediction
    from etloom.simulator.untimed import UntimedPrediction

_MAX_ROWS = 20


@dataclass(frozen=True)
class TargetOptions:
    """The network, size and device of the prediction, as the user wrote them."""

    network: Annotated[
        str | None,
        "The network: a factor of the recorded bandwidth (x0.2), a rate (200Mbit/s), a preset, a YAML file.",
    ] = None
    recorded_network: Annotated[
        str | None,
        "The nominal rate of the recorded network (1Gbit/s). Transfers are then assumed to reach the same "
        "share of the nominal rate of --network.",
    ] = None
    ranks: Annotated[int | None, "The number of ranks.", Flag(type=click.IntRange(1, 100_000))] = None
    parallel: Annotated[
        str | None,
        "Sizes of the process mesh: tp=4,pp=8,dp=16 (or cp, ep); vp: model chunks per stage; mb: "
        "micro-batches.",
        Flag(metavar="AXES"),
    ] = None
    device: Annotated[str | None, "The GPU: h100, b200, ..., as in docs/flops.md.", Flag(metavar="NAME")] = (
        None
    )
    host: Annotated[
        float | None,
        "Factor of the times of work on the host (0.5: a host twice as fast).",
        Flag(metavar="FACTOR"),
    ] = None
    learn_from: Annotated[
        Path | None,
        "A store or a run whose calls show the times of products and attention (of a --fake-world).",
        Flag(metavar="PATH"),
    ] = None


def _list_presets() -> dict[str, str]:
    from etloom.simulator.network.topology import PRESETS

    return {"presets": ", ".join(PRESETS)}


@command(help_values=_list_presets)
def predict(
    *,
    path: RunPath,
    target: TargetOptions,
    top: Annotated[
        int | None,
        "Number of rows shown; default: 20 with --format table, else all. 0: all.",
        Flag(type=click.IntRange(min=0)),
    ] = None,
    out: Annotated[
        Path | None, "Write the predicted run: .parquet, .pftrace, .json.gz, .et.", Flag("-o")
    ] = None,
    format: Annotated[Format | None, "Format of the table on stdout.", Flag("-f")] = None,
    run: RunOptions,
) -> None:
    """Predict the step time of a recorded run on another network, another number of ranks, or another device.

    Latency and bandwidth are fitted to the recording; transfers that overlap share their links. The first line is the
    error with which the models reproduce the recording. The truth lies between the bounds in 9 of 10 cases. Without
    options the recording itself is predicted, which shows how accurate the models are.

    The row "step time" is the median time from the begin of a step to the begin of the next one; the row of a step ends
    when its last work on the device does.

    Presets of networks: {presets}. docs/predict.md describes the YAML.

    Examples:

    \b
      etloom predict run/
      etloom predict run/ --network x0.2
      etloom predict run/ --network 200Mbit/s --recorded-network 1Gbit/s
      etloom predict run/ --ranks 64
      etloom predict run/ --ranks 64 --network cluster.yaml
      etloom predict run/ --parallel dp=16 --out predicted.parquet
      etloom predict run/ --parallel dp=16,ep=8             # experts on 8 of 16 replicas
      etloom predict run/ --parallel pp=8,mb=32             # stages and micro-batches
      etloom predict run/ --device b200
      etloom predict fake/ --device a100 --network dgx-a100
    """
    import etloom
    from etloom.simulator.untimed import UntimedPrediction

    changes = _parse_target(target)
    if out is not None:
        check_export(out)
    prediction = etloom.predict(open_job(path, run), **changes)
    _print_prediction(prediction, top, format)
    if out is not None:
        if isinstance(prediction, UntimedPrediction):
            raise click.BadParameter("a run without times has no predicted run to write", param_hint="--out")
        write_run(prediction.job, out)


def _print_prediction(
    prediction: Prediction | RelaidPipeline | UntimedPrediction, top: int | None, format: Format | None
) -> None:
    """Print the prediction's first message, the first ``top`` rows of its table, and its remaining messages."""
    for line in prediction.reasons[:1]:
        print_message(line)
    table = prediction.table
    if top is None:
        top = _MAX_ROWS if choose_format(format, None) is Format.table else 0
    write_table(table.head(top) if top else table, format, None)
    if 0 < top < table.height:
        print_message(f"{count_noun(table.height - top, 'more row')}; --top 0 shows all")
    for line in prediction.reasons[1:]:
        print_message(line)


def _parse_target(target: TargetOptions) -> dict[str, Any]:
    """Check the options of `etloom predict` and return those that the user set, as arguments of `etloom.predict`."""
    from etloom.analyses.flops.peaks import lookup_peaks
    from etloom.simulator.network import parse_target
    from etloom.simulator.resizing import parse_parallel

    changes: dict[str, Any] = {
        "network": target.network,
        "recorded_network": target.recorded_network,
        "ranks": target.ranks,
        "device": target.device,
        "host": target.host,
        "learn_from": target.learn_from,
    }
    for option, network in (("network", target.network), ("recorded_network", target.recorded_network)):
        if network is not None:
            with as_usage_error(option):
                parse_target(network)
    if target.device is not None:
        with as_usage_error("device"):
            lookup_peaks(target.device)
    with as_usage_error("parallel"):
        changes["parallel"] = None if target.parallel is None else parse_parallel(target.parallel)
    return {name: value for name, value in changes.items() if value is not None}
