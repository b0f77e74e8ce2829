"""Work after a recording has ended: convert its files to PyTorch's format, complete its records, and describe it."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from etloom import formats
from etloom.core.errors import EtloomError

if TYPE_CHECKING:
    from etloom.collector import CollectResult
    from etloom.core.trace import Trace

MAX_CONVERTED_BYTES = 64 << 20
"""Larger observer files are neither read nor converted automatically: one of this size takes 0.7 GB and 7 s, larger
ones proportionally more. If memory runs out, this process is killed and the exit status of the command is lost."""
_MAX_TOTAL_BYTES = 512 << 20
"""Limit for all automatically converted files together: a minute."""
MAX_BYTES_FOR_STEPS = 256 << 20
"""Limit for the file of a killed process; of a larger one the complete steps stay unknown."""


def finish_recording(collected: CollectResult, out: Path) -> list[str]:
    """Convert the observer files (.etob) of a recording, and record each window's complete steps and sequence length.

    Args:
        collected: the recording.
        out: the folder as the user wrote it, for messages.

    Returns:
        One message for each part that could not be done.
    """
    messages: list[str] = []
    folders = collected.windows or (collected.out,)
    with collect_failures(messages, "PyTorch's format is not written"):
        messages += convert_observer_files(folders, partial(get_user_path, run_folder=collected.out, out=out))
    for folder in folders:
        with collect_failures(messages, f"{folder}: which steps are complete is unknown"):
            messages += record_whole_steps(folder, MAX_BYTES_FOR_STEPS)
        with collect_failures(messages, f"{folder}: the workload card lacks the sequence length"):
            record_sequence_length(folder)
    return messages


@contextlib.contextmanager
def collect_failures(messages: list[str], loss: str) -> Iterator[None]:
    """Catch an exception in the block and append it to ``messages``, so that the job's exit status is preserved.

    Args:
        messages: receives one line that begins with ``loss``.
        loss: what is missing because of the exception.
    """
    from polars.exceptions import PanicException  # a BaseException

    try:
        yield
    except BrokenPipeError:  # nobody reads messages either
        raise
    except (EtloomError, OSError) as error:
        messages.append(f"{loss}: {error}")
    except (Exception, PanicException) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        messages.append(f"{loss}: {reason[:300]}")


def get_user_path(folder: Path, run_folder: Path, out: Path) -> Path:
    """Return a window's folder as a path below ``out``, the user's path; unchanged if ``out`` contains placeholders."""
    return out / folder.relative_to(run_folder) if "{" not in str(out) else folder


def describe_recording(collected: CollectResult, user_path: Path) -> str:
    """Return one line of text: the recorded ranks, steps and windows, their folder, and the command to run next.

    Args:
        collected: the recording.
        user_path: the folder of the last window, as the user wrote it.
    """
    from etloom.core.text import count_noun

    has_windows = len(collected.windows) > 1
    contents = "" if has_windows else describe_window((collected.windows or (collected.out,))[0])
    places = [window.relative_to(collected.out) for window in collected.windows]
    actors = sorted(
        {place.parts[0] for place in places if place.parts and place.parts[0].startswith("actor_")}
    )
    depth = len(places[-1].parts) if has_windows else 0
    folder = user_path.parents[depth - 1] if depth else user_path
    ranks = (
        f"rank {collected.ranks[0]}"
        if len(collected.ranks) == 1
        else count_noun(len(collected.ranks), "rank")
    )
    if contents.endswith(", 0 operators"):
        return f"nothing ran while {ranks} recorded{contents}: the traces in {folder} are empty"
    windows = f"{len(collected.windows)} windows of " if has_windows else ""
    if actors:
        windows = f"{len(places)} windows of " if len(places) > len(actors) else ""
        ranks = "Ray actors " + ", ".join(name.removeprefix("actor_") for name in actors)
    return (
        f"recorded {windows}{ranks}{contents} in {folder}; next: etloom report {shlex.quote(str(user_path))}"
    )


def describe_window(folder: Path) -> str:
    """Describe a recording window, as ", steps 3-4, 120 operators"; empty if the rank records do not list the steps."""
    from etloom.collector import process_endings, run_folder
    from etloom.core.text import count_noun, format_ranges

    ranks = run_folder.read_rank_records(folder)
    is_cut = process_endings.describe_losses(ranks) is not None
    steps_by_rank = [set(facts.get("steps") or ()) for facts in ranks] or [set()]
    steps = sorted(set.intersection(*steps_by_rank) if is_cut else set.union(*steps_by_rank))
    operators = [facts.get("operators") for facts in ranks]
    parts = []
    if ranks and all(facts.get("steps") is not None for facts in ranks):
        requested = process_endings.requested_steps(ranks) if is_cut else None
        total = f" of {requested}" if requested else ""
        parts.append(
            (f"step{'s' * (len(steps) > 1)} {format_ranges(steps)}" if steps else "no whole step") + total
        )
    if parts and None not in operators:
        parts.append(count_noun(sum(operators), "operator"))  # type: ignore[arg-type]
    return "".join(f", {part}" for part in parts)


def convert_observer_files(folders: Sequence[Path], get_name: Callable[[Path], Path]) -> list[str]:
    """Convert the observer files (.etob) of windows to PyTorch's JSON format, for other tools.

    Args:
        folders: the folders of the windows.
        get_name: returns a folder as the user wrote it.

    Returns:
        Messages about files that are not converted, and how to convert them.
    """
    from etloom.api.files import convert
    from etloom.core.text import count_noun

    messages: list[str] = []
    skipped: list[tuple[Path, Path]] = []
    total = 0
    for source in sorted(path for folder in folders for path in folder.glob("observer_*.etob")):
        size = source.stat().st_size
        target = source.with_name(f"torch_et_{source.stem.removeprefix('observer_')}.json.gz")
        if size > MAX_CONVERTED_BYTES or total + size > _MAX_TOTAL_BYTES:
            folder = get_name(source.parent)
            skipped.append((folder / source.name, folder / target.name))
            continue
        total += size
        with collect_failures(messages, f"{target} is not written"):
            convert(source, target, "execution-trace")
    if skipped:
        first, converted = map(str, skipped[0])
        files = first if len(skipped) == 1 else f"{count_noun(len(skipped), 'observer file')}"
        command = shlex.join(["etloom", "convert", first, converted, "--to", "execution-trace"])
        messages.append(
            f"{files}: too large to convert automatically; etloom reads it as it is. To get PyTorch's format, run: "
            f"{command}"
        )
    return messages


def record_whole_steps(folder: Path, max_bytes: int | None = None) -> list[str]:
    """Determine the complete steps of killed processes from their observer files, and add these to the rank records.

    Args:
        folder: the folder of a window.
        max_bytes: larger files are not read; None reads all.

    Returns:
        Messages about files that were not read.
    """
    import polars as pl

    from etloom.collector import run_folder
    from etloom.core.steps import parse_step

    messages: list[str] = []
    steps_by_rank: dict[int, list[int]] = {}
    for facts in run_folder.read_rank_records(folder):
        source = folder / f"observer_{facts['rank']}.etob"
        if facts.get("steps") is not None or not source.is_file():
            continue
        if max_bytes is not None and source.stat().st_size > max_bytes:
            messages.append(
                f"{source}: too large to find its complete steps automatically; etloom info shows them"
            )
            continue
        if (trace := _read_observer_file(source)) is None:
            continue
        events = trace.events.filter(pl.col("dur").is_not_null())
        steps_by_rank[facts["rank"]] = (
            events.select(parse_step()).to_series().drop_nulls().unique().sort().to_list()
        )
    run_folder.add_complete_steps(folder, steps_by_rank)
    return messages


def record_sequence_length(folder: Path) -> None:
    """Add the sequence length to the workload card: the last dimension of embedding indices, if always the same."""
    import polars as pl

    from etloom.collector import run_folder

    source = min(folder.glob("observer_*.etob"), default=None)
    if source is None or source.stat().st_size > MAX_CONVERTED_BYTES:
        return
    trace = cast("Trace", formats.read(source))
    lookups = trace.nodes.filter(pl.col("name").cast(pl.String) == "aten::embedding").select(node="id")
    indices = trace.tensors.filter(pl.col("io") == 0, pl.col("index") == 1).join(lookups, on="node")
    # A nested tensor has no shape.
    shapes = [json.loads(shape) for shape in indices["shape"].cast(pl.String).drop_nulls()]
    lengths = {shape[-1] for shape in shapes if len(shape) > 1}
    if len(lengths) == 1:
        run_folder.add_sequence_length(folder, lengths.pop())


def _read_observer_file(path: Path) -> Trace | None:
    """Read an observer file (.etob); None if it is damaged, which is reported when the run is opened."""
    try:
        return cast("Trace", formats.read(path))
    except EtloomError:
        return None
