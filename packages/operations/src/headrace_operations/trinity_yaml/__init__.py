"""Conversion of Trinity-RFT's YAML files to settings of Headrace: `headrace trinity convert`."""
