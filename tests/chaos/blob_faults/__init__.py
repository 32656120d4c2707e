"""A folder for `PYTHONPATH`: its `sitecustomize` disturbs what a process does with the files of a blob store."""
