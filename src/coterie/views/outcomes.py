"""The results that ``coterie.run`` and ``coterie.compare`` return: RunResult and Comparison.

Both are made from data in memory or read from a folder; either way the same code computes every
number.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ..core.site_gain import SiteGain
from ..errors import printable_lines
from ..runs import comparison_folder, run_folder
from ..runs.comparison_folder import COMPARISON, REPORT
from ..runs.run import History
from ..runs.run_folder import RunData
from ..storage import files
from .comparison import Compared, ComparedRun, refuse_unlike

if TYPE_CHECKING:
    from .verdict import SiteAnswer


@final
@dataclass(frozen=True, eq=False, repr=False)
class RunResult(ComparedRun):
    """The result of one run: its summary, its history and every client's model."""

    data: RunData

    @classmethod
    def read(cls, path: str | Path) -> "RunResult":
        """Read a finished run from its folder."""
        return cls(run_folder.read(Path(path)))

    @property
    def history(self) -> History:
        """Every round, the scores of every client, and every collaboration matrix."""
        return self.data.history

    @property
    def summary(self) -> dict[str, Any]:
        """The numbers of ``summary.json``."""
        return dict(self.data.summary)

    @property
    def path(self) -> Path | None:
        """The run's folder; None if the run was not written to disk."""
        return self.data.path

    def __repr__(self) -> str:
        from .table import run_text

        page = self.path and self.path / REPORT
        place = f"\n\npage: {page}" if page is not None and page.is_file() else ""
        return printable_lines(run_text(self) + place)

    def _repr_html_(self) -> str:
        from .table import run_html

        return run_html(self)


@final
@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Compared[RunResult]):
    """The runs of several methods on the same federation; Local is always one of them."""

    runs: tuple[RunResult, ...]
    path: Path | None = None
    gains_at_sites: Mapping[str, Sequence[SiteGain]] | None = None

    @classmethod
    def of(
        cls,
        runs: Iterable[RunResult],
        path: Path | None = None,
        gains: Mapping[str, Sequence[SiteGain]] | None = None,
    ) -> "Comparison":
        """A comparison of these runs; refused unless they can be compared.

        They need the same clients and the same metric, and each seed a run of Local. ``gains`` are
        the clients' gains by each method, if the clients computed them themselves.
        """
        runs = tuple(runs)
        refuse_unlike(runs)
        return cls(runs, path, gains)

    @property
    def site_gains(self) -> Mapping[str, Sequence[SiteGain]] | None:
        """Each client's gain by each method, if the clients computed it themselves."""
        return self.gains_at_sites

    @classmethod
    def read(cls, path: str | Path) -> "Comparison":
        """Read a comparison from the folder that ``coterie compare`` wrote."""
        path = Path(path)
        run_folder.refuse_newer(path / comparison_folder.COMPARE)
        places = [path / name for name in comparison_folder.run_names(path)]
        return cls.of(map(RunResult.read, places), path, comparison_folder.read_gains(path))

    @cached_property
    def verdict(self) -> str:
        """Whether joining is worth it, in a sentence or two."""
        from .verdict import verdict

        return printable_lines(verdict(self))

    def client(self, name: str) -> "SiteAnswer":
        """What the comparison says to one client, in a sentence and in numbers."""
        from .verdict import site_answer

        return site_answer(self, name)

    @cached_property
    def answers(self) -> tuple["SiteAnswer", ...]:
        """The answers to all clients; none if there is no method beside Local."""
        from .verdict import answers

        return answers(self)

    def to_dict(self) -> dict[str, Any]:
        """The contents of ``comparison.json``."""
        from .table import notes
        from .verdict import client_sentence

        found = list((self.judgements or {}).values())
        overall = {j.method: {**j.overall._asdict(), "p": j.p, "shown": j.claim} for j in found}
        return {
            "verdict": self.verdict,
            "notes": notes(self),
            "recommended": self.choice,
            "metric": self.metric,
            "seeds": list(self.seeds),
            "methods": [{**row._asdict(), "gain": overall.get(row.method)} for row in self.rows],
            "sites": [answer.to_dict() for answer in self.answers],
            "clients": [
                {
                    **{"client": one.client, "method": one.method},
                    **{**one.gain._asdict(), "p": one.p, "shown": one.claim},
                    "sentence": client_sentence(self, one),
                }
                for judged in found
                for one in judged.clients
            ],
            "runs": [
                {
                    "method": run.method,
                    "seed": run.seed,
                    "digest": run.summary["digest"],
                    "path": self._place(run),
                }
                for run in self.runs
            ],
        }

    def _place(self, run: RunResult) -> str | None:
        """The path of a run relative to the comparison's folder; None if it was not written."""
        if run.path is None or self.path is None:
            return None
        return Path(os.path.relpath(run.path, self.path)).as_posix()

    def write(self, path: str | Path) -> Path:
        """Write ``comparison.json`` and ``report.html`` into a folder; returns the page's path."""
        from .page import page

        path = Path(path)
        comparison_folder.write_gains(path, self.gains_at_sites)
        files.write_json(path / COMPARISON, self.to_dict())
        files.write_text(path / REPORT, page(self))
        return path / REPORT

    def text(self, columns: Sequence[str] = ()) -> str:
        """The table and the verdict as text, with the further columns of these names."""
        from .table import checked_columns, comparison_text

        return printable_lines(comparison_text(self, checked_columns(columns)))

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        from .table import comparison_html

        return comparison_html(self)
