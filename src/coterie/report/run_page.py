"""The HTML page of one run, in one file: its rounds, clients, matrix, alarms and costs."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..core.metrics import METRICS, Floats
from ..experiment.run_folder import RunData
from ..results.clinical import ClinicalChoice
from ..results.history import History, Line
from ..results.reliance import Reliance, reliance
from ..results.summary import last_score
from . import exposed, figures, helping, pieces, words
from .clinical_page import clinical_view
from .colours import colour
from .outcomes import RunResult
from .table import run_facts

ONE_RUN = (
    "One run alone does not tell whether joining is worth it; “coterie compare” compares methods "
    "with training alone."
)


class RoundFacts(NamedTuple):
    """One row of the table of rounds."""

    round: int
    clients: int
    mean: str
    sent: str
    received: str
    seconds: str
    left_out: str


class ClientFacts(NamedTuple):
    """One row of the table of clients."""

    name: str
    train: int
    val: int
    test: int
    first: str
    last: str
    source: str  # the client with the largest part of its weight on others
    lack: str


def run_page(data: RunData, choice: ClinicalChoice | None = None) -> str:
    """The page of one run as HTML text; everything that comes from users is escaped."""
    history, summary = data.history, data.summary
    relied = reliance([history])
    return pieces.rendered(
        "run.html",
        {
            "eyebrow": "coterie run",
            "title": words.label(history.method),
            "verdict": pieces.unbroken(f"{_sentence(data)} {ONE_RUN}"),
            "facts": _facts(history),
            "alarms": summary["alarms"],
            "rejected": _rejected(summary["rejected"]),
            "curves": figures.client_curves(history),
            "numbers": [fact for fact in run_facts(RunResult(data)) if fact[0] != "alarm"],
            "helping": _helping(history, relied),
            "best": words.label(history.method),
            "own": False,
            "exposed": exposed.exposed({history.method: [history]}),
            "clinical": clinical_view({history.method: history}, choice),
            "costs": _costs(summary),
            "rounds": [_round_line(line, history.metric) for line in history.lines],
            "clients": _client_lines(history, relied),
            "seed": history.seed,
            "metric": METRICS[history.metric].title,
            "command": pieces.command_of(data.environment),
            "digest": summary["digest"],
            "config": pieces.pretty(data.config),
            "where": pieces.pretty(data.environment),
        },
    )


def _sentence(data: RunData) -> str:
    """A sentence on the mean score after the last round."""
    history, metric = data.history, data.history.metric
    mean = last_score(data.summary)
    text = (
        f"{words.label(history.method)} gives a mean {METRICS[metric].title} of "
        f"{words.number(mean, metric)}{words.unit(metric)} after {len(history.lines)} rounds"
    )
    gain = data.summary["relative_to_local"]
    if gain is None:
        return f"{text}."
    size = words.number(float(gain), metric, sign=True)
    return f"{text}, {size} compared with each client’s own local model."


def _facts(history: History) -> list[tuple[str, str]]:
    groups = pieces.groups_of(history.roster)
    return [
        ("clients", str(len(history.roster))),
        *([("true groups", str(groups))] if groups else []),
        ("training samples per client", pieces.samples_of(history.roster)),
        ("rounds", str(len(history.lines))),
        ("seed", str(history.seed)),
    ]


def _rejected(counts: Mapping[str, int]) -> list[str]:
    """One sentence for each reason why uploads were rejected."""
    return [
        f"Uploads were left out as {reason.replace('_', ' ')}: {count}."
        for reason, count in counts.items()
    ]


def _costs(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Bytes and seconds of the run, its engine, and how the calls were executed."""
    clients, ran = max(1, summary["clients"]), summary["ran"]
    sizes = [
        ("bytes sent per client for training, whole run", "bytes_up"),
        ("bytes received per client for training, whole run", "bytes_down"),
        ("bytes received per client only for prediction", "bytes_serve"),
    ]
    calls = [
        (f"{call['stage']}", f"{call['way']}{': ' + call['why'] if call['why'] else ''}")
        for call in ran.get("calls", [])
    ]
    return [
        *((text, words.size(summary[name] / clients)) for text, name in sizes),
        ("seconds of all rounds", f"{summary['seconds']:.1f}"),
        ("engine", str(ran.get("engine") or words.NONE)),
        *dict.fromkeys(calls),
    ]


def _round_line(line: Line, metric: str) -> RoundFacts:
    mean = words.NONE
    if line.get("test") is not None:
        mean = words.number(float(line["test"]), metric)
    who = [f"{one['client']} ({one['reason'].replace('_', ' ')})" for one in line["rejected"]]
    return RoundFacts(
        line["round"] + 1,
        len(line["clients"]),
        mean,
        words.size(line["bytes_up"]),
        words.size(line["bytes_down"]),
        f"{line['seconds']:.2f}",
        words.listing(who) or words.NONE,
    )


def _client_lines(history: History, relied: Reliance | None) -> list[ClientFacts]:
    roster, sources = history.roster, _sources(history, relied)

    def score(scores: Floats, i: int) -> str:
        return words.number(float(scores[i]), history.metric)

    return [
        ClientFacts(
            name,
            int(roster.n_train[i]),
            int(roster.n_val[i]),
            int(roster.n_test[i]),
            score(history.test[0], i),
            score(history.last, i),
            sources[i],
            roster.weak.get(name, words.NONE),
        )
        for i, name in enumerate(roster.clients)
    ]


def _sources(history: History, relied: Reliance | None) -> list[str]:
    """For each client, the other client on which it has the largest part of its weight."""
    names = history.roster.clients
    if relied is None:
        return [words.NONE] * len(names)
    best = relied.share.argmax(1).tolist()
    return [
        f"{names[j]} ({100 * relied.share[i, j]:.0f} %)" if relied.share[i, j] > 0 else words.NONE
        for i, j in enumerate(best)
    ]


def _helping(history: History, relied: Reliance | None) -> helping.Helping | None:
    if relied is None:
        return None
    method = history.method
    stroke = {method: colour(method)}
    return helping.helping({method: relied}, {method: history}, stroke, helping.OF_RUN)
