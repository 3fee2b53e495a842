"""Sampling and scoring: batches, the pipeline sampler, rewards."""
