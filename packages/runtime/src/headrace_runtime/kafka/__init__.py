"""Kafka clients of the services: topics, consumers, producers, and the conversion of events to records."""
