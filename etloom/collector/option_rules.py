"""What the options of a recording mean together: a combination in which one of them would do nothing is refused.

Each function raises CollectError, of the option that would do nothing.
"""

from __future__ import annotations

from typing import Any

from .option_parsing import SOURCES, option_error, parse_sources

RING_WITHOUT_KINETO = "a ring is recorded without Kineto's trace, which has no bound (--with et says so)"


def resolve_sources(
    what: str | None,
    *,
    shapes: bool | None,
    stack: bool,
    memory: bool,
    ring: bool,
    step_by: str | None = None,
) -> dict[str, Any]:
    """Fields of Options: of `what` all that is recorded, else Kineto's and an execution trace with what the others say.

    A ring, and steps of the job's own profiler, are recorded without Kineto's trace.
    """
    if what is None:
        found = {
            name: name in ("kineto", "et") for name in SOURCES if name not in ("stacks", "flight-recorder")
        }
        found |= {"shapes": shapes is not False, "stack": stack, "memory": memory, "flight_recorder": False}
    else:
        for option, given in (("shapes", shapes is not None), ("stack", stack), ("memory", memory)):
            if given:
                raise option_error(
                    "all that is recorded is listed already", option, "write it into --with or leave it out"
                )
        found = parse_sources(what)
    why = "has no bound, and would grow beside a ring" if ring else ""
    if step_by == "profiler":
        why = "is left to the job's own torch.profiler: two sessions of Kineto end the process"
    if why and found["kineto"]:
        if what is not None:
            raise option_error(f"Kineto's trace {why}", "what", "leave out kineto, as in --with et")
        for option in ("stack", "memory"):
            if found[option]:
                raise option_error(f"it stands in Kineto's trace, which {why}", option, "leave it out")
        found["kineto"] = False
    return found


def check_observer(found: dict[str, bool], observer: str, *, ring: bool, max_bytes: int | None) -> None:
    """Whether there is an execution trace, and one of the observer that these options are of."""
    if observer not in ("native", "stock"):
        raise option_error(f"{observer!r} is no observer", "observer", "choose native or stock")
    if max_bytes is not None and max_bytes < 1 << 20:
        raise option_error(f"{max_bytes} bytes are too few", "max_bytes", "allow 1 MiB or more")
    for option, given in (
        ("ring", ring),
        ("max_bytes", max_bytes is not None),
        ("observer", observer == "stock"),
    ):
        if given and not found["et"]:
            raise option_error("no execution trace is recorded, which it is of", option, "add et to --with")
        if given and observer == "stock" and option != "observer":
            raise option_error("torch's own observer has no bound", option, "leave out --observer stock")


def check_windows(given: dict[str, Any]) -> None:
    """Of `steps`, `every`, `on_demand`, `max_windows`, `step_name` and `step_by`, None where they are not given."""
    several = given["every"] is not None or given["on_demand"] is not None
    most = given["max_windows"]
    if most is not None and most < 1:
        raise option_error(f"{most} windows", "max_windows", "keep 1 or more")
    if most is not None and not several:
        raise option_error("there is one window", "max_windows", "it is for --every and --on-demand")
    if given["steps"] is not None and given["on_demand"] is not None:
        raise option_error(
            "a window on demand opens when it is asked for", "steps", "leave out one of the two"
        )
    if given["step_name"] is not None and given["step_by"] is not None:
        raise option_error("steps are told twice", "step_by", "leave out --step-by or --step-name")
