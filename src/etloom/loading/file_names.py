"""Parse names of trace files: rank, stage or process of an inference engine, and graph captures."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from etloom.core.errors import InvalidValue

# kineto_trace_3.json, torch_et_3.json.gz, _dump_3, kineto_rank3_x.json, rank-3.Apr.1102.pt.trace.json, ...
_RANK_NAME_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?:^|[._-])(?:kineto(?:_trace)?|(?:torch|pytorch|chakra)_et|et|observer|trace|nsys|fr_trace|flight_recorder|dump)_(\d+)(?:\.|$)",
        r"(?:^|[._\[-])(?<!local[._-])rank[-_]?(\d+)(?!\d)",
        r"(?:^|[._-])worker[-_]?(\d+)(?!\d)",
        r"^\w+\.(\d+)\.et(?:\.gz)?$",
        r"^nccl_trace_rank_.+_(\d+)$",
        r"^ascend_pytorch_profiler_(\d+)\.db$",
        # Chakra's collection scripts: host.3.json, device.3.json, linked.3.json, chakra_host_et.3.json.gz
        r"(?:^|[._-])(?:host|device|linked|kineto|et)[._-](\d+)\.json(?:\.gz|\.zst)?$",
    )
)
TRACE_NAME = re.compile(
    r"(?:^|[._-])(?:kineto(?:_trace)?|(?:torch|pytorch|chakra)_et|fr_trace)_(?:rank)?\d+[^/]*\.json(?:\.gz|\.zst)?$"
    r"|\.pt\.trace\.json(?:\.gz|\.zst)?$"
)
"""Names that only traces have; "rank" alone may be in the name of any file."""
CAPTURE_NAME = re.compile(r"(?i)(?:^|[._-])capture(?:[._-]|$)[^/]*\.json(?:\.gz|\.zst)?$")
"""Names of traces of the capture of device graphs: graph_capture_rank_0.json.gz, capture_trace_rank_0.json."""
CAPTURE_FOLDER = "capture_traces"
_STAGE = re.compile(r"(?i)(?<![a-z])(?:decode|extend|prefill|mixed|target_verify|idle)(?![a-z])")
"""Stage of an engine in the name of a trace; SGLang writes one file per stage of a rank."""
_COMPANION = re.compile(r"profiler_info_(\d{1,9})\.json")
"""Name of the file in which torch_npu states the rank of a folder of traces."""
OTHER_PROCESS = re.compile(
    r"(?i)(?<![a-z])(async_llm|(?:de)?tokenizer(?:_manager)?|scheduler|engine_?core|api_?server|frontend)(?![a-z])"
)
"""Process of an engine that is not a rank, in the name of its trace."""
_PATTERN_EXAMPLE = r"for example 'host-(\d+)'"


def find_rank_in_name(path: Path, rank_pattern: str | None = None) -> int | None:
    """Return the rank in a file name, by the regular expression ``rank_pattern`` or else by common naming schemes."""
    return match_rank(path, choose_patterns(rank_pattern))


def choose_patterns(rank_pattern: str | None) -> tuple[re.Pattern[str], ...]:
    """Return the regular expressions that extract a rank from a file name.

    ``rank_pattern`` only, or if it is None those of common naming schemes.
    """
    return _RANK_NAME_PATTERNS if rank_pattern is None else (_compile_rank_pattern(rank_pattern),)


def _compile_rank_pattern(text: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise InvalidValue(
            f"{text!r} is not a regular expression: {error}", remedy=_PATTERN_EXAMPLE, option="rank_pattern"
        ) from None
    if pattern.groups < 1:
        raise InvalidValue(
            f"{text!r} has no group for the rank", remedy=_PATTERN_EXAMPLE, option="rank_pattern"
        )
    return pattern


def match_rank(path: Path | str, patterns: Iterable[re.Pattern[str]]) -> int | None:
    """Return the rank in a file name by the first matching pattern; numbers of more than nine digits are ignored.

    Those are times.
    """
    for pattern in patterns:
        match = pattern.search(path if isinstance(path, str) else path.name)
        if match is None or match[1] is None or len(match[1]) > 9:
            continue
        if not match[1].isdecimal():
            raise InvalidValue(
                f"the group of {pattern.pattern!r} matches {match[1]!r} in {match.string}; expected a number",
                remedy=_PATTERN_EXAMPLE,
                option="rank_pattern",
            )
        return int(match[1])
    return None


def match_folder_rank(path: str, patterns: Iterable[re.Pattern[str]]) -> int | None:
    """Return the rank in the nearest part of a path that has one, else in the whole path."""
    patterns = tuple(patterns)
    for name in reversed(Path(path).parts):
        if (rank := match_rank(Path(name), patterns)) is not None:
            return rank
    return match_rank(path, patterns)


def find_companion_rank(path: Path) -> int | None:
    """Return the rank in the name of the only profiler_info_N.json in a trace's folder or the one above, else None."""
    for folder in (path.parent, path.parent.parent):
        try:
            ranks = {int(match[1]) for file in folder.iterdir() if (match := _COMPANION.fullmatch(file.name))}
        except OSError:
            return None
        if ranks:
            return ranks.pop() if len(ranks) == 1 else None
    return None


def list_ranked_files(folder: Path, rank_pattern: str | None = None) -> list[Path]:
    """Return a single file for each rank that occurs in the file names of a folder; [] if the folder is unreadable."""
    files: dict[int, Path] = {}
    try:
        patterns = choose_patterns(rank_pattern)
        for path in folder.iterdir():
            rank = None if path.name.startswith(".") else match_rank(path, patterns)
            if rank is not None:
                files.setdefault(rank, path)
    except (OSError, InvalidValue):
        return []
    return list(files.values())


def mask_stage(name: str) -> str:
    """Return a name with ``*`` in place of the stage of an engine in it."""
    return _STAGE.sub("*", name)


def are_parts(path: Path, other: Path) -> bool:
    """Return whether the names of two traces differ only in the engine's stage (such as prefill and decode)."""
    names = [mask_stage(file.name) for file in (path, other)]
    return names[0] == names[1] and "*" in names[0]
