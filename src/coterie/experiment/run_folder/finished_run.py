"""A finished run as data: its history, config, environment, summary and predictors."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...core.algorithm import Mixture
from ...core.calls import Form
from ...core.digests import client_digests, combined_digest
from ...errors import StoreError
from ...results.alarms import raise_alarms
from ...results.history import History, Log
from ...results.summary import summarise
from ...storage import files
from . import stored_models
from .names import MODELS

RAN = "ran"  # key in the environment: how each form of a call was executed


@dataclass(frozen=True, eq=False)
class RunData:
    """One finished run, in memory or read from its folder."""

    history: History
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    path: Path | None = None
    held: Mixture | None = None  # the predictors in memory; None if they are in the folder

    def mixture(self) -> Mixture:
        """The predictors of all clients: ``weights [K, r]``, ``models [K, r, P]``."""
        if self.held is not None:
            return self.held
        return stored_models.read_models(self._stored())

    def predictor(self, client: int) -> Mixture:
        """The predictor of one client: ``weights [r]``, ``models [r, P]``."""
        if self.held is not None:
            return Mixture(*(part[client] for part in self.held))
        return stored_models.read_predictor(self._stored(), client)

    def _stored(self) -> Path:
        if self.path is None or not (self.path / MODELS).exists():
            raise StoreError(
                "this run kept no models: they are at the sites of its federation; get a site's "
                "own model there with 'coterie site export'"
            )
        return self.path / MODELS


class Predictors(NamedTuple):
    """The clients' final predictors: their digest, and the models if they are here."""

    digest: str
    mixture: Mixture | None

    @classmethod
    def of(cls, mixture: Mixture, digests: tuple[str, ...] | None) -> "Predictors":
        """The predictors of a run's last round; ``digests`` are those that sites computed."""
        here = digests is None or mixture.models.shape[-1] > 0
        found = client_digests(mixture) if here else digests or ()
        return cls(combined_digest(found), mixture if here else None)


def collect(
    log: Log,
    predictors: Predictors,
    config: Mapping[str, Any],
    environment: Mapping[str, Any],
    references: Mapping[str, History] | None = None,
) -> RunData:
    """The data of a finished run; ``references`` are the histories of ``local`` and ``fedavg``.

    They must have the same clients, because each client is compared with itself.
    """
    history, known = log.history(), references or {}
    for name, other in known.items():
        if other.roster.fingerprint != history.roster.fingerprint:
            raise StoreError(
                f"{history.method} and {name} ran on different data (partition "
                f"{history.roster.fingerprint} and {other.roster.fingerprint}); expected the same "
                "clients; run both with the same seed and partition"
            )
    summary = summarise(history, predictors.digest, known.get("local"))
    summary["ran"] = _ran_summary(config, environment)
    summary["alarms"] = [alarm._asdict() for alarm in raise_alarms(history, known)]
    return RunData(history, config, environment, files.plain(summary), held=predictors.mixture)


def ran(forms: Iterable[Form]) -> dict[str, dict[str, str]]:
    """How each form of a call was executed, by the form's id."""
    return {form.id: {"stage": form.stage, "way": form.way, "why": form.why} for form in forms}


def _ran_summary(config: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, Any]:
    """The engine that ran, and how many forms of calls of each stage were executed in which way."""
    chosen = config.get("resolved", {})
    forms = [(f["stage"], f["way"], f["why"]) for f in environment.get(RAN, {}).values()]
    counted = sorted(Counter(forms).items())
    names = ("engine", "chunk", "compiler", "kernels")
    return {
        **{name: chosen.get(name) for name in names},
        "calls": [
            {"stage": stage, "way": way, "why": why or None, "forms": count}
            for (stage, way, why), count in counted
        ],
    }
