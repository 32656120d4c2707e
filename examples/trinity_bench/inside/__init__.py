"""What runs in Trinity's own environment, named in its YAML by dotted path. Nothing here imports Headrace."""
