"""Requests and responses as in the protocol guide, one module per family of APIs."""
