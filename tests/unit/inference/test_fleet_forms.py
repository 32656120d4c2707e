"""The answer forms that a replica announces depend on the tokenizers of its versions."""

from __future__ import annotations

from pathlib import Path

import structlog

from headrace_inference.fleet import Fleet, FleetLimits
from headrace_runtime.storage.versions import VersionCache
from tests.unit.inference.conftest import Models
from tests.unit.inference.test_fleet import Rig


async def test_a_tokenizer_that_disagrees_with_the_grammar_takes_the_ability_from_the_heartbeat(
    models: Models, tmp_path: Path
) -> None:
    """And gives it back with the version; the version itself answers all that needs no form."""
    limits = FleetLimits(versions_max=4, drain_s=0.01, retry_s=0.01)
    rig = Rig(models, tmp_path / "cache")
    checked: list[int] = []

    def check(_tokenizer: object, vocabulary: int) -> str:
        checked.append(vocabulary)
        return "its tokens are not what they seem"

    rig.fleet = Fleet(rig.engine, VersionCache(models.blobs, tmp_path / "cache"), limits, rig.news.set, check)
    assert rig.fleet.holds_forms()
    rig.route(models.first.served)
    with structlog.testing.capture_logs() as logs:
        await rig.until(lambda: rig.states.get(models.first.version) == "ready")
    assert not rig.fleet.holds_forms()
    assert checked == [320]
    assert [entry["reason"] for entry in logs if entry["event"] == "forms_not_held"] == [check(None, 320)]
    rig.route()
    await rig.until(lambda: not rig.states)
    assert rig.fleet.holds_forms()
    await rig.fleet.close()
