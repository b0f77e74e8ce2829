"""Chooses the observer of a recording: the native one if it can be built here, else torch's."""

from __future__ import annotations

from collections.abc import Callable

from ..options import CollectOptions


def choose_observer(
    options: CollectOptions, *, records_et: bool, on_build: Callable[[], None] | None = None
) -> tuple[str, list[str]]:
    """Return the observer to use, "native" or "stock", and messages about what it cannot do.

    Args:
        options: The requested observer, and its limits.
        records_et: Whether an execution trace is recorded; without one nothing is built.
        on_build: Called before the native observer is compiled.

    Raises:
        CollectError: A ring is requested, and the native observer cannot be built.
    """
    from etloom.core.errors import CollectError

    if not records_et:
        return options.observer, []
    observer, warnings = build_if_native(options.observer, on_build)
    if options.ring and observer != "native":
        raise CollectError(
            f"--ring requires the native observer: {warnings[0]}", remedy="leave out --ring (ring=True)"
        )
    if options.max_bytes is not None and observer != "native":
        warnings.append("--max-size has no effect on torch's observer")
    return observer, warnings


def build_if_native(requested: str, on_build: Callable[[], None] | None = None) -> tuple[str, list[str]]:
    """Build the native observer if it is requested; return the observer to use, and messages if it is another one."""
    if requested == "stock":
        return requested, []
    from . import BuildError, build_library, find_library

    try:
        if find_library() is None and on_build is not None:
            on_build()
        build_library()
    except ImportError:
        # No torch here. The processes of the job check whether the native observer was built for their torch.
        return requested, []
    except BuildError as error:
        return "stock", [f"the native observer cannot be built, torch's observer is used instead: {error}"]
    return requested, []
