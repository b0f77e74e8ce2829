"""Options of a recording: as the user writes them, and as the processes of the job receive them."""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Annotated, Any, TypedDict, get_args

from .rank_environment import rank_from_environment, read_int_variable

VARIABLE = "ETLOOM_COLLECT"
"""The environment variable that carries `RecordingOptions` to the processes of the job."""
_PROFILER_WARMUP_NS = 2_000_000_000


@dataclass(frozen=True)
class CollectOptions:
    """Options of `collect`, as the user writes them.

    Other steps: with `step_name` a step is one record_function of the job whose name matches, as in an inference
    server; with `step_by` "profiler" it is one of the job's own `ProfilerStep#N`; with "500ms" it is a time interval,
    counted from the first nn.Module of any rank. Such a window opens while the job runs, so an operator at its edge
    may be in one trace only.

    Several windows: `every` 1000 with `length` 2 records two steps of every thousand; `on_demand` 2 records two steps
    each time `request_recording(out)` is called or this process receives SIGUSR2, with `ring` also what came before,
    up to `max_bytes`. Each window has its own folder in `out`, step_<first>; the newest `max_windows` are kept.

    The options `shapes`, `stack` and `memory` are for calls without `sources`. `max_bytes` is in bytes, unlike
    --max-size. `all_threads`: also profile threads that Python code starts.
    """

    steps: Annotated[
        str | None,
        "Steps to record, FIRST:END without END: 3:5 records steps 3 and 4; with --ring, 3: records all from 3.  "
        "[default: 3:5]",
    ] = None
    every: Annotated[int | None, "Record a window every N steps, into OUT/step_N."] = None
    length: Annotated[int | None, "Steps per window of --every.  [default: 2]"] = None
    max_windows: Annotated[
        int | None, "Keep only the newest N windows of --every and --on-demand.  [default: 50]"
    ] = None
    step_by: Annotated[
        str | None,
        "How steps are counted: optimizer (calls of the optimizer's step), profiler (the job's own ProfilerStep#N), "
        "or a duration such as 500ms.  [default: optimizer]",
    ] = None
    step_name: Annotated[
        str | None, "Count ranges of record_function whose name matches as steps, instead of --step-by."
    ] = None
    ranks: Annotated[str | None, "Record on these ranks only, such as 0,8-15."] = None
    sources: Annotated[
        str | None,
        "What to record, separated by commas: et, kineto, shapes, memory, stacks, flight-recorder, nsys.  "
        "[default: kineto,et,shapes]",
    ] = None
    shapes: Annotated[
        bool | None, "Without --with: record the shapes of operator inputs.  [default: shapes]"
    ] = None
    stack: Annotated[bool, "Without --with: also record Python stacks."] = False
    memory: Annotated[bool, "Without --with: also record allocations."] = False
    source_lines: Annotated[
        bool | None,
        "With Python stacks: keep the first lines of the job's own functions in them, which reports show.  "
        "[default: source-lines]",
    ] = None
    all_threads: bool = True
    observer: Annotated[
        str,
        "The recorder of the execution trace: native (etloom's, which also records times, at a tenth of the overhead "
        "per operator) or stock (torch's).",
    ] = "native"
    max_bytes: Annotated[
        int | None, "Maximum size of the native observer's file per window.  [default: 4096]"
    ] = None
    ring: Annotated[
        bool,
        "Record from step 3 to the end (or --steps), and overwrite the oldest records at --max-size. Records no "
        "Kineto trace, whose size cannot be limited. With --on-demand: also keep the steps before the trigger.",
    ] = False
    watch: Annotated[
        bool, "Also keep the state of each rank in OUT/.watch, for etloom watch OUT and etloom hangs OUT."
    ] = False
    on_demand: Annotated[
        int | None,
        "Record this number of steps whenever triggered: by etloom collect --trigger OUT, or by SIGUSR2 to this "
        "process.",
    ] = None
    fake_world: Annotated[
        int | None,
        "Run nothing on devices: record --ranks (default: 0) of a job of this size with fake tensors, on any "
        "machine. Each rank runs alone, without torchrun, and records step 1 or --steps.",
    ] = None


class RecordKeywords(TypedDict, total=False):
    """The options of `CollectOptions` that `record` takes as keyword arguments."""

    sources: str | None
    shapes: bool | None
    stack: bool
    memory: bool
    source_lines: bool | None
    all_threads: bool
    observer: str
    max_bytes: int | None
    ring: bool


@dataclass(frozen=True)
class RecordingOptions:
    """Validated options, passed to the processes of the job in an environment variable.

    The window is the steps [first, last); last None: to the end of the job.
    """

    out: str
    scratch: str
    first: int = 0
    last: int | None = None
    shapes: bool = True
    stack: bool = False
    memory: bool = False
    source_lines: bool = False
    all_threads: bool = True
    kineto: bool = True
    et: bool = True
    flight_recorder: bool = False
    nsys: bool = False
    observer: str = "native"
    max_bytes: int | None = None
    ring: bool = False
    watch: bool = False
    ranks: tuple[int, ...] | None = None
    every: int | None = None  # steps from the begin of one window to the begin of the next
    max_windows: int = 50  # of several windows, keep the newest ones
    on_demand: int | None = None  # steps of a window on demand
    step_name: str | None = None  # record_functions whose name matches this regular expression are steps
    step_ns: int | None = None  # steps are time intervals of this length
    job_marks_steps: bool = False  # the job itself marks its steps with ProfilerStep#N
    supervised: bool = False  # a launcher waits for the command and reports the outcome of the recording
    etloom_version: str | None = None
    command: tuple[str, ...] | None = None

    @property
    def step_range(self) -> str:
        return f"{self.first}:{'' if self.last is None else self.last}"

    @property
    def has_several_windows(self) -> bool:
        """True if the recording may consist of several windows, each stored in a separate folder."""
        return self.every is not None or self.on_demand is not None

    @property
    def warmup_steps(self) -> int:
        """Number of steps by which profilers are prepared before a window: 1; for time-based steps, enough for 2 s."""
        return 1 if self.step_ns is None else -(-_PROFILER_WARMUP_NS // self.step_ns)

    def for_window(self, first: int, last: int | None) -> RecordingOptions:
        """Return a copy of the options for the recording window of steps [first, last), with the window's folder."""
        out = f"{self.out}/step_{first}" if self.has_several_windows else self.out
        return replace(self, out=out, first=first, last=last)

    def to_environment(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> RecordingOptions:
        values = json.loads(os.environ[VARIABLE])
        for name in ("command", "ranks"):
            if values[name] is not None:
                values[name] = tuple(values[name])
        return cls(**values)


def new_scratch_name(out: str) -> str:
    """Return the path of a new hidden folder for unfinished files; host, pid and a random part make it unique."""
    return f"{out}/.etloom-{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"


def loaded_version() -> str | None:
    """Return the version of etloom, or None in a process that has loaded only the collector."""
    version = getattr(sys.modules.get("etloom"), "__version__", None)
    return version if isinstance(version, str) else None


# Rules for combinations of options: an option that would have no effect is refused.
#
# Each function raises CollectError, naming the option that would have no effect.

RING_WITHOUT_KINETO = "--ring excludes the Kineto trace, which has no size limit (use --with et)"
_MIN_BYTES = 1 << 20


def check_keywords(function: str, keywords: Iterable[str], known: Collection[str]) -> None:
    """Raise InvalidOption if a keyword is not in `known`, the options of `function`; suggest a similar name."""
    from etloom.core.errors import InvalidOption

    for keyword in keywords:
        if keyword not in known:
            near = difflib.get_close_matches(keyword, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"its options: {', '.join(known)}"
            raise InvalidOption(f"etloom.{function} has no option {keyword!r}", remedy=remedy)


def check_types(values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raise InvalidOption if an option's value does not have the type that `types` (from `get_type_hints`) declares.

    A bool is not accepted as an int.
    """
    for name, value in values.items():
        allowed = get_args(types[name]) or (types[name],)
        if type(value) not in allowed:
            expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
            raise option_error(f"expected {expected}, got {type(value).__name__} {value!r:.60}", name)


def resolve_sources(options: CollectOptions) -> dict[str, Any]:
    """Return the fields of RecordingOptions that select the recorded traces and details, from the user's options.

    These are `sources`, else a Kineto trace and an execution trace with the details of `shapes`, `stack` and `memory`.
    A ring, and steps of the job's own profiler, exclude the Kineto trace.
    """
    fields: dict[str, Any]
    if options.sources is None:
        names = (name for name in SOURCES if name not in ("stacks", "flight-recorder"))
        fields = {name: name in ("kineto", "et") for name in names}
        fields |= {"shapes": options.shapes is not False, "stack": options.stack, "memory": options.memory}
        fields["flight_recorder"] = False
    else:
        is_set = {"shapes": options.shapes is not None, "stack": options.stack, "memory": options.memory}
        for option, value in is_set.items():
            if value:
                raise option_error("cannot be combined with --with", option, "add it to the list of --with")
        fields = parse_sources(options.sources)
    reason = _reason_without_kineto(options)
    if reason and fields["kineto"]:
        if options.sources is not None:
            raise option_error(f"kineto cannot be recorded: {reason}", "sources", "leave out kineto")
        for option in ("stack", "memory"):
            if fields[option]:
                raise option_error(
                    f"requires the Kineto trace, which cannot be recorded: {reason}", option, "leave it out"
                )
        fields["kineto"] = False
    if options.source_lines and not fields["stack"]:
        raise option_error("requires Python stacks", "source_lines", "add stacks to --with")
    fields["source_lines"] = fields["stack"] and options.source_lines is not False
    return fields


def _reason_without_kineto(options: CollectOptions) -> str | None:
    if options.step_by == "profiler":
        return "--step-by profiler leaves Kineto to the job's own torch.profiler, and two sessions crash the process"
    return "--ring excludes the Kineto trace, which has no size limit" if options.ring else None


def check_observer(options: CollectOptions, *, records_et: bool) -> None:
    """Raise InvalidOption if `observer`, `ring` or `max_bytes` is invalid or cannot be combined with other options."""
    if options.observer not in ("native", "stock"):
        raise option_error(
            f"unknown observer {options.observer!r}; expected one of native, stock", "observer"
        )
    if options.max_bytes is not None and options.max_bytes < _MIN_BYTES:
        raise option_error(f"expected at least 1 MiB, got {options.max_bytes} bytes", "max_bytes")
    is_set = {
        "ring": options.ring,
        "max_bytes": options.max_bytes is not None,
        "observer": options.observer == "stock",
    }
    for option, value in is_set.items():
        if value and not records_et:
            raise option_error("requires an execution trace", option, "add et to --with")
        if value and options.observer == "stock" and option != "observer":
            raise option_error(
                "requires the native observer: torch's observer has no size limit",
                option,
                "leave out --observer stock",
            )


def check_windows(options: CollectOptions) -> None:
    """Raise InvalidOption if an option that defines steps or recording windows is invalid or conflicts with another."""
    several = options.every is not None or options.on_demand is not None
    if options.max_windows is not None and options.max_windows < 1:
        raise option_error(f"expected at least 1 window, got {options.max_windows}", "max_windows")
    if options.max_windows is not None and not several:
        raise option_error("requires --every or --on-demand", "max_windows")
    if options.steps is not None and options.on_demand is not None:
        raise option_error("cannot be combined with --on-demand", "steps")
    if options.step_name is not None and options.step_by is not None:
        raise option_error("cannot be combined with --step-name", "step_by")
    if options.step_name is not None:
        try:
            re.compile(options.step_name)
        except re.error as error:
            raise option_error(
                f"invalid regular expression {options.step_name!r}: {error}", "step_name"
            ) from None


# Parsers for options of a recording: steps, ranks, sources, durations, folder names.
#
# Each function raises CollectError, naming the option and the expected form, for a value that it cannot parse.

SOURCES = ("kineto", "et", "memory", "stacks", "shapes", "flight-recorder", "nsys")
_MIN_STEP_NS = 10_000_000
_UNITS_NS = {"ms": 10**6, "s": 10**9, "m": 60 * 10**9}
_DEFAULT_STEPS = "3:5"
_DEFAULT_RING_STEPS = "3:"
_DEFAULT_LENGTH = 2


def parse_steps(steps: str | None) -> tuple[int, int | None]:
    """Parse a range of steps such as "3:5" to (first, last), where `last` is exclusive, or None for the end of the job.

    Args:
        steps: "3:5" for steps 3 and 4, "3:" for all from 3 on, ":5" for the first five, "3" for step 3, None for all.
    """
    if steps is None:
        return 0, None
    match = re.fullmatch(r"\s*(\d*)\s*(:?)\s*(\d*)\s*", steps)
    if match and (match[1] or match[2]):
        first = int(match[1] or 0)
        last = (int(match[3]) if match[3] else None) if match[2] else first + 1
        if last is None or first < last:
            return first, last
    raise option_error(
        f"expected a range of steps, got {steps!r}",
        "steps",
        "write FIRST:LAST as in a slice, for example 3:5 for steps 3 and 4",
    )


def parse_window(
    steps: str | None, every: int | None, length: int | None, on_demand: int | None, ring: bool = False
) -> tuple[int, int | None]:
    """Return the first recording window that the options define, as steps (first, last); `last` is exclusive or None.

    It is `steps`, else, with `every` N and `length` L, the steps from N to N + L, else 3:5. With `ring`, which keeps
    the end of a long window, the default is 3: instead of 3:5.
    """
    for name, number in (("every", every), ("length", length), ("on_demand", on_demand)):
        if number is not None and number < 1:
            raise option_error(f"expected at least 1 step, got {number}", name)
    if every is None:
        if length is not None:
            raise option_error("requires --every", "length", "write --every N --for M, or --steps FIRST:LAST")
        default = _DEFAULT_RING_STEPS if ring and on_demand is None else _DEFAULT_STEPS
        return parse_steps(steps or default)
    if on_demand is not None:
        raise option_error("cannot be combined with --on-demand", "every")
    first, last = parse_steps(steps) if steps else (every, every + (length or _DEFAULT_LENGTH))
    if steps and length is not None:
        raise option_error("cannot be combined with --steps", "length")
    if last is None:
        raise option_error(f"expected a last step with --every, got {steps!r}", "steps", "write FIRST:LAST")
    if last - first >= every:
        raise option_error(
            f"windows of {last - first} steps every {every} steps overlap",
            "every",
            "choose shorter windows or a larger --every",
        )
    return first, last


def parse_ranks(ranks: str | None) -> tuple[int, ...] | None:
    """Parse ranks such as "0,8-15" (rank 0 and ranks 8 to 15) into ascending order; None means all ranks."""
    if ranks is None:
        return None
    numbers: set[int] = set()
    for part in ranks.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise option_error(
                f"expected rank numbers and ranges, got {ranks!r}", "ranks", "for example 0,8-15"
            )
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(numbers))


def parse_sources(sources: str) -> dict[str, bool]:
    """Parse a list of trace sources and details, such as "kineto,et,shapes", into fields of RecordingOptions."""
    names = [part.strip() for part in sources.split(",")]
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        raise option_error(f"unknown source {unknown[0]!r}; expected one of {', '.join(SOURCES)}", "sources")
    if "nsys" in names and "kineto" in names:
        raise option_error(
            "nsys and kineto are mutually exclusive: both use CUPTI",
            "sources",
            "record them one after the other",
        )
    if not {"nsys", "kineto", "et", "flight-recorder"} & set(names):
        raise option_error(f"{sources} only adds details to a trace", "sources", "add kineto")
    if {"stacks", "memory"} & set(names) and "kineto" not in names:
        raise option_error("stacks and memory require the Kineto trace", "sources", "add kineto")
    fields = {"stacks": "stack", "flight-recorder": "flight_recorder"}
    return {fields.get(name, name): name in names for name in SOURCES}


def parse_step_by(step_by: str | None) -> dict[str, Any]:
    """Parse what delimits steps, "optimizer", "profiler" or a duration ("2s"), into fields of RecordingOptions."""
    if step_by in (None, "optimizer"):
        return {}
    if step_by == "profiler":
        # The job has its own Kineto session, and a second one would crash the process.
        return {"step_name": r"^ProfilerStep#\d+$", "job_marks_steps": True, "kineto": False}
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m)\s*", step_by or "")
    if match is None:
        raise option_error(
            f"expected optimizer, profiler or a duration, got {step_by!r}", "step_by", "for example 500ms"
        )
    step_ns = round(float(match[1]) * _UNITS_NS[match[2]])
    if step_ns < _MIN_STEP_NS:
        raise option_error(f"expected at least 10ms, got {step_by}", "step_by")
    return {"step_ns": step_ns}


def expand_folder_name(out: str) -> str:
    """Replace {host}, {rank} and {time} in a folder name, so that several hosts can write to different folders.

    A leading ~ is the home folder.
    """
    rank = rank_from_environment()
    values = {
        "host": socket.gethostname(),
        "time": datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ"),
        "rank": read_int_variable("SLURM_PROCID") if rank is None else rank,
    }

    def expand(match: re.Match[str]) -> str:
        name = match[1]
        if values.get(name) is None:
            reason = "the environment has no rank" if name in values else "unknown placeholder"
            raise option_error(
                f"{reason}: {{{name}}} in {out}",
                "out",
                "use {host}, {time}, or {rank} with a launcher that sets RANK",
            )
        return str(values[name])

    return os.path.expanduser(re.sub(r"\{(\w*)\}", expand, out))  # noqa: PTH111


def local_folder(out: str) -> str:
    """Convert a user's folder name to an absolute path, with placeholders replaced. Raises CollectError for a URL."""
    if re.match(r"[a-z][a-z0-9+.-]+:/", out):
        raise option_error(
            f"expected a local folder, got {out.partition('://')[0]}://",
            "out",
            "etloom collect --out uploads to URLs",
        )
    return os.path.abspath(expand_folder_name(out))  # noqa: PTH100


def option_error(message: str, option: str, remedy: str | None = None) -> Exception:
    """Return the error for a wrong value of a parameter of `collect` or `record`."""
    from etloom.core.errors import InvalidOption

    return InvalidOption(message, option=option, remedy=remedy)
