"""Request handlers: `async def name(broker, call, request) -> response`.

A handler that writes must submit to the writer before its first await. The requests of a connection start in order, so
their effects then have the same order.
"""
