"""Measurements on a real model, without training."""
