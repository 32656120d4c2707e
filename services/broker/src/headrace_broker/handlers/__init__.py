"""What the broker does for each request: `async def name(broker, call, request) -> response`.

A handler that writes must submit to the writer before it awaits anything: requests of one connection start in order,
and so their effects have that order too.
"""
