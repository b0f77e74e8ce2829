"""Which files of a folder are traces, and of which rank."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from etloom.core.errors import EtloomError, ReadError
from etloom.core.schema import Stat
from etloom.formats import UNKNOWN_FORMAT, detect_format
from etloom.formats.io.compression import DECOMPRESSION_ERRORS, read_chunks
from etloom.formats.io.workload_card import find_cards, read_card
from etloom.loading.run_json import find_unfinished_recording, read_run_json

# kineto_trace_3.json, torch_et_3.json.gz, kineto_rank3_x.json, rank3_trace.json, rank-3.Apr.1102.pt.trace.json, ...
_RANK_NAME_PATTERNS = (
    r"(?:^|[._-])(?:kineto(?:_trace)?|(?:torch|pytorch|chakra)_et|et|observer|trace|nsys|fr_trace|flight_recorder)_(\d+)(?:\.|$)",
    r"(?:^|[._-])rank[-_]?(\d+)(?!\d)",
    r"(?:^|[._-])worker[-_]?(\d+)(?!\d)",
    r"^\w+\.(\d+)\.et(?:\.gz)?$",
)
_DISTRIBUTED = re.compile(rb'"distributedInfo"\s*:\s*(?=\{)')
_MAX_DISTRIBUTED_BYTES = 1 << 24
"""Bytes of distributedInfo that are looked through for a rank that follows the process groups."""
_JSON = json.JSONDecoder()
_RANK_INSIDE = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[]{0,4096}?"rank"\s*:\s*"?(\d{1,9})')
# The names that only traces have: "rank" alone may stand in any file's.
_TRACE_NAME = re.compile(
    r"(?:^|[._-])(?:kineto(?:_trace)?|(?:torch|pytorch|chakra)_et|fr_trace)_(?:rank)?\d+[^/]*\.json(?:\.gz|\.zst)?$"
    r"|\.pt\.trace\.json(?:\.gz|\.zst)?$"
)
_MAX_LISTED_FILES = 12
"""Files that a message names."""
_PATTERN = r"for example 'host-(\d+)'"
_SALVAGED = ".salvaged"
_FORMAT_SIDES = {"execution-trace": "host", "observer": "host", "kineto": "device", "nsys": "device"}
"""Formats of which a rank has one of each kind; any other stands alone."""


@dataclass(frozen=True)
class Found:
    """The traces of a folder by rank, host and device trace of a rank together."""

    ranks: dict[int, list[Path]]
    formats: dict[Path, str]
    stats: list[Stat] = field(default_factory=list)  # rows of stats that concern the whole job
    of_ranks: dict[int, list[Stat]] = field(default_factory=dict)  # and those that concern a rank
    ignored: list[Path] = field(default_factory=list)  # files that are no traces
    card: dict[str, Any] | None = None  # CCL-Bench's workload card beside the traces
    run: dict[str, Any] | None = None  # what `etloom collect` wrote of the run: command, versions, steps


def discover(folder: str | PathLike[str], rank_pattern: str | None = None) -> Found:
    """The traces of a folder by rank.

    The rank is in the name, by ``rank_pattern`` (a regular expression whose first group is the rank) or by the names
    the field uses; else in the file. Traces without any are of rank 0 if there is one of a kind. Files of metrics that
    name no rank go to the lowest one.

    Raises ReadError for a folder without traces, or with several whose ranks cannot be told; EtloomError for a
    pattern that is no regular expression with a group, or whose group is no number.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ReadError("no such folder", where=folder, remedy="check the path")
    rows: defaultdict[int | None, list[Stat]] = defaultdict(list)  # by the rank that they concern
    stats = rows[None]
    unreadable: list[EtloomError] = []
    paths, salvaged = _prefer_salvaged(_list_files(folder))
    formats, ignored = _detect_formats(paths, unreadable)
    _drop_converted(formats, stats)
    if not formats and unreadable:
        raise unreadable[0]
    if not formats:
        raise ReadError("no traces in this folder", where=folder, remedy=_suggest_remedy(folder, ignored))
    patterns = (
        [_compile_rank_pattern(rank_pattern)]
        if rank_pattern
        else [re.compile(name) for name in _RANK_NAME_PATTERNS]
    )
    ranks: dict[int, list[Path]] = {}
    without: list[Path] = []
    metrics = [path for path in formats if formats[path] == "metrics"]
    for path in formats:
        rank = _find_rank_in_name(path, patterns)
        if rank is None and formats[path] == "kineto" and rank_pattern is None:
            try:
                rank = _find_rank_in_content(path)
            except EtloomError as error:
                unreadable.append(error)
                continue
        if rank is None and path not in metrics:
            without.append(path)
        elif rank is not None:
            ranks.setdefault(rank, []).append(path)
    _place_unranked(without, ranks, formats, folder)
    if not ranks and unreadable:
        raise unreadable[0]
    if not ranks:
        raise ReadError("holds metrics, but no traces", where=folder, remedy=_suggest_remedy(folder, ignored))
    placed = {path for paths in ranks.values() for path in paths}
    ranks[min(ranks)] += [path for path in metrics if path not in placed]
    for rank, paths in sorted(ranks.items()):
        ranks[rank] = _keep_one_per_kind(paths, formats, rows[rank])
    for failure in unreadable:
        named = _find_rank_in_name(Path(failure.where or ""), patterns)
        rows[named].append(Stat("job.unreadable_file", "error", 1, str(failure)))
    of_path = {path: rank for rank, paths in ranks.items() for path in paths}
    for path, row in salvaged.items():
        rows[of_path.get(path)].append(row)
    # A name may claim any rank: the gaps are counted, not listed.
    missing = max(ranks) + 1 - len(ranks)
    if missing:
        first = itertools.islice((rank for rank in itertools.count() if rank not in ranks), min(missing, 8))
        some = ", ".join(map(str, first)) + (", ..." if missing > 8 else "")
        stats.append(Stat("job.missing_ranks", "info", missing, f"no trace of rank {some}"))
    card, (run, cut_short) = _read_first_card(folder, stats), read_run_json(folder, stats)
    for rank, row in cut_short.items():
        rows[rank].append(row)
    of_ranks = {rank: said for rank, said in rows.items() if rank is not None and said}
    return Found(dict(sorted(ranks.items())), formats, stats, of_ranks, ignored, card, run)


def rank_in_name(path: Path) -> int | None:
    """The rank that the name of a file states, by the names the field uses."""
    return _find_rank_in_name(path, map(re.compile, _RANK_NAME_PATTERNS))


def _find_rank_in_name(path: Path, patterns: Iterable[re.Pattern[str]]) -> int | None:
    """The rank by the first pattern that finds one; more than nine digits, as of a time, are none."""
    for pattern in patterns:
        match = pattern.search(path.name)
        if match is None or match[1] is None or len(match[1]) > 9:
            continue
        if not match[1].isdecimal():
            raise EtloomError(
                f"{pattern.pattern!r} takes {match[1]!r} of {path.name} for a rank",
                remedy=_PATTERN,
                option="rank_pattern",
            )
        return int(match[1])
    return None


def _read_first_card(folder: Path, stats: list[Stat]) -> dict[str, Any] | None:
    """The workload card, if there is one that can be read."""
    for path in find_cards(folder):
        try:
            return read_card(path)
        except EtloomError as error:
            stats.append(Stat("job.workload_card", "data_loss", 1, str(error)))
    return None


def _list_files(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise ReadError(f"cannot be read: {error.strerror}", where=folder) from None


def _prefer_salvaged(paths: Sequence[Path]) -> tuple[list[Path], dict[Path, Stat]]:
    """The paths without those that `etloom salvage` made whole in a file beside them, and of each such file the row of
    stats that says so."""
    stems = {path: path.name.partition(".json")[0] for path in paths}
    whole = {stem: path for path, stem in stems.items() if stem.endswith(_SALVAGED)}
    kept = []
    said: dict[Path, Stat] = {}
    for path in paths:
        taken = whole.get(stems[path] + _SALVAGED)
        if taken is None:
            kept.append(path)
        else:
            example = f"{taken.name} is read in place of {path.name}, from which it was salvaged"
            said[taken] = Stat("job.salvaged_taken", "data_loss", 1, example)
    return kept, said


def _detect_formats(
    paths: Iterable[Path], unreadable: list[EtloomError]
) -> tuple[dict[Path, str], list[Path]]:
    """The format of each trace, and what is none. A file that is called a trace and is none cannot be read."""
    formats: dict[Path, str] = {}
    ignored = []
    for path in paths:
        if not (
            path.is_file() or path.is_dir()
        ):  # opening a pipe would wait for ever; a link may lead nowhere
            ignored.append(path)
            continue
        try:
            name = detect_format(path)
        except EtloomError as error:
            unreadable.append(error)
            continue
        if name is not None and not (path.is_file() and name == "parquet"):
            formats[path] = "metrics" if name == "parquet" and _find_converted_file(path) else name
        elif path.is_file() and name is None and _TRACE_NAME.search(path.name):
            what = UNKNOWN_FORMAT if path.stat().st_size else "the file is empty"
            unreadable.append(ReadError(what, where=path))
        elif path.is_file():
            ignored.append(path)
    return formats, ignored


def _find_converted_file(path: Path) -> str | None:
    """The name of the file of metrics that `etloom convert` made this folder of; None for any other trace."""
    if not path.is_dir():
        return None
    try:
        meta = json.loads((path / "meta.json").read_bytes())["meta"]
        (format,), (file,) = meta["formats"], meta["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Path(file).name if format == "metrics" else None


def _drop_converted(formats: dict[Path, str], stats: list[Stat]) -> None:
    """Leave out files of metrics that stand beside what they were converted to: their samples would count twice."""
    taken = {
        name: path
        for path, format in formats.items()
        if format == "metrics" and (name := _find_converted_file(path))
    }
    for path in [path for path, format in formats.items() if format == "metrics" and path.name in taken]:
        del formats[path]
        example = f"{taken[path.name].name} is read in place of {path.name}, of which it was made"
        stats.append(Stat("job.converted_taken", "info", 1, example))


def _compile_rank_pattern(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise EtloomError(
            f"{pattern!r} is no regular expression: {error}", remedy=_PATTERN, option="rank_pattern"
        ) from None
    if compiled.groups < 1:
        raise EtloomError(f"{pattern!r} has no group for the rank", remedy=_PATTERN, option="rank_pattern")
    return compiled


def _find_rank_in_content(path: Path) -> int | None:
    """What distributedInfo says, wherever in the file it stands. Raises ReadError, LimitError."""
    held = b""
    try:
        for piece in read_chunks(path):
            held += piece
            if (begin := _DISTRIBUTED.search(held)) is None:
                held = held[-64:]
                continue
            held = held[begin.start() :]
            if (first := _RANK_INSIDE.match(held)) is not None:
                return int(first[1])
            try:
                info, _ = _JSON.raw_decode(held.partition(b":")[2].decode("utf-8", "replace").lstrip())
            except (ValueError, RecursionError):
                if len(held) > _MAX_DISTRIBUTED_BYTES:
                    return None
                continue
            rank = str(info.get("rank"))
            return int(rank) if rank.isdecimal() and len(rank) < 10 else None
    except DECOMPRESSION_ERRORS:
        return None  # reading the trace itself says what is wrong with it
    except OSError as error:
        raise ReadError(f"cannot be read: {error.strerror or error}", where=path) from None
    return None


def _place_unranked(
    without: list[Path], ranks: dict[int, list[Path]], formats: dict[Path, str], folder: Path
) -> None:
    """Give traces that name no rank the one rank there is, where there is one of each format."""
    if not without:
        return
    kinds = [formats[path] for path in without]
    if len(ranks) > 1 or len(kinds) != len(set(kinds)):
        some = ", ".join(path.name for path in without[:_MAX_LISTED_FILES])
        more = f" and {len(without) - _MAX_LISTED_FILES} more" if len(without) > _MAX_LISTED_FILES else ""
        placed = [f"{path.name} ({rank})" for rank, paths in ranks.items() for path in paths]
        others = f"; others do, with their rank: {', '.join(placed[:_MAX_LISTED_FILES])}" if placed else ""
        others += ", ..." if len(placed) > _MAX_LISTED_FILES else ""
        raise ReadError(
            f"{len(without)} traces do not say which rank they are of: {some}{more}{others}",
            where=folder,
            remedy=r"say how to tell, for example --rank-pattern 'host-(\d+)', or open one of them on its own",
        )
    ranks.setdefault(next(iter(ranks), 0), []).extend(without)


def _keep_one_per_kind(paths: list[Path], formats: dict[Path, str], stats: list[Stat]) -> list[Path]:
    """The traces that are linked: one of the host and one of the device, else one of another format; and metrics."""
    kinds = {path: _FORMAT_SIDES.get(formats[path], formats[path]) for path in paths}
    traces = [kind for kind in kinds.values() if kind != "metrics"]
    wanted = {"host", "device"} & set(traces) or set(traces[:1])
    kept: dict[str, Path] = {}
    metrics = []
    # Our observer's file holds more than the execution trace that is made of it.
    doubled = "observer" in (formats[path] for path in paths)
    for path, kind in kinds.items():
        if kind == "metrics":
            metrics.append(path)
        elif doubled and formats[path] == "execution-trace":
            continue
        elif kind not in wanted:
            stats.append(Stat("job.left_out", "info", 1, f"{path.name}, open it on its own"))
        elif kind in kept:
            example = f"{path.name} is left out, {kept[kind].name} was read"
            stats.append(Stat("job.two_files_for_a_rank", "data_loss", 1, example))
        else:
            kept[kind] = path
    return [*kept.values(), *metrics]


def _suggest_remedy(folder: Path, ignored: Iterable[Path]) -> str:
    """Where traces may be, or what lies in the folder in their place."""
    inside = sorted(path.name for path in _list_files(folder) if path.is_dir())
    if inside:
        return f"try one of its folders: {', '.join(inside[:5])}"
    if (begun := find_unfinished_recording(folder)) is not None:
        return begun
    ends = Counter(_file_ending(path) for path in ignored)
    some = ", ".join(f"{count:,} {end}" for end, count in ends.most_common(_MAX_LISTED_FILES // 2))
    more = ", ..." if len(ends) > _MAX_LISTED_FILES // 2 else ""
    if not some:
        return "it is empty"
    read = "PyTorch's traces, Nsight Systems exports, Chakra .et and others of README's table"
    return f"it holds {some}{more}; read are {read}; `etloom info FILE` tells of one"


def _file_ending(path: Path) -> str:
    """.json.gz, .txt: how a name ends, with its packing."""
    packed = path.suffix in (".gz", ".zst")
    return "".join(path.suffixes[-2:] if packed else path.suffixes[-1:]) or "without an ending"
