"""Rules for combinations of options: an option that would have no effect is refused.

Each function raises CollectError, naming the option that would have no effect.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, get_args

from .option_parsing import SOURCES, option_error, parse_sources
from .options import CollectOptions

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
