"""`headrace up`."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace_cli.commands.shared import (
    Config,
    DataDir,
    Overridden,
    Pythons,
    command,
    console,
    console_line,
    console_login,
    echo,
    format_state,
    running_state,
    service_names,
    table,
)

if TYPE_CHECKING:
    from headrace_operations.supervisor import RunState, Supervisor
    from headrace_schemas import ModelEvent


def up(
    config: Config = None,
    data_dir: DataDir = None,
    settings: Overridden = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Start only this service; may be repeated.", metavar="SERVICE", autocompletion=service_names),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            help="Do not start this service; may be repeated.", metavar="SERVICE", autocompletion=service_names
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the gateway; default: gateway.port, which is 8000.", min=1, max=65535)
    ] = None,
    auto_ports: Annotated[
        bool, typer.Option("--auto-ports", help="Use free ports instead of the default ports.")
    ] = False,
    pythons: Pythons = None,
    timeout: Annotated[float, typer.Option(help="Seconds until every service must answer.", min=1)] = 120.0,
    hang_timeout: Annotated[
        float, typer.Option(help="Seconds without a sign of life until a service is killed.", min=6)
    ] = 30.0,
) -> None:
    """Start every installed service on this machine and keep them running until Ctrl-C.

    The broker is left out if [bold]bus.address[/] is set, the judge without [bold]judge.endpoint.base_url[/], the
    trainer without [bold]trainer.base[/]. Each service is a process with its own log and is restarted when it ends or
    hangs. On Ctrl-C all services are stopped cleanly.
    """
    from rich.markup import escape

    from headrace.errors import UsageError
    from headrace_operations.supervisor import Limits, Supervisor
    from headrace_operations.supervisor.overrides import parse_assignments
    from headrace_operations.supervisor.plan import installed, parse_pythons

    out = console()
    overrides = parse_assignments(settings or [])
    if port is not None and overrides.setdefault("gateway.port", port) != port:
        raise UsageError(
            f"--port {port}: --set gateway.port={overrides['gateway.port']} differs; leave one of them out"
        )
    supervisor = Supervisor(
        data_dir,
        config=config,
        settings=overrides,
        only=only or (),
        without=without or (),
        auto_ports=auto_ports,
        pythons=parse_pythons(pythons or []),
        limits=Limits(hang_timeout_s=hang_timeout),
        report=lambda line: out.print(f"[yellow]{line}[/]"),
    )
    stopping = _stop_on_signals(supervisor)
    try:
        supervisor.start()
        if config is not None:
            out.print(f"[dim]settings of {escape(str(config))}[/]")
        with out.status("starting " + ", ".join(service.name for service in supervisor.plan.services)):
            state = _wait_up(supervisor, stopping, timeout)
        if state is not None:
            print_summary(state)
            if not any("replicas" in info.produces for info in installed().values()):
                out.print("[yellow]inference is not installed here; pip install 'headrace\\[local]' adds it[/]")
        with _print_decisions(state):
            while not supervisor.wait(0.2) and not stopping.is_set():
                state = _print_changes(state, supervisor.state) if state is not None else None
    finally:
        with out.status("stopping"):
            supervisor.stop()
    supervisor.wait()
    out.print("stopped")


def _wait_up(supervisor: Supervisor, stopping: threading.Event, timeout_s: float) -> RunState | None:
    """Wait until all services answer, and return their state, or None if a signal stops the start."""
    from headrace_operations.supervisor import StartFailed

    try:
        return supervisor.wait_up(timeout_s)
    except StartFailed:
        if stopping.is_set():
            return None
        raise


@contextlib.contextmanager
def _print_decisions(state: RunState | None) -> Iterator[None]:
    """Print decisions about versions and reward findings while the block runs."""
    if state is None or "registry" not in state.services:
        yield
        return

    from rich.markup import escape

    from headrace.following import Listener, describe_decision
    from headrace_operations.guard import FindingReporter

    def print_decision(event: ModelEvent) -> None:
        if (text := describe_decision(event)) is not None:
            colour = {"promoted": "green", "evaluated": "default"}.get(event.decision, "yellow")
            console().print(f"[{colour}]{escape(text)}[/]")

    reporter = FindingReporter(lambda text: console().print(f"[yellow]{escape(text)}[/]"))
    listener = Listener(state.bus, print_decision, reporter)
    listener.start()
    try:
        yield
    finally:
        listener.stop()


def _stop_on_signals(supervisor: Supervisor) -> threading.Event:
    """Stop cleanly on the first signal, and at once on the second one."""
    stopping = threading.Event()

    def stop(_number: int, _frame: object) -> None:
        supervisor.begin_stop(now=stopping.is_set())
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopping


def print_summary(state: RunState) -> None:
    """Print the services with their addresses. On a terminal, addresses of pages include a login for a browser."""
    from headrace_schemas.http.stack_access import token_file

    out = console()
    rows = [
        (name, format_state(service), service.url, str(service.pid), service.log)
        for name, service in state.services.items()
    ]
    out.print(table(["service", "state", "address", "pid>", "log"], rows))
    out.print(f"bus       [bold]{state.bus}[/]")
    if state.token_is_key or state.token_is_password:
        token_path = token_file(Path(state.data_dir))
        out.print(f"token     {token_path}   [dim]commands read it, other clients need it[/]")
    if sys.stdout.isatty() and (page := _page_with_login(state)):
        out.print(f"browser   {page}   [dim]other pages take the same login[/]")
    if "console" in state.services:
        out.print(console_line(state.services["console"].url, Path(state.data_dir)), soft_wrap=True)
    if state.base_url:
        out.print(f"base_url  [bold green]{state.base_url}[/]   the one line to change in your agent")
    gateway = state.services.get("gateway")
    if gateway and gateway.status != "ready":
        out.print("[yellow]no model is served yet; the gateway is ready once the first version is loaded[/]")
    for name, reason in state.left_out.items():
        out.print(f"[dim]{name} is not started: {reason}[/]")
    out.print("[dim]Ctrl-C stops everything[/]")


def console_address(data_dir: DataDir = None) -> None:
    """Print an address that logs you in to the console once. It replaces an address that was not used yet."""
    from headrace.errors import UsageError

    state = running_state(data_dir)
    if "console" not in state.services:
        reason = state.left_out.get("console", "not installed")
        raise UsageError(f"the console is not running ({reason}); start it with `headrace up`")
    echo(console_login(state.services["console"].url, Path(state.data_dir)))


def _page_with_login(state: RunState) -> str | None:
    """Return the address of the registry's list of models with the token as its password, for a browser.

    Return None if `headrace up` has no registry or made no key. Print the address only to a terminal, because other
    output may be stored in a log.
    """
    from headrace_schemas.http.stack_access import USERNAME, read_token

    registry = state.services.get("registry")
    token = read_token(Path(state.data_dir)) if state.token_is_key else ""
    if registry is None or not token:
        return None
    scheme, _, address = registry.url.partition("://")
    return f"{scheme}://{USERNAME}:{token}@{address}/v1/models"


def _print_changes(before: RunState, now: RunState) -> RunState:
    for name, service in now.services.items():
        earlier = before.services[name]
        if (earlier.status, earlier.lacks) != (service.status, service.lacks) and service.status in (
            "ready",
            "unready",
        ):
            console().print(f"{name}: {format_state(service)}")
    return now


def add_to(app: typer.Typer) -> None:
    command(
        app,
        up,
        "headrace up",
        "headrace up --set trainer.base=models/base --port 8100",
        "headrace up --config headrace.toml --without trainer",
        "headrace up --python inference=.venv-vllm/bin/python --set inference.engine=vllm",
        "headrace up --set bus.address=kafka:9092   [dim]# your own Kafka[/]",
    )
    command(app, console_address, "headrace console", "xdg-open $(headrace console)", name="console")
