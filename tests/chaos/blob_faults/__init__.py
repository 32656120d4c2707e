"""Folder for `PYTHONPATH`: its `sitecustomize` disturbs the work of a process on the files of a blob store."""
