"""coterie: personalised federated learning in which every client finds its right collaborators.

    import coterie
    print(coterie.compare(rounds=10))

Names are imported when they are first used, so that ``import coterie`` is quick. The public API is
listed in docs/README.md: the names of ``__all__`` and a few packages.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "api": ("run", "compare", "read", "resume", "verify"),
    "advising.advice": ("Advised", "advise"),
    "attacking.robustness": ("Robustness", "attack"),
    "diagnosis.doctor": ("doctor",),
    "estimator": ("PersonalisedClassifier",),
    "exporting.writing": ("export",),
    "exporting.exported_model": ("ExportedModel", "Predictions", "load_export"),
    "onboarding.onboarded": ("Onboarded", "onboard"),
    "views.comparison": ("Comparison",),
    "runs.run": ("Run",),
    "studies.outcome": ("StudyOutcome",),
    "studies.reproducing": ("reproduce",),
    "studies.sweeping": ("sweep",),
    "studies.tuned": ("Tuned",),
    "studies.tuning": ("tune",),
    "runs.config.loading": ("Config", "load"),
    "core.algorithm": ("Algorithm", "GlobalModel", "OwnModel", "Mixture", "Round", "Traits"),
    "core.client": ("Client",),
    "core.problem": ("Problem",),
    "errors": ("CoterieError", "ConfigError", "DataError", "EngineError", "StoreError"),
}

__all__ = [
    "Advised", "Algorithm", "Client", "Comparison", "Config", "ConfigError", "CoterieError",
    "DataError", "EngineError", "ExportedModel", "GlobalModel", "Mixture", "Onboarded",
    "OwnModel", "PersonalisedClassifier", "Predictions", "Problem", "Robustness", "Round",
    "Run", "StoreError", "StudyOutcome", "Traits", "Tuned", "advise", "attack", "compare",
    "doctor", "export", "load", "load_export", "onboard", "read", "reproduce", "resume", "run",
    "sweep", "tune", "verify",
]  # fmt: skip

if TYPE_CHECKING:
    from .advising.advice import Advised, advise
    from .api import compare, read, resume, run, verify
    from .attacking.robustness import Robustness, attack
    from .core.algorithm import Algorithm, GlobalModel, Mixture, OwnModel, Round, Traits
    from .core.client import Client
    from .core.problem import Problem
    from .diagnosis.doctor import doctor
    from .errors import ConfigError, CoterieError, DataError, EngineError, StoreError
    from .estimator import PersonalisedClassifier
    from .exporting.exported_model import ExportedModel, Predictions, load_export
    from .exporting.writing import export
    from .onboarding.onboarded import Onboarded, onboard
    from .runs.config.loading import Config, load
    from .runs.run import Run
    from .studies.outcome import StudyOutcome
    from .studies.reproducing import reproduce
    from .studies.sweeping import sweep
    from .studies.tuned import Tuned
    from .studies.tuning import tune
    from .views.comparison import Comparison


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            module = importlib.import_module(f".{home}", __name__)
            return getattr(module, name)
    raise AttributeError(f"module 'coterie' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
