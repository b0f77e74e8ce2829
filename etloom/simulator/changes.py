"""The language of what-if: what to change, parsed.

    WHAT[:NAME] [KEY=VALUE ...] CHANGE

WHAT is one of `TARGETS`; NAME a pattern (``*gemm*``) for the name of the kernel, operator, call or collective;
KEY=VALUE narrows it to a rank, step, stream or process group; CHANGE is ``x0.5`` (times), ``=20us`` (to), or
``+3us`` and ``-3us`` (more, less; never below 0). "kernel:*gemm* step=5 x0.5", "comm x0", "launch =2us".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from etloom.core.errors import EtloomError

TARGETS = {
    "kernel": "computation on a device",
    "copy": "memcpy and memset on a device",
    "comm": "communication: the moving of data, not the waiting for others",
    "op": "an operator and all that runs in it on the host",
    "host": "what runs on host threads, by the innermost event",
    "python": "time on host threads in which no operator and no call is open",
    "launch": "from the submission of work to its start on an idle stream",
    "stream": "from one kernel to the next on a stream",
    "sync": "from the end of device work to the return of the call that waited for it",
}
FILTER_KEYS = ("rank", "step", "stream", "group")
MAX_FACTOR = 1e6
MAX_NS = 10**15
"""Greater factors and times (11 days) are refused: schedules of them would not fit 64 bits."""
NS_PER_UNIT = {"ns": 1, "us": 1_000, "µs": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_CHANGE = re.compile(
    r"x(?P<times>\d+(?:\.\d*)?|\.\d+)|(?P<sign>[=+-])\s*(?P<amount>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>ns|us|µs|ms|s)"
)


@dataclass(frozen=True)
class Change:
    """Of the lags chosen: multiply by ``times``, or set to ``to_ns``, or add ``plus_ns``."""

    what: str
    name: str | None = None
    where: dict[str, str] = field(default_factory=dict)
    times: float | None = None
    to_ns: int | None = None
    plus_ns: int | None = None
    text: str = ""


@dataclass(frozen=True)
class RemoveSync:
    """The host no longer waits for the device in operators or calls of these names."""

    name: str

    @property
    def text(self) -> str:
        return f"remove sync {self.name}"


@dataclass(frozen=True)
class Network:
    """Communication takes latency_ns (default: the least that any of its group and sort took) and the rest times
    ``bandwidth`` less."""

    bandwidth: float = 1.0
    latency_ns: int | None = None

    @property
    def text(self) -> str:
        latency = "" if self.latency_ns is None else f", latency {self.latency_ns:,} ns"
        return f"bandwidth x{self.bandwidth:g}{latency}"


@dataclass(frozen=True)
class NoStraggler:
    """No rank waits for a later one: each communication begins for all when the first has come."""

    @property
    def text(self) -> str:
        return "no straggler"


AnyChange = Change | RemoveSync | Network | NoStraggler


def parse_change(text: str) -> Change:
    """The change that a line of the language says. Raises EtloomError, which says where it went wrong."""
    plain = text.strip()
    head, _, rest = plain.partition(" ")
    what, _, name = head.partition(":")
    if what not in TARGETS:
        raise _syntax_error(
            text, 0, f"{what!r} is nothing that can be changed", f"one of {', '.join(TARGETS)}"
        )
    if ":" in head and not name:
        raise _syntax_error(text, len(head), "a name is missing", "such as kernel:*gemm*")
    where: dict[str, str] = {}
    found: re.Match[str] | None = None
    at = len(head)
    for word in re.finditer(r"(?:[=+-]\s*)?\S+", rest):
        at = plain.index(rest) + word.start() if rest else at
        key, equals, value = word[0].partition("=")
        if found is not None:
            raise _syntax_error(
                text, at, f"{word[0]!r} follows the change", "one change a line; give --set several times"
            )
        if equals and key in FILTER_KEYS and value:
            where[key] = value
        elif match := _CHANGE.fullmatch(word[0]):
            found = match
        else:
            raise _syntax_error(
                text,
                at,
                f"{word[0]!r} is no change",
                f"x0.5, =20us, +3us, -3us, or one of {'=, '.join(FILTER_KEYS)}=",
            )
    if found is None:
        raise _syntax_error(
            text, len(plain), "it does not say what becomes of it", "x0.5, =20us, +3us or -3us"
        )
    for key in ("rank", "step", "stream"):
        if key in where and not re.fullmatch(r"-?\d{1,18}", where[key]):
            raise _syntax_error(text, plain.index(f"{key}="), f"{key}={where[key]} is no number", f"{key}=0")
    if found["times"] is not None:
        times = float(found["times"])
        if times > MAX_FACTOR:
            raise _syntax_error(
                text, plain.index(found[0]), f"{found[0]} is too much", f"at most x{MAX_FACTOR:g}"
            )
        return Change(what, name or None, where, times=times, text=plain)
    amount = _to_ns(found["amount"], found["unit"])
    if amount is None:
        raise _syntax_error(
            text, plain.index(found[0]), f"{found[0]} is too much", f"at most {MAX_NS / 1e9:g}s"
        )
    if found["sign"] == "=":
        return Change(what, name or None, where, to_ns=amount, text=plain)
    return Change(what, name or None, where, plus_ns=amount if found["sign"] == "+" else -amount, text=plain)


def parse_factor(text: str) -> float:
    """2x, x2 or 2. Raises EtloomError for what is no number from 1 / MOST_TIMES to MOST_TIMES."""
    match = re.fullmatch(r"x?(\d+(?:\.\d*)?|\.\d+)x?", text.strip())
    if match is None or not 1 / MAX_FACTOR <= float(match[1]) <= MAX_FACTOR:
        raise EtloomError(
            f"{text!r} is no factor from {1 / MAX_FACTOR:.6f} to {MAX_FACTOR:.0f}",
            remedy="such as 2x or 0.5x",
        )
    return float(match[1])


def parse_duration_ns(text: str) -> int:
    """20us as ns. Raises EtloomError."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ns|us|µs|ms|s)", text.strip())
    amount = None if match is None else _to_ns(match[1], match[2])
    if amount is None:
        raise EtloomError(f"{text!r} is no time up to {MAX_NS / 1e9:g}s", remedy="such as 20us")
    return amount


def _to_ns(amount: str, unit: str) -> int | None:
    """None for more than MOST_NS."""
    ns = float(amount) * NS_PER_UNIT[unit]
    return round(ns) if ns <= MAX_NS else None


def _syntax_error(text: str, at: int, what: str, remedy: str) -> EtloomError:
    return EtloomError(f"{text!r}, character {at + 1}: {what}", remedy=remedy)
