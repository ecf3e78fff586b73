"""What runs show: histories, summaries, alarms, paired gains, whether joining is worth it."""

from typing import Any


def __getattr__(name: str) -> Any:
    """The names that the module ``coterie.results`` had before it became this package."""
    from ..core import old_paths

    return old_paths.package_attribute("results", name)
