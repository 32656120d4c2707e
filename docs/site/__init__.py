"""The documentation as a site: `mkdocs.yml` lists its pages, this package lays them out for the generator."""
