"""The OpenAI-compatible HTTP interface, on the wire of a stock vLLM server."""
