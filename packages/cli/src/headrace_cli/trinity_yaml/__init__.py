"""Trinity-RFT's YAML files as settings of Headrace: `headrace trinity convert`."""
