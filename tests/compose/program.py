"""Every image built, the stack started, and the shortened demo played through the published gateway port.

The agent and the judgement are those of `headrace demo`. When the run breaks off, reports/compose-test.log holds the
last output of the containers.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.errors import HeadraceError
from headrace_cli.commands.shared import console
from headrace_cli.demo import recipe as demo
from headrace_cli.demo.console_reporter import ConsoleReporter
from headrace_cli.demo.performance import Options, StackAddress
from headrace_cli.demo.report import Report
from headrace_cli.demo.runner import perform
from tests.compose.engine import Engine, EngineFailed, Image, Limits, Project, look_at_image, look_at_limits
from tests.repo.compose_files import EXAMPLE, ROOT, env_example, filled, ours, service_of, services
from tests.support.processes import free_port
from tests.system.line import no_problems
from tests.system.program import Program, Run

HEALTHY_S_MAX = 1200.0
POLL_S = 2.0
LOG_LINES = 200
LEFT_OUT = {
    "judge": "needs an endpoint",
    "inference-gpu": "needs a GPU",
    "trainer-gpu": "needs a GPU",
    "inference-vllm": "needs a GPU, and an image of many gigabytes",
    "trainer-trinity": "needs GPUs, and an image of many gigabytes",
}
"""Services of Headrace that are not started; the judge's image is built all the same."""
RUNNING = ["kafka", "postgres", *(name for name in ours() if name not in LEFT_OUT)]


def play(run: Run) -> None:
    try:
        run.figures |= _play_stack(run.options, run.seed, run.folder)
        shortfalls = run.figures["shortfalls"]
    except (EngineFailed, HeadraceError, TimeoutError) as error:
        shortfalls = [f"{type(error).__name__}: {error}"]
    run.add(no_problems("images, limits, containers and the demo", shortfalls, shown_max=20))
    for shortfall in shortfalls:
        print(f"    {shortfall}")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(seed=0)
    parser.add_argument(
        "--traffic-s", type=float, default=240.0, help="limit of the agent's work (default: %(default)s)"
    )
    parser.add_argument("--no-build", action="store_true", help="use the images that exist")


def _play_stack(options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    engine = Engine.find()
    key, ports = secrets.token_hex(16), {name: free_port() for name in ("GATEWAY_PORT", "REGISTRY_PORT", "KAFKA_PORT")}
    values = _env_file(folder / ".env", key, ports, seed)
    project = Project(engine, f"headrace-test-{os.getpid()}", folder / ".env")
    images = _images(project, build=not options.no_build)
    try:
        healthy_s = _start(project)
        limits = {name: look_at_limits(project, name) for name in RUNNING}
        os.environ["OPENAI_API_KEY"] = key
        (folder / "out").mkdir()
        report, problems = asyncio.run(_demo(options.traffic_s, seed, ports, folder / "out"))
    except BaseException:
        _keep_logs(project)
        raise
    finally:
        project.down()
    problems += [text for name, image in images.items() for text in image.shortfalls(name)]
    problems += [text for name, limit in limits.items() for text in limit.shortfalls(name, services(**values)[name])]
    problems += [f"container of {name} is still there" for name in RUNNING if project.container(name)]
    return _figures(engine, images, limits, report) | {"healthy_s": healthy_s, "shortfalls": problems}


def _figures(engine: Engine, images: dict[str, Image], limits: dict[str, Limits], report: Report) -> dict[str, Any]:
    return {
        "engine": " ".join(engine.compose),
        "images": {name: asdict(image) for name, image in images.items()},
        "limits": {name: asdict(limit) for name, limit in limits.items()},
        "not_started": LEFT_OUT,
        "demo": asdict(report),
    }


def _env_file(path: Path, key: str, ports: dict[str, int], seed: int) -> dict[str, str]:
    """Write a user's settings, with generated keys and ports."""
    values = env_example() | {
        "POSTGRES_PASSWORD": secrets.token_hex(16),
        "INTERNAL_KEY": secrets.token_hex(32),
        "GATEWAY_KEY_SHA256": hashlib.sha256(key.encode()).hexdigest(),
        "SEED": str(seed),
        **{name: str(port) for name, port in ports.items()},
    }
    path.write_text("".join(f"{name}={value}\n" for name, value in values.items()), encoding="utf-8")
    return values


def _images(project: Project, *, build: bool) -> dict[str, Image]:
    """One build after the other, so that the layer with torch is made once."""
    images = {}
    for name in sorted({service_of(name) for name in ours()}):
        began = time.monotonic()
        if build:
            project.build(name)
        image = look_at_image(project.engine, ours()[name]["image"], time.monotonic() - began if build else 0.0)
        print(f"{image.name}: {image.added_mb} MB over its base, {image.build_s:.0f} s", flush=True)
        images[name] = image
    return images


def _start(project: Project) -> float:
    """Up, and until every check of every container passes; how long that took. Raises `TimeoutError`."""
    began = time.monotonic()
    project.up([*RUNNING, *filled(EXAMPLE)["services"].keys() - LEFT_OUT.keys()])
    waiting = list(RUNNING)
    while waiting:
        waiting = [name for name in waiting if not project.passes(name, services()[name]["healthcheck"]["test"])]
        if waiting and time.monotonic() - began > HEALTHY_S_MAX:
            raise TimeoutError(f"not healthy after {HEALTHY_S_MAX:g} s: {', '.join(waiting)}")
        time.sleep(POLL_S if waiting else 0)
    print(f"every container is healthy after {time.monotonic() - began:.0f} s", flush=True)
    return round(time.monotonic() - began, 1)


async def _demo(traffic_s: float, seed: int, ports: dict[str, int], out: Path) -> tuple[Report, list[str]]:
    """The agent of the demo, at work through the published ports. The agent must have become better, if by little."""
    played = demo.read(ROOT / "examples/email_agent").model_copy(update={"environment": ("OPENAI_API_KEY",)})
    goal = played.short.model_copy(update={"traffic_s_max": traffic_s})
    addresses = StackAddress(f"127.0.0.1:{ports['KAFKA_PORT']}", f"http://127.0.0.1:{ports['GATEWAY_PORT']}")
    reporter = ConsoleReporter(console())
    report = await perform(played, Options(seed, goal, out, out, out, {}), addresses, reporter)
    problems = report.shortfalls(goal)
    if report.after <= report.before:
        problems.append(f"the agent did not become better: {report.before:.3f} → {report.after:.3f}")
    reporter.print_summary(report, [])
    return report, problems


def _keep_logs(project: Project) -> None:
    path = ROOT / "reports/compose-test.log"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"== {name}\n{project.logs(name, LOG_LINES)}\n" for name in RUNNING), encoding="utf-8")


PROGRAM = Program("Build every image and play the shortened demo through the published port.", play, _add_arguments)
