"""DeepSpeed, and the only imports of it."""
