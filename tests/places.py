"""Where things are. Not in conftest.py, of which there are two."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = Path(os.environ.get("ETLOOM_DATA", ROOT.parent / "shared" / "data"))
