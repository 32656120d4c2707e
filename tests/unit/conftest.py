"""Fixtures of tests inside one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_power_cut() -> Iterator[None]:
    """A killed process leaves the page cache behind, so no test here has to wait for the disk. Tests of the calls
    themselves replace them.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                patch.setattr(os, name, lambda _handle: None)
        yield
