"""Which window comes next: of given steps, again every so many, when somebody asks, or around the question."""

from __future__ import annotations

from pathlib import Path

from ..options import Options
from .on_demand import WindowRequests


class WindowSchedule:
    """The next window is [first, last), last None: to the end. While it `waits` there is none until somebody asks."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lead = options.lead
        self.listens = options.on_demand is not None
        # What a ring holds is wanted from before the question on, so its window opens at once.
        self.looks_back = options.ring and options.on_demand is not None
        self.first, self.last = options.first, None if self.looks_back else options.last
        self.waits = options.on_demand is not None and not self.looks_back
        self._demand = WindowRequests(Path(options.out), anew=options.supervised)

    def __str__(self) -> str:
        return f"{self.first}:{'' if self.last is None else self.last}"

    @property
    def asked(self) -> int | None:
        """Steps of the window, where they are known beforehand."""
        return None if self.last is None or self.looks_back else self.last - self.first

    @property
    def agreed_on(self) -> bool:
        """Somebody asked for the window."""
        return self.listens and not (self.waits or self.looks_back)

    def asked_too_late(self, rank: int) -> bool:
        """At the end of a job without a launcher; its rank 0 removes the question, lest the next job here takes it."""
        return self.listens and not (rank or self._options.supervised) and self._demand.withdraw()

    @property
    def unasked(self) -> bool:
        """The window that is open is a ring nobody has asked about."""
        return self.looks_back and self.last is None

    def due(self, count: int) -> bool:
        """The profilers should get ready, or be."""
        return not self.waits and count >= self.first - self._lead

    def over(self, count: int) -> bool:
        return self.last is not None and count >= self.last

    def hear(self, count: int) -> bool:
        """Take note, at the end of step `count` - 1, of a window that somebody has asked for; True where one has."""
        if not (self.waits or self.unasked):
            return False
        options = self._options
        window = self._demand.agreed(count, options.on_demand or 1, ahead=max(3, self._lead + 1))
        if window is None:
            return False
        if self.looks_back:
            self.last = max(window[1], count)
        else:
            self.first, self.last = window
            self.waits = count > self.first  # too late
        return True

    def go_on(self, count: int) -> bool:
        """To the next window after step `count` - 1; False where there is none."""
        every = self._options.every
        if every is not None and self.last is not None:
            windows = max(1, -(-(count + 1 - self.first) // every))
            self.first, self.last = self.first + windows * every, self.last + windows * every
        elif self.looks_back:
            self.first, self.last = count + self._lead, None
        elif self._options.on_demand is not None:
            self.waits = True
        else:
            return False
        return True
