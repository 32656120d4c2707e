"""The `torch` engine: transformers models with continuous batching, one forward pass per token for a whole batch.

`engine` implements the engine in the event loop, `worker` is the only thread that computes, `batch` schedules one
version, `rows`, `kv` and `prefix` hold its state, `program` runs forward passes, `sampler` draws tokens, `loader` and
`probe` load and check weights.
"""
