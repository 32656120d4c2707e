"""The agent of a demo ends with the demo, however the demo ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from headrace_cli.demo import agent
from tests.support.processes import alive, wait_until

FOR_EVER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
DEMO = """
import asyncio, sys
from headrace_cli.demo import agent
async def main():
    async with agent.running_agent([sys.executable, "-S", "-c", "import time; time.sleep(600)"], {}) as process:
        print(process.pid, flush=True)
        await process.wait()
asyncio.run(main())
"""


async def test_the_agent_is_terminated_when_the_demo_ends() -> None:
    async with agent.running_agent(FOR_EVER, {}) as process:
        assert alive(process.pid)
    assert process.returncode == -15


async def test_it_ends_with_a_demo_that_is_cancelled() -> None:
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def demo() -> None:
        async with agent.running_agent(FOR_EVER, {}) as process:
            started.set_result(process.pid)
            await process.wait()

    task = asyncio.create_task(demo())
    pid = await asyncio.wait_for(started, 20)
    task.cancel()
    await asyncio.wait([task])
    assert not alive(pid)


def test_it_ends_with_a_demo_that_is_killed() -> None:
    demo = subprocess.Popen([sys.executable, "-c", DEMO], stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    pid = int(demo.stdout.readline())
    assert alive(pid)
    demo.kill()
    demo.communicate()
    wait_until(lambda: not alive(pid), 10, "the agent's end")
