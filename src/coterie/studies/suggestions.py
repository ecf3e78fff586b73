"""Suggests values to try, one trial after the other: a grid, or Optuna's sampler.

Suggestions follow from the space, the number of trials and the scores alone. A search that was
killed asks again from the beginning: the scores of finished trials come from their records, so it
goes the same way without a second record of it.
"""

import json
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .tune_plan import Choices, Searched, Space, Values, combinations, size

if TYPE_CHECKING:
    from optuna import Trial

MOST_REPEATS = 50  # for each trial: Optuna may suggest what it has suggested before
RANDOM = 4  # at least so many trials are drawn at random before the sampler uses their scores
SEED = 0  # of the sampler: methods with the same fields begin with the same values


def suggestions(space: Space, trials: int) -> Generator[Values, float, None]:
    """Yield values to try and receive their score, larger is better; at most ``trials`` times.

    If all combinations fit into the trials, each of them is suggested once. Otherwise Optuna
    suggests values that were not tried before.
    """
    count = size(space)
    if count is not None and count <= trials:
        yield from combinations(space)
    else:
        yield from _sampled(space, trials)


def require_optuna(space: Space, trials: int, where: str) -> None:
    """Refuse a space that only Optuna can search if Optuna is not installed."""
    count = size(space)
    if count is not None and count <= trials:
        return
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        what = "a range" if count is None else f"{count} combinations in {trials} trials"
        raise ConfigError(
            f"{where}: searching {what} needs Optuna; install it with 'pip install "
            "coterie[tune]', or list values that all fit into the trials"
        ) from error


def _sampled(space: Space, trials: int) -> Generator[Values, float, None]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=SEED, n_startup_trials=max(RANDOM, trials // 2))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    scores: dict[str, float] = {}
    for _ in range(trials * MOST_REPEATS):
        if len(scores) == trials:
            return
        trial = study.ask()
        values = {field: _value(trial, field, searched) for field, searched in space.items()}
        key = json.dumps(values)
        if key not in scores:
            scores[key] = yield values
        study.tell(trial, scores[key])


def _value(trial: "Trial", field: str, searched: Searched) -> Any:
    if isinstance(searched, Choices):
        texts = [json.dumps(value) for value in searched.values]
        return searched.values[texts.index(trial.suggest_categorical(field, texts))]
    if searched.whole:
        return trial.suggest_int(field, int(searched.low), int(searched.high), log=searched.log)
    found = trial.suggest_float(field, searched.low, searched.high, log=searched.log)
    return min(max(float(f"{found:.3g}"), searched.low), searched.high)  # three digits are enough
