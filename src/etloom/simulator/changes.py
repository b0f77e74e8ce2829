"""The what-if language: parses changes such as "kernel:*gemm* x0.5".

    WHAT[:NAME] [KEY=VALUE ...] CHANGE

WHAT is one of `TARGETS`; NAME a pattern (``*gemm*``) for the name of the kernel, operator, call or collective;
KEY=VALUE restricts it to a rank, step, stream, process group or kernel family; CHANGE is ``x0.5`` (times), ``=20us``
(to), or ``+3us`` and ``-3us`` (more, less; never below 0), of each kernel, transfer, delay or call as a whole.
"kernel:*gemm* step=5 x0.5", "comm x0", "launch =2us".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from etloom.core import text as texts
from etloom.core.errors import InvalidValue
from etloom.core.text import format_ranks

TARGETS = {
    "kernel": "compute kernels",
    "copy": "memcpy and memset",
    "comm": "communication: the transfer of data, without waits for other ranks",
    "op": "an operator and everything that runs in it on the host",
    "host": "time on host threads, by the innermost event",
    "python": "time on host threads outside operators and runtime calls",
    "launch": "time from the submission of a kernel to its start on an idle stream",
    "stream": "time from one kernel to the next on a stream",
    "sync": "time from the end of a kernel to the return of the call that waited for it",
}
FILTER_KEYS = ("rank", "step", "stream", "group", "family")
MAX_FACTOR = 1e6
MAX_NS = 10**15
"""Larger factors and times (11 days) are rejected: their sums would not fit 64 bits."""
NS_PER_UNIT = {**texts.NS_PER_UNIT, "µs": texts.NS_PER_UNIT["us"]}
MIN_BYTES_PER_SECOND, MAX_BYTES_PER_SECOND = 1e3, 1e15
_FACTOR = r"x?(\d+(?:\.\d*)?|\.\d+)x?"
_BANDWIDTH = re.compile(
    r"(?P<amount>\d+(?:\.\d*)?|\.\d+)\s*(?:(?P<prefix>[kKMGT])(?P<binary>i)?)?(?P<unit>B|b|bits?)(?:/s|ps)"
)
_CHANGE = re.compile(
    r"x(?P<times>\d+(?:\.\d*)?|\.\d+)|(?P<sign>[=+-])\s*(?P<amount>\d+(?:\.\d*)?|\.\d+)\s*(?P<unit>ns|us|µs|ms|s)"
)


@dataclass(frozen=True)
class Change:
    """A change of lags: multiplies the selected lags by ``times``, sets them to ``to_ns``, or adds ``plus_ns``.

    On the host, ``to_ns`` and ``plus_ns`` are of a whole call, which may consist of several edges."""

    target: str
    name: str | None = None
    filters: dict[str, str] = field(default_factory=dict)
    times: float | None = None
    to_ns: int | None = None
    plus_ns: int | None = None
    text: str = ""


@dataclass(frozen=True)
class RemoveSync:
    """A change by which the host no longer waits for the device in calls or operators whose name matches the pattern
    ``name``."""

    name: str

    @property
    def text(self) -> str:
        return f"remove sync {self.name}"


@dataclass(frozen=True)
class Network:
    """A changed network: ``bandwidth`` times the recorded bandwidth, or ``bytes_per_second`` for every rank.

    The recorded bandwidth and latency are fitted to the recording; transfers that overlap share their links
    (`etloom.simulator.network`). ``latency_ns`` is that of one message; default: the fitted one.
    """

    bandwidth: float = 1.0
    latency_ns: int | None = None
    bytes_per_second: float | None = None

    @property
    def text(self) -> str:
        latency = "" if self.latency_ns is None else f", latency {self.latency_ns:,} ns"
        if self.bytes_per_second is not None:
            return f"bandwidth {self.bytes_per_second / 1e9:g} GB/s{latency}"
        return f"bandwidth x{self.bandwidth:g}{latency}"


@dataclass(frozen=True)
class NoStraggler:
    """A change by which every rank takes, for each operation, the median time of the ranks that run the same program.

    What the ranks then wait for each other, and the transfer of data, follow from that.
    """

    @property
    def text(self) -> str:
        return "no straggler"


@dataclass(frozen=True)
class LikePeers:
    """A change by which ``ranks`` take, for each operation, the median time of other ranks with the same program."""

    ranks: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"{format_ranks(self.ranks)} like the median of peers"


AnyChange = Change | RemoveSync | Network | NoStraggler | LikePeers


def parse_change(text: str) -> Change:
    """Parse a change such as "comm x0.5". Raises EtloomError with the position of the problem."""
    plain = text.strip()
    head, _, rest = plain.partition(" ")
    target, _, name = head.partition(":")
    if target not in TARGETS:
        raise _syntax_error(text, 0, f"unknown target {target!r}", f"expected one of {', '.join(TARGETS)}")
    if ":" in head and not name:
        raise _syntax_error(text, len(head), "expected a name after the colon", "such as kernel:*gemm*")
    filters: dict[str, str] = {}
    change: re.Match[str] | None = None
    position = len(head)
    for word in re.finditer(r"(?:[=+-]\s*)?\S+", rest):
        position = plain.index(rest) + word.start() if rest else position
        key, equals, value = word[0].partition("=")
        if change is not None:
            raise _syntax_error(
                text,
                position,
                f"unexpected {word[0]!r} after the change",
                "one change per text; repeat --set",
            )
        if equals and key in FILTER_KEYS and value:
            filters[key] = value
        elif match := _CHANGE.fullmatch(word[0]):
            change = match
        else:
            raise _syntax_error(
                text,
                position,
                f"expected a change, got {word[0]!r}",
                f"x0.5, =20us, +3us, -3us, or one of {'=, '.join(FILTER_KEYS)}=",
            )
    if change is None:
        raise _syntax_error(text, len(plain), "the change is missing", "add x0.5, =20us, +3us or -3us")
    for key in ("rank", "step", "stream"):
        if key in filters and not re.fullmatch(r"-?\d{1,18}", filters[key]):
            raise _syntax_error(
                text, plain.index(f"{key}="), f"expected an integer, got {key}={filters[key]}", f"{key}=0"
            )
    if change["times"] is not None:
        times = float(change["times"])
        if times > MAX_FACTOR:
            raise _syntax_error(
                text, plain.index(change[0]), f"{change[0]} is too large", f"at most x{MAX_FACTOR:g}"
            )
        return Change(target, name or None, filters, times=times, text=plain)
    amount = _to_ns(change["amount"], change["unit"])
    if amount is None:
        raise _syntax_error(
            text, plain.index(change[0]), f"{change[0]} is too large", f"at most {MAX_NS / 1e9:g}s"
        )
    if change["sign"] == "=":
        return Change(target, name or None, filters, to_ns=amount, text=plain)
    return Change(
        target, name or None, filters, plus_ns=amount if change["sign"] == "+" else -amount, text=plain
    )


def parse_network(bandwidth: str | None, latency_ns: int | None) -> Network:
    """Parse a bandwidth: a factor (2x, x2, 2), or bytes or bits per second (400GB/s, 50 GiB/s, 400Gbit/s, 400Gbps).

    k, M, G, T are powers of 1000; Ki, Mi, Gi, Ti of 1024. B is bytes, b and bit are bits. Raises EtloomError for
    other texts and for values outside the limits.
    """
    text = (bandwidth or "1").strip()
    if re.fullmatch(_FACTOR, text):
        return Network(parse_factor(text), latency_ns)
    match = _BANDWIDTH.fullmatch(text)
    bytes_per_second = 0.0
    if match is not None:
        base = 1024 if match["binary"] else 1000
        scale = base ** " kmgt".index((match["prefix"] or " ").lower())
        bytes_per_second = float(match["amount"]) * scale / (1 if match["unit"] == "B" else 8)
    if not MIN_BYTES_PER_SECOND <= bytes_per_second <= MAX_BYTES_PER_SECOND:
        raise InvalidValue(
            f"expected a factor or a bandwidth from 1kB/s to 1000TB/s, got {bandwidth!r}",
            remedy="such as 2x, 400GB/s (bytes) or 400Gbit/s (bits); k, M, G, T are decimal, Ki, Mi, Gi, Ti binary",
        )
    return Network(latency_ns=latency_ns, bytes_per_second=bytes_per_second)


def parse_factor(text: str) -> float:
    """Parse a factor: 2x, x2 or 2. Raises EtloomError for other texts and outside 1 / MAX_FACTOR to MAX_FACTOR."""
    match = re.fullmatch(_FACTOR, text.strip())
    if match is None or not 1 / MAX_FACTOR <= float(match[1]) <= MAX_FACTOR:
        raise InvalidValue(
            f"expected a factor from {1 / MAX_FACTOR:.6f} to {MAX_FACTOR:.0f}, got {text!r}",
            remedy="such as 2x or 0.5x",
        )
    return float(match[1])


def parse_duration_ns(text: str) -> int:
    """Parse a time such as 20us; return ns. Raises EtloomError."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ns|us|µs|ms|s)", text.strip())
    amount = None if match is None else _to_ns(match[1], match[2])
    if amount is None:
        raise InvalidValue(f"expected a time up to {MAX_NS / 1e9:g}s, got {text!r}", remedy="such as 20us")
    return amount


def _to_ns(amount: str, unit: str) -> int | None:
    """Convert an amount of a time unit (ns, us, ms, s) to ns; None above MAX_NS."""
    ns = float(amount) * NS_PER_UNIT[unit]
    return round(ns) if ns <= MAX_NS else None


def _syntax_error(text: str, position: int, target: str, remedy: str) -> InvalidValue:
    return InvalidValue(f"{text!r}, character {position + 1}: {target}", remedy=remedy)
