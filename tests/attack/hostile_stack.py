"""`headrace up` with two tenants, a reward function with hostile results, and optional planted faults."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tests.support import tiny_model
from tests.support.fake_llm import FakeLLM
from tests.support.headrace_up import HeadraceUp

MODEL = "tiny"
_PLANTED_FOLDER = Path(__file__).parent / "planted"

REWARDS = '''
"""A reward function whose results are as strange as the context that callers send."""
RESULTS = [
    {"a": 1.7e308, "b": 1.7e308}, float("nan"), float("inf"), 1.7e308, -1.7e308, 10**400, "text", None, [], {"a": None},
    {f"criterion-{number}": 1.0 for number in range(65)}, {"\\x00": 1.0}, {"\\ud83d": 0.5}, 1e-320, True, object(), 0.5,
]

class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")

def strange(trajectory, context):
    choice = hash(trajectory.trajectory_id) % (len(RESULTS) + 5)
    if choice == len(RESULTS):
        raise ValueError("a\\x00b \\ud83d")
    if choice == len(RESULTS) + 1:
        raise Unprintable
    if choice == len(RESULTS) + 2:
        raise RecursionError("x" * 100_000)
    if choice == len(RESULTS) + 3:
        return context.get("k")
    if choice == len(RESULTS) + 4:
        raise SystemExit(3)
    return RESULTS[choice]
'''


def hostile_stack(folder: Path, judge: FakeLLM, settings: dict[str, object], *, planted: bool) -> HeadraceUp:
    folder.mkdir(parents=True)
    (folder / "strange_rewards.py").write_text(REWARDS, encoding="utf-8")
    base = tiny_model.build(folder / "base")
    keys = [
        {"name": name, "tenant": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "scopes": scopes}
        for name, scopes in (("mallory", ["chat", "feedback", "admin"]), ("alice", ["chat", "feedback"]))
    ]
    limits = {"requests_per_s": 5000.0, "burst": 10_000}
    config = folder / "headrace.toml"
    config.write_text("", encoding="utf-8")
    chosen: dict[str, object] = {
        "gateway.keys": keys,
        **{
            f"gateway.{limit_name}.{name}": value
            for limit_name in ("limits_per_key", "limits_total")
            for name, value in limits.items()
        },
        "trainer.base": str(base),
        "trainer.model": MODEL,
        "trainer.batch_experiences": 64,
        "trainer.batch_experiences_min": 1,
        "collector.idle_s": 20.0,
        "scorer.functions": ["strange_rewards:strange"],
        "scorer.labels": {"good": 1.0},
        "scorer.reward_wait_s": 5.0,
        "judge.endpoint.base_url": judge.base_url,
        "judge.endpoint.model": "judge-1",
        **settings,
    }
    folders = [str(folder), *([str(_PLANTED_FOLDER)] if planted else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {"PYTHONPATH": os.pathsep.join(folders)}
    return HeadraceUp(folder / "data", config, chosen, environ)
