"""Fixtures of tests that run in a single process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _no_power_cut() -> Iterator[None]:
    """Replace `fsync` and `fdatasync` by no-ops, because no unit test cuts the power.

    The page cache survives a killed process. Tests of these calls replace them again.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                patch.setattr(os, name, lambda _handle: None)
        yield
