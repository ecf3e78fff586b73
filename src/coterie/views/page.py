"""What the page of a comparison and the page of a run have in common."""

import base64
import hashlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from ..algorithms.exposure import EXPOSURES, Exposure
from ..core.metrics import METRICS
from ..errors import ConfigError, did_you_mean
from ..runs.run import LOCAL, Line, Roster, Run, dense
from ..runs.summary import last_score
from ..storage import files
from . import figures, helping, words
from .clinical import ClinicalChoice
from .clinical_page import ClinicalView, clinical_view
from .figures import scatters
from .judgement import Claim, models_of
from .reliance import MOST_CLIENTS, Reliance, reliance, seen_by
from .svg import style
from .table import methods_table, notes, run_facts, tests, to_html

if TYPE_CHECKING:
    from .comparison import Comparison


@cache
def _templates() -> Environment:
    """The templates of all pages, with their script, its hash, and the colours of methods."""
    made = Environment(
        loader=PackageLoader(__package__, "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = resources.files(__package__).joinpath("templates/report.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    made.globals |= {
        "script": Markup(text),
        "script_hash": Markup(f"sha256-{digest}"),
        "palette": {mode: Markup(style(mode)) for mode in ("light", "dark")},
    }
    return made


def rendered(template: str, values: Mapping[str, Any]) -> str:
    """A page as HTML text, from a template; everything that comes from users is escaped.

    The page's policy allows the one script of ours by its hash, and no other.
    """
    return _templates().get_template(template).render(values)


def unbroken(text: str) -> str:
    """The text with no-break spaces, so that numbers stay on one line with their units."""
    return re.sub(r" (?=[%=<]|[0-9.]+\))", "\N{NO-BREAK SPACE}", text)


def client_index(roster: Roster, name: str) -> int:
    """The place of a client in its federation; an unknown name is refused."""
    if name not in roster.clients:
        known = did_you_mean(name, roster.clients)
        raise ConfigError(f"there is no client '{name}'; {known}")
    return roster.clients.index(name)


def command_of(environment: Mapping[str, Any]) -> str | None:
    """The command line that started a run; None if it was started from Python."""
    argv = environment.get("argv") or []
    if not argv or Path(argv[0]).stem not in ("coterie", "__main__"):
        return None
    return shlex.join(["coterie", *argv[1:]])


def pretty(value: Mapping[str, Any]) -> str:
    """A config or an environment as indented JSON text."""
    return json.dumps(files.plain(dict(value)), indent=2, ensure_ascii=False, default=str)


# ---- what leaves a site: what each method shows of it, to whom, and how many sites had its model

# Methods under which a site receives models of single other sites, or can compute them.
RAW = ("fedfomo", "fedfomo_ma", "federico", "cobo")
UNKNOWN = Exposure(
    "what the paragraph “Travels:” of the method’s module says", "see there", words.NONE
)


class Exposed(NamedTuple):
    """The section of a page on what leaves a site: the heads and the cells of its two tables."""

    method_heads: tuple[str, ...]
    methods: list[tuple[str, ...]]
    raw: bool  # whether a method of RAW is among them
    site_heads: tuple[str, ...]
    sites: list[tuple[object, ...]]  # over all methods that send anything


def exposed(runs: Mapping[str, Sequence[Run]], only: int | None = None) -> Exposed:
    """The section for the runs of these methods; ``only`` is the one site that the page is for."""
    users = {method: users_of(some) for method, some in runs.items() if method in RAW}
    every = [run for some in runs.values() for run in some]
    sites = range(len(every[0].roster)) if only is None else [only]
    sent = () if only is not None else ("sent per site",)
    seen = ("the server sees of a site", "a site sees", "stays at the site")
    return Exposed(
        ("method", *seen, *sent, "raw model had by"),
        [_method_exposure(m, some, users.get(m), only) for m, some in runs.items()],
        bool(users),
        (
            *("site", "uploads, all methods and seeds", "rejected"),
            *(f"{words.label(method)}: had by" for method in users),
        ),
        [_site_exposure(every, users, i) for i in sites],
    )


def users_of(runs: Sequence[Run]) -> NDArray[np.int64] | None:
    """For each site, the other sites that had its model, or gave it weight, in any round ``[K]``.

    The largest number over runs. Who had a model as it is, messages tell (:func:`seen_by`); who can
    compute it from an average, only weights do. None if neither is known.
    """
    counts = [seen for run in runs if (seen := seen_by(run)).any()]
    for run in runs:
        if run.matrices and len(run.roster) <= MOST_CLIENTS:
            used = np.logical_or.reduce([dense(A) != 0 for A in run.matrices])
            np.fill_diagonal(used, False)
            counts.append(used.sum(0))
    most: NDArray[np.int64] | None = np.max(counts, axis=0) if counts else None
    return most


def _method_exposure(
    method: str, runs: Sequence[Run], users: NDArray[np.int64] | None, only: int | None
) -> tuple[str, ...]:
    row, peers = EXPOSURES.get(method, UNKNOWN), len(runs[0].roster) - 1
    up = [sum(line["bytes_up"] for line in run.lines) / len(run.roster) for run in runs]
    seen = "not as it is" if method in EXPOSURES else "not known"
    if method in RAW:
        seen = "not known: sites did not show their weights"
    if users is not None:
        mine = users if only is None else users[[only]]
        span = str(mine.min()) if mine.min() == mine.max() else f"{mine.min()} to {mine.max()}"
        least = "" if any(seen_by(run).any() for run in runs) else "at least "
        seen = f"{least}{span} of {peers} other sites"
    told = (part.replace("**", "").replace("`", "") for part in row[:3])
    sent = () if only is not None else (words.size(float(np.mean(up))),)
    return words.label(method), *told, *sent, seen


def _site_exposure(
    runs: Sequence[Run], users: Mapping[str, NDArray[np.int64] | None], i: int
) -> tuple[object, ...]:
    """A site, its accepted uploads, those rejected, and who had its model by each method of RAW."""
    name = runs[0].roster.clients[i]
    lines = [line for run in runs for line in run.lines]
    out = Counter(
        one["reason"] for line in lines for one in line["rejected"] if one["client"] == name
    )
    uploads = 0
    for run in runs:
        took = sum(i in line["clients"] for line in run.lines if line["bytes_up"] > 0)
        left = sum(one["client"] == name for line in run.lines for one in line["rejected"])
        uploads += max(0, took - left)
    told = ", ".join(f"{n} {reason.replace('_', ' ')}" for reason, n in out.items())
    seen = tuple(words.NONE if one is None else str(one[i]) for one in users.values())
    return name, uploads, told or words.NONE, *seen


# ---- the HTML page of a comparison, in one file that needs no network and no other file ---------

# A script makes choosing a site easier; without it the page shows everything.


class ClientLine(NamedTuple):
    """One row of the table of clients: the scores of one client, and its gain."""

    name: str
    samples: int
    scores: tuple[str, ...]
    gain: str  # with its interval, where it can be judged
    shown: Claim | str
    worse: bool


def page(comparison: "Comparison", choice: ClinicalChoice | None = None) -> str:
    """The page of a comparison as HTML text; everything that comes from users is escaped."""
    shown, last = methods_table(comparison), comparison.runs[-1]
    best = shown_method(comparison)
    return rendered(
        "report.html",
        {
            "eyebrow": "coterie comparison",
            "title": "Is joining worth it?",
            "verdict": unbroken(comparison.verdict),
            "answers": comparison.answers,
            "facts": [
                *facts_of(comparison.runs),
                (comparison.trainings, str(len(comparison.seeds))),
            ],
            "alarms": [alarm for row in comparison.rows for alarm in row.alarms],
            "rejected": rejected_of(comparison.runs),
            "table": to_html(shown),
            "meanings": [(one.head, one.meaning) for one in shown.columns if one.meaning],
            "notes": notes(comparison),
            "tests": tests(comparison),
            "curves": figures.learning_curves(comparison),
            "own": False,
            "exposed": exposed({m: list(comparison.of_method(m)) for m in comparison.methods}),
            "unit": ", in points," if METRICS[comparison.metric].percent else "",
            "clinical": clinical_of(comparison, best, choice),
            "panels": figures.panels(comparison, best),
            "scatters": scatters(comparison, best),
            "helping": helping_of(comparison, best),
            "over": comparison,
            "models": models_of(comparison),
            "heads": [words.label(method) for method in comparison.methods],
            "clients": _clients(comparison, best),
            "best": words.label(best),
            "metric": METRICS[comparison.metric].title,
            "command": command_of(last.environment),
            "runs": comparison.to_dict()["runs"],
            "config": pretty(last.config),
            "where": pretty(last.environment),
        },
    )


def shown_method(comparison: "Comparison") -> str:
    """The method that the page shows first: the recommended one, or the last."""
    return comparison.choice.method if comparison.choice else comparison.methods[-1]


def facts_of(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Clients, true groups where they are known, training samples and rounds of these runs."""
    roster = runs[0].roster
    known = [set(run.roster.groups.tolist()) for run in runs if run.roster.groups is not None]
    least, most = roster.n_train.min(), roster.n_train.max()
    return [
        ("clients", str(len(roster))),
        *([("true groups", str(max(map(len, known))))] if known else []),
        ("training samples per client", f"{most}" if least == most else f"{least}–{most}"),
        ("rounds", str(len(runs[0].lines))),
    ]


def rejected_of(runs: Sequence[Run]) -> list[str]:
    """One sentence for each reason why uploads were rejected."""
    found: dict[str, Counter[str]] = {}
    for run in runs:
        for reason, count in run.summary["rejected"].items():
            found.setdefault(reason, Counter())[words.label(run.method)] += count
    return [
        f"Uploads were left out as {reason.replace('_', ' ')}: "
        f"{', '.join(f'{count} of {method}' for method, count in methods.items())}."
        for reason, methods in found.items()
    ]


def helping_of(comparison: "Comparison", best: str) -> helping.Helping | None:
    """Who helps whom, by method; the recommended method first."""
    order = sorted(comparison.reliances, key=lambda method: method != best)
    first = {method: comparison.of_method(method)[0] for method in order}
    relied = {method: comparison.reliances[method] for method in order}
    return helping.helping(relied, first, helping.OF_COMPARISON)


def clinical_of(
    comparison: "Comparison", best: str, choice: ClinicalChoice | None
) -> ClinicalView | None:
    """The clinical numbers of the recommended method and of Local."""
    return clinical_view({m: comparison.told(m) for m in dict.fromkeys((best, LOCAL))}, choice)


def _clients(comparison: "Comparison", best: str) -> list[ClientLine]:
    roster, metric = comparison.runs[0].roster, comparison.metric
    scores = {method: comparison.site_scores(method) for method in comparison.methods}
    gained = comparison.site_gain(best)
    found = (comparison.judgements or {}).get(best)
    judged = {one.client: one for one in found.clients} if found else {}

    def gain(name: str, value: float) -> str:
        if name not in judged:
            return words.number(value, metric, sign=True)
        return words.gain_cell(value, judged[name].gain.low, judged[name].gain.high, metric)

    return [
        ClientLine(
            name,
            int(roster.n_train[i]),
            tuple(words.number(float(one[i]), metric) for one in scores.values()),
            gain(name, float(gained[i])),
            judged[name].claim if name in judged else words.NONE,
            bool(gained[i] < 0),
        )
        for i, name in enumerate(roster.clients)
    ]


# ---- the HTML page of one run, in one file: its rounds, clients, matrix, alarms and costs -------

ONE_RUN = (
    "One run alone does not tell whether joining is worth it; “coterie compare” compares methods "
    "with training alone."
)


def run_page(run: Run, choice: ClinicalChoice | None = None) -> str:
    """The page of one run as HTML text; everything that comes from users is escaped."""
    summary, relied = run.summary, reliance([run])
    return rendered(
        "run.html",
        {
            "eyebrow": "coterie run",
            "title": words.label(run.method),
            "verdict": unbroken(f"{_sentence(run)} {ONE_RUN}"),
            "facts": [*facts_of([run]), ("seed", str(run.seed))],
            "alarms": summary["alarms"],
            "rejected": rejected_of([run]),
            "curves": figures.client_curves(run),
            "numbers": [fact for fact in run_facts(run) if fact[0] != "alarm"],
            "helping": helping_of_run(run, relied),
            "best": words.label(run.method),
            "own": False,
            "exposed": exposed({run.method: [run]}),
            "clinical": clinical_view({run.method: [run]}, choice),
            "costs": _costs(summary),
            "rounds": [_round_line(line, run.metric) for line in run.lines],
            "clients": _client_lines(run, relied),
            "seed": run.seed,
            "metric": METRICS[run.metric].title,
            "command": command_of(run.environment),
            "digest": summary["digest"],
            "config": pretty(run.config),
            "where": pretty(run.environment),
        },
    )


def _sentence(run: Run) -> str:
    """A sentence on the mean score after the last round."""
    metric = run.metric
    mean = last_score(run.summary)
    text = (
        f"{words.label(run.method)} gives a mean {METRICS[metric].title} of "
        f"{words.number(mean, metric)}{words.unit(metric)} after {len(run.lines)} rounds"
    )
    gain = run.summary["relative_to_local"]
    if gain is None:
        return f"{text}."
    size = words.number(float(gain), metric, sign=True)
    return f"{text}, {size} compared with each client’s own local model."


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


def _round_line(line: Line, metric: str) -> tuple[object, ...]:
    """One row of the table of rounds."""
    mean = words.NONE
    if line.get("test") is not None:
        mean = words.number(float(line["test"]), metric)
    who = [f"{one['client']} ({one['reason'].replace('_', ' ')})" for one in line["rejected"]]
    return (
        line["round"] + 1,
        len(line["clients"]),
        mean,
        words.size(line["bytes_up"]),
        words.size(line["bytes_down"]),
        f"{line['seconds']:.2f}",
        words.listing(who) or words.NONE,
    )


def _client_lines(run: Run, relied: Reliance | None) -> list[tuple[object, ...]]:
    """Each client's row: its samples, first and last score, and on whom it has the most weight."""
    roster = run.roster

    def most(i: int) -> str:
        share = np.zeros(1) if relied is None else relied.share[i]
        j = int(share.argmax())
        if relied is None or not share[j] > 0:
            return words.NONE
        told = ", ".join(filter(None, [f"{100 * share[j]:.0f} %", relied.seldom(i)]))
        return f"{roster.clients[j]} ({told})"

    return [
        (
            *(name, roster.n_train[i], roster.n_val[i], roster.n_test[i]),
            *(words.number(float(scores[i]), run.metric) for scores in (run.test[0], run.last)),
            *(most(i), roster.weak.get(name, words.NONE)),
        )
        for i, name in enumerate(roster.clients)
    ]


def helping_of_run(run: Run, relied: Reliance | None) -> helping.Helping | None:
    """Who helps whom in one run."""
    known = {} if relied is None else {run.method: relied}
    return helping.helping(known, {run.method: run}, helping.OF_RUN)
