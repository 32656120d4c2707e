"""Settings of the stack under fire.

Waiting times are short; bounds on loss, order and retries are the defaults.
"""

from __future__ import annotations

from pathlib import Path

MODEL = "chaos"


def machine_a(base: Path, rewards: Path, judge_url: str) -> dict[str, object]:
    """Every service's settings; machine B takes those of the services that it runs."""
    return {
        "inference.heartbeat_s": 0.5,
        "inference.ttl_s": 3,
        "inference.torch.device": "cpu",
        "collector.idle_s": 30,
        "scorer.functions": [f"{rewards}:short"],
        "scorer.required": ["feedback"],
        "scorer.reward_wait_s": 15,
        "scorer.lease_s": 5,
        "judge.endpoint.base_url": judge_url,
        "judge.endpoint.model": "judge",
        "judge.sample_rate": 0.2,
        "judge.lease_s": 5,
        "trainer.base": base,
        "trainer.model": MODEL,
        "trainer.batch_experiences": 64,
        "trainer.batch_experiences_min": 1,
        "trainer.batch_wait_s": 3,
        "trainer.steps_per_version": 6,
        "trainer.save_interval_s": 3,
        "trainer.max_staleness": 64,
        "trainer.memory.window_experiences": 1_000_000,
        "trainer.optimizer.learning_rate": 1e-4,
        "trainer.compute.device": "cpu",
        "registry.lease_s": 3,
        "registry.probe_timeout_s": 60,
    }
