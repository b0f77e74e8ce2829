"""Real runs that many tests only ask about: a run is opened once for tests that follow each other.

A test that changes code of etloom, by monkeypatch, opens the run itself: traces keep what was computed of them.
"""

from __future__ import annotations

from functools import lru_cache

import etloom

open_run = lru_cache(maxsize=4)(etloom.open)
