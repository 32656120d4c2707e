"""Request handlers, one function per API: `async def name(broker, call, request) -> response`.

A handler that writes must submit its operation to the writer before its first await. The requests of a connection are
started in the order of arrival, so their writes then have the same order.
"""
