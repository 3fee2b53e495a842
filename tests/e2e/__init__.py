"""Whole runs, as a user starts them."""
