"""Marks that several tests share."""

from __future__ import annotations

import pytest


def on_each_bus(fixture: str) -> pytest.MarkDecorator:
    """A test on each kind of bus, of which `make test` runs the embedded one."""
    return pytest.mark.parametrize(fixture, ["embedded", pytest.param("kafka", marks=pytest.mark.kafka)], indirect=True)
