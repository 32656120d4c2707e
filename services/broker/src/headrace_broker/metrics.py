"""Prometheus metrics of the broker. At each scrape they are read from `Stats`, the catalog and the groups."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import REGISTRY, Collector

from headrace_broker.broker import Broker
from headrace_broker.server import Server

_PREFIX = "headrace_broker"


def register(broker: Broker, server: Server) -> None:
    """Add the broker's metrics to those that `/metrics` returns."""
    REGISTRY.register(BrokerCollector(broker, server))


class BrokerCollector(Collector):
    """Source of the broker's metrics. Prometheus' client calls it at each scrape, in the event loop."""

    def __init__(self, broker: Broker, server: Server) -> None:
        self._broker = broker
        self._server = server

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._counters()
        yield from self._log()
        yield from self._memory()

    def _requests(self) -> Iterator[Metric]:
        stats = self._broker.stats
        requests = SummaryMetricFamily(
            f"{_PREFIX}_request_seconds", "Requests by API; Fetch includes its wait", labels=["api"]
        )
        for api, count in stats.requests.items():
            requests.add_metric([api], count, stats.request_seconds[api])
        yield requests
        errors = CounterMetricFamily(
            f"{_PREFIX}_errors", "Refused requests and partitions by Kafka error code", labels=["code"]
        )
        for code, count in stats.errors.items():
            errors.add_metric([str(int(code))], count)
        yield errors
        commits = SummaryMetricFamily(f"{_PREFIX}_commit_seconds", "Group commits, fsync included")
        commits.add_metric([], stats.commits, stats.commit_seconds)
        yield commits

    def _counters(self) -> Iterator[Metric]:
        stats = self._broker.stats
        for name, text, value in (
            ("commit_operations", "Operations in group commits", stats.commit_operations),
            ("commit_failures", "Failed commits", stats.commit_failures),
            ("malformed", "Connections closed because of malformed data", stats.malformed),
            ("handler_failures", "Connections closed because of a bug", stats.handler_failures),
            ("connections_refused", "Connections beyond the 512 that are allowed", stats.connections_refused),
            ("produced_bytes", "Bytes of produced record batches", stats.produced_bytes),
            ("fetched_bytes", "Bytes of fetched record batches", stats.fetched_bytes),
            ("rebalances", "Group generations with assignments", stats.rebalances),
            ("expired_bytes", "Bytes deleted by retention", stats.expired_bytes),
            ("compacted_bytes", "Bytes removed by compaction", stats.compacted_bytes),
        ):
            yield CounterMetricFamily(f"{_PREFIX}_{name}", text, value)

    def _log(self) -> Iterator[Metric]:
        size = GaugeMetricFamily(f"{_PREFIX}_log_bytes", "Bytes of stored record batches", labels=["topic"])
        offsets = GaugeMetricFamily(f"{_PREFIX}_log_offsets", "Offsets between start and end", labels=["topic"])
        for topic in self._broker.catalog.topics.values():
            size.add_metric([topic.name], sum(view.bytes for view in topic.partitions))
            offsets.add_metric([topic.name], sum(view.end - view.start for view in topic.partitions))
        yield size
        yield offsets
        members = GaugeMetricFamily(f"{_PREFIX}_group_members", "Members of a consumer group", labels=["group"])
        for group in self._broker.coordinator.all():
            members.add_metric([group.id], len(group.members))
        yield members

    def _memory(self) -> Iterator[Metric]:
        memory = GaugeMetricFamily(f"{_PREFIX}_held_bytes", "Memory of requests and of fetches", labels=["what"])
        memory.add_metric(["requests"], self._server.request_bytes)
        memory.add_metric(["fetches"], self._broker.fetch_memory.used)
        yield memory
        stats = self._broker.stats
        yield GaugeMetricFamily(
            f"{_PREFIX}_mended", "Pages and log frames that were repaired at the start", stats.repaired
        )
        yield GaugeMetricFamily(
            f"{_PREFIX}_lost_batches", "Ranges of offsets that were lost by damage", stats.lost_batches
        )
        yield GaugeMetricFamily(f"{_PREFIX}_connections", "Connected clients", self._broker.stats.connections)
