"""Schedules recording windows: fixed steps, periodic, on demand, or (ring buffer) around a request."""

from __future__ import annotations

from pathlib import Path

from ..options import RecordingOptions
from .on_demand import WindowRequests

_MIN_STEPS_AHEAD = 3


class WindowSchedule:
    """Determines the next recording window: steps [first, last); last None means to the end of the job.

    Attributes:
        accepts_requests: Windows are recorded on demand.
        uses_ring: A ring buffer also keeps what came before a request, so its window opens at once.
        is_waiting: There is no next window until somebody requests one.
    """

    def __init__(self, options: RecordingOptions) -> None:
        self._options = options
        self._warmup_steps = options.warmup_steps
        self.accepts_requests = options.on_demand is not None
        self.uses_ring = options.ring and options.on_demand is not None
        self.first, self.last = options.first, None if self.uses_ring else options.last
        self.is_waiting = options.on_demand is not None and not self.uses_ring
        self._requests = WindowRequests(Path(options.out), is_cleared=options.supervised)

    def __str__(self) -> str:
        return f"{self.first}:{'' if self.last is None else self.last}"

    @property
    def window_length(self) -> int | None:
        """Number of steps of the window, or None if it is not known in advance."""
        return None if self.last is None or self.uses_ring else self.last - self.first

    @property
    def is_requested(self) -> bool:
        """True if the next window is a window on demand that has been requested."""
        return self.accepts_requests and not (self.is_waiting or self.uses_ring)

    @property
    def is_unrequested_ring(self) -> bool:
        """True while the ring buffer records and nobody has requested to save the recorded steps."""
        return self.uses_ring and self.last is None

    def take_late_request(self, rank: int) -> bool:
        """Remove an unanswered recording request when a job without a launcher ends; return True if there was any.

        Rank 0 removes it, so that the next job in this folder does not take it.
        """
        if not self.accepts_requests or rank or self._options.supervised:
            return False
        return self._requests.withdraw()

    def is_due(self, count: int) -> bool:
        """Return whether, after `count` steps, the profilers of the next window should be prepared or running."""
        return not self.is_waiting and count >= self.first - self._warmup_steps

    def is_over(self, count: int) -> bool:
        return self.last is not None and count >= self.last

    def poll_requests(self, count: int) -> bool:
        """Schedule a newly requested recording window after `count` steps; return whether there was a new request."""
        if not (self.is_waiting or self.is_unrequested_ring):
            return False
        ahead = max(_MIN_STEPS_AHEAD, self._warmup_steps + 1)
        window = self._requests.next_window(count, self._options.on_demand or 1, ahead)
        if window is None:
            return False
        if self.uses_ring:
            self.last = max(window[1], count)
        else:
            self.first, self.last = window
            self.is_waiting = count > self.first  # too late
        return True

    def advance(self, count: int) -> bool:
        """Schedule the next recording window after `count` steps; return False if there is no further window."""
        every = self._options.every
        if every is not None and self.last is not None:
            windows = max(1, -(-(count + 1 - self.first) // every))
            self.first, self.last = self.first + windows * every, self.last + windows * every
        elif self.uses_ring:
            self.first, self.last = count + self._warmup_steps, None
        elif self._options.on_demand is not None:
            self.is_waiting = True
        else:
            return False
        return True
