"""Paths of the repository and of the shared real traces."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("ETLOOM_DATA", ROOT.parent / "shared" / "data"))
