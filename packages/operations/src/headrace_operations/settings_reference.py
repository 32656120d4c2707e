"""The settings of every installed service, asked from the services: each is a program that can describe its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

from pydantic import JsonValue, TypeAdapter

from headrace.errors import HeadraceError
from headrace_operations.toml_text import toml
from headrace_runtime.reference import SettingDoc, Tier
from headrace_runtime.services import ServiceInfo

_WIDTH = 120
_TIMEOUT_S = 60.0
_CHECK_TIMEOUT_S = 240.0
"""A gate may take its minute in a check, and reward functions may import much."""
_HEADER = """# Headrace settings. Everything is optional: what is commented out shows the default.
#
# `headrace up --config FILE` reads this. An environment variable overrides a line (HEADRACE_GATEWAY__PORT=8100), and so
# does `headrace up --set gateway.port=8100`. An unknown name stops the start.
# In each table the first settings are those that users set, then follows what tunes, then what limits.
# This file is the output of `headrace config reference`.
"""
_BEGINNING = """# Headrace settings: those that users set. What is commented out shows the default.
# `headrace config reference` has all settings.
"""
TIERS = get_args(Tier)
Described = dict[str, list[SettingDoc]]
_DESCRIBED = TypeAdapter(Described)


def ask(services: Mapping[str, ServiceInfo]) -> Described:
    """Section to settings: those that all services share under `common`, then one section for each service."""
    found: Described = {}
    for name, done in _run_all(services, dict.fromkeys(services, "--describe-settings")).items():
        if done.returncode:
            raise HeadraceError(f"{name} cannot describe its settings: {done.stderr.strip()[-500:]}")
        found |= _DESCRIBED.validate_json(done.stdout)
    return found


def refusals(services: Mapping[str, ServiceInfo], environ: Mapping[str, str], *, bus: bool) -> dict[str, list[str]]:
    """Service to what it found wrong when it tried what its start would; one of them looks at the `bus` as well."""
    asked = {name: "--check-bus" if bus and name == min(services) else "--check" for name in services}
    done = _run_all(services, asked, environ=environ, timeout_s=_CHECK_TIMEOUT_S)
    return {name: _sentences(name, result) for name, result in done.items()}


def _sentences(name: str, result: subprocess.CompletedProcess[str]) -> list[str]:
    """What is wrong stands on standard output; what stopped the attempt itself is the end of standard error."""
    if not result.returncode:
        return []
    said = result.stdout.splitlines() or result.stderr.splitlines()[-1:] or [f"exit status {result.returncode}"]
    return [line.removeprefix(f"headrace {name}: ") for line in said]


def as_toml(described: Described, *, only: str | None = None, tier: str | None = None) -> str:
    """A settings file in which every setting (of a tier) stands with its meaning, commented out, with its default."""
    sections = [name for name in described if only is None or name == only]
    parts = [_HEADER] if only is None and tier is None else []
    parts += filter(None, (_section(described[section], tier) for section in sections))
    return "\n".join(parts)


def to_begin_with(described: Described, given: Mapping[str, JsonValue]) -> str:
    """A file with the common settings: those that are `given` are set, the others commented out."""
    sections = [_section(settings, "common", given) for settings in described.values()]
    return "\n".join([_BEGINNING, *filter(None, sections)])


def _section(settings: Sequence[SettingDoc], tier: str | None, given: Mapping[str, JsonValue] | None = None) -> str:
    """Its tables, in each the tiers in their order."""
    tables: dict[str, list[SettingDoc]] = {}
    for setting in settings:
        if tier in (None, setting.tier):
            tables.setdefault(setting.name.rpartition(".")[0], []).append(setting)
    lines: list[str] = []
    for table, inside in tables.items():
        lines += [f"\n[{table}]"] if table else []
        for each in TIERS:
            found = [setting for setting in inside if setting.tier == each]
            lines += [f"# --- {each}"] if found and tier is None else []
            for setting in found:
                lines += _lines(setting, given or {})
    return "\n".join(lines).lstrip("\n") + "\n" if lines else ""


def _lines(setting: SettingDoc, given: Mapping[str, JsonValue]) -> list[str]:
    key = setting.name.rpartition(".")[2]
    text = f"{setting.description} ({setting.kind})" if setting.description else f"({setting.kind})"
    wrapped = textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False)
    comment = [f"# {line}" for line in wrapped]
    if setting.name in given:
        return [*comment, f"{key} = {toml(given[setting.name])}"]
    value = "..." if setting.required or setting.default is None else toml(setting.default)
    return [*comment, f"#{key} = {value}"]


def _run_all(
    services: Mapping[str, ServiceInfo],
    arguments: Mapping[str, str],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> dict[str, subprocess.CompletedProcess[str]]:
    with ThreadPoolExecutor(max_workers=4) as pool:
        done = {
            name: pool.submit(_run, info.module, arguments[name], environ, timeout_s) for name, info in services.items()
        }
    return {name: future.result() for name, future in done.items()}


def _run(
    module: str, argument: str, environ: Mapping[str, str] | None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, argument]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environ and dict(environ)
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"is not done after {timeout_s:g} s")
