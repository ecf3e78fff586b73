"""The laws that every method must keep, for anyone's method.

    from coterie.testing import check_method

    def test_my_method():
        check_method(MyMethod)

It needs no pytest: in a notebook ``print(check_method(MyMethod))`` says what was checked.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.algorithm import Algorithm, AnyAlgorithm
from ..core.fields import summary
from ..core.locations import failure
from ..errors import ConfigError, CoterieError, did_you_mean
from . import declared, functions, whole_runs
from .harness import Case, Network, NotApplicableError, mlp

__all__ = ["LAWS", "BrokenLawsError", "MethodReport", "check_method"]


class Law(NamedTuple):
    """A promise that every method makes, and the function that finds where it is broken."""

    findings: Callable[[Case], Iterator[str]]
    needs: tuple[str, ...] = ()  # laws without which this one cannot be judged

    @property
    def promise(self) -> str:
        """In words, of the method."""
        return summary(self.findings)


_RUN = ("init", "messages", "rounds")
_PURE = (*_RUN, "inputs", "repeatable", "isolation")
_JUDGED = (*_PURE, "predictor")

LAWS: dict[str, Law] = {
    "fields": Law(functions.fields_are_checked),
    "init": Law(functions.init_gives_a_row_per_client),
    "messages": Law(functions.messages_have_a_row_per_client, ("init",)),
    "rounds": Law(functions.rounds_run, ("init", "messages")),
    "inputs": Law(functions.inputs_are_left_unchanged, _RUN),
    "repeatable": Law(functions.the_same_call_gives_the_same_numbers, _RUN),
    "isolation": Law(functions.clients_do_not_meet_in_local, ("fields", *_RUN, "repeatable")),
    "predictor": Law(functions.predictors_are_mixtures, _RUN),
    "participation": Law(whole_runs.half_of_the_clients_are_enough, _PURE),
    "replies": Law(whole_runs.any_replies_are_enough, (*_JUDGED, "participation")),
    "trace_key": Law(declared.chapters_are_declared, _PURE),
    "engines": Law(whole_runs.engines_agree, _JUDGED),
    "evaluation": Law(whole_runs.evaluating_changes_nothing, _JUDGED),
    "replay": Law(
        whole_runs.replayed_rounds_agree, ("fields", *_JUDGED, "trace_key", "engines", "evaluation")
    ),
    "order": Law(whole_runs.the_order_of_clients_does_not_matter, _JUDGED),
    "resume": Law(whole_runs.a_stopped_run_ends_the_same, ("fields", *_JUDGED, "evaluation")),
    "guard": Law(
        whole_runs.hostile_uploads_harm_nobody_else, (*_JUDGED, "participation", "replies")
    ),
    "test_data": Law(functions.only_scores_follow_test_data, _PURE),
    "validation": Law(declared.validation_is_declared, _PURE),
    "sharing": Law(declared.shared_samples_are_declared, _RUN),
    "matrix": Law(declared.the_matrix_is_what_was_applied, _PURE),
}


@dataclass(frozen=True)
class MethodReport:
    """What was found of a method."""

    method: str
    held: tuple[str, ...]  # laws that hold
    broken: dict[str, tuple[str, ...]] = field(default_factory=dict)  # law: what was found
    not_applicable: dict[str, str] = field(default_factory=dict)  # law: why it says nothing here
    not_checked: dict[str, str] = field(default_factory=dict)  # law: which broken law prevents it
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [f"{self.method}: {len(self.held)} laws hold ({self.seconds:.1f} s)"]
        for law, findings in self.broken.items():
            lines.append(f"  BROKEN {law}: {LAWS[law].promise}.")
            lines += [f"    - {words}" for words in findings]
        for title, group in (
            ("does not apply", self.not_applicable),
            ("not checked", self.not_checked),
        ):
            lines += [f"  {title}: {law} ({why})" for law, why in group.items()]
        return "\n".join(lines)


class BrokenLawsError(CoterieError, AssertionError):
    """A method that breaks laws; ``report`` has what was found."""

    def __init__(self, report: MethodReport) -> None:
        super().__init__(str(report))
        self.report = report


def check_method(
    method: type[AnyAlgorithm] | AnyAlgorithm,
    *,
    laws: Iterable[str] | None = None,
    network: Network = mlp,
) -> MethodReport:
    """Check the laws that every method must keep, on a small federation in memory.

    ``method`` is a class whose fields all have defaults, or an instance. ``laws`` names those to
    check, of :data:`LAWS`; without it all are. ``network`` makes a network for pictures
    ``[1, 6, 6]`` of three classes.

    Raises :class:`BrokenLawsError`, an ``AssertionError`` that lists every broken law in words;
    returns a report where all hold. It takes some seconds on one core.
    """
    began = time.perf_counter()
    chosen = _chosen(laws)
    algorithm = _made(method)
    report = _report(Case(algorithm, network), chosen, began)
    if report.broken:
        raise BrokenLawsError(report)
    return report


def _chosen(laws: Iterable[str] | None) -> list[str]:
    names = list(LAWS if laws is None else laws)
    for name in names:
        if name not in LAWS:
            raise ConfigError(f"laws: '{name}' is unknown; {did_you_mean(name, LAWS)}")
    return [name for name in LAWS if name in names]


def _made(method: type[AnyAlgorithm] | AnyAlgorithm) -> AnyAlgorithm:
    """The method, with its default fields where a class is given."""
    if not isinstance(method, type):
        if isinstance(method, Algorithm):
            return method
        raise ConfigError(f"check_method: found {method!r}; expected a method or its class")
    if not issubclass(method, Algorithm):
        raise ConfigError(
            f"check_method: found {method.__name__}; expected a class that derives from OwnModel, "
            "GlobalModel or Algorithm"
        )
    try:
        return method()
    except Exception as error:
        words = (
            f"{method.__name__}() cannot be made: {type(error).__name__}: {error}; give every "
            "field a default that is in its range, and define every abstract function"
        )
        raise BrokenLawsError(MethodReport(method.__name__, (), {"fields": (words,)})) from error


def _report(case: Case, chosen: list[str], began: float) -> MethodReport:
    """All chosen laws in order; one whose needs are broken is not checked."""
    held: list[str] = []
    broken: dict[str, tuple[str, ...]] = {}
    apart: dict[str, str] = {}
    unchecked: dict[str, str] = {}
    for name in chosen:
        needed = [other for other in LAWS[name].needs if other in broken]
        findings = None if needed else _findings(case, LAWS[name])
        if needed:
            unchecked[name] = f"mend '{needed[0]}' first"
        elif isinstance(findings, str):
            apart[name] = findings
        elif not findings:
            held.append(name)
        elif findings in broken.values():  # one exception, met by several laws
            unchecked[name] = "an error that is told above prevents it"
        else:
            broken[name] = findings
    seconds = time.perf_counter() - began
    title = type(case.algorithm).__name__
    return MethodReport(title, tuple(held), broken, apart, unchecked, seconds)


def _findings(case: Case, law: Law) -> tuple[str, ...] | str:
    """Where a law is broken; a text where it says nothing about this method."""
    try:
        return tuple(law.findings(case))
    except NotApplicableError as reason:
        return str(reason)
    except Exception as error:
        return (failure(error, case.algorithm),)
