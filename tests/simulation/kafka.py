"""Replacements of Kafka's client libraries and of Faust by the simulated bus, by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.simulation import clients, faust_app

STANDS_FOR: Mapping[str, object] = {
    "headrace_runtime.kafka.producer.AIOKafkaProducer": clients.Producer,
    "headrace_runtime.kafka.consumer.AIOKafkaConsumer": clients.Consumer,
    "headrace_runtime.stream.faust_host._app": faust_app.App,
}
