"""Runner for agent programs of other projects, in a separate environment (`make install GROUP=clients`)."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from tests.support import presence

PROGRAMS = Path(__file__).parent / "programs"
_TIMEOUT_S = 240.0
"""Their imports alone take seconds, on a busy machine minutes."""


async def run(program: str, base_url: str, model: str) -> list[dict[str, object]]:
    """Run the program, and return the JSON of its last line. Skip the test without the environment."""
    presence.need("clients")
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "HEADRACE_"))}
    process = await asyncio.create_subprocess_exec(
        str(presence.CLIENTS),
        str(PROGRAMS / f"{program}.py"),
        base_url,
        model,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ | quiet,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-4000:]
    results: list[dict[str, object]] = json.loads(output.decode().strip().splitlines()[-1])
    return results
