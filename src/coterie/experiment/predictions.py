"""The answers of a model to new samples."""

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

from ..data.sources.columns import NUMBER, TargetColumn
from ..storage import files

Floats = npt.NDArray[np.float64]

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


@final
@dataclass(frozen=True, eq=False)
class Predictions:
    """One row per sample, in the order of the samples."""

    target: TargetColumn
    values: Floats  # [n, classes] probabilities, or [n] in the unit of the target
    kept: dict[str, list[str]]  # columns that were copied from the table

    @property
    def labels(self) -> list[str]:
        """The most likely class of each sample; empty where the probabilities are not finite.

        In a regression, the predicted value as text.
        """
        if self.values.ndim == 1:
            return [repr(value) for value in self.values.tolist()]
        known = np.isfinite(self.values).all(axis=1)
        best = np.where(known, self.values.argmax(axis=1), -1).tolist()
        return [self.target.classes[at] if at >= 0 else "" for at in best]

    @property
    def header(self) -> tuple[str, ...]:
        """The names of the columns of :meth:`to_csv`."""
        name = f"predicted {self.target.name}".strip()
        classes = (f"probability of {c}" for c in self.target.classes)
        return (*self.kept, name, *classes)

    def to_csv(self) -> str:
        """All answers as CSV text: kept columns, the answer, a probability for each class."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.header)
        kept = list(zip(*self.kept.values(), strict=True)) or [()] * len(self.values)
        probable = self.values.tolist() if self.values.ndim == 2 else [()] * len(self.values)
        for old, label, shares in zip(kept, self.labels, probable, strict=True):
            writer.writerow([*old, _cell(label), *map(repr, shares)])
        return text.getvalue()

    def write(self, path: str | Path) -> None:
        """Write the CSV text to a file."""
        files.write_text(Path(path), self.to_csv())

    def __len__(self) -> int:
        return len(self.values)


def _cell(label: str) -> str:
    """The name of a class; a quote is put before one that a spreadsheet reads as a formula."""
    is_formula = label.startswith(_FORMULA) and not re.match(NUMBER, label)
    return f"'{label}" if is_formula else label
