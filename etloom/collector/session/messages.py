"""What a process of the job says of its recording: on stderr, a line at a time, and in the seals of its windows."""

from __future__ import annotations

import sys

from ..rank_environment import rank_from_environment


class MessageLog:
    """`said` is what was said so far, without what `seal` gave away."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._remarks: dict[str, bool] = {}  # and whether they were said
        self._told: set[str] = set()
        self._missed = self._unsaid = self._unsealed = 0
        self._last_missed = ""

    def warn(self, message: str) -> None:
        """One line on stderr; `stderr` may be closed or full, which is no reason to stop a job."""
        rank = rank_from_environment()
        line = " ".join(f"rank {rank}: {message}".split()) if rank is not None else " ".join(message.split())
        self.said.append(line)
        try:
            sys.stderr.write(f"etloom: {line}\n")
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            self.said.append("stderr could not be written")

    def warn_once(self, line: str) -> None:
        """What every window may find anew."""
        if line not in self._told:
            self._told.add(line)
            self.warn(line)

    def miss(self, line: str, *, sparingly: bool) -> None:
        """A window that is not recorded. Of many, `sparingly`, the first, the tenth, the hundredth and so on are said:
        a job of days may miss thousands."""
        self._missed += 1
        self._last_missed = line
        if not sparingly or self._missed == 1:
            self.warn(line)
        elif _is_power_of_ten(self._missed):
            self._unsaid = 0
            self.warn(f"{line} ({count_noun(self._missed, 'window')} missed by now)")
        else:
            self._unsaid += 1
            self._unsealed += 1

    def sum_up(self) -> None:
        """What `miss` did not say."""
        if self._unsaid:
            self._unsaid = 0
            self.warn(f"{count_noun(self._missed, 'window')} missed in all; the last: {self._last_missed}")

    def remark(self, line: str) -> None:
        """What the reader of the open window ought to know of its steps; said once, as a window closes."""
        self._remarks.setdefault(line, False)

    def seal(self, *, repeats: bool) -> list[str]:
        """What belongs into the seal of the window that closes now; of several each has what is new since the last."""
        for line in [line for line, told in self._remarks.items() if not told]:
            self.warn(line)
            self._remarks[line] = True
        said = list(self.said)
        if self._unsealed:
            said.append(
                f"{count_noun(self._unsealed, 'window')} more missed before this one: {self._last_missed}"
            )
            self._unsealed = 0
        if repeats:
            self.said.clear()
        return said


def _is_power_of_ten(number: int) -> bool:
    return str(number).strip("0") == "1"


def describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]


def count_noun(number: int, what: str) -> str:
    """1 step, 2 steps; from four digits on with commas."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def format_ranges(numbers: list[int]) -> str:
    """Ascending numbers, without repetition, as `0-3, 7`; where that gets long, the first of it."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in parts[:8]]
    return ", ".join(shown) + (", ..." if len(parts) > 8 else "")
