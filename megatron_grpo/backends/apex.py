"""NVIDIA Apex, used where it is installed, never required.

The PyPI project named ``apex`` is an unrelated web toolkit, so the name alone proves nothing.
"""

from importlib.machinery import PathFinder
from importlib.util import find_spec

PARTS = ("apex.normalization", "apex.optimizers")


def nvidia_apex_available() -> bool:
    """Whether ``import apex`` would give NVIDIA's: it has fused norms and optimizers. Imports nothing."""
    package = find_spec("apex")
    if package is None or package.submodule_search_locations is None:
        return False
    folders = list(package.submodule_search_locations)
    return all(PathFinder.find_spec(part, folders) is not None for part in PARTS)
