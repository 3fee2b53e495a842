"""GRPO post-training of pipeline-parallel models over slow links: compressed boundaries, anchors."""

__version__ = "0.1.0"
