"""The answer to a client that joins a finished run: with whom, how good, from how many samples.

import coterie
found = coterie.onboard("runs/one", "new-site.csv", out="new-site-model")
print(found)                  # the table and the answer in words
print(found.collaborators)    # {"Lakeside": 0.61, "County": 0.27}
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from ..core.imports import Code, Given
from ..data.labelled_samples import read_labelled
from ..data.new_samples import Source
from ..errors import ConfigError, printable_lines
from ..experiment.export import refuse_filled, write_export
from ..experiment.joinable_run import JoinableRun, open_joinable
from ..experiment.onboarding import (
    DRAWS,
    SIZES,
    JoinOutcome,
    Tried,
    collaborators,
    draws_of,
    join,
    newcomer,
    personal_model,
)
from ..results.learning_curve import CurvePoint, curve_point
from ..storage import files
from . import onboard_text
from .table import to_html, to_text

Weights = Mapping[str, float | None]  # by client; None where all clients have one model


@final
@dataclass(frozen=True, eq=False, repr=False)
class Onboarded:
    """What a newcomer gets from a finished run."""

    client: str
    method: str
    metric: str
    clients: int  # of the run
    test: int  # the newcomer's samples that test
    average: float | None  # score of the run's plain average, if there is one
    points: tuple[CurvePoint, ...]  # by the number of labelled samples; the last has all
    weights: tuple[Weights, ...]  # of the run's clients, mean over the draws of each point
    path: Path | None  # folder of the personal model, if it was written

    @property
    def collaborators(self) -> dict[str, float | None]:
        """The run's clients whose models helped, with their weights, from all samples."""
        return dict(self.weights[-1])

    @property
    def words(self) -> str:
        """The answer in a few sentences."""
        return onboard_text.answer(self)

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON; the keys are documented in docs/json.md."""
        return {
            "client": self.client,
            "method": self.method,
            "metric": self.metric,
            "answer": self.words,
            "collaborators": self.collaborators,
            "test_samples": self.test,
            "average": self.average,
            "curve": [
                {**point._asdict(), "collaborators": dict(weights)}
                for point, weights in zip(self.points, self.weights, strict=True)
            ],
            "folder": self.path and str(self.path),
        }

    def __repr__(self) -> str:
        return printable_lines("\n\n".join([to_text(onboard_text.table_of(self)), self.words]))

    def _repr_html_(self) -> str:
        return str(to_html(onboard_text.table_of(self)))


def onboard(
    run: str | Path,
    data: Source,
    *,
    name: str | None = None,
    sizes: Sequence[int] = SIZES,
    draws: int = DRAWS,
    epochs: int | None = None,
    drop: Sequence[str] = (),
    out: str | Path | None = None,
    code: Given = None,
) -> Onboarded:
    """Let a client that was not in a finished run join it with its own labelled samples.

    Args:
        run: folder of the finished run.
        data: file of labelled samples in any format that a config can name, or a table in memory.
        name: the newcomer's name; by default that of the file.
        sizes: numbers of labelled samples to try; all samples are always tried.
        draws: random draws of each number.
        epochs: passes of local training after joining; by default as many as in one round.
        drop: columns to ignore.
        out: new folder for the personal model, as ``coterie.export`` writes it.
        code: folders from which code that the run's config names may be imported.
    """
    _check(sizes, draws, epochs)
    place = None if out is None else refuse_filled(files.folder_of(out, "--out"))
    host = open_joinable(files.folder_of(run, "RUN"), Code.of(code, installed=False))
    dataset = read_labelled(data, host.schema, host.config.data.options, drop)
    new = newcomer(host, dataset, _name(name, data))
    plan = draws_of(new.pool, sizes, draws, host.data.history.seed)
    found = join(host, new, plan, epochs)
    if place is not None:
        write_export(personal_model(host, new, found), place)
    return _collected(host, new.name, len(new.test), found, place)


def _check(sizes: Sequence[int], draws: int, epochs: int | None) -> None:
    if draws < 1 or min(sizes, default=1) < 1 or (epochs is not None and epochs < 0):
        raise ConfigError(
            f"found the sizes {list(sizes)}, {draws} draws and {epochs} epochs; expected sizes of "
            "1 or more, one draw or more, and no negative epochs"
        )


def _name(given: str | None, data: Source) -> str:
    if given is not None:
        return given
    return Path(data).stem if isinstance(data, str | Path) else "newcomer"


def _collected(
    host: JoinableRun, client: str, test: int, found: JoinOutcome, path: Path | None
) -> Onboarded:
    metric, by_size = host.data.history.metric, dict[int, list[Tried]]()
    for one in found.tries:
        by_size.setdefault(one.draw.size, []).append(one)
    points = tuple(
        curve_point(metric, size, [(one.joined, one.alone) for one in tries])
        for size, tries in by_size.items()
    )
    weights = tuple(_mean_weights(host, tries) for tries in by_size.values())
    return Onboarded(
        client=client,
        method=host.data.history.method,
        metric=metric,
        clients=len(host.data.history.roster),
        test=test,
        average=found.average,
        points=points,
        weights=weights,
        path=path,
    )


def _mean_weights(host: JoinableRun, tries: Sequence[Tried]) -> Weights:
    known = [one.weights for one in tries if one.weights is not None]
    return collaborators(host, torch.stack(known).mean(0) if known else None)
