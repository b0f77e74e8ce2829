"""etloom watch: shows the progress of a running job, and the cause when it stalls, crashes or is slow."""

from __future__ import annotations

import json
import shlex
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from etloom.cli.command import LOCAL_PATH_TYPE, FiniteFloat, Flag, Positional, command
from etloom.cli.error_handling import make_printable, print_message

if TYPE_CHECKING:
    from etloom.analyses.hangs.progress import Observation
    from etloom.api.watching import JobWatcher

TROUBLE_STATUS = 3
_POLL_S = 0.5
_REPORT_S = 10.0
_WEBHOOK_TIMEOUT_S = 5


@command()
def watch(
    *,
    run: Annotated[Path, "The folder of etloom collect --watch.", Positional("RUN", type=LOCAL_PATH_TYPE)],
    stall: Annotated[
        float | None,
        "Time without progress that is a stall; default: three steps, at least 2 s (60 s before the "
        "first steps, outside of communication or in a data loader; 300 s in a checkpoint).",
        Flag(type=FiniteFloat(min=0.5), metavar="SECONDS"),
    ] = None,
    webhook: Annotated[
        str | None, "Send the cause to this URL, as JSON by HTTP POST.", Flag(metavar="URL")
    ] = None,
    record: Annotated[
        bool,
        "Request a window of all ranks when a rank is slow or steps become slower (of a job with --on-demand).",
    ] = False,
) -> None:
    """Watch a job that runs under etloom collect --watch: show step time, late ranks, and causes of stalls and crashes.

    When the job stalls or crashes, the cause is printed, the state of all ranks is kept in RUN/incidents, and the
    command ends. A slow rank and a change of the step time are reported once, and the job is watched further. A
    pause of one rank in other code while the others wait for it, as for validation, is a stall, too: choose a longer
    --stall for such a job.

    Examples:

    \b
      etloom collect --watch --out run/ -- torchrun --nproc-per-node 8 train.py &
      etloom watch run/ --webhook http://127.0.0.1:9000/alerts
      etloom watch run/ --stall 1800 || scancel "$JOB"

    Exit status: 0 if the job ended; 1 if it ended and was recorded without --watch; 3 if it stalled or crashed.
    """
    if webhook is not None and not webhook.startswith(("http://", "https://")):
        raise click.BadParameter(f"expected a URL of http or https, got {webhook!r}", param_hint="--webhook")
    from etloom.api.watching import JobWatcher

    watcher = JobWatcher(run, stall)
    if watcher.observe() is None:
        watcher.check_is_watched()
        print_message(
            f"{run}: no rank has written its state yet; waiting for a job that is started with: "
            f"etloom collect --watch --out {shlex.quote(str(run))} -- COMMAND"
        )
    if not follow_job(watcher, click.echo, recorded_run=run if record else None, webhook=webhook):
        raise click.exceptions.Exit(TROUBLE_STATUS)


def follow_job(
    watcher: JobWatcher,
    write: Callable[[str], None],
    *,
    recorded_run: Path | None = None,
    webhook: str | None = None,
    has_ended: threading.Event | None = None,
) -> bool:
    """Write the progress of a job, slow ranks and the cause of a stall or crash, until one of these ends it.

    Args:
        watcher: of the job.
        write: called with each line.
        recorded_run: the folder of a job with --on-demand, which shall record when it becomes slow.
        webhook: a URL to which causes are sent.
        has_ended: set when the job has ended.

    Returns:
        False if the job stalled or crashed.
    """
    has_ended = has_ended or threading.Event()
    reported: set[str] = set()
    next_report = time.monotonic()
    while not has_ended.is_set():
        observation = watcher.observe()
        if observation is None:
            watcher.check_is_watched()
        else:
            if time.monotonic() >= next_report or observation.has_ended:
                write(format_progress(observation))
                next_report = time.monotonic() + _REPORT_S
            if observation.has_ended:
                return True
            _report_slowdown(observation, reported, write, recorded_run, webhook)
            if observation.has_stalled and observation.cause is not None:
                write(make_printable(observation.cause.sentence))
                for rank, text in observation.cause.evidence.iter_rows():
                    write(make_printable(f"  rank {rank}: {text}"))
                _keep_incident(watcher, observation)
                _send(webhook, observation)
                return False
        has_ended.wait(_POLL_S)
    return True


def format_progress(observation: Observation) -> str:
    """Return the number of steps, the step time in ms and the three ranks that arrive latest as one line."""
    step = "unknown" if observation.step_ns is None else f"{observation.step_ns / 1e6:,.1f} ms"
    latest = sorted(observation.lateness_ns.items(), key=lambda item: -item[1])[:3]
    late = ", ".join(f"rank {rank} {late_ns / 1e6:,.1f} ms" for rank, late_ns in latest)
    return f"{observation.steps:,} steps, step time {step}, lateness: {late or 'unknown'}"


def _report_slowdown(
    observation: Observation,
    reported: set[str],
    write: Callable[[str], None],
    recorded_run: Path | None,
    webhook: str | None,
) -> None:
    """Report a slow rank and a change of the step time, each once; request a recording if ``recorded_run`` is set."""
    messages = {}
    if observation.step_change is not None:
        messages["change"] = f"the step time changed to {observation.step_change:.2f} times the earlier one"
    if observation.cause is not None and not observation.has_stalled:
        messages[f"slow {observation.cause.ranks}"] = observation.cause.sentence
    for key, message in messages.items():
        if key in reported:
            continue
        reported.add(key)
        write(make_printable(message))
        _send(webhook, observation)
        if recorded_run is not None:
            from etloom.collector import request_recording

            request_recording(recorded_run, 0)


def _keep_incident(watcher: JobWatcher, observation: Observation) -> None:
    """Save the state of all ranks; print a message if that fails, so that the exit status still states the stall."""
    try:
        print_message(f"state saved: {watcher.keep_incident(observation)}; etloom hangs shows details")
    except (OSError, shutil.Error) as error:
        print_message(f"the state cannot be saved: {error}")


def _send(url: str | None, observation: Observation) -> None:
    """Send the cause of a stall or slowdown to the URL of a webhook; print a message if that fails or takes long.

    The time limit of a socket is for each read, so a thread sends, which ends with the process.
    """
    if url is None:
        return
    failures: list[str] = []
    sending = threading.Thread(target=_post, args=(url, observation, failures), daemon=True)
    sending.start()
    sending.join(_WEBHOOK_TIMEOUT_S)
    if sending.is_alive():
        failures = [f"no answer within {_WEBHOOK_TIMEOUT_S} s"]
    for failure in failures:
        print_message(f"webhook {url}: {failure}")


def _post(url: str, observation: Observation, failures: list[str]) -> None:
    import http.client
    import urllib.request

    from etloom.api.watching import describe_cause

    body = json.dumps(describe_cause(observation)).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=_WEBHOOK_TIMEOUT_S):  # noqa: S310
            pass
    except (OSError, ValueError, http.client.HTTPException) as error:
        failures.append(str(error))
