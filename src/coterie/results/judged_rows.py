"""What is known of test samples beside the answers to them: names of classes, and subgroups."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..data.federation import Federation


class JudgedRows(NamedTuple):
    """What is known of the test samples beside the answers to them; rows are as in Outcomes."""

    classes: tuple[str, ...]  # their names; none in a regression
    target: str = ""  # the column that they come from; empty if there is none
    column: str = ""  # the column of the table that gives the subgroups; empty if there is none
    names: tuple[str, ...] = ()  # of the subgroups
    codes: NDArray[np.int64] | None = None  # [N] the subgroup of each test sample

    @classmethod
    def of(cls, federation: "Federation") -> "JudgedRows | None":
        """The test samples of a federation; None if its clients name the classes differently."""
        data = federation.dataset
        if federation.relabel is not None:
            return None
        classes = data.class_names or tuple(map(str, range(data.classes)))
        target = data.target.name if data.target is not None else ""
        if data.subgroups is None:
            return cls(classes, target)
        codes = np.concatenate([data.subgroups[test].numpy() for test in federation.test])
        groups = data.subgroup_column, data.subgroup_names
        return cls(classes, target, *groups, codes.astype(np.int64))
