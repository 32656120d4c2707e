"""Parsing of requests: bodies, identity and context, checked and in the gateway's internal form."""
