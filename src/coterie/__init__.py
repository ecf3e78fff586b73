"""coterie: personalised federated learning in which every client finds its right collaborators.

    import coterie
    print(coterie.compare(rounds=10))

Names are imported when they are first used, so that ``import coterie`` is quick.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "api": ("run", "compare"),
    "doctor": ("doctor",),
    "results": ("RunResult", "Comparison"),
    "config": ("Config", "load"),
    "algorithm": ("Algorithm", "GlobalModel", "OwnModel", "Mixture", "Round"),
    "client": ("Client",),
    "errors": ("CoterieError", "ConfigError", "DataError", "EngineError", "StoreError"),
}

__all__ = [
    "Algorithm",
    "Client",
    "Comparison",
    "Config",
    "ConfigError",
    "CoterieError",
    "DataError",
    "EngineError",
    "GlobalModel",
    "Mixture",
    "OwnModel",
    "Round",
    "RunResult",
    "StoreError",
    "compare",
    "doctor",
    "load",
    "run",
]

if TYPE_CHECKING:
    from .algorithm import Algorithm, GlobalModel, Mixture, OwnModel, Round
    from .api import compare, run
    from .client import Client
    from .config import Config, load
    from .doctor import doctor
    from .errors import ConfigError, CoterieError, DataError, EngineError, StoreError
    from .results import Comparison, RunResult


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            module = importlib.import_module(f".{home}", __name__)
            # Kept here under their own names: the module coterie.run must not hide the function.
            globals().update({each: getattr(module, each) for each in names})
            return globals()[name]
    raise AttributeError(f"module 'coterie' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
