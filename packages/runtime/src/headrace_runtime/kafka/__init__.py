"""Kafka clients: topics, consumers, producers, and the form of a record."""
