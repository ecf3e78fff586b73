"""The warnings of ``coterie doctor`` about data: one sentence each, with clients and columns."""

from collections.abc import Sequence

from ..core.metrics import METRICS
from ..data.duplicates import Duplicates, shared_units
from ..data.extremes import extremes
from ..data.federation import Federation
from ..data.inspection import OFF, alike, codings, empty_columns, scales
from ..results.history import Roster
from .diagnosis import SiteRow

MANY = 8  # at most so many clients are named in a warning
HIGH = 80.0  # percent: an accuracy of always answering the commonest class that hides failures
COARSE = 20.0  # percentage points: a test set that shows only larger gains tells little


def some(names: Sequence[str]) -> str:
    """The first names, separated by commas."""
    return ", ".join(names[:MANY]) + (" …" if len(names) > MANY else "")


def _capped(said: list[str], what: str) -> list[str]:
    """The first warnings, and how many more there are."""
    more = len(said) - MANY
    return [*said[:MANY], f"{more} more {what}"] if more > 0 else said


def data_warnings(federation: Federation) -> list[str]:
    """Warnings about columns that clients wrote in different ways, or left empty."""
    empty = [
        f"column '{column}' is empty in all rows of {some(clients)}; their models learn nothing "
        "from it"
        for column, clients in empty_columns(federation).items()
    ]
    return [
        *_capped(empty, "columns are empty at some clients"),
        *_capped(_spellings(federation), "categories are written in several ways"),
        *_capped(_scales(federation), "columns of clients have another scale"),
        *_out_of_scale(federation),
    ]


def _spellings(federation: Federation) -> list[str]:
    pairs, said = alike(federation), []
    for pair in pairs:
        said.append(
            f"column '{pair.column}': '{pair.one}' ({some(pair.at)}) and '{pair.other}' "
            f"({some(pair.other_at)}) look like one category written in two ways; write it one way"
        )
    told = {pair.column for pair in pairs}
    for odd in codings(federation):
        if odd.column not in told:
            said.append(
                f"column '{odd.column}': no other client uses the categories of '{odd.client}' "
                f"({some(odd.own)}); the others use {some(odd.others)}; check that they mean the "
                "same by it"
            )
    return said


def _scales(federation: Federation) -> list[str]:
    return [
        f"client '{one.client}': column '{one.column}' has a {one.what} of {one.own:g}, the others "
        f"{one.others:g}, {OFF:g} times or more apart; check its unit (cm and m, mg and g)"
        for one in scales(federation)
    ]


def score_warnings(sites: Sequence[SiteRow], metric: str, tests: float) -> list[str]:
    """Warnings about scores that say little: a dominating class, and small test sets."""
    found, known = [], [site.part.commonest for site in sites if site.part.commonest is not None]
    if metric == "accuracy" and known and sum(known) / len(known) >= HIGH:
        found.append(
            f"always answering the commonest class scores {sum(known) / len(known):.1f} % accuracy;"
            ' a useless model looks good: use --set run.metric=auc (or [run] metric = "auc")'
        )
    tested = [site for site in sites if site.part.test]
    blind = [f"{s.part.client} ({s.part.test_units})" for s in tested if s.smallest is None]
    coarse = [
        f"{s.part.client} ({s.part.test_units}: from {s.smallest:.0f} points)"
        for s in tested
        if s.smallest is not None and s.smallest > COARSE
    ]
    if blind:
        found.append(
            f"{len(blind)} of {len(sites)} clients have too few test samples (or units) to show "
            f"any gain of their own: {some(blind)}; raise data.test, or collect more"
        )
    if coarse and METRICS[metric].targets == "classes":
        found.append(
            f"{len(coarse)} of {len(sites)} clients have test data that shows only large gains of "
            f"their own, corrected for {tests:g} tests: {some(coarse)}; the mean over clients may "
            "still tell"
        )
    return found


def repeated_warnings(federation: Federation, repeated: Duplicates) -> list[str]:
    """Warnings about samples and units that occur twice and would make scores too good."""
    found = []
    if repeated.across_splits:
        number, who = sum(repeated.across_splits.values()), list(repeated.across_splits)
        found.append(
            f"{number} samples are in more than one of train, validation and test data of a "
            f"client: {some(who)}"
        )
    if repeated.across_clients:
        found.append(
            f"{repeated.across_clients} samples are held by more than one client: "
            f"{some(list(repeated.holders))}"
        )
    units = shared_units(federation)
    if units:
        found.append(
            f"{len(units)} units are named at more than one client and taken for different ones "
            f"there: {some(units)}; if they are the same, one client may train on what tests "
            "another"
        )
    return found


def _out_of_scale(federation: Federation) -> list[str]:
    """Warnings about columns in which a client's numbers are far out of the others' scale."""
    said = [
        f"client '{one.client}': column '{one.column}' holds {one.value:g}, where all clients "
        f"together are around {one.middle:g} (typically {one.usual:g} away); check its unit and "
        "its digits"
        for one in extremes(federation)
    ]
    return _capped(said, "columns of clients are out of scale")


def weak_warnings(roster: Roster, participation: float) -> list[str]:
    """Warnings about clients that lack data, and about rounds with less than one client."""
    kinds: dict[str, list[str]] = {}
    for name, lack in roster.weak.items():
        kinds.setdefault(lack, []).append(name)
    found = []
    for lack, names in kinds.items():
        found.append(f"{len(names)} of {len(roster)} clients have {lack}: {some(names)}")
    if participation * len(roster) < 1:
        found.append("participation is below one client per round; one client takes part")
    return found
