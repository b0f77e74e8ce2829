"""What `etloom collect` does after the command: PyTorch's format, the length of a sequence, the closing line."""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from etloom.cli.error_handling import print_message
from etloom.core.errors import EtloomError

if TYPE_CHECKING:
    from etloom.collector import Collected


def summarize_recording(collected: Collected, where: Path) -> str:
    """What was recorded, and what to do with it; `where`: the folder of the last window, as the user calls it."""
    from etloom.collector.session.messages import count_noun

    ranks = (
        f"rank {collected.ranks[0]}"
        if len(collected.ranks) == 1
        else count_noun(len(collected.ranks), "rank")
    )
    several = len(collected.windows) > 1
    what = "" if several else describe_window((collected.windows or (collected.out,))[0])
    folder = where.parent if several else where
    if what.endswith(", 0 operators"):
        return f"nothing ran while {ranks} recorded{what}: the traces in {folder} are empty"
    windows = f"{len(collected.windows)} windows of " if several else ""
    return f"recorded {windows}{ranks}{what} in {folder}; next: etloom report {shlex.quote(str(where))}"


def describe_window(folder: Path) -> str:
    """The steps and operators of a window, as its ranks sealed it; empty where they do not say."""
    from etloom.collector import process_endings, run_folder
    from etloom.collector.session.messages import count_noun, format_ranges

    ranks = run_folder.sealed_ranks(folder)
    cut = process_endings.describe_losses(ranks) is not None
    each = [set(facts.get("steps") or ()) for facts in ranks] or [set()]
    steps = sorted(set.intersection(*each) if cut else set.union(*each))
    operators = [facts.get("operators") for facts in ranks]
    told = []
    if ranks and all(facts.get("steps") is not None for facts in ranks):
        asked = process_endings.requested_steps(ranks) if cut else None
        of = f" of {asked}" if asked else ""
        told.append(
            (f"step{'s' * (len(steps) > 1)} {format_ranges(steps)}" if steps else "no whole step") + of
        )
    if told and None not in operators:
        told.append(count_noun(sum(operators), "operator"))  # type: ignore[arg-type]
    return "".join(f", {part}" for part in told)


@contextlib.contextmanager
def report_failures(lost: str) -> Iterator[None]:
    """The job has ended and its exit status stands: what fails now is one line that begins with what is `lost`."""
    from polars.exceptions import PanicException  # a BaseException

    try:
        yield
    except BrokenPipeError:  # nobody reads what we say, either
        raise
    except (EtloomError, OSError) as error:
        print_message(f"{lost}: {error}")
    except (Exception, PanicException) as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())
        print_message(f"{lost}: {why[:300]}")


MAX_CONVERTED_BYTES = 64 << 20
"""Of an observer's file that is read unasked after the command: to read or convert one of so many takes 0.7 GB and 7 s,
larger ones more in proportion. Where memory ends, so does this process, and with it the exit status of the command."""
_MAX_TOTAL_BYTES = 512 << 20
"""Of all files that are converted: a minute."""
MAX_BYTES_FOR_STEPS = 256 << 20
"""Of the file of a killed process: without, its whole steps stay unknown."""


def convert_observer_files(folders: Sequence[Path], name: Callable[[Path], Path]) -> None:
    """Put observers' files into PyTorch's format beside them, for other tools; say which are left, and how to.

    name: a folder as the user calls it.
    """
    from etloom import convert
    from etloom.collector.session.messages import count_noun

    left: list[tuple[Path, Path]] = []
    together = 0
    for recorded in sorted(path for folder in folders for path in folder.glob("observer_*.etob")):
        size = recorded.stat().st_size
        target = recorded.with_name(f"torch_et_{recorded.stem.removeprefix('observer_')}.json.gz")
        if size > MAX_CONVERTED_BYTES or together + size > _MAX_TOTAL_BYTES:
            folder = name(recorded.parent)
            left.append((folder / recorded.name, folder / target.name))
            continue
        together += size
        with report_failures(f"{target} is not written"):
            convert(recorded, target, "execution-trace")
    if left:
        observed, wanted = map(str, left[0])
        which = observed if len(left) == 1 else count_noun(len(left), "file") + " of the observer"
        how = shlex.join(["etloom", "convert", observed, wanted, "--to", "execution-trace"])
        print_message(
            f"{which}: too large to convert unasked; every verb reads the observer's format; for PyTorch's: {how}"
        )


def record_whole_steps(folder: Path, most_bytes: int | None = None) -> None:
    """The steps that a process had whole as it was killed: nobody else counted them.

    most_bytes: larger files are not read, and a line says so; null reads all.
    """
    import polars as pl

    import etloom
    from etloom.collector import run_folder

    found: dict[int, list[int]] = {}
    for facts in run_folder.sealed_ranks(folder):
        recorded = folder / f"observer_{facts['rank']}.etob"
        if facts.get("steps") is not None or not recorded.is_file():
            continue
        if most_bytes is not None and recorded.stat().st_size > most_bytes:
            print_message(
                f"{recorded}: too large to look unasked which steps are whole; etloom info reads it"
            )
            continue
        try:
            trace = cast("etloom.Trace", etloom.read(recorded))
        except EtloomError:  # who reads it next is told; its steps stay unknown
            continue
        events = trace.events.filter(pl.col("dur").is_not_null())
        step = pl.col("name").cast(pl.String).str.extract(r"^ProfilerStep#(\d{1,18})$").cast(pl.Int64)
        found[facts["rank"]] = events.select(step).to_series().drop_nulls().unique().sort().to_list()
    run_folder.note_steps(folder, found)


def record_sequence_length(folder: Path) -> None:
    """The length of a sequence, for the card: of the indices that embeddings look up, where all agree."""
    import polars as pl

    import etloom
    from etloom.collector import run_folder

    recorded = min(folder.glob("observer_*.etob"), default=None)
    if recorded is None or recorded.stat().st_size > MAX_CONVERTED_BYTES:
        return
    trace = cast("etloom.Trace", etloom.read(recorded))
    lookups = trace.nodes.filter(pl.col("name").cast(pl.String) == "aten::embedding").select(node="id")
    indices = trace.tensors.filter(pl.col("io") == 0, pl.col("index") == 1).join(lookups, on="node")
    # A nested tensor has no shape.
    shapes = [json.loads(shape) for shape in indices["shape"].cast(pl.String).drop_nulls()]
    lengths = {shape[-1] for shape in shapes if len(shape) > 1}
    if len(lengths) == 1:
        run_folder.note_sequence(folder, lengths.pop())
