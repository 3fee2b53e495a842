"""The engines: Megatron, DeepSpeed and transformers are imported here and nowhere else."""
