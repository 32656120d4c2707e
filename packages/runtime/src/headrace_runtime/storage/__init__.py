"""Storage of a service: blobs, database, versions, files."""
