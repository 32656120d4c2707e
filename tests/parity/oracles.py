"""Values written by hand, for the comparison with programs and unit tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from headrace_schemas import Dialogue, FunctionCall, Message, ToolCall, Trajectory
from headrace_schemas.values.ids import session_key

EXPLORER: dict[str, Any] = {
    "mode": "serve", "project": "test", "name": "test", "checkpoint_root_dir": "/tmp/shared",
    "model": {"model_path": "models/Qwen3-tiny", "max_model_len": 8192, "max_response_tokens": 2048,
              "temperature": 0.7},
    "algorithm": {"algorithm_type": "reinforceplusplus"},
    "cluster": {"node_num": 1, "gpu_per_node": 4},
    "explorer": {
        "rollout_model": {
            "engine_num": 2, "tensor_parallel_size": 2, "enable_openai_api": True, "enable_history": True,
            "enable_auto_tool_choice": True, "tool_call_parser": "hermes", "dtype": "bfloat16", "seed": 42,
        },
        "service_status_check_interval": 10, "proxy_port": 8010,
    },
    "buffer": {
        "train_batch_size": 16,
        "trainer_input": {"experience_buffer": {"name": "exp_buffer", "storage_type": "sql"}},
    },
    "synchronizer": {"sync_method": "checkpoint", "sync_interval": 1},
    "monitor": {"monitor_type": "tensorboard"},
}  # fmt: skip
"""The keys of the document about the Java extension, of its explorer."""
TRAINER: dict[str, Any] = {
    **{key: EXPLORER[key] for key in ("project", "name", "checkpoint_root_dir", "model", "algorithm", "cluster")},
    "mode": "train",
    "buffer": {
        "train_batch_size": 32,
        "trainer_input": {"experience_buffer": {"name": "exp_buffer", "storage_type": "sql"}},
    },
    "trainer": {
        "save_interval": 16, "ulysses_sequence_parallel_size": 1, "save_hf_checkpoint": "always",
        "max_checkpoints_to_keep": 5,
        "trainer_config": {
            "trainer": {"balance_batch": False, "max_actor_ckpt_to_keep": 5, "max_critic_ckpt_to_keep": 5}
        },
    },
    "synchronizer": {"sync_method": "checkpoint", "sync_interval": 1},
    "monitor": {"monitor_type": "tensorboard"},
}  # fmt: skip
CONVERTED = {
    "data_dir": "/tmp/shared",
    "gateway.model_aliases": {"models/Qwen3-tiny": "Qwen3-tiny"},
    "gateway.port": 8010,
    "inference.port": 8011,
    "inference.tool_parser": "hermes",
    "inference.torch.context_tokens_max": 8192,
    "inference.torch.dtype": "bfloat16",
    "trainer.algorithm": "reinforce++",
    "trainer.base": "models/Qwen3-tiny",
    "trainer.batch_experiences": 32,
    "trainer.lineage": "test-test",
    "trainer.model": "Qwen3-tiny",
    "trainer.steps_per_version": 1,
}
"""Rewards of both records."""


def hand_made_trajectory() -> Trajectory:
    """A question, a thought with a tool call, its result, an answer."""
    call = ToolCall(id="call-1", function=FunctionCall(name="search", arguments='{"query": "invoice"}'))
    messages = (
        Message(role="user", content="Who sent the invoice?"),
        Message(role="assistant", content="I look for it.", tool_calls=(call,)),
        Message(role="tool", content="From: Ada", tool_call_id="call-1"),
        Message(role="assistant", content="Ada sent it."),
    )
    return Trajectory(
        time=datetime(2026, 1, 1, tzinfo=UTC),
        trajectory_id="t-1",
        session_key=session_key("default", "conv_001"),
        session_id="conv_001",
        model="tiny",
        branches=(),
        dialogues=(Dialogue(messages=messages),),
        end_reason="end_call",
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def the_record() -> dict[str, Any]:
    """The article's record of the trajectory."""
    return {
        "conversation_id": "conv_001",
        "messages": [
            {"role": "user", "content": "Who sent the invoice?"},
            {"role": "assistant", "content": "I look for it."},
            {"role": "tool", "content": "From: Ada"},
            {"role": "assistant", "content": "Ada sent it."},
        ],
        "thoughts": [{"step": 1, "content": "I look for it."}],
        "tool_calls": [{"tool": "search", "args": {"query": "invoice"}, "result": "From: Ada"}],
    }
