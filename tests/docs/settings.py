"""Settings as a page shows them, validated by the services themselves."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

from headrace_operations.supervisor.plan import installed
from headrace_runtime.main import Service
from headrace_runtime.settings.sections import ServiceSettings, load

_NEEDED = {
    "HEADRACE_TRAINER__BASE": "a-folder",
    "HEADRACE_JUDGE__ENDPOINT__BASE_URL": "http://127.0.0.1:1/v1",
    "HEADRACE_JUDGE__ENDPOINT__MODEL": "judge",
}
"""Settings without a default, for pages that show only others."""


def check(text: str, folder: Path) -> None:
    """Each service that the text has a section for reads all of it. Raises `SettingError`."""
    path = folder / "shown.toml"
    path.write_text(text, encoding="utf-8")
    services = installed()
    named = [name for name in services if name in tomllib.loads(text)]
    for name in named or ["gateway"]:  # what is common to all, any of them checks
        service: Service[ServiceSettings] = import_module(f"{services[name].module}.__main__").SERVICE
        load(name, service.settings, path, _NEEDED)
