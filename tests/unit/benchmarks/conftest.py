"""Benchmarks play examples, which are not installed: their folder is made importable, as benchmarks do."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
