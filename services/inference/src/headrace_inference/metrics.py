"""Metrics of the inference service. Its README.md describes them."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram, Info

ENGINE = Info("headrace_inference_engine", "Engine, tool parser and reasoning parser")
REQUESTS = Counter("headrace_inference_requests_total", "Chat completions, by HTTP status", ["status"])
TTFT_SECONDS = Histogram(
    "headrace_inference_ttft_seconds",
    "From a streamed request to its first sampled token",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 15, 60),
)
PROMPT_TOKENS = Counter("headrace_inference_prompt_tokens_total", "Prompt tokens, by where their KV came from", ["kv"])
SAMPLED_TOKENS = Counter("headrace_inference_sampled_tokens_total", "Tokens sampled")
BATCH_SIZE = Histogram(
    "headrace_inference_batch_size", "Sequences per decode step", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
)
WAITING = Gauge("headrace_inference_waiting", "Sequences that wait for a row of the batch", ["version"])
RUNNING = Gauge("headrace_inference_running", "Sequences that decode or prefill", ["version"])
KV_BYTES = Gauge("headrace_inference_kv_bytes", "Memory of KV, by use", ["version", "use"])

PREEMPTIONS = Counter("headrace_inference_preemptions_total", "Sequences set back because KV memory ran out")
ENGINE_FAILURES = Counter("headrace_inference_engine_failures_total", "Steps of the engine that raised an error")
LOADS = Counter("headrace_inference_loads_total", "Versions loaded, by outcome", ["outcome"])
LOAD_SECONDS = Histogram(
    "headrace_inference_load_seconds",
    "From fetching a version to its probe",
    buckets=(0.1, 0.2, 0.5, 1, 2, 5, 15, 60, 300),
)
PROBE_DELTA = Gauge(
    "headrace_inference_probe_delta", "Largest logprob difference of the last probe, by what it compares", ["against"]
)
EXACT_PROMPTS = Counter(
    "headrace_inference_exact_prompts_total", "Prompts that continued a conversation, by outcome", ["outcome"]
)
"""`exact`: the tokens of the conversation were reused; `diverged`: they did not match the prompt; `new`: no
conversation was remembered."""

GRAMMARS = Counter(
    "headrace_inference_grammars_total", "Requests with a grammar, by whether it was in the cache", ["known"]
)
"""`compiled`: the grammar was new; `cached`: it was compiled before."""


class VersionGauges:
    """Gauges of one version's batch. Its series are looked up once, because they are set after every step."""

    def __init__(self, version: str) -> None:
        self._version = version
        self.waiting = WAITING.labels(version)
        self.running = RUNNING.labels(version)
        self.kv_running = KV_BYTES.labels(version, "running")
        self.kv_prefixes = KV_BYTES.labels(version, "prefixes")

    def remove(self) -> None:
        """Remove the series of the version, after it was unloaded."""
        WAITING.remove(self._version)
        RUNNING.remove(self._version)
        KV_BYTES.remove(self._version, "running")
        KV_BYTES.remove(self._version, "prefixes")
