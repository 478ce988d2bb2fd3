"""Model families: one file = one family, found by the `model_type` of config.json (see `converters/family.py`)."""
