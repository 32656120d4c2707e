"""Settings of topics: honoured ones, and refusals of all others."""

from __future__ import annotations

import pytest

from headrace_broker.errors import Code, Rejected
from headrace_broker.topic_config import TopicConfig, parse


def test_defaults_are_kafkas() -> None:
    assert parse([]).entries() == {
        "cleanup.policy": "delete",
        "retention.ms": "604800000",
        "retention.bytes": "-1",
        "max.message.bytes": "1048588",
        "delete.retention.ms": "86400000",
        "min.compaction.lag.ms": "0",
    }


@pytest.mark.parametrize("policy", ["compact,delete", "delete,compact", "delete, compact"])
def test_both_policies(policy: str) -> None:
    config = parse([("cleanup.policy", policy)])
    assert config.compacts
    assert config.deletes


@pytest.mark.parametrize(
    ("name", "value"),
    [("segment.bytes", "52428800"), ("message.timestamp.type", "CreateTime"), ("min.insync.replicas", "1")],
)
def test_what_changes_nothing_is_taken_and_shown(name: str, value: str) -> None:
    config = parse([(name, value), ("retention.ms", "-1")])
    assert config.entries()[name] == value
    assert config.non_default() == {name: value, "retention.ms": "-1"}
    assert TopicConfig.unpacked(config.packed()) == config


def test_settings_of_an_older_broker_are_read() -> None:
    assert TopicConfig.unpacked('["compact", 1, 2, 3, 4]') == TopicConfig("compact", 1, 2, 3, 4)


def test_none_means_the_default() -> None:
    assert parse([("retention.ms", None)]) == TopicConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("segment.byte", "1000"),
        ("min.insync.replicas", "2"),
        ("message.timestamp.type", "LogAppendTime"),
        ("compression.type", "zstd"),
        ("retention_ms", "1000"),
        ("retention.msx", "1000"),
        ("cleanup.policy", ""),
        ("cleanup.policy", "compress"),
        ("retention.ms", "-2"),
        ("retention.ms", "1e3"),
        ("retention.bytes", str(1 << 63)),
        ("max.message.bytes", "-1"),
    ],
)
def test_refused_with_the_name_in_the_message(name: str, value: str) -> None:
    with pytest.raises(Rejected, match=name) as caught:
        parse([(name, value)])
    assert caught.value.code is Code.INVALID_CONFIG
