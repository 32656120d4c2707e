"""Settings of topics: what is honoured, and that nothing else is taken."""

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
    }


@pytest.mark.parametrize("policy", ["compact,delete", "delete,compact", "delete, compact"])
def test_both_policies(policy: str) -> None:
    config = parse([("cleanup.policy", policy)])
    assert config.compacts
    assert config.deletes


def test_none_means_the_default() -> None:
    assert parse([("retention.ms", None)]) == TopicConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("segment.bytes", "1000"),
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
