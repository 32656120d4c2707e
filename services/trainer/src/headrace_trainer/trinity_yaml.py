"""`python -m headrace_trainer.trinity_yaml`: prints Trinity's configuration, for `headrace trinity config`."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from headrace_runtime.errors import SettingError
from headrace_runtime.main import Service
from headrace_runtime.settings.sections import Common
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trinity_learner.configuration import (
    TrinityJob,
    TrinitySettings,
    as_yaml,
    configuration,
    context_of,
    rate_of,
    size_of,
)

SERVICE = Service(
    "trainer",
    "Prints Trinity's configuration.",
    TrainerSettings,
    "headrace_trainer.trinity_yaml:run",
)


async def run(_common: Common, settings: TrainerSettings) -> None:
    """Print the configuration to standard output. Raises `SettingError`."""
    sys.stdout.write(await asyncio.to_thread(_yaml, settings))


def _yaml(settings: TrainerSettings) -> str:
    chosen = settings.of("trinity")
    assert isinstance(chosen, TrinitySettings)
    if not chosen.folder:
        raise SettingError("trainer.trinity.folder", "", "name a folder that Trinity's processes and the trainer share")
    base = Path(settings.base)
    try:
        config = json.loads((base / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError("trainer.base", settings.base, f"has no config.json that can be read: {error}") from None
    job = TrinityJob(
        Path(chosen.folder).absolute() / settings.lineage / "jobs", "JOB", base.absolute(), size_of(settings, 0)
    )
    return as_yaml(configuration(settings, job, rate_of(settings, base, config), context_of(config)))


if __name__ == "__main__":
    SERVICE.main()
