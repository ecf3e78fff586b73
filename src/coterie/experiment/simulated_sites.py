"""The folders in which the clients of the wire engine keep their own files, by run."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..engines.hosts import Worker
from ..engines.worker import place
from ..results.judgement import LOCAL
from .setting import Cell, Gains

SITES = "sites"  # in a run's folder: one folder per client


class Homes:
    """Where the clients of each run keep their files: in the run's folder or a temporary one."""

    def __init__(self) -> None:
        self._temporary: Path | None = None

    def of(self, cell: Cell) -> Path:
        """The folder of one run's clients."""
        if cell.out is not None:
            return cell.out / SITES
        if self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="coterie-sites-"))
        return self._temporary / cell.method.label / f"seed-{cell.seed}"

    def gains(self, cells: Sequence[Cell], clients: int, metric: str) -> Gains:
        """Each client's gain over Local, computed next to its answers in another process."""
        homes = {(cell.method.label, cell.seed): self.of(cell) for cell in cells}
        methods = dict.fromkeys(label for label, _ in homes if label != LOCAL)
        seeds = list(dict.fromkeys(seed for _, seed in homes))
        worker = Worker()
        try:
            return {
                method: [
                    worker.judge(
                        metric,
                        [
                            (place(homes[method, seed], k), place(homes[LOCAL, seed], k))
                            for seed in seeds
                        ],
                    )
                    for k in range(clients)
                ]
                for method in methods
            }
        finally:
            worker.close()

    def close(self) -> None:
        """Remove the temporary folder."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None
