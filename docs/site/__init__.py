"""The documentation as a site: `mkdocs.yml` says what stands in it, this lays its pages out for the generator."""
