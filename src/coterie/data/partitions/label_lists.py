"""The five distributions of P4 over ten agents and ten classes (spec 13.5)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...errors import DataError
from ..assign import Floats, Ints, Plan, class_cells, client_names, largest_remainder
from ..federation import Dataset
from .base import Partition
from .groups import independent

AGENTS = 10

# Entry c is the share of class c that agent 0 receives; the other agents use cyclic shifts.
LISTS: dict[str, tuple[float, ...]] = {
    "A": (0.1,) * 10,
    "B": (0.25,) * 4 + (0.0,) * 6,
    "C": (0.0, 0.0, 0.0, 0.1, 0.2, 0.4, 0.2, 0.1, 0.0, 0.0),
}
# The share of all data that each agent holds (P4's Table 4).
SIZES: dict[str, tuple[float, ...]] = {
    "A": (0.1,) * 10,
    "B": (0.21, 0.06, 0.11, 0.06, 0.11, 0.06, 0.16, 0.06, 0.11, 0.06),
    "C": (0.1, 0.1, 0.1, 0.1, 0.2, 0.05, 0.05, 0.1, 0.1, 0.1),
}


@dataclass(frozen=True)
class LabelLists(Partition):
    """P4's distributions A, B, C, and A*, B* with concept shift; agent 0 is Alice."""

    distribution: Literal["A", "B", "C", "A*", "B*"] = "A"  # how classes are spread over agents
    sizes: Literal["A", "B", "C"] = "A"  # the sizes of the agents' data; A is equal
    shift: Literal["right", "left"] = "right"  # left mirrors the agents, as P4's printed table does

    def plan(self, dataset: Dataset, seed: int) -> Plan:
        """Plan shares of every class; the test part has equal sizes."""
        cells, names = class_cells(dataset, "waffle")
        if dataset.classes != AGENTS:
            raise DataError(
                f"{dataset.name} has {dataset.classes} classes; partition 'waffle' needs ten, one "
                "for each of its ten agents"
            )
        shares = label_shares(LISTS[self.distribution[0]], self.shift)
        sizes = np.array(SIZES[self.sizes])
        shifted = self.distribution.endswith("*")
        return Plan(
            client_names(AGENTS),
            cells,
            names,
            lambda supply, test: share_out(shares if test else sized(shares, sizes), supply),
            relabel=independent(AGENTS, dataset.classes, seed) if shifted else None,
        )


def label_shares(list_of_alice: tuple[float, ...], shift: str) -> Floats:
    """The share of every class that each agent receives ``[agents, classes]``.

    Shifted to the right, agent 1 of B has labels 1-4; to the left it has labels 9, 0, 1, 2.
    """
    step = 1 if shift == "right" else -1
    return np.stack([np.roll(list_of_alice, step * agent) for agent in range(AGENTS)])


def sized(shares: Floats, sizes: Floats) -> Floats:
    """Shares for agents of unequal sizes, all reduced by one factor if a class would run out."""
    wanted = shares * (sizes * AGENTS)[:, None]
    return wanted / max(1.0, float(wanted.sum(axis=0).max()))


def share_out(shares: Floats, supply: Ints) -> Ints:
    """Integer counts of every class from shares; samples beyond the shares are not assigned.

    Samples left by rounding go to different agents from one class to the next.
    """
    columns = []
    for c, (share, available) in enumerate(zip(shares.T, supply, strict=True)):
        due = np.append(share, max(0.0, 1.0 - float(share.sum())))
        turn = (np.arange(len(due)) - c) % len(due)
        columns.append(largest_remainder(int(available), due, turn.astype(np.float64))[:-1])
    return np.stack(columns, axis=1)
