"""coterie: personalised federated learning in which every client finds its right collaborators.

    import coterie
    print(coterie.compare(rounds=10))

Names are imported when they are first used, so that ``import coterie`` is quick. The public API is
listed in docs/README.md: the names of ``__all__`` and a few packages.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .core import old_paths

__version__ = "0.1.0"

_HOMES = {
    "api": ("run", "compare", "resume", "verify"),
    "commands.advise": ("Advised", "advise"),
    "commands.doctor": ("doctor",),
    "experiment.export": ("export",),
    "experiment.exported_model": ("ExportedModel", "load_export"),
    "experiment.predictions": ("Predictions",),
    "report.onboarded": ("Onboarded", "onboard"),
    "report.outcomes": ("RunResult", "Comparison"),
    "studies.outcome": ("StudyOutcome",),
    "studies.reproducing": ("reproduce",),
    "studies.sweeping": ("sweep",),
    "studies.tuned": ("Tuned",),
    "studies.tuning": ("tune",),
    "experiment.config.loading": ("Config", "load"),
    "core.algorithm": ("Algorithm", "GlobalModel", "OwnModel", "Mixture", "Round", "Traits"),
    "core.client": ("Client",),
    "core.problem": ("Problem",),
    "errors": ("CoterieError", "ConfigError", "DataError", "EngineError", "StoreError"),
}

__all__ = [
    "Advised",
    "Algorithm",
    "Client",
    "Comparison",
    "Config",
    "ConfigError",
    "CoterieError",
    "DataError",
    "EngineError",
    "ExportedModel",
    "GlobalModel",
    "Mixture",
    "Onboarded",
    "OwnModel",
    "Predictions",
    "Problem",
    "Round",
    "RunResult",
    "StoreError",
    "StudyOutcome",
    "Traits",
    "Tuned",
    "advise",
    "compare",
    "doctor",
    "export",
    "load",
    "load_export",
    "onboard",
    "reproduce",
    "resume",
    "run",
    "sweep",
    "tune",
    "verify",
]

if TYPE_CHECKING:
    from .api import compare, resume, run, verify
    from .commands.advise import Advised, advise
    from .commands.doctor import doctor
    from .core.algorithm import Algorithm, GlobalModel, Mixture, OwnModel, Round, Traits
    from .core.client import Client
    from .core.problem import Problem
    from .errors import ConfigError, CoterieError, DataError, EngineError, StoreError
    from .experiment.config.loading import Config, load
    from .experiment.export import export
    from .experiment.exported_model import ExportedModel, load_export
    from .experiment.predictions import Predictions
    from .report.onboarded import Onboarded, onboard
    from .report.outcomes import Comparison, RunResult
    from .studies.outcome import StudyOutcome
    from .studies.reproducing import reproduce
    from .studies.sweeping import sweep
    from .studies.tuned import Tuned
    from .studies.tuning import tune


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            module = importlib.import_module(f".{home}", __name__)
            return getattr(module, name)
    raise AttributeError(f"module 'coterie' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Package(ModuleType):
    """The package's module type: keeps ``coterie.run`` the function when old modules are imported.

    Importing the old module ``coterie.run`` would otherwise replace the function of that name.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
old_paths.install()
