"""Seeds of random tests: fixed unless `TEST_SEED` is another number, or `random` for a new number in each run.

The default is fixed, so that a failing run points at the change under test. `make test TEST_SEED=random` explores.
"""

from __future__ import annotations

import os
import random
import zlib

_SETTING = os.environ.get("TEST_SEED", "0")
_NUMBER = random.SystemRandom().randrange(2**31) if _SETTING == "random" else int(_SETTING)


FIXED = _SETTING != "random"
"""Whether every run with the same setting draws the same seeds."""


def draw_seed(label: str | None = None) -> int:
    """Return a 32-bit seed for `label`, by default for the running test, and print the command that repeats it."""
    label = label or os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0]
    print(f"TEST_SEED={_NUMBER}")
    return zlib.crc32(f"{_NUMBER}:{label}".encode())
