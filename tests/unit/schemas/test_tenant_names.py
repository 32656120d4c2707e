"""Names of tenants joined with their own names: no two pairs share a result."""

from __future__ import annotations

import itertools

from headrace_schemas.values.ids import ingested_trajectory_id, tenant_name

_PARTS = ["a", "b", "a/b", "/", "a/", "/1/a", "1", "default", "tenant-aaaaaaaaaaaaaaaa/x", "é", "x" * 512]


def test_no_two_pairs_share_a_tenant_name() -> None:
    pairs = list(itertools.product(_PARTS, _PARTS))
    assert len({tenant_name(tenant, name) for tenant, name in pairs}) == len(pairs)


def test_tenant_names_of_plain_tenants_are_those_of_earlier_releases() -> None:
    assert tenant_name("acme", "task/1") == "acme/task/1"


def test_no_two_pairs_share_an_ingested_trajectory_id() -> None:
    pairs = list(itertools.product(_PARTS, _PARTS))
    names = {ingested_trajectory_id(tenant, name) for tenant, name in pairs}
    assert len(names) == len(pairs)
    assert max(map(len, names)) <= 512
    assert all(
        ingested_trajectory_id(tenant, ingested_trajectory_id(tenant, name)) == ingested_trajectory_id(tenant, name)
        for tenant, name in pairs
    )
