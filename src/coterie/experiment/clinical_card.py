"""The part of a model card on a clinical outcome: calibration, sensitivity, subgroups.

Bins and subgroups with few rows are given without numbers: a card may be passed on.
"""

from collections.abc import Callable, Sequence

from ..core.metrics import METRICS
from ..results.calibration import Calibration, Estimate, Sensitivity
from ..results.clinical import FEWEST, SiteClinical

FEW = "too few rows"


def clinical_text(found: SiteClinical, plain: Callable[[object], str]) -> str:
    """The text in Markdown; ``plain`` escapes what comes from data."""
    numbers, parts = found.numbers, []
    if found.outcome is not None:
        parts.append(
            f"The outcome is {plain(found.outcome)}: {numbers.positives} of the client's "
            f"{numbers.rows} test samples."
        )
        if numbers.calibration is None:
            parts.append(f"The test samples are too few (fewer than {FEWEST}) for more numbers.")
        else:
            parts += [_calibration(numbers.calibration), *_sensitivity(found, numbers.sensitivity)]
    if numbers.subgroups:
        title = METRICS[found.metric].title
        rows = [
            (plain(group.name), *_few(group.rows, _interval(group.score, found.metric)))
            for group in numbers.subgroups
        ]
        head = (plain(found.column), "test samples", f"{title} (95 % interval)")
        parts.append(f"By {plain(found.column)}:\n\n{_table(head, rows)}")
    return "\n\n".join(parts)


def _calibration(found: Calibration) -> str:
    rows = [
        (f"{part.predicted:.2f}", *_few(part.rows, f"{part.observed:.2f}")) for part in found.bins
    ]
    table = _table(("mean predicted probability", "test samples", "share with the outcome"), rows)
    return (
        f"Expected calibration error {found.error:.3f}, Brier score {found.brier:.3f} (less is "
        f"better). A well calibrated model has the same number in both columns:\n\n{table}"
    )


def _sensitivity(found: SiteClinical, sensitivity: Sensitivity | None) -> list[str]:
    if sensitivity is None:
        return ["All test samples are of one kind, so that there is no sensitivity."]
    value, low, high = (f"{100 * part:.0f}" for part in sensitivity.found)
    return [
        f"With a specificity of {100 * found.specificity:g} % it finds {value} % (95 % interval "
        f"{low} to {high}) of the samples with the outcome: those with a probability of at least "
        f"{sensitivity.threshold:.3g}. The threshold was chosen on the same samples."
    ]


def _interval(score: Estimate | None, metric: str) -> str:
    if score is None:
        return "—"
    unit = " %" if METRICS[metric].percent else ""
    value, low, high = (f"{part:.4g}" for part in score)
    return f"{value}{unit} ({low} to {high})"


def _few(rows: int, text: str) -> tuple[str, str]:
    return (f"fewer than {FEWEST}", FEW) if rows < FEWEST else (str(rows), text)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
