"""The settings of every installed service. Each service program describes its own settings in a child process."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import JsonValue, TypeAdapter

from headrace.errors import HeadraceError
from headrace_operations.supervisor.overrides import toml
from headrace_runtime.services import ServiceInfo
from headrace_runtime.settings.reference import SettingDoc, Tier
from headrace_runtime.settings.table import variable_of

_WIDTH = 120
_TIMEOUT_S = 60.0
_CHECK_TIMEOUT_S = 240.0
"""A check may run a gate program for a minute, and reward functions may import large packages."""
_HEADER = """# Headrace settings. Everything is optional: what is commented out shows the default.
#
# `headrace up --config FILE` reads this. An environment variable overrides a line (HEADRACE_GATEWAY__PORT=8100), and so
# does `headrace up --set gateway.port=8100`. An unknown name stops the start.
# `host`, `lease_s` and `retry_s` hold for all services; the section of a service may set another value.
# In each table the first settings are those that users set, then follows what tunes, then what limits.
# This file is the output of `headrace config reference`.
"""
_STARTER_HEADER = """# Headrace settings: those that users set. What is commented out shows the default.
# `headrace config reference` has all settings.
"""
TIERS = get_args(Tier)
Described = dict[str, list[SettingDoc]]
_DESCRIBED = TypeAdapter(Described)


def describe_settings(services: Mapping[str, ServiceInfo]) -> Described:
    """Return the settings by section: shared settings under `common`, then one section for each service.

    Raises:
        HeadraceError: a service cannot describe its settings.
    """
    sections: Described = {}
    for name, result in _run_all(services, dict.fromkeys(services, "--describe-settings")).items():
        if result.returncode:
            raise HeadraceError(f"{name} cannot describe its settings: {result.stderr.strip()[-500:]}")
        sections |= _DESCRIBED.validate_json(result.stdout)
    return sections


@dataclass(frozen=True, slots=True)
class ServiceCheck:
    """Result of the check of a service. `notes` are sentences about a start without problems."""

    problems: list[str]
    notes: list[str]


def check_services(
    services: Mapping[str, ServiceInfo],
    environ: Mapping[str, str],
    *,
    bus: bool,
    on_checked: Callable[[], None] = lambda: None,
) -> dict[str, ServiceCheck]:
    """Let each service check its settings and dependencies as it does at its start, and return the results by service.

    Args:
        services: the services to check.
        environ: environment variables of the check.
        bus: whether one of the services also checks the bus.
        on_checked: called after the check of each service, from another thread.
    """
    arguments = {name: "--check-bus" if bus and name == min(services) else "--check" for name in services}
    results = _run_all(services, arguments, environ=environ, timeout_s=_CHECK_TIMEOUT_S, on_finished=on_checked)
    return {
        name: ServiceCheck(_problems(name, result), [] if result.returncode else result.stdout.splitlines())
        for name, result in results.items()
    }


def suggest_values(
    services: Mapping[str, ServiceInfo], values: Mapping[str, JsonValue], environ: Mapping[str, str]
) -> dict[str, JsonValue]:
    """Return `values` with the values that services suggest for their other settings.

    A service that refuses `values` adds none.
    """
    variables = {variable_of(name): str(value) for name, value in values.items()}
    arguments = dict.fromkeys(services, "--suggest-settings")
    results = _run_all(services, arguments, environ={**environ, **variables})
    suggested = [json.loads(result.stdout) for result in results.values() if not result.returncode]
    return {name: value for part in suggested for name, value in part.items()} | dict(values)


def _problems(name: str, result: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the problems that a check printed, or the last line of standard error if the check itself failed."""
    if not result.returncode:
        return []
    lines = result.stdout.splitlines() or result.stderr.splitlines()[-1:] or [f"exit status {result.returncode}"]
    return [line.removeprefix(f"headrace {name}: ") for line in lines]


def as_toml(described: Described, *, only: str | None = None, tier: str | None = None) -> str:
    """Return a settings file in which every setting (of `tier`) is a comment with its description and default.

    Args:
        described: the settings by section.
        only: the only section to include; None includes all.
        tier: the only tier of settings to include; None includes all.
    """
    sections = [name for name in described if only is None or name == only]
    parts = [_HEADER] if only is None and tier is None else []
    parts += filter(None, (_section(described[section], tier) for section in sections))
    return "\n".join(parts)


def starter_file(described: Described, values: Mapping[str, JsonValue]) -> str:
    """Render a settings file with the common settings and those in `values`, which are set. All others are comments."""
    sections = [_section(settings, "common", values) for settings in described.values()]
    return "\n".join([_STARTER_HEADER, *filter(None, sections)])


def as_json_schema(described: Described) -> dict[str, JsonValue]:
    """Return the JSON Schema of a settings file, with which editors complete and check it.

    Required settings are optional in it, because environment variables may set them. Unknown names are errors.
    """
    root, definitions = _table(), dict[str, JsonValue]()
    for setting in (setting for settings in described.values() for setting in settings):
        *tables, key = setting.name.split(".")
        properties = root["properties"]
        for table in tables:
            properties = properties.setdefault(table, _table())["properties"]
        value = _with_own_definitions(setting)
        definitions |= value.pop("$defs", {})
        default = {} if setting.default is None else {"default": setting.default}
        properties[key] = {**value, "description": setting.description, **default}
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Settings of Headrace"}
    return {**title, **root, **({"$defs": definitions} if definitions else {})}


def _table() -> dict[str, Any]:
    return {"type": "object", "properties": {}, "additionalProperties": False}


def _with_own_definitions(setting: SettingDoc) -> dict[str, Any]:
    """Return the JSON schema of a setting, with the setting's name prefixed to its definitions, so that names are
    unique.
    """
    text = json.dumps(setting.value_schema).replace('"#/$defs/', f'"#/$defs/{setting.name}.')
    schema: dict[str, Any] = json.loads(text)
    if "$defs" in schema:
        schema["$defs"] = {f"{setting.name}.{name}": part for name, part in schema["$defs"].items()}
    return schema


def _section(settings: Sequence[SettingDoc], tier: str | None, values: Mapping[str, JsonValue] | None = None) -> str:
    """Render the tables of one section; in each table the tiers follow each other."""
    tables: dict[str, list[SettingDoc]] = {}
    for setting in settings:
        if (tier in (None, setting.tier) and not setting.shared) or setting.name in (values or {}):
            tables.setdefault(setting.name.rpartition(".")[0], []).append(setting)
    lines: list[str] = []
    for table, inside in tables.items():
        lines += [f"\n[{table}]"] if table else []
        for tier_name in TIERS:
            group = [setting for setting in inside if setting.tier == tier_name]
            lines += [f"# --- {tier_name}"] if group and tier is None else []
            for setting in group:
                lines += _lines(setting, values or {})
    return "\n".join(lines).lstrip("\n") + "\n" if lines else ""


def _lines(setting: SettingDoc, values: Mapping[str, JsonValue]) -> list[str]:
    key = setting.name.rpartition(".")[2]
    text = f"{setting.description} ({setting.kind})" if setting.description else f"({setting.kind})"
    wrapped = textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    comment = [f"# {line}" for line in wrapped]
    if setting.name in values:
        return [*comment, f"{key} = {toml(values[setting.name])}"]
    value = "..." if setting.required or setting.default is None else toml(setting.default)
    return [*comment, f"#{key} = {value}"]


def _run_all(
    services: Mapping[str, ServiceInfo],
    arguments: Mapping[str, str],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
    on_finished: Callable[[], None] = lambda: None,
) -> dict[str, subprocess.CompletedProcess[str]]:
    with ThreadPoolExecutor(max_workers=4) as pool:
        futures = {
            name: pool.submit(_run, info.module, arguments[name], environ, timeout_s) for name, info in services.items()
        }
        for future in futures.values():
            future.add_done_callback(lambda _: on_finished())
    return {name: future.result() for name, future in futures.items()}


def _run(
    module: str, argument: str, environ: Mapping[str, str] | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, argument]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environ and dict(environ)
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"the check did not finish within {timeout_s:g} s")
