"""Examples are not installed: their folder is made importable, as `python -m` in it would."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))
