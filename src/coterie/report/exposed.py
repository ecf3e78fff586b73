"""What leaves a site: what each method shows of it, to whom, and how many sites used its model."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..algorithms.exposure import EXPOSURES, Exposure
from ..results.history import History, dense
from ..results.reliance import MOST_CLIENTS
from . import words

# Methods under which a site receives models of single other sites, or can compute them.
RAW = ("fedfomo", "fedfomo_ma", "federico")
UNKNOWN = Exposure(
    "what the paragraph “Travels:” of the method’s module says", "see there", words.NONE
)


class MethodExposure(NamedTuple):
    """One row of the table of methods."""

    method: str
    server: str
    site: str
    stays: str
    sent: str  # bytes that one site sends for training, whole run
    peers: str  # how many other sites used the raw model of a site


class SiteExposure(NamedTuple):
    """One row of the table of sites, over all methods that send anything."""

    name: str
    uploads: int  # accepted uploads, of all methods and seeds
    rejected: str
    users: tuple[str, ...]  # for each method of RAW: other sites that used this site's model


class Exposed(NamedTuple):
    """The section of a page on what leaves a site."""

    methods: tuple[MethodExposure, ...]
    raw: tuple[str, ...]  # headings of ``users``
    sites: tuple[SiteExposure, ...]


def exposed(histories: Mapping[str, Sequence[History]], only: int | None = None) -> Exposed:
    """The section for the runs of these methods; ``only`` is the one site that the page is for."""
    users = {m: users_of(runs) for m, runs in histories.items() if m in RAW}
    roster = next(iter(histories.values()))[0].roster
    sites = range(len(roster)) if only is None else [only]
    return Exposed(
        tuple(_method(m, runs, users.get(m), only) for m, runs in histories.items()),
        tuple(words.label(method) for method in users),
        tuple(_site(histories, users, i) for i in sites),
    )


def users_of(runs: Sequence[History]) -> NDArray[np.int64] | None:
    """For each site, the other sites that gave its model weight in any round ``[K]``.

    The largest number over runs. A model that was received and got no weight is not counted. None
    if the weights are not known.
    """
    known = [run for run in runs if run.matrices and len(run.roster) <= MOST_CLIENTS]
    if not known:
        return None
    counts = []
    for run in known:
        used = np.logical_or.reduce([dense(A) != 0 for A in run.matrices])
        np.fill_diagonal(used, False)
        counts.append(used.sum(0))
    most: NDArray[np.int64] = np.max(counts, axis=0)
    return most


def _method(
    method: str, runs: Sequence[History], users: NDArray[np.int64] | None, only: int | None
) -> MethodExposure:
    row, peers = EXPOSURES.get(method, UNKNOWN), len(runs[0].roster) - 1
    up = [sum(line["bytes_up"] for line in run.lines) / len(run.roster) for run in runs]
    seen = "not as it is" if method in EXPOSURES else "not known"
    if method in RAW:
        seen = "not known: sites did not show their weights"
    if users is not None:
        mine = users if only is None else users[[only]]
        span = str(mine.min()) if mine.min() == mine.max() else f"{mine.min()} to {mine.max()}"
        seen = f"at least {span} of {peers} other sites"
    server, site, stays = (part.replace("**", "").replace("`", "") for part in row[:3])
    sent = words.size(float(np.mean(up))) if only is None else words.NONE
    return MethodExposure(words.label(method), server, site, stays, sent, seen)


def _site(
    histories: Mapping[str, Sequence[History]],
    users: Mapping[str, NDArray[np.int64] | None],
    i: int,
) -> SiteExposure:
    name, uploads, reasons = "", 0, dict[str, int]()
    for runs in histories.values():
        for run in runs:
            name = run.roster.clients[i]
            out = [
                r["reason"] for line in run.lines for r in line["rejected"] if r["client"] == name
            ]
            took = sum(i in line["clients"] for line in run.lines if line["bytes_up"] > 0)
            uploads += max(0, took - len(out))
            for reason in out:
                reasons[reason] = reasons.get(reason, 0) + 1
    left = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in reasons.items())
    seen = tuple(words.NONE if one is None else str(one[i]) for one in users.values())
    return SiteExposure(name, uploads, left or words.NONE, seen)
