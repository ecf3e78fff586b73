"""Repeats a trial that a trace fails, on other numbers.

In float32 rounding may turn the decision of a ReLU or of a max pool in a trial. That changes the
result by more than rounding alone, and looks like a mistake. A mistake shows on other numbers as
well, so a trace that is right in float64 is refused only if it fails twice.
"""

from collections.abc import Callable

from ..errors import MismatchError
from .trust import Call, TraceTrial


def passed(trial: TraceTrial, replay: Call) -> TraceTrial:
    """The trial that a trace passes, this one or another; a trace that passes none is refused."""
    trial.exact(replay)
    try:
        trial.rounded(replay)
        return trial
    except MismatchError:
        other = trial.again()
    other.traced(replay)
    return other


def passed_compiled(
    trial: TraceTrial, replay: Call, uncompile: Callable[[], None], compile_anew: Callable[[], None]
) -> tuple[TraceTrial, bool]:
    """As :func:`passed` for compiled steps; also whether an error of part of a step would show."""
    try:
        return trial, trial.compiled(replay)
    except MismatchError:
        other = trial.again()
    uncompile()  # compiled steps may differ from the call by what the trace does
    other.traced(replay)
    compile_anew()
    return other, other.compiled(replay)
