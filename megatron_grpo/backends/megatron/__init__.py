"""Megatron-core: stages, schedule, the boundary hook, decoding."""
