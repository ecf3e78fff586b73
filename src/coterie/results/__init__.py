"""What runs show: histories, summaries, alarms, paired gains, whether joining is worth it."""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:  # a type checker need not know the old names, and sees wrong ones then

    def __getattr__(name: str) -> Any:
        """The names that the module ``coterie.results`` had before it became this package."""
        from ..core import old_paths

        return old_paths.package_attribute("results", name)
