"""Embedded single-node broker with the Kafka wire protocol."""
