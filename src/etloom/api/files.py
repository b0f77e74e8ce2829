"""Public functions that write, convert, check and repair trace files, and that record runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from etloom import formats
from etloom.api.arguments import OutPath, OwnPath, Run, StrPath, as_run, verb, writing
from etloom.core import registry
from etloom.core.errors import CollectError, InvalidValue, warn
from etloom.core.losses import describe_loss
from etloom.core.registry import check_options, unknown_options_error
from etloom.core.urls import clean_url

if TYPE_CHECKING:
    from etloom.collector import CollectResult, GatherResult
    from etloom.core.trace import Job, Trace
    from etloom.exports.chakra_lint.lint_codes import LintResult as LintResult
    from etloom.formats.io.salvage import SalvagedFile
    from etloom.loading.file_reading import Progress


@dataclass(frozen=True)
class SalvagedRun:
    """The result of `etloom.salvage` for the folder of a killed recording: ranks with traces, summary, warnings.

    Attributes:
        path: the folder.
        ranks: ranks whose traces were kept.
        summary: what happened and what was kept, as text.
        warnings: what could not be kept.
    """

    path: Path
    ranks: tuple[int, ...]
    summary: str
    warnings: tuple[str, ...]


@verb
def export(run: Run, path: OutPath, format: str | None = None, **options: Any) -> Path:
    """Write a run to a file or folder in another format.

    Args:
        run: a Trace, a Job, or a path.
        path: the file or folder to write.
        format: name of the format; default: from the ending of ``path``.
        options: of the format.

    Returns:
        The path; the file of the lowest rank for a format with one file per rank (chakra).

    Raises:
        UnknownName: The format does not exist.
        EtloomError: it has no such option, or the path cannot be written.

    Example:
        >>> etloom.export("run/", "run.parquet").name
        'run.parquet'
    """
    opened = as_run(run)
    target = Path(path)
    name = format or registry.find_by_suffix("exports", target)
    plugin = registry.get("exports", name)
    check_options("exports", name, options)
    with writing(target), registry.name_plugin_in_errors("exports", name):
        plugin.write(opened, target, *_predict_metrics(opened, plugin), **options)
    return _first_file(plugin, opened, target)


def _predict_metrics(run: Trace | Job, plugin: ModuleType) -> tuple[dict[str, dict[str, Any]], ...]:
    """Return the argument of an export that needs predictions: the predicted metrics; of others nothing."""
    from etloom.core.trace import Job

    if not getattr(plugin, "NEEDS_PREDICTION", False):
        return ()
    from etloom.api.network_metrics import predict_network_metrics

    return (predict_network_metrics(run if isinstance(run, Job) else Job({run.rank or 0: run})),)


@verb
def convert(
    path: StrPath,
    out: OutPath,
    format: str | None = None,
    *,
    progress: Progress | None = None,
    reader: str | None = None,
    **options: Any,
) -> Path:
    """Convert one trace file to another format without linking it.

    A Kineto file of more than `etloom.loading.file_reading.SPILL_BYTES` is converted to Parquet part by part, in
    bounded memory.

    Args:
        path: the file.
        out: the file or folder to write.
        format: name of the format; default: from the ending of ``out``. A Chakra file becomes chakra-json if it ends in
            .json.
        progress: see `open`.
        reader: name of the reader; default: detected from the first bytes.
        options: of the reader.

    Returns:
        The path of the new file; with a rank in its name for chakra.

    Raises:
        ReadError, LimitError: the file cannot be read.
        EtloomError: unknown format or option, or the file cannot be written.

    Example:
        >>> etloom.convert("run/kineto_trace_0.json", "rank0.parquet").name
        'rank0.parquet'
    """
    source, target = Path(path), Path(out)
    name = format or _choose_format(source, target, reader)
    exporter = registry.get("exports", name)
    find_converter = getattr(exporter, "find_converter", None)
    if find_converter is not None and (convert_file := find_converter(source, reader)) is not None:
        with writing(target), registry.name_plugin_in_errors("exports", name):
            convert_file(target, progress)
        return target
    file_progress = partial(progress, source) if progress else None
    trace = formats.read(source, reader, progress=file_progress, **options)
    with writing(target):
        exporter.write(trace, target)
    if loss := describe_loss(trace.stats):
        warn(f"{source}: data lost or doubtful: {loss}")
    return _first_file(exporter, trace, target)


def _first_file(exporter: Any, run: Trace | Job, target: Path) -> Path:
    list_files = getattr(exporter, "list_files", None)
    return target if list_files is None else list_files(run, target)[0]


def _choose_format(source: Path, target: Path, reader: str | None) -> str:
    """Return the export format of the target's file name; .json is chakra-json if the source is a Chakra file."""
    is_json = target.name.endswith((".json", ".json.gz"))
    if is_json and (reader or formats.detect_format(source)) == "chakra":
        return "chakra-json"
    return registry.find_by_suffix("exports", target)


@verb
def lint(*paths: StrPath, groups: StrPath | None = None) -> LintResult:
    """Check Chakra or Kineto traces for problems that keep a simulator from running them or make results wrong.

    Args:
        paths: files NAME.RANK.et of a job, or files of Kineto; or a folder with them.
        groups: file with the ranks of the process groups; default: NAME.comm_groups.json next to the files.

    Returns:
        The findings: ``.table`` has one row per rank and kind of problem, ``.has_errors`` says if there are errors,
        ``.verdict`` predicts whether ASTRA-sim finishes, hangs or aborts (None: not a Chakra trace),
        ``.simulated_ns`` and ``.recorded_ns`` are the time of its replay and that of the recording.

    Raises:
        ReadError: there are no such files, or they cannot be read.

    Example:
        >>> path = etloom.export("run/", "sim/job.et")
        >>> etloom.lint("sim/").has_errors
        False
    """
    from etloom.exports import chakra_lint, kineto_lint

    if files := kineto_lint.find_files(map(Path, paths)):
        return kineto_lint.lint_files(files)
    return chakra_lint.lint(*paths, groups=groups)


@verb
def salvage(
    path: OwnPath, out: OutPath | None = None, *, progress: Progress | None = None
) -> SalvagedFile | SalvagedRun:
    """Repair a truncated or damaged JSON trace, or complete the folder of a killed recording.

    Args:
        path: an execution trace or Kineto trace (plain, gzip or zstd), or a folder of `collect`.
        out: the new file; default: x.salvaged.json next to x.json. A folder is completed in place.
        progress: see `open`.

    Returns:
        What was kept: a SalvagedFile, or for a folder a SalvagedRun.

    Raises:
        ReadError: the file contains no rows.
        LimitError: a row is too long.
        CollectError: there is nothing to complete in the folder, or a process still records.

    Example:
        >>> etloom.salvage("run/kineto_trace_0.json").is_intact
        True
    """
    source = _fetch_to_salvage(path, out)
    if source.is_dir():
        return _salvage_run(source)
    from etloom.formats.io import salvage as repair

    target = repair.default_output_path(source) if out is None else Path(out)
    return repair.salvage(source, target, partial(progress, source) if progress else None)


def _fetch_to_salvage(path: OwnPath, out: OutPath | None) -> Path:
    """Return the local path of the file to repair; a URL is downloaded. Raises CollectError for a folder's URL."""
    if (url := clean_url(path)) is None:
        return Path(path)
    from etloom.formats.io import mirror

    if out is None:
        raise InvalidValue(
            "salvage does not change a file at a URL", where=url, remedy="specify the new file", option="out"
        )
    source = mirror.fetch(url)
    if source.is_dir():
        raise CollectError(
            "is not a local folder", where=url, remedy="salvage the folder where it was recorded"
        )
    return source


def _salvage_run(folder: Path) -> SalvagedRun:
    from etloom.api.recording import collect_failures, record_whole_steps
    from etloom.collector import process_endings, run_folder, salvage_run

    result = salvage_run(folder)
    messages, recovered = list(result.warnings), result.recovered
    if not recovered:
        return SalvagedRun(folder, (), "nothing to salvage", tuple(messages))
    for window in (folder, *run_folder.list_windows(folder)):
        with collect_failures(messages, f"{window}: which steps are complete is unknown"):
            messages += record_whole_steps(window)
    summary = (
        f"{process_endings.describe_endings(recovered)}; {process_endings.describe_recovered(recovered)}"
    )
    return SalvagedRun(
        folder, tuple(sorted({facts["rank"] for facts in recovered})), summary, tuple(messages)
    )


@verb
def gather(*folders: StrPath, out: OutPath, overwrite: bool = False, same_job: bool = False) -> GatherResult:
    """Copy the traces that several hosts recorded into one folder.

    Args:
        folders: the folders of one job, one per host; they are not changed.
        out: the folder for all traces.
        overwrite: replace the traces of an earlier run in ``out``.
        same_job: accept the folders as one job without checking.

    Returns:
        The ranks in ``out`` by window, and warnings.

    Raises:
        CollectError: the folders are not of one job, have different recordings of a rank, or cannot be written.

    Example:
        >>> gathered = etloom.gather("node0/run", "node1/run", out="run")  # doctest: +SKIP
    """
    from etloom import collector

    return collector.gather(folders, out, overwrite=overwrite, same_job=same_job)


@verb
def collect(
    command: Sequence[str],
    out: OwnPath,
    steps: str | None = None,
    *,
    overwrite: bool = False,
    on_build: Callable[[], None] | None = None,
    **recording: Any,
) -> CollectResult:
    """Run a command and record some of its training steps on every rank that it starts.

    Afterwards observer files of up to 64 MiB are converted to PyTorch's format, and run.json and the workload card are
    completed.

    Args:
        command: the words of the command.
        out: the folder for the traces; {host}, {rank} and {time} are filled in. For the URL of an object store, a
            temporary folder, whose finished windows are uploaded while the command runs.
        steps: steps to record, as a slice; default: "3:5", steps 3 and 4.
        overwrite: replace the traces of an earlier run.
        on_build: called before the native observer is compiled.
        recording: what is recorded and when: the fields of `etloom.collector.CollectOptions`.

    Returns:
        The exit status of the command, the recorded ranks, the folders, and warnings.

    Raises:
        CollectError: the options contradict each other, or the command cannot be started.

    Example:
        >>> collected = etloom.collect(["python", "train.py"], "run/", steps="10:12")  # doctest: +SKIP
    """
    from etloom import collector
    from etloom.api.recording import finish_recording

    known = [field.name for field in fields(collector.CollectOptions)]
    if unknown := sorted(recording.keys() - known):
        raise unknown_options_error("etloom.collect", unknown, known)
    options = collector.CollectOptions(steps=steps, **recording)

    def record(folder: Path) -> CollectResult:
        result = collector.collect(command, folder, options, overwrite=overwrite, on_build=on_build)
        messages = finish_recording(result, folder)
        return replace(result, warnings=(*messages, *result.warnings))

    if (url := clean_url(out)) is None:
        return record(Path(out))
    from etloom.api.uploading import collect_to_url

    return collect_to_url(url, overwrite, record)
