"""What a reader must know before believing a row of a study: alarms of its runs, equal models."""

from collections.abc import Iterator

from ..report import words
from .outcome import StudyOutcome
from .study import StudyColumn

WARNING = "Careful:"  # what stands before each of them


def warnings(outcome: StudyOutcome, column: StudyColumn) -> list[str]:
    """One sentence per alarm and per group of methods with equal models, with its seeds."""
    found: dict[str, list[int]] = {}
    for text, seed in (*_alarms(outcome, column), *_equal(outcome, column)):
        found.setdefault(text, []).append(seed)
    return [f"{text} ({_named(seeds)})" for text, seeds in found.items()]


def _alarms(outcome: StudyOutcome, column: StudyColumn) -> Iterator[tuple[str, int]]:
    for method in column.config.methods():
        for record in outcome.of(column, method.label):
            for alarm in record.summary.get("alarms", ()):
                yield alarm["text"].rstrip("."), record.seed


def _equal(outcome: StudyOutcome, column: StudyColumn) -> Iterator[tuple[str, int]]:
    """Methods whose clients predict with the same models, bit for bit."""
    alike: dict[tuple[int, str], list[str]] = {}
    for method in column.config.methods():
        for record in outcome.of(column, method.label):
            digest = record.summary.get("digest")
            if digest:
                alike.setdefault((record.seed, digest), []).append(words.label(method.label))
    for (seed, _), labels in alike.items():
        if len(labels) > 1:
            yield f"{', '.join(labels[:-1])} and {labels[-1]} end with the same models", seed


def _named(seeds: list[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, sorted(seeds)))}"
