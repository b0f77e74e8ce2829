"""Prints the messages of a job's process on stderr, and stores them in the records of its recording windows."""

from __future__ import annotations

import sys

from ..fork_hold import output_lock
from ..rank_environment import rank_from_environment
from ..text import count_noun


class MessageLog:
    """Prints messages, and collects them for the record of the next recording window.

    Attributes:
        messages: Messages printed since the last call of `take_for_record`.
    """

    def __init__(self) -> None:
        self.messages: list[str] = []
        self._remarks: dict[str, bool] = {}  # remark -> whether it was printed
        self._printed_once: set[str] = set()
        self._missed = self._unprinted = self._unrecorded = 0
        self._last_missed = ""

    def warn(self, message: str) -> None:
        """Print a message as a line on stderr; ignore a closed or full stderr, which must not fail the job."""
        rank = rank_from_environment()
        prefix = "" if rank is None else f"rank {rank}: "
        line = " ".join(f"{prefix}{message}".split())
        self.messages.append(line)
        try:
            with output_lock:
                sys.stderr.write(f"etloom: {line}\n")
                sys.stderr.flush()
        except (OSError, ValueError, AttributeError):
            self.messages.append("stderr could not be written")

    def warn_once(self, line: str) -> None:
        """Print a message only the first time, although every recording window may report it."""
        if line not in self._printed_once:
            self._printed_once.add(line)
            self.warn(line)

    def report_missed(self, line: str, *, sparingly: bool) -> None:
        """Print the message `line` about a missed recording window; with `sparingly`, print few and count the others.

        With `sparingly` only the first, tenth, hundredth and so on are printed: a job of days may miss thousands.
        """
        self._missed += 1
        self._last_missed = line
        if not sparingly or self._missed == 1:
            self.warn(line)
        elif _is_decimal_power(self._missed):
            self._unprinted = 0
            self.warn(f"{line} ({count_noun(self._missed, 'window')} missed so far)")
        else:
            self._unprinted += 1
            self._unrecorded += 1

    def report_total_missed(self) -> None:
        """Print the number of recording windows that were missed, if some of them were not reported individually."""
        if self._unprinted:
            self._unprinted = 0
            self.warn(
                f"{count_noun(self._missed, 'window')} missed in total; the last one: {self._last_missed}"
            )

    def remark(self, line: str) -> None:
        """Store a message about the open recording window; it is printed once, when a window closes."""
        self._remarks.setdefault(line, False)

    def take_for_record(self, *, has_several_windows: bool) -> list[str]:
        """Print the stored remarks, and return all messages for the record of the recording window that closes now.

        With several windows each gets the messages since the previous one.
        """
        for line in [line for line, printed in self._remarks.items() if not printed]:
            self.warn(line)
            self._remarks[line] = True
        messages = list(self.messages)
        if self._unrecorded:
            messages.append(
                f"{count_noun(self._unrecorded, 'more window')} missed before this one: {self._last_missed}"
            )
            self._unrecorded = 0
        if has_several_windows:
            self.messages.clear()
        return messages


def _is_decimal_power(number: int) -> bool:
    return str(number).strip("0") == "1"
