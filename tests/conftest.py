"""Tests marked ``gpu`` are skipped, by name, where there is no GPU."""

import pytest

from megatron_grpo.launch import visible_gpus


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if visible_gpus():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
