"""Storage of the services: blobs, databases, versions of models, and files."""
