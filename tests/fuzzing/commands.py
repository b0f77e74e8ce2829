"""The commands of etloom and of its compatibility fronts, as functions of a run in a folder and of its mutated file."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from etloom import cli
from etloom.core import registry
from etloom.core.errors import EtloomError

_STATUSES = {0, 1, 2, 3}
"""Exit statuses that a damaged input may have (3: `check` is undecided); 70 is an internal error."""
_OUTPUT = "{out}"


@dataclass(frozen=True)
class Command:
    """A command line. ``{run}`` is the folder of the run, ``{file}`` the mutated file, ``{out}`` a new folder."""

    name: str
    words: tuple[str, ...]
    front: str = ""
    """The module of `etloom.compat` with this command; by default it is a verb of etloom."""

    def run(self, run: Path, file: Path, out: Path) -> tuple[int, str, str]:
        """Run the command in this process; return its exit status, stdout and stderr. Raises what it raises."""
        other = next(
            (path for path in sorted(run.iterdir()) if path != file and path.suffix == file.suffix), file
        )
        words = [word.format(run=run, file=file, out=out, other=other) for word in self.words]
        output, messages = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(messages):
            main = importlib.import_module(f"etloom.compat.{self.front}").main if self.front else cli.main
            try:
                status = main(words)
            except SystemExit as leave:  # of argparse
                status = leave.code if isinstance(leave.code, int) else 1
        return status, output.getvalue(), messages.getvalue()

    def check(self, run: Path, file: Path, out: Path) -> str | None:
        """Run the command; return what is wrong with how it ended, or None."""
        return self.judge(*self.run(run, file, out))

    def judge(self, status: int, output: str, messages: str) -> str | None:
        """Return what is wrong with how the command ended, or None."""
        if status not in _STATUSES:
            return f"exit status {status}: {messages.strip()[-500:]}"
        if status and not messages.strip() and self.name != "lint":  # whose errors are its result
            return f"exit status {status} without a message"
        if "Warning" in messages or ("Traceback" in messages and not os.environ.get("ETLOOM_DEBUG")):
            return f"a warning or traceback reached stderr: {messages.strip()[-500:]}"
        if status == 0 and "json" in self.words:
            json.loads(output, parse_constant=_refuse_constant)
        return None


class HtaCommand(Command):
    """A method of HTA's TraceAnalysis."""

    def run(self, run: Path, file: Path, out: Path) -> tuple[int, str, str]:
        from etloom.compat.hta import TraceAnalysis

        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            try:
                result = getattr(TraceAnalysis(trace_dir=str(run)), self.words[0])()
            except (EtloomError, OSError) as error:
                return 1, "", str(error)
        return 0, str(type(result) is pd.DataFrame), ""


class StoreCommand(Command):
    """Adding the run to a store, and a question about the stored run."""

    def run(self, run: Path, file: Path, out: Path) -> tuple[int, str, str]:
        add = Command(
            "store", ("store", "add", "{run}", "--to", "{out}/store", "--name", "run", "--jobs", "1")
        )
        added = add.run(run, file, out)
        return added if added[0] else super().run(run, file, out)


class WatchCommand(Command):
    """One look of `etloom watch` at a job, which itself goes on until the job ends."""

    def run(self, run: Path, file: Path, out: Path) -> tuple[int, str, str]:
        from etloom.api.watching import JobWatcher, describe_cause
        from etloom.cli.watch import format_progress

        observation = JobWatcher(run, settle_s=0).observe()
        if observation is None:
            return 1, "", "no state"
        return 0, json.dumps([format_progress(observation), describe_cause(observation)]), ""


class AgentCommand(Command):
    """A tool of `etloom mcp`: its name and arguments; errors are answers."""

    def __init__(self, tool: str, **arguments: Any) -> None:
        super().__init__("mcp", (tool, *map(str, arguments.values())))
        object.__setattr__(self, "arguments", arguments)

    def run(self, run: Path, file: Path, out: Path) -> tuple[int, str, str]:
        from etloom.cli.mcp.bounded_text import MAX_TOKENS, estimate_tokens
        from etloom.cli.mcp.opened_runs import OpenedRuns
        from etloom.cli.mcp.tools import RunTools

        answer = getattr(RunTools(OpenedRuns([run])), self.words[0])(**vars(self)["arguments"])
        return 0 if estimate_tokens(answer) <= MAX_TOKENS else 70, answer, ""


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _list_commands() -> list[Command]:
    commands = [
        Command("info", ("info", "{run}")),
        Command("info", ("info", "{file}", "--format", "json")),
        Command("link", ("link", "{run}", "--out", "{out}/linked.parquet")),
        Command("link", ("link", "{run}", "--out", "{out}/plus", "--to", "etplus")),
        Command("link", ("link", "--host", "{other}", "--device", "{file}", "--out", "{out}/linked.parquet")),
        Command("report", ("report", "{run}", "--out", "{out}/report.html")),
        Command("report", ("report", "{file}", "--out", "{out}/report.html")),
        Command("simulate", ("simulate", "{run}", "--set", "kernel:* x0.5", "--format", "json")),
        Command("simulate", ("simulate", "{run}", "--straggler", "none", "--bandwidth", "2x", "--out", "{out}/sim.parquet")),
        Command("simulate", ("simulate", "{run}", "--remove-sync", "*", "--set", "launch x0", "--set", "op:* +3us")),
        Command("diff", ("diff", "{run}", "{file}", "--html", "{out}/diff.html")),
        Command("diff", ("diff", "{file}", "{run}", "--by", "kernel", "--format", "json")),
        Command("diff", ("diff", "{run}", "{run}", "--by", "operator")),
        Command("check", ("check", "{run}", "--baseline", "{file}", "--junit", "{out}/check.xml", "--github")),
        Command("check", ("check", "{file}", "--baseline", "{run}", *_repeat("--metric", (
            "step-time", "device-busy", "exposed-communication", "peak-memory")))),
        Command("lint", ("lint", "{run}")),
        Command("lint", ("lint", "{file}", "--format", "json")),
        Command("salvage", ("salvage", "{file}", "--out", "{out}/salvaged.json")),
        Command("salvage", ("salvage", "{run}")),
        Command("replay", ("replay", "comms", "{run}", "--dry-run")),
        Command("replay", ("replay", "comms", "{file}", "--dry-run", "--shrink", "--per", "call", "--use-one-trace")),
        Command("query", ("query", "{run}", "select * from stats", "--format", "json")),
        Command("query", ("query", "{run}", "select name, sum(dur) from events group by name order by 2 desc limit 5")),
        Command("query", ("query", "{run}", "select * from comms join groups using (pg_name)", "--format", "csv")),
        Command("repro", ("repro", "{run}", "--event", "3", "--out", "{out}/repro")),
        Command("repro", ("repro", "{file}", "--event", "40", "--out", "{out}/repro")),
        Command("convert", ("convert", "{file}", "{out}/file.parquet")),
        Command("convert", ("convert", "{file}", "{out}/file.json", "--to", "chrome")),
        Command("convert", ("convert", "{file}", "{out}/file.json", "--to", "execution-trace")),
        Command("hangs", ("hangs", "{run}")),
        Command("hangs", ("hangs", "{file}", "--format", "json")),
        Command("predict", ("predict", "{run}", "--format", "json")),
        Command("predict", ("predict", "{run}", "--network", "x0.2", "--recorded-network", "1Gbit/s", "--out", "{out}/p.et")),
        Command("predict", ("predict", "{file}", "--ranks", "4", "--network", "dgx-h100", "--out", "{out}/p.parquet")),
        Command("predict", ("predict", "{run}", "--parallel", "pp=2,mb=4", "--device", "b200")),
        Command("gather", ("gather", "{run}", "--out", "{out}/gathered")),
        StoreCommand("store", ("store", "list", "{out}/store", "--format", "json")),
        StoreCommand("store", ("store", "stragglers", "{out}/store", "--by", "rank", "--format", "json")),
        StoreCommand("store", ("report", "{out}/store/run=run", "--out", "{out}/report.html")),
        StoreCommand("store", ("diff", "{out}/store/run=run", "{run}", "--format", "json")),
        StoreCommand("store", ("check", "{run}", "--baseline", "{out}/store/run=run")),
        WatchCommand("watch", ("json",)),
        AgentCommand("open_run"), AgentCommand("summary"), AgentCommand("findings", top=100), AgentCommand("explain", number=1),
        AgentCommand("compare", before="", after="", by="kernel"), AgentCommand("what_if", changes=["comm x0", "kernel:* x2"]),
        AgentCommand("predict", ranks=4), AgentCommand("hangs"), AgentCommand("analyze", name="stragglers"),
        AgentCommand("query", sql="select * from events order by dur desc limit 5"),
        AgentCommand("timeline", rank=0, start_ns=-(2**62), end_ns=2**62),
        Command("trace_link", ("--chakra-host-trace", "{other}", "--chakra-device-trace", "{file}", "--rank", "0",
                               "--output-file", "{out}/plus.json"), "chakra"),
        Command("converter", ("PyTorch", "--input", "{file}", "--output", "{out}/converted"), "chakra_converter"),
        Command("jsonizer", ("--input_filename", "{file}", "--output_filename", "{out}/x.json"), "chakra_jsonizer"),
        Command("visualizer", ("--input_filename", "{file}", "--output_filename", "{out}/x.dot"), "chakra_visualizer"),
        Command("visualizer", ("--input_filename", "{file}", "--output_filename", "{out}/x.graphml"), "chakra_visualizer"),
        Command("timeline", ("--input_filename", "{file}", "--output_filename", "{out}/x.json", "--num_npus", "2",
                             "--npu_frequency", "1"), "chakra_timeline_visualizer"),
        Command("comms_replay", ("--trace-path", "{run}", "--trace-type", "et", "--dry-run"), "comms_replay"),
    ]  # fmt: skip
    for export in registry.list_plugins("exports"):
        for source in ("{run}", "{file}"):
            words = ("export", source, "--to", export, "--out", f"{_OUTPUT}/{export}")
            commands.append(Command("export", words))
    commands.append(
        Command(
            "export",
            ("export", "{run}", "--to", "chrome", "--overlay", "critical-path", "--out", "{out}/x.json"),
        )
    )
    commands.append(
        Command(
            "export", ("export", "{run}", "--to", "folded", "-O", "time=device", "--out", "{out}/x.folded")
        )
    )
    for analysis in registry.list_plugins("analyses"):
        commands += [
            Command("analyze", ("analyze", analysis, "{run}", "--format", "json")),
            Command("analyze", ("analyze", analysis, "{run}", "--format", "csv")),
        ]
    commands += [
        HtaCommand("hta", (method,))
        for method in (
            "get_temporal_breakdown", "get_comm_comp_overlap", "get_gpu_kernel_breakdown", "get_potential_stragglers",
            "get_idle_time_breakdown", "get_queue_length_summary", "get_memory_bw_summary", "get_cuda_kernel_launch_stats",
        )
    ]  # fmt: skip
    return commands


def _repeat(flag: str, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word for value in values for word in (flag, value))


COMMANDS: list[Command] = _list_commands()
"""Every verb, analysis, export and compatibility front."""

Check = Callable[[Path, Path, Path], str | None]
