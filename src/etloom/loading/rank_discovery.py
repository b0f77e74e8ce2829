"""Discover the traces in a folder: which files are traces, and to which rank each belongs."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from etloom.core import registry
from etloom.core.errors import EtloomError, ReadError
from etloom.core.schema import Stat
from etloom.formats import UNKNOWN_FORMAT, detect_format, kineto
from etloom.formats.kineto import unitrace
from etloom.formats.tables.meta_checks import is_rank
from etloom.loading.file_names import (
    CAPTURE_FOLDER,
    CAPTURE_NAME,
    OTHER_PROCESS,
    TRACE_NAME,
    are_parts,
    choose_patterns,
    find_companion_rank,
    find_rank_in_name,
    mask_stage,
    match_folder_rank,
    match_rank,
)
from etloom.loading.folder_contents import (
    find_captures,
    find_converted_file,
    holds_traces,
    list_files,
    list_tree,
    prefer_salvaged,
    read_first_card,
    read_run_json,
    suggest_remedy,
)
from etloom.loading.rank_inference import InferredRanks, infer_ranks, mask_recording, natural_key

_MAX_NAMED_FILES = 12
"""Files that a message names."""
_MAX_NAMED_RANKS = 8
_FORMAT_SIDES = {
    "execution-trace": "host",
    "observer": "host",
    "kineto": "device",
    "nsys": "device",
    "rocprof": "device",
    "ascend": "device",
    "memory-snapshot": "memory",
}
"""Format -> role of its file. A rank has at most one file per role; files of other formats are read alone."""


@dataclass(frozen=True)
class DiscoveredRun:
    """The traces discovered in a folder, by rank, and what else the folder contains.

    Attributes:
        ranks: rank -> its files: host and device trace, and files of metrics.
        stats: rows of stats about the whole job.
        rank_stats: rank -> rows of stats about it.
        ignored: files that are not traces.
        card: CCL-Bench's workload card next to the traces.
        run: run.json of `etloom collect`: command, versions, steps.
        captures: rank -> traces of the capture of its device graphs.
        processes: name -> trace of a process that is not a rank, such as a tokenizer.
    """

    ranks: dict[int, list[Path]]
    stats: list[Stat] = field(default_factory=list)
    rank_stats: dict[int, list[Stat]] = field(default_factory=dict)
    ignored: list[Path] = field(default_factory=list)
    card: dict[str, Any] | None = None
    run: dict[str, Any] | None = None
    captures: dict[int, list[Path]] = field(default_factory=dict)
    processes: dict[str, Path] = field(default_factory=dict)


def discover_ranks(folder: str | PathLike[str], rank_pattern: str | None = None) -> DiscoveredRun:
    """Find the trace files in a folder, else below it, and determine the rank of each.

    The rank is taken from the name, by ``rank_pattern`` or the usual names of the field; else from the content, from
    profiler_info_N.json, or from the numbers in which the paths differ. Traces without any rank belong to rank 0 if
    there is one of each format. Metrics without a rank belong to the rank of their folder, else to the lowest one.

    Args:
        folder: the folder; if it has no traces, the folders below it hold the ranks of one run.
        rank_pattern: a regular expression for file names, or paths below the folder, whose first group is the rank.

    Raises:
        ReadError: the folder has no traces, several whose rank is unknown, or several runs below it.
        EtloomError: the pattern is not a regular expression with a group, or the group does not match a number.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ReadError("no such folder", where=folder, remedy="check the path")
    discovery = _Discovery(folder, rank_pattern)
    discovery.detect_formats()
    discovery.drop_converted_metrics()
    discovery.drop_copies_of_profiles()
    discovery.drop_job_reports()
    discovery.check_has_traces()
    discovery.separate_captures()
    discovery.assign_ranks()
    discovery.add_metrics()
    discovery.select_one_per_side()
    discovery.note_unreadable_files()
    discovery.note_salvaged_files()
    discovery.note_missing_ranks()
    discovery.note_other_runs()
    return discovery.finish()


class _Discovery:
    """Intermediate results of the discovery of traces in a folder; `discover_ranks` calls the methods in order."""

    def __init__(self, folder: Path, rank_pattern: str | None) -> None:
        self.folder = folder
        self.searches_content = rank_pattern is None
        self.patterns = choose_patterns(rank_pattern)
        self.is_tree = False
        self.formats: dict[Path, str] = {}
        self.ranks: dict[int, list[Path]] = {}
        self.ignored: list[Path] = []
        self.unreadable: list[EtloomError] = []
        self.salvaged: dict[Path, Stat] = {}
        self.captures: list[Path] = []
        self.processes: dict[str, Path] = {}
        self.stats: defaultdict[int | None, list[Stat]] = defaultdict(list)
        """Rank, None for the whole job -> rows of stats."""

    def detect_formats(self) -> None:
        """Detect the format of each file in the folder; if none is a trace, of each file below the folder."""
        self._detect_files(list_files(self.folder))
        if not self.formats and not self.unreadable:
            self.is_tree = True
            self._detect_files(list_tree(self.folder))

    def _detect_files(self, files: Sequence[Path]) -> None:
        """Detect the format of files; a file named like a trace whose format is unknown counts as unreadable."""
        paths, self.salvaged = prefer_salvaged(files)
        for path in paths:
            if not (path.is_file() or path.is_dir()):  # opening a pipe would block; a link may be broken
                self.ignored.append(path)
                continue
            try:
                name = detect_format(path)
            except EtloomError as error:
                self.unreadable.append(error)
                continue
            if name is not None and not (path.is_file() and name == "parquet"):
                is_metrics = name == "parquet" and find_converted_file(path) is not None
                self.formats[path] = "metrics" if is_metrics else name
            elif path.is_file() and name is None and TRACE_NAME.search(path.name):
                problem = UNKNOWN_FORMAT if path.stat().st_size else "the file is empty"
                self.unreadable.append(ReadError(problem, where=path))
            elif path.is_file():
                self.ignored.append(path)

    def drop_converted_metrics(self) -> None:
        """Ignore metrics files that were converted to a folder next to them, since their samples would count twice."""
        metrics = self._list_metrics()
        converted = {
            path.with_name(name): path for path in metrics if (name := find_converted_file(path)) is not None
        }
        for path in metrics:
            if path in converted:
                del self.formats[path]
                example = (
                    f"{converted[path].name} is read instead of {path.name}, from which it was converted"
                )
                self.stats[None].append(Stat("job.converted_file_used", "info", 1, example))

    def drop_copies_of_profiles(self) -> None:
        """Ignore the .trace.json that XLA's profiler writes next to each .xplane.pb; it has fewer events."""
        profiles = {path.name.partition(".")[0] for path, name in self.formats.items() if name == "xplane"}
        copies = [
            path
            for path, name in self.formats.items()
            if name == "kineto" and ".trace.json" in path.name and path.name.partition(".")[0] in profiles
        ]
        for path in copies:
            del self.formats[path]
            example = f"{path.name}, the .xplane.pb next to it contains more"
            self.stats[None].append(Stat("job.skipped_file", "info", 1, example))

    def drop_job_reports(self) -> None:
        """Ignore reports of NCCL's RAS next to traces: they are of the whole job, not of a rank."""
        reports = [path for path, name in self.formats.items() if name == "nccl-ras"]
        for path in reports if len(reports) < len(self.formats) else reports[:-1]:
            del self.formats[path]
            example = f"{path.name} is a report of NCCL's RAS; etloom hangs reads it"
            self.stats[None].append(Stat("job.skipped_file", "info", 1, example))

    def check_has_traces(self) -> None:
        """Raise the error of the first unreadable file if no file is readable, or ReadError if there are no traces."""
        if self.formats:
            return
        if self.unreadable:
            raise self.unreadable[0]
        raise ReadError(
            "no traces found", where=self.folder, remedy=suggest_remedy(self.folder, self.ignored)
        )

    def separate_captures(self) -> None:
        """Separate traces of CUDA graph captures from the traces of ranks, unless all Kineto traces are of captures."""
        captures = [
            path for path, name in self.formats.items() if name == "kineto" and CAPTURE_NAME.search(path.name)
        ]
        others = [path for path, name in self.formats.items() if name == "kineto" and path not in captures]
        if others:
            self.formats = {path: name for path, name in self.formats.items() if path not in captures}
            self.captures = [*captures, *find_captures(self.folder)]

    def assign_ranks(self) -> None:
        """Assign each trace to the rank that it states or its path implies; else to the run's only rank."""
        stated = self._drop_repeated({path: self._match_rank(path) for path in self.formats})
        for path, format in list(self.formats.items()):
            if stated[path] is None and self.searches_content:
                try:
                    rank = _find_rank_in_content(path, format)
                except EtloomError as error:
                    self.unreadable.append(error)
                    del stated[path]
                    continue
                stated[path] = find_companion_rank(path) if rank is None else rank
        if self.is_tree and self.searches_content:
            parents = {path: path.parent for path, rank in stated.items() if rank is None}
            by_folder = {
                path: match_folder_rank(self._relative(parents[path]), self.patterns) for path in parents
            }
            stated |= self._drop_repeated(by_folder)
        self._check_one_run(stated)
        for path, rank in stated.items():
            if rank is not None:
                self.ranks.setdefault(rank, []).append(path)
        unranked = [path for path, rank in stated.items() if rank is None and self.formats[path] != "metrics"]
        unranked = self._separate_other_processes(self._skip_merged(unranked))
        if unranked:
            self._place_unranked(unranked)
        if not self.ranks and self.unreadable:
            raise self.unreadable[0]
        if not self.ranks:
            remedy = suggest_remedy(self.folder, self.ignored)
            raise ReadError("contains metrics, but no traces", where=self.folder, remedy=remedy)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _match_rank(self, path: Path) -> int | None:
        rank = match_rank(path, self.patterns)
        if rank is None and self.is_tree and not self.searches_content:
            return match_folder_rank(self._relative(path), self.patterns)
        return rank

    def _drop_repeated(self, ranks: Mapping[Path, int | None]) -> dict[Path, int | None]:
        """Return the rank in each file name; None for a format in which ranks repeat: they count within a host."""
        names = dict(ranks)
        if not self.is_tree or not self.searches_content:
            return names
        for format in set(self.formats.values()) - {"metrics"}:
            paths = [
                path for path, rank in ranks.items() if rank is not None and self.formats[path] == format
            ]
            if len({ranks[path] for path in paths}) < len(paths):
                names |= dict.fromkeys(paths)
        return names

    def _check_one_run(self, ranks: Mapping[Path, int | None]) -> None:
        """Raise ReadError if two files of a tree are recordings of one process, with the command for each run."""
        groups: defaultdict[tuple[str, int | str], list[Path]] = defaultdict(list)
        for path, rank in ranks.items():
            process = mask_recording(self._relative(path)) if rank is None else rank
            if self.formats[path] != "metrics" and (self.is_tree or rank is None):
                groups[self.formats[path], process].append(path)
        repeated = [paths for paths in groups.values() if len(paths) > 1 and not are_parts(*paths[:2])]
        if not repeated:
            return
        split = [path.relative_to(self.folder).parts for path in repeated[0][:2]]
        depth = next(place for place, pair in enumerate(zip(*split, strict=False)) if len(set(pair)) > 1)
        self._raise_several_runs(depth)

    def _raise_several_runs(self, depth: int) -> NoReturn:
        runs = {
            self.folder.joinpath(*path.relative_to(self.folder).parts[: depth + 1]): None
            for path in self.formats
        }
        ordered = sorted(runs, key=lambda path: natural_key(self._relative(path)))
        commands = "; ".join(f"etloom info {path}" for path in ordered[:_MAX_NAMED_FILES])
        more = f"; and {len(runs) - _MAX_NAMED_FILES} more" if len(runs) > _MAX_NAMED_FILES else ""
        raise ReadError(
            f"contains {len(runs)} recordings of the same processes, which are several runs",
            where=self.folder,
            remedy=f"open one: {commands}{more}",
        )

    def _skip_merged(self, unranked: list[Path]) -> list[Path]:
        """Return the files without exports of several ranks; all files if there are no other traces.

        An export for a viewer, next to the traces that it was made from, would be read as one more rank.
        """
        merged = [path for path in unranked if self.formats[path] == "kineto" and kineto.is_merged(path)]
        if not self.ranks and len(merged) == len(unranked):
            return unranked
        for path in merged:
            example = f"{path.name} is an export of several ranks for a viewer"
            self.stats[None].append(Stat("job.skipped_file", "info", 1, example))
        return [path for path in unranked if path not in merged]

    def _separate_other_processes(self, unranked: list[Path]) -> list[Path]:
        """Separate traces of processes that are not ranks (such as a tokenizer); return the remaining traces.

        If there are no other traces, all of them remain.
        """
        names = {
            path: match[1] for path in unranked if (match := OTHER_PROCESS.search(path.name)) is not None
        }
        rest = [path for path in unranked if path not in names]
        if not self.ranks and not rest:
            return unranked
        for path, name in names.items():
            self.processes[path.name.partition(".json")[0] if name in self.processes else name] = path
            example = f"{path.name} ({name}); open it separately"
            self.stats[None].append(Stat("job.other_process", "info", 1, example))
        return rest

    def _place_unranked(self, unranked: list[Path]) -> None:
        """Assign traces of unknown rank to the only rank if their formats differ; number XLA profiles, a file per host.

        Raises:
            ReadError: the ranks are ambiguous.
        """
        formats = [self._name_recorder(path) for path in unranked]
        unranked = sorted(unranked, key=lambda path: natural_key(mask_recording(self._relative(path))))
        if not self.ranks and set(formats) == {"xplane"}:  # one per host; each device is a rank
            self.ranks.update((host, [path]) for host, path in enumerate(unranked))
            return
        unranked = self._place_by_folder(unranked) if self.ranks and self.is_tree else unranked
        if len(self.ranks) <= 1 and len(formats) == len(set(formats)):
            self.ranks.setdefault(next(iter(self.ranks), 0), []).extend(unranked)
            return
        if not unranked or self._place_by_path(unranked):
            return
        self._check_one_run({path: self._match_rank(path) for path in unranked})
        names = ", ".join(map(self._relative, unranked[:_MAX_NAMED_FILES]))
        more = f" and {len(unranked) - _MAX_NAMED_FILES} more" if len(unranked) > _MAX_NAMED_FILES else ""
        placed = [f"{self._relative(path)} ({rank})" for rank, paths in self.ranks.items() for path in paths]
        others = f"; others have a rank: {', '.join(placed[:_MAX_NAMED_FILES])}" if placed else ""
        others += ", ..." if len(placed) > _MAX_NAMED_FILES else ""
        raise ReadError(
            f"the rank of {len(unranked)} traces is unknown: {names}{more}{others}",
            where=self.folder,
            remedy=r"specify it, for example --rank-pattern 'host-(\d+)', or open one of the files separately",
        )

    def _place_by_folder(self, unranked: Sequence[Path]) -> list[Path]:
        """Assign traces to the only rank whose traces are in their folder; return the remaining traces."""
        rest: list[Path] = []
        for path in unranked:
            ranks = [
                rank
                for rank, paths in self.ranks.items()
                if any(path.parent == other.parent for other in paths)
            ]
            (self.ranks[ranks[0]] if len(ranks) == 1 else rest).append(path)
        return rest

    def _place_by_path(self, unranked: Sequence[Path]) -> bool:
        """Assign traces to ranks by the numbers in their paths; return False if these are ambiguous."""
        if not self.searches_content:
            return False
        inferred: dict[str, tuple[list[Path], InferredRanks]] = {}
        placed = {self.formats[path] for paths in self.ranks.values() for path in paths}
        for format in {self.formats[path] for path in unranked}:
            paths = [path for path in unranked if self.formats[path] == format]
            texts = [mask_stage(mask_recording(self._relative(path))) for path in paths]
            processes = dict(zip(reversed(texts), reversed(paths), strict=True))
            names = list(dict.fromkeys(texts))

            def find_device(
                number: int, names: Sequence[str] = names, processes: Mapping[str, Path] = processes
            ) -> int | None:
                path = processes[names[number]]
                return kineto.find_device(path) if self.formats[path] == "kineto" else None

            ranks = infer_ranks(names, find_device)
            if ranks is None or format in placed:
                return False
            of_names = dict(zip(names, ranks.ranks, strict=True))
            inferred[format] = (paths, InferredRanks(tuple(of_names[text] for text in texts), ranks.source))
        for paths, ranks in inferred.values():
            for path, rank in zip(paths, ranks.ranks, strict=True):
                self.ranks.setdefault(rank, []).append(path)
            first = f"{self._relative(paths[0])} is rank {ranks.ranks[0]}"
            example = f"the ranks of {len(paths)} traces are inferred from {ranks.source}: {first}"
            self.stats[None].append(Stat("job.ranks_inferred", "info", len(paths), example))
        return True

    def add_metrics(self) -> None:
        """Assign metrics files without a rank to the rank of their folder in a tree, else to the lowest rank."""
        placed = {path for paths in self.ranks.values() for path in paths}
        metrics = [path for path in self._list_metrics() if path not in placed]
        self.ranks[min(self.ranks)] += self._place_by_folder(metrics) if self.is_tree else metrics

    def select_one_per_side(self) -> None:
        """Select the files to read per rank: a host and a device trace (or a trace of another kind), and metrics."""
        for rank, paths in sorted(self.ranks.items()):
            self.ranks[rank] = self._select_files(paths, self.stats[rank])

    def _select_files(self, paths: list[Path], stats: list[Stat]) -> list[Path]:
        sides = {path: _FORMAT_SIDES.get(self.formats[path], self.formats[path]) for path in paths}
        traces = [side for side in sides.values() if side != "metrics"]
        selected = {"host", "device"} & set(traces)
        selected = selected | ({"memory"} & set(traces)) if selected else set(traces[:1])
        # The observer's file contains more than the execution trace that is made from it.
        has_observer = "observer" in (self.formats[path] for path in paths)
        by_side: dict[str, Path] = {}
        metrics, parts = [], []
        for path, side in sides.items():
            if side == "metrics":
                metrics.append(path)
            elif has_observer and self.formats[path] == "execution-trace":
                continue
            elif side not in selected:
                stats.append(
                    Stat(
                        "job.skipped_file",
                        "info",
                        1,
                        f"{path.name} is not part of the run: open it separately",
                    )
                )
            elif side in by_side and (are_parts(path, by_side[side]) or self._differ(path, by_side[side])):
                parts.append(path)
            elif side in by_side:
                example = f"{path.name} is ignored, {by_side[side].name} was read"
                stats.append(Stat("job.duplicate_rank_files", "data_loss", 1, example))
            else:
                by_side[side] = path
        return [*by_side.values(), *parts, *metrics]

    def _name_recorder(self, path: Path) -> str:
        """Return what tells the recordings of one process by different profilers apart."""
        return (
            unitrace.RECORDER
            if self.formats[path] == "kineto" and kineto.is_of_unitrace(path)
            else self.formats[path]
        )

    def _differ(self, path: Path, other: Path) -> bool:
        """Return whether different profilers recorded two files of the device, which loading joins by their times."""
        is_device = all(_FORMAT_SIDES.get(self.formats[file]) == "device" for file in (path, other))
        return is_device and self._name_recorder(path) != self._name_recorder(other)

    def note_unreadable_files(self) -> None:
        """Add a row to stats for each file that cannot be read."""
        for error in self.unreadable:
            rank = match_rank(Path(error.where or ""), self.patterns)
            self.stats[rank].append(Stat("job.unreadable_file", "error", 1, str(error)))

    def note_salvaged_files(self) -> None:
        """Add a row to stats for each salvaged copy that is read instead of a damaged file."""
        rank_by_path = {path: rank for rank, paths in self.ranks.items() for path in paths}
        for path, row in self.salvaged.items():
            self.stats[rank_by_path.get(path)].append(row)

    def note_missing_ranks(self) -> None:
        """Add to stats the number of ranks without a trace below the highest rank.

        It is not an error: the number in a name may mean something else.
        """
        missing = max(self.ranks) + 1 - len(self.ranks)
        if missing:
            gaps = (rank for rank in itertools.count() if rank not in self.ranks)
            first = ", ".join(map(str, itertools.islice(gaps, min(missing, _MAX_NAMED_RANKS))))
            more = ", ..." if missing > _MAX_NAMED_RANKS else ""
            self.stats[None].append(
                Stat("job.missing_ranks", "info", missing, f"no trace of rank {first}{more}")
            )

    def note_other_runs(self) -> None:
        """Add to stats the folders next to the traces that contain traces too, which are not read."""
        others = [
            path
            for path in list_files(self.folder)
            if path not in self.formats and path.name != CAPTURE_FOLDER and holds_traces(path)
        ]
        if others and not self.is_tree:
            selected = ", ".join(path.name for path in itertools.islice(self.formats, _MAX_NAMED_FILES // 4))
            names = ", ".join(path.name for path in others[: _MAX_NAMED_FILES // 2])
            more = ", ..." if len(others) > _MAX_NAMED_FILES // 2 else ""
            example = f"{selected} is read; traces in the folders {names}{more} are not"
            self.stats[None].append(Stat("job.other_runs", "info", len(others), example))

    def finish(self) -> DiscoveredRun:
        """Read the folder's workload card and run.json; return them with each rank's traces as a `DiscoveredRun`."""
        card = read_first_card(self.folder, self.stats[None])
        run, losses = read_run_json(self.folder, self.stats[None])
        for rank, row in losses.items():
            self.stats[rank].append(row)
        return DiscoveredRun(
            dict(sorted(self.ranks.items())),
            self.stats[None],
            {rank: rows for rank, rows in self.stats.items() if rank is not None and rows},
            self.ignored,
            card,
            run,
            self._assign_captures(),
            self.processes,
        )

    def _assign_captures(self) -> dict[int, list[Path]]:
        """Return each rank's traces of CUDA graph captures: files with the rank's number, or none, in their names."""
        numbers = {path: find_rank_in_name(path) for path in self.captures}
        captures = {
            rank: [path for path, number in numbers.items() if number in (None, rank)] for rank in self.ranks
        }
        return {rank: paths for rank, paths in captures.items() if paths}

    def _list_metrics(self) -> list[Path]:
        return [path for path, format in self.formats.items() if format == "metrics"]


def _find_rank_in_content(path: Path, format: str) -> int | None:
    """Return the rank stated in a file's contents, by its reader's ``find_rank``; None if no rank is stated."""
    find_rank = getattr(registry.get("readers", format), "find_rank", None)
    rank = None if find_rank is None else find_rank(path)
    return rank if is_rank(rank) else None
