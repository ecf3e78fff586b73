"""Results of runs: histories, summaries, alarms, and tests of gains over training alone."""

from typing import TYPE_CHECKING, Any

if not TYPE_CHECKING:  # hidden from type checkers, which would else accept any wrong name

    def __getattr__(name: str) -> Any:
        """The names that the module ``coterie.results`` had before it became this package."""
        from ..core import old_paths

        return old_paths.package_attribute("results", name)
