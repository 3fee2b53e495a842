"""The training loop and what it leaves behind: the run record, the live view and checkpoint files."""
