"""Numbers and names as people read them."""

import math
from collections.abc import Iterable, Sequence

from ..core.metrics import METRICS
from ..runs.statistics import OverSeeds

NONE = "—"
UNKNOWN = "too few test rows for an interval"
MINUS = "\N{MINUS SIGN}"


def label(method: str) -> str:
    """The name of a method as its paper writes it; an unknown name is returned as it is.

    >>> label("fedavg_ft"), label("pfedme"), label("my.package:Method"), label("fedfomo@5")
    ('FedAvg-FT', 'pFedMe', 'Method', 'FedFomo (5)')
    """
    from ..algorithms import ALGORITHMS, ALIASES

    method, variant, tag = method.partition("@")
    if variant:
        return f"{label(method)} ({tag})"

    if method in ALIASES:
        base, adapt = ALIASES[method]
        return f"{label(base)}-{adapt.upper()}"
    if method in ALGORITHMS:
        return ALGORITHMS[method].title or ALGORITHMS[method].__name__
    return method.rpartition(":")[2]


def _places(value: float, metric: str) -> int:
    """The number of decimals: one for percents, else enough to show three digits."""
    if METRICS[metric].percent or not math.isfinite(value) or value == 0:
        return 1
    return min(6, max(0, 2 - math.floor(math.log10(abs(value)))))


def number(value: float, metric: str, sign: bool = False, places: int | None = None) -> str:
    """A score or a difference of scores as text."""
    if math.isnan(value):
        return NONE
    if math.isinf(value):
        return f"{MINUS if value < 0 else '+' if sign else ''}∞"
    places = _places(value, metric) if places is None else places
    text = format(value, f"{'+' if sign else ''}.{places}f")
    return text.lstrip("+-") if float(text) == 0 else text.replace("-", MINUS)


def numbers(values: Sequence[float], metric: str) -> list[str]:
    """Scores as text, all with as many decimals as the largest of them needs."""
    places = _places(max((abs(x) for x in values if math.isfinite(x)), default=0.0), metric)
    return [number(value, metric, places=places) for value in values]


def plain(value: float, places: int = 2) -> str:
    """A number without a unit as text, with the minus sign that all other numbers have.

    >>> plain(-0.613), plain(math.nan)
    ('−0.61', '—')
    """
    return NONE if math.isnan(value) else f"{value:.{places}f}".replace("-", MINUS)


def unit(metric: str) -> str:
    """The text that follows a score in a sentence: `` %`` or nothing."""
    return " %" if METRICS[metric].percent else ""


def points(metric: str) -> str:
    """The text that follows a difference of scores: `` points`` or nothing."""
    return " points" if METRICS[metric].percent else ""


def gains(metric: str, loss: bool = False, you: bool = False) -> str:
    """What joining does, before the size of a gain or of a loss.

    >>> gains("accuracy"), gains("accuracy", loss=True, you=True), gains("rmse"), gains("r2")
    ('gains', 'costs you', 'lowers the error (RMSE) by', 'raises the R² by')
    """
    row = METRICS[metric]
    if row.percent:
        return f"{'costs' if loss else 'gains'}{' you' if you else ''}"
    verb = "raises" if row.higher_is_better != loss else "lowers"
    return f"{verb} {'your' if you else 'the'} {row.title} by"


def spread(value: OverSeeds, metric: str) -> str:
    """``mean ± deviation over seeds``; for one seed, the mean alone."""
    if not math.isfinite(value.deviation):
        return number(value.mean, metric)
    places = _places(value.mean, metric)
    return f"{number(value.mean, metric)} ± {number(value.deviation, metric, places=places)}"


def interval(gain: float, low: float, high: float, metric: str) -> str:
    """A gain or loss with its 95 % interval, for use in a sentence.

    >>> interval(5.0, 1.2, 8.8, "accuracy")
    'a gain of 5.0 points (95 % interval 1.2 to 8.8)'
    """
    what = "gain" if gain >= 0 else "loss"
    size, *_ = numbers((abs(gain), low, high), metric)
    told = ends(gain, low, high, metric)
    told = told if told == UNKNOWN else f"95 % interval {told}"
    return f"a {what} of {size}{points(metric)} ({told})"


def ends(gain: float, low: float, high: float, metric: str) -> str:
    """The ends of a gain's interval, or that the test rows are too few to have one.

    >>> ends(5.0, 1.2, 8.8, "accuracy"), ends(5.0, -math.inf, math.inf, "accuracy")
    ('1.2 to 8.8', 'too few test rows for an interval')
    """
    if math.isfinite(gain) and math.isinf(low) and math.isinf(high):
        return UNKNOWN
    return " to ".join(numbers((gain, low, high), metric)[1:])


def gain_cell(gain: float, low: float, high: float, metric: str) -> str:
    """A gain with its interval, for a table: ``+5.0 (1.2 to 8.8)``; a dash if it is not known."""
    if math.isnan(gain):
        return NONE
    return f"{number(gain, metric, sign=True)} ({ends(gain, low, high, metric)})"


def size(value: float) -> str:
    """A number of bytes as text, in B, kB, MB, GB or TB.

    >>> size(0), size(999), size(1_234_000)
    ('0', '999 B', '1.2 MB')
    """
    if math.isnan(value):
        return NONE
    if value == 0:
        return "0"
    power = min(int(math.log10(value) // 3), 4) if value >= 1 else 0
    scaled, name = value / 1000**power, ("B", "kB", "MB", "GB", "TB")[power]
    return f"{scaled:.0f} {name}" if power == 0 or scaled >= 100 else f"{scaled:.1f} {name}"


def part(value: float | None) -> str:
    """A part of a whole as a percentage; a dash if it is not known (None or NaN).

    >>> part(0.4), part(1e-6), part(0), part(None)
    ('40 %', '< 1 %', '0 %', '—')
    """
    if value is None or math.isnan(value):
        return NONE
    return "< 1 %" if 0 < value < 0.005 else f"{100 * value:.0f} %"


def count(value: OverSeeds) -> str:
    """A count as text: with one decimal if the mean over seeds is not a whole number."""
    if math.isnan(value.mean):
        return NONE
    return f"{value.mean:.0f}" if value.mean == round(value.mean) else f"{value.mean:.1f}"


def chance(p: float) -> str:
    """A p-value as text; never shown as 0.

    >>> chance(0.0), chance(0.0311), chance(1.0)
    ('p < 0.001', 'p = 0.031', 'p = 1')
    """
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def listing(names: list[str], most: int = 3) -> str:
    """A list of names for use in a sentence.

    >>> listing(["a"]), listing(list("abcd")), listing(list("abcdef"))
    ('a', 'a, b, c and d', 'a, b, c and 3 others')
    """
    if len(names) > most + 1:
        return f"{', '.join(names[:most])} and {len(names) - most} others"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]])) if names else ""


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]], rules: str = "l") -> list[str]:
    """The lines of a Markdown table; a column of numbers is on the right: the rules ``lr``.

    The last rule holds for all columns that follow.

    >>> markdown(("method", "mean"), [("Local", "1.0")], "lr")
    ['| method | mean |', '| --- | ---: |', '| Local | 1.0 |']
    """
    marks = rules.ljust(len(heads), rules[-1])
    line = ["---:" if mark == "r" else "---" for mark in marks]
    return [f"| {' | '.join(cells)} |" for cells in (heads, line, *rows)]
