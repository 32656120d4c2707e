"""Requests and responses, one file per family, field for field as in the protocol guide, at the one version served."""
