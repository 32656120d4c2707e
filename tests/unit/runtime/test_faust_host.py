"""Settings of the bus that Faust receives."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.stream import faust_host


@pytest.mark.parametrize(("request_s", "session_s"), [(30.0, 10.0), (5.0, 10.0), (30.0, 60.0)])
def test_every_pair_of_bounds_that_settings_allow_can_start(request_s: float, session_s: float, tmp_path: Path) -> None:
    """Faust refuses to start when a request may take less time than a session."""
    bus = BusSettings(request_timeout_s=request_s, session_timeout_s=session_s)
    conf = faust_host._app("group", bus, tmp_path).conf
    assert conf.broker_session_timeout == session_s
    assert conf.broker_request_timeout == max(request_s, session_s)
