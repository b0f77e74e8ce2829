"""The command ``etloom``: one module per subcommand; the work is done by `etloom.api`.

Results go to stdout, messages and progress to stderr. Exit status: 0; 1 for an error of the input, reported
in one line; 2 for wrong usage; 70 for an internal error; 130 after Ctrl-C. The module of a verb, and the libraries
that it needs, are imported when the verb runs, so that ``etloom --help`` answers at once.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

import click

import etloom
from etloom.cli.command import CONTEXT_SETTINGS
from etloom.cli.error_handling import handle_errors
from etloom.core.errors import EtloomError

__all__ = ["app", "main"]

_VERBS = {
    "demo": "Show report, findings and a what-if of a bundled recording.",
    "collect": "Run a command and record some of its training steps.",
    "store": "Keep runs in a store: read once, many questions.",
    "gather": "Copy the traces recorded on several hosts into one folder.",
    "run": "Run a command, record and watch it, and report at the end.",
    "info": "Show formats, ranks, devices, steps and data loss of traces.",
    "link": "Link operators, launches and GPU activity; save the result.",
    "analyze": "Run an analysis and print its table.",
    "hangs": "Name the ranks that caused a hang or crash.",
    "watch": "Watch a running job; name the cause when it stalls.",
    "query": "Run an SQL SELECT over the tables.",
    "report": "Summarize a run and write an HTML report.",
    "ui": "Show a run of any size in the browser, from a server.",
    "simulate": "Predict the run time under changed conditions (what-if).",
    "predict": "Predict the step time on another network or number of ranks.",
    "plan": "Rank the layouts of a training job on a cluster.",
    "diff": "Compare two runs.",
    "check": "Fail if a run is slower than a baseline (CI gate).",
    "replay": "Re-run recorded communication, computation or both.",
    "repro": "Write a script that runs one recorded operator or collective.",
    "export": "Write traces in another format.",
    "lint": "Check Chakra traces before a simulator uses them.",
    "convert": "Convert one trace file to another format.",
    "mcp": "Serve runs to agents (Model Context Protocol).",
    "salvage": "Repair a truncated or damaged trace.",
    "cache": "Show how large the cache is, or remove it.",
}
"""Verb -> its short help. The command is the object of that name in the module of that name."""
_SIGNAL_FORWARDERS = {"collect", "replay", "run"}
"""Verbs that run other programs, which get signals and the environment unchanged."""
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
"""Variables that verbs set, except those that run other programs: threads for linear algebra, which would keep a CPU
busy for 0.1 s and which nothing needs."""


class VerbGroup(click.Group):
    """The group of all etloom commands; the module of a command is imported only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        command: click.Command = getattr(importlib.import_module(f"etloom.cli.{cmd_name}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb of a command line; the name of an analysis, or the path of a run, stands for a verb, too.

        ``etloom stragglers run/`` is ``etloom analyze stragglers run/``, and ``etloom run/`` is ``etloom report run/``.
        """
        if args[0] == "compare":  # the name of the Python function
            args = ["diff", *args[1:]]
        if args[0] not in _VERBS:
            try:
                args = [_find_verb(args[0]), *args]
            except (click.UsageError, EtloomError):
                if not ctx.resilient_parsing:  # the shell completes a line that is not finished
                    raise
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_VERBS.items()))


@click.group(cls=VerbGroup, no_args_is_help=True, context_settings=CONTEXT_SETTINGS)
@click.version_option(etloom.__version__, message="etloom %(version)s", help="Print the version and exit.")
def app() -> None:
    """Collect, read, link, analyze, query, report and export execution traces of machine-learning jobs.

    The name of an analysis, and the path of a run, stand for a command, too.

    Examples:

    \b
      etloom demo
      etloom run -- torchrun --nproc-per-node 2 train.py
      etloom collect --out run/ --steps 3:5 -- torchrun --nproc-per-node 2 train.py
      etloom run/                 # etloom report run/
      etloom findings run/        # etloom analyze findings run/
    """


def _find_verb(word: str) -> str:
    """Return the verb that a word without one stands for: analyze for the name of an analysis, report for a run.

    Raises:
        click.UsageError: neither; the message states the nearest command; for a word that may be the name of a file,
            no command that runs other programs.
    """
    from etloom.core import registry
    from etloom.core.errors import UnknownName
    from etloom.core.paths import expand_home
    from etloom.core.urls import clean_url

    analyses = registry.list_plugins("analyses")
    if word.replace("_", "-") in analyses:
        return "analyze"
    if clean_url(word) is not None or os.path.lexists(expand_home(word)):
        return "report"
    may_be_file = re.search(r"[./\d]", word) is not None or os.sep in word
    refused = _SIGNAL_FORWARDERS if may_be_file else set()
    commands = {verb: verb for verb in _VERBS if verb not in refused}
    commands |= {name: f"{name} RUN" for name in analyses}
    error = UnknownName("command", word, commands, synonyms=registry.SYNONYMS["analyses"])
    what = f"unknown command {word!r}{', and no such file or folder' * may_be_file}"
    if error.nearest is None:
        raise click.UsageError(f"{what}; etloom --help lists the commands")
    raise click.UsageError(f"{what}; did you mean 'etloom {commands[error.nearest]}'?")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: the words after ``etloom``; default: those of this process.
    """
    if arguments is None:
        gc.set_threshold(100_000, 50, 50)  # garbage collection during imports would cost 25 ms
        if not _SIGNAL_FORWARDERS.intersection(sys.argv[1:2]):
            signal.signal(signal.SIGTERM, _exit_on_signal)
            for name, value in _ENVIRONMENT.items():  # before numpy and polars are imported
                os.environ.setdefault(name, value)
    try:
        with handle_errors():
            status = app(args=arguments, prog_name="etloom", standalone_mode=False) or 0
    except SystemExit as leave:
        status = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    if arguments is None:
        gc.freeze()  # the collection at the end of the process would look at every object: 0.15 s
        _exit_despite_threads(status)
    return int(status)


def _exit_despite_threads(status: int) -> None:
    """Exit at once if daemon threads still run: Python unwinds them at its end, and native code then aborts."""
    threading._shutdown()  # type: ignore[attr-defined]  # threads that it waits for may start daemon threads
    if not any(thread.daemon for thread in threading.enumerate()):
        return
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader is gone, or it is closed
            stream.flush()
    os._exit(status)


def _exit_on_signal(number: int, frame: object) -> None:
    """Raise SystemExit with status 128 + signal number, so that Python removes temporary files before it exits."""
    raise SystemExit(128 + number)
