"""An actor of a Ray cluster through which spread runs report and learn that they have to stop.

It imports nothing and holds reports as bytes, so that its process starts quickly and stays small.
"""


class Board:
    """Holds the reports of runs until they are taken, and the signal that asked to stop."""

    def __init__(self) -> None:
        self._reports: list[bytes] = []
        self._asked: int | None = None

    def tell(self, report: bytes) -> int | None:
        """Report a round; the reply is the signal that asked to stop, or None."""
        self._reports.append(report)
        return self._asked

    def asked(self) -> int | None:
        """The signal that asked to stop, or None."""
        return self._asked

    def take(self, asked: int | None) -> list[bytes]:
        """The reports since the last call; ``asked`` is what the runs learn from now on."""
        self._asked, reports, self._reports = asked, self._reports, []
        return reports
