"""The `torch` engine: transformers models, continuous batching, one forward per token for a whole batch.

`engine` is its face to the event loop, `worker` the one thread that computes, `batch` the schedule of one version,
`rows`, `kv` and `prefix` its state, `program` one forward, `sampler` what follows it, `loader` and `probe` the weights.
"""
