"""Chooses the observer that records the execution trace: etloom's native observer if it can be built, else torch's."""

from __future__ import annotations

from collections.abc import Callable

from ..options import CollectOptions


def choose_observer(
    options: CollectOptions,
    *,
    records_et: bool,
    needs_gate: bool = False,
    on_build: Callable[[], None] | None = None,
) -> tuple[str, list[str]]:
    """Return the name of the observer to use, "native" (etloom's) or "stock" (torch's), and warnings for the user.

    Args:
        options: The requested observer, and its limits.
        records_et: Whether an execution trace is recorded; without one nothing is built, unless:
        needs_gate: Whether torch's profiler starts and stops in the middle of operators, which only the native
            library makes safe (profiler_gate.py).
        on_build: Called before the native observer is compiled.

    Raises:
        CollectError: A ring or the gate is needed, and the native observer cannot be built.
    """
    from etloom.core.errors import CollectError

    if not (records_et or needs_gate):
        return options.observer, []
    observer, warnings = build_if_native(options.observer, on_build)
    if needs_gate and observer != "native":
        reason = f": {warnings[0]}" if warnings else ", not --observer stock"
        raise CollectError(
            f"--step-by TIME requires the native observer{reason}",
            remedy="count steps in another way, for example with --step-name, or leave out Kineto (--with et)",
        )
    if options.ring and observer != "native":
        raise CollectError(
            f"--ring requires the native observer: {warnings[0]}", remedy="leave out --ring (ring=True)"
        )
    if options.max_bytes is not None and observer != "native":
        warnings.append("--max-size has no effect on torch's observer")
    return observer, warnings


def build_if_native(requested: str, on_build: Callable[[], None] | None = None) -> tuple[str, list[str]]:
    """Build the native observer if it is requested; return the observer's name, and a message if the build failed."""
    if requested == "stock":
        return requested, []
    from . import BuildError, build_library, find_failure, find_library

    try:
        if on_build is not None and find_library() is None and find_failure() is None:
            on_build()
        build_library()
    except ImportError:
        # No torch here. The processes of the job check whether the native observer was built for their torch.
        return requested, []
    except BuildError as error:
        return "stock", [f"the native observer cannot be built, torch's observer is used instead: {error}"]
    return requested, []
