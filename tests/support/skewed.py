"""`python -m tests.support.skewed FILE MODULE` runs a service by a clock that is wrong by the seconds in FILE.

The file is read at each look at the clock, so that a test can let the clock jump.
"""

from __future__ import annotations

import runpy
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest import mock

from headrace_runtime.clock import SystemClock


def command(module: str, skew: Path | None) -> list[str]:
    """What runs a service, by a wrong clock when there is a file for it."""
    before = [] if skew is None else ["tests.support.skewed", str(skew)]
    return [sys.executable, "-m", *before, module]


def main() -> None:
    file, module = Path(sys.argv[1]), sys.argv[2]

    def now(_clock: SystemClock) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=float(file.read_text(encoding="utf-8") or 0))

    mock.patch.object(SystemClock, "now", now).start()
    sys.argv = [module, *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
