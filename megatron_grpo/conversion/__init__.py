"""Weights between Hugging Face directories and pipeline stages: tables, exact inverses, whole files."""
