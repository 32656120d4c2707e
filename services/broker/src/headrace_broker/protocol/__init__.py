"""Messages of the Kafka protocol: requests and responses as in Kafka's protocol guide, one module per family of
APIs."""
