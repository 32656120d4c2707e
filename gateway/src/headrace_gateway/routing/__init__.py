"""Which version and replica answer a call, and the stream from it."""
