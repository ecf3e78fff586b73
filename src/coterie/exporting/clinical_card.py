"""The part of a model card on an outcome: calibration, sensitivity, subgroups, recalibration.

Bins and subgroups with few rows are given without numbers: a card may be passed on.
"""

import math
import re
from collections.abc import Sequence

from ..core.metrics import METRICS
from ..errors import printable
from ..views import words
from ..views.clinical import FEWEST, Calibration, Sensitivity, SiteClinical
from ..views.clinical_page import TOO_FEW, rows_text, sensitivity_text, share_text, subgroup_text
from .calibration import Recalibration

_MARKS = re.compile(r"([\\`*_{}\[\]<>#|&~])")


def plain(text: object) -> str:
    """A text from data or a config, as plain text in Markdown."""
    return _MARKS.sub(r"\\\1", printable(text))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Bins and subgroups with few rows are given without numbers: a card may be passed on.


def clinical_text(found: SiteClinical) -> str:
    """The text in Markdown."""
    numbers, parts = found.numbers, []
    if found.outcome is not None:
        parts.append(
            f"The outcome, “{plain(found.outcome)}”, is that of {numbers.positives} of the "
            f"client's {numbers.rows} test samples."
        )
        if numbers.calibration is None:
            parts.append(f"The test samples are too few (fewer than {FEWEST}) for more numbers.")
        else:
            parts += [_calibration(numbers.calibration), *_sensitivity(found, numbers.sensitivity)]
    if numbers.subgroups:
        title = METRICS[found.metric].title + words.unit(found.metric)
        rows = [
            (
                plain(group.name),
                plain(rows_text(group.rows)),
                subgroup_text(group, group.score, found.metric),
            )
            for group in numbers.subgroups
        ]
        head = (plain(found.column), "test samples", f"{title} (95 % interval)")
        parts.append(f"By {plain(found.column)}:\n\n{markdown_table(head, rows)}")
    return "\n\n".join(parts)


def clinical_section(
    found: SiteClinical | None, before: SiteClinical | None, again: Recalibration | None
) -> str:
    """The part of the card on an outcome and on recalibration; empty without either."""
    parts = [] if found is None else [clinical_text(found)]
    if again is not None:
        rows = [("log loss", f"{again.before:.3f}", f"{again.after:.3f}")]
        old, new = (one and one.numbers.calibration for one in (before, found))
        if old and new:
            rows += [
                ("expected calibration error", f"{old.error:.3f}", f"{new.error:.3f}"),
                ("Brier score", f"{old.brier:.3f}", f"{new.brier:.3f}"),
                ("calibration slope", words.plain(old.slope), words.plain(new.slope)),
            ]
        parts.append(
            f"Recalibrated with a temperature of {again.temperature:.3g}, chosen on the client's "
            f"{again.samples} validation samples. On its test samples:\n\n"
            + markdown_table(("", "before", "after"), rows)
            + ("\n\nHere it did not help." if again.after > again.before else "")
        )
    return "\n\n".join(parts)


def _calibration(found: Calibration) -> str:
    rows = [
        (
            f"{part.predicted:.2f}",
            rows_text(part.rows),
            TOO_FEW if part.rows < FEWEST else f"{part.observed:.2f}",
        )
        for part in found.bins
    ]
    table = markdown_table(
        ("mean predicted probability", "test samples", "share with the outcome"), rows
    )
    slope = f", calibration slope {words.plain(found.slope)} (ideally 1)"
    slope = "" if math.isnan(found.slope) else slope
    return (
        f"Expected calibration error {found.error:.3f}, Brier score {found.brier:.3f} (less is "
        f"better){slope}. A well calibrated model has the same number in both columns:\n\n{table}"
    )


def _sensitivity(found: SiteClinical, sensitivity: Sensitivity | None) -> list[str]:
    if sensitivity is None:
        return ["All test samples are of one kind, so that there is no sensitivity."]
    if sensitivity.specificity is not None:
        return [
            f"The threshold {sensitivity.threshold:.3g} was chosen on the client's validation "
            f"samples, for a specificity of {100 * found.specificity:g} %. On the test samples it "
            f"finds {sensitivity_text(sensitivity)} of those with the outcome, and "
            f"{share_text(sensitivity.specificity)} of the others give no alarm."
        ]
    return [
        f"With a specificity of {100 * found.specificity:g} % it finds "
        f"{sensitivity_text(sensitivity)} of the samples with the outcome: those with a "
        f"probability of at least {sensitivity.threshold:.3g}. The threshold was chosen on the "
        "same samples."
    ]
