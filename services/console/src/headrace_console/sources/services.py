"""Health, metrics and reward sources of all services, requested over HTTP at most every two seconds."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx2
from pydantic import ValidationError

from headrace_console.settings import ConsoleSettings
from headrace_console.sources.clients import bearer, open_client
from headrace_runtime.clock import Clock
from headrace_runtime.services import ServiceInfo
from headrace_runtime.settings.sections import Common, ServiceSettings
from headrace_schemas.http.registry_api import SourceList, SourceState

READ_INTERVAL_S = 2.0
_TIMEOUT_S = 2.0
_PAGE_BYTES_MAX = 4_194_304
_STATE_BYTES_MAX = 1_048_576
_WITH_SOURCES = ("scorer", "judge")
_SAMPLE = re.compile(r"(?P<name>headrace_[a-z_]{1,100})(?:\{(?P<labels>[^\n]*)\})? (?P<value>[0-9.eE+-]+)")
_LABEL = re.compile(r'(?P<name>[a-z_]{1,100})="(?P<value>(?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\(.)")
Samples = dict[str, list[tuple[dict[str, str], float]]]
"""Labels and value of each sample, by the name of the metric."""


@dataclass(frozen=True, slots=True)
class ServiceReport:
    """State of a service. `status` is `away` if the service did not answer."""

    name: str
    status: Literal["ready", "unready", "away"]
    problems: tuple[str, ...] = ()
    samples: Samples = field(default_factory=dict)
    sources: tuple[SourceState, ...] = ()

    def value(self, metric: str, **labels: str) -> float | None:
        """Return the sum of a metric over all samples with `labels`, or None if there is no such sample."""
        values = [
            value for sample_labels, value in self.samples.get(metric, ()) if labels.items() <= sample_labels.items()
        ]
        return sum(values) if values else None

    def by_label(self, metric: str, label: str) -> dict[str, float]:
        """Return the values of a metric that are not 0, by one of its labels."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(metric, ()):
            if value and label in labels:
                sums[labels[label]] = sums.get(labels[label], 0.0) + value
        return sums


@dataclass(frozen=True, slots=True)
class StackReport:
    """State of all services at one time. `left_out` maps services that `headrace up` did not start to the reason."""

    services: Mapping[str, ServiceReport]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def service(self, name: str) -> ServiceReport:
        """Return the report of the service `name`, or a report with the state `away` if there is none."""
        return self.services.get(name) or ServiceReport(name, "away")

    @property
    def calls(self) -> int | None:
        """Number of turns that the gateway captured since its start, or None if it does not answer."""
        gateway = self.service("gateway")
        if gateway.status == "away":
            return None
        return int(gateway.value("headrace_gateway_turns_total") or 0)


class Progress:
    """The two state reports around the last increase of the number of trained experiences."""

    def __init__(self) -> None:
        self.before: StackReport | None = None
        """The report with the last rise, or the first report if it has trained experiences, or None."""
        self.preceding: StackReport | None = None
        """The report before the last rise, or None if there was no rise."""
        self._last: StackReport | None = None
        self._rose_at_s: float | None = None
        self._trained: float | None = None

    def note(self, report: StackReport, now_s: float) -> None:
        """Compare a new report with the last one. If the number of trained experiences rose, store both as the
        increase.

        Args:
            report: the new report.
            now_s: monotonic time in seconds.
        """
        trained = report.service("trainer").value("headrace_trainer_trained_total")
        if trained is None:  # the trainer does not answer
            return
        if self._trained is None and trained:
            self.before = report
        elif self._trained is not None and trained > self._trained:
            self.before, self.preceding, self._rose_at_s = report, self._last, now_s
        self._trained, self._last = trained, report

    def untrained_s(self, now_s: float) -> float | None:
        """Return the seconds since the number of trained experiences last rose, or None if no increase was observed."""
        return None if self._rose_at_s is None else now_s - self._rose_at_s


class StackReader:
    """Reader of all services. `report` requests their pages again if the last report is older than two seconds."""

    def __init__(
        self, common: Common, settings: ConsoleSettings, installed: Mapping[str, ServiceInfo], clock: Clock
    ) -> None:
        self._common = common
        self._settings = settings
        self._installed = {name: info for name, info in installed.items() if name != "console"}
        self._clock = clock
        self._lock = asyncio.Lock()
        self._report = StackReport({})
        self._read_at_s: float | None = None
        self.progress = Progress()
        key = common.security.internal_key.get_secret_value()
        self._headers = bearer(key)

    def url(self, name: str) -> str:
        """Return the address of a service: its entry in `console.urls`, otherwise its port on this machine."""
        if name in self._settings.urls:
            return self._settings.urls[name]
        section = self._common.section_of(name, ServiceSettings)
        info = self._installed.get(name)
        host = "127.0.0.1" if section.host in ("0.0.0.0", "::", "") else section.host  # noqa: S104 (compared, not bound)
        return f"http://{f'[{host}]' if ':' in host else host}:{section.port or (info.port if info else 0)}"

    async def report(self) -> StackReport:
        """Return the state of all services, at most two seconds old. Concurrent callers share one report."""
        async with self._lock:
            now_s = self._clock.monotonic_s()
            if self._read_at_s is None or now_s - self._read_at_s >= READ_INTERVAL_S:
                self._report = await self._read()
                self._read_at_s = self._clock.monotonic_s()
                self.progress.note(self._report, self._read_at_s)
            return self._report

    async def _read(self) -> StackReport:
        left_out = await asyncio.to_thread(read_left_out, self._common.data_dir)
        names = {name for name in {*self._installed, *self._settings.urls} if name not in left_out} - {"console"}
        async with open_client(_TIMEOUT_S, self._headers) as client:
            reports = await asyncio.gather(*(self._read_service(client, name) for name in sorted(names)))
        return StackReport({report.name: report for report in reports}, left_out)

    async def _read_service(self, client: httpx2.AsyncClient, name: str) -> ServiceReport:
        url = self.url(name)
        try:
            health = await client.get(f"{url}/health")
            metrics = await client.get(f"{url}/metrics")
            sources = await client.get(f"{url}/sources") if name in _WITH_SOURCES else None
        except (httpx2.HTTPError, OSError) as error:
            return ServiceReport(name, "away", (f"does not answer at {url} ({type(error).__name__})",))
        samples = parse_samples(metrics.text[:_PAGE_BYTES_MAX]) if metrics.status_code == 200 else {}
        return ServiceReport(
            name,
            "ready" if health.status_code == 200 else "unready",
            _problems(health.content[:_PAGE_BYTES_MAX]),
            samples,
            _sources(sources.content[:_PAGE_BYTES_MAX]) if sources is not None and sources.status_code == 200 else (),
        )


def parse_samples(page: str) -> Samples:
    """Return the samples of Headrace's metrics on a page in Prometheus' text format."""
    samples: Samples = {}
    for line in page.splitlines():
        match = _SAMPLE.fullmatch(line)
        if match is None or match["name"].endswith("_bucket"):
            continue
        labels = {
            label["name"]: _ESCAPED.sub(lambda escape: "\n" if escape[1] == "n" else escape[1], label["value"])
            for label in _LABEL.finditer(match["labels"] or "")
        }
        samples.setdefault(match["name"], []).append((labels, float(match["value"])))
    return samples


def read_left_out(data_dir: Path) -> dict[str, str]:
    """Return, from the state file of `headrace up`, the services that it did not start, with the reason for each."""
    try:
        with (data_dir / "run" / "state.json").open("rb") as file:
            state = json.loads(file.read(_STATE_BYTES_MAX))
        left_out: dict[str, Any] = state["left_out"]
        return {str(name): str(reason) for name, reason in left_out.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _problems(body: bytes) -> tuple[str, ...]:
    """Return the problems that a `/health` response lists, and the names of failed checks without an explanation."""
    try:
        page = json.loads(body)
        reasons = page.get("reasons", {})
        failed = [name for name, passed in page["checks"].items() if not passed and name not in reasons]
        return tuple(dict.fromkeys([*failed, *(f"{name}: {reason}" for name, reason in reasons.items())]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def _sources(body: bytes) -> tuple[SourceState, ...]:
    try:
        return SourceList.model_validate_json(body, extra="ignore").data
    except ValidationError:
        return ()
