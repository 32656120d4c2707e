"""`POST /v1/responses`: OpenAI's Responses API as a translation onto chat calls, which are captured as any other.

`items` reads the conversation, `request` the rest of a body, `output` writes a response, `events` writes it as a
stream. Nothing is kept between calls: what was said before comes in `input`.
"""
