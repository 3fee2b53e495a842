"""Two to four gloo ranks with the real Megatron and DeepSpeed: sharded equals unsharded."""
