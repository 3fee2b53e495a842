"""Tests marked ``gpu`` or ``needs`` are skipped, by name, where there is no GPU or a package is missing."""

from importlib.util import find_spec

import pytest

from megatron_grpo.launch import visible_gpus


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="a package that is missing is a failure, as in make test-all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_gpu, everything = visible_gpus(), config.getoption("--all")
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        packages = [name for mark in item.iter_markers("needs") for name in mark.args]
        missing = [name for name in packages if find_spec(name) is None]
        if missing and not everything:
            reason = f"needs {', '.join(missing)}: `make test-all` installs what is missing"
            item.add_marker(pytest.mark.skip(reason=reason))
