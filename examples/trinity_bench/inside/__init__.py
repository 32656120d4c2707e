"""Modules that run in Trinity's own environment, where its YAML names them. The modules do not import Headrace."""
