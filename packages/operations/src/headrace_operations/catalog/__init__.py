"""Import of folders as versions, export of versions to folders, and comparison of two versions."""
