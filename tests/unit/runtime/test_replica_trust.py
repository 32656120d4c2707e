"""A replica's URL is called when the replica signed it or a setting names its host, not because a topic has it."""

from __future__ import annotations

import random

import pytest
from pydantic import SecretStr, ValidationError

from headrace_runtime.http.guard import ReplicaTrust, signed
from headrace_runtime.settings.sections import SecuritySettings
from headrace_schemas import Replica
from tests.support.fake_replica import FakeReplica
from tests.support.seeds import draw_seed

KEYED = SecuritySettings(internal_key=SecretStr("between-us"))
GENUINE = signed(FakeReplica("replica-0", url="http://10.0.0.7:8010").heartbeat(), KEYED)


def forged(rng: random.Random) -> Replica:
    """Return a heartbeat that a sender without the key could write, with copies of genuine signatures."""
    hosts = [
        "evil.example",
        "10.0.0.8",
        "127.0.0.1",
        "[::1]",
        "10.0.0.7.evil.example",
        "10.0.0.7@evil.example",
        "0x7f.1",
    ]
    url = rng.choice((
        f"http://{rng.choice(hosts)}:{rng.randrange(70_000)}",
        f"{GENUINE.url}{rng.choice(('@evil.example', '/../x', '.evil.example', '0', '/', '?x', '#'))}",
        "http://evil.example\\@10.0.0.7:8010", "http://evil.example/\n10.0.0.7", f"gopher://{rng.choice(hosts)}",
    ))  # fmt: skip
    other_security = SecuritySettings(internal_key=SecretStr(rng.randbytes(8).hex()))
    base = GENUINE.model_copy(update={"url": url, "replica_id": rng.choice(("replica-0", "replica-1", "é\0"))})
    signature = rng.choice(("", "0" * 64, GENUINE.signature, signed(base, other_security).signature))
    return base.model_copy(update={"signature": signature})


def test_a_forged_heartbeat_is_never_accepted() -> None:
    seed = draw_seed()
    rng, trust = random.Random(seed), ReplicaTrust(KEYED)
    assert trust.accepts(GENUINE)
    assert not [replica.url for replica in (forged(rng) for _ in range(1000)) if trust.accepts(replica)]
    assert len(trust._logged_urls) <= 3, "what is logged is bounded by the replicas that are named"


def test_what_is_remembered_of_refused_replicas_is_bounded() -> None:
    trust = ReplicaTrust(KEYED)
    for number in range(3000):
        assert not trust.accepts(FakeReplica(f"replica-{number}", url="http://evil.example").heartbeat())
    assert len(trust._logged_urls) == 1024


@pytest.mark.parametrize(
    ("url", "accepted"),
    [
        ("http://127.0.0.1:8010", True),
        ("http://[::1]:8010", True),
        ("http://localhost:8010", True),
        ("http://10.0.0.7:8010", False),
        ("http://replica:8010", False),
        ("http://localhost.evil.example:8010", False),
        ("file:///etc/passwd", False),
    ],
)
def test_without_a_key_loopback_alone_is_accepted(url: str, accepted: bool) -> None:
    assert ReplicaTrust(SecuritySettings()).accepts(FakeReplica(url=url).heartbeat()) is accepted


@pytest.mark.parametrize(
    ("url", "accepted"),
    [
        ("http://gpu-1:8010", True),
        ("http://GPU-1:8010/path", True),
        ("https://a.replicas.internal:8010", True),
        ("http://replicas.internal:8010", False),
        ("http://evilreplicas.internal:8010", False),
        ("http://gpu-1.evil.example:8010", False),
        ("http://gpu-1@evil.example:8010", False),
        ("http://evil.example#gpu-1", False),
        ("http://evil.example\\gpu-1", False),
        ("http://gpu-1:99999999", False),
        ("ftp://gpu-1:8010", False),
    ],
)
@pytest.mark.parametrize("key", ["", "between-us"])
def test_a_setting_names_hosts_that_need_no_signature(url: str, accepted: bool, key: str) -> None:
    settings = SecuritySettings(internal_key=SecretStr(key), replica_hosts=("gpu-1", "*.replicas.internal"))
    assert ReplicaTrust(settings).accepts(FakeReplica(url=url).heartbeat()) is accepted


def test_patterns_are_checked() -> None:
    for wrong in ("", "http://gpu-1", "gpu-1:*", "a*b", "*.*"):
        with pytest.raises(ValidationError):
            SecuritySettings(replica_hosts=(wrong,))


def test_a_heartbeat_of_an_older_release_is_read() -> None:
    text = GENUINE.model_copy(update={"signature": ""}).to_json().replace(b',"signature":""', b"")
    assert b"signature" not in text
    assert Replica.from_json(text).signature == ""
