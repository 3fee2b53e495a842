"""``python -m megatron_grpo``: what ``deepspeed --module megatron_grpo`` runs on every rank."""

from megatron_grpo.cli import main

if __name__ == "__main__":
    main()
