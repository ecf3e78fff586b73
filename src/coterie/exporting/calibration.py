"""What a client's own validation samples say of its model's probabilities.

They choose the threshold of an alarm, and the temperature: probabilities become
``softmax(log(p) / T)``, with the T that makes the validation samples most likely. The class with
the highest probability stays the same.
"""

import warnings
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from ..core.algorithm import Mixture
from ..core.answers import Answers
from ..core.flat import FlatModel
from ..core.metrics import LEAST_CHANCE, log_losses
from ..data.federation import Federation
from ..data.standard import Preprocessing
from ..engines.evaluation import outputs
from ..errors import ConfigError, CoterieError, CoterieWarning
from ..runs.assemble import assemble
from ..runs.config.schema import Config

FEWEST = 10  # validation samples, of two classes or more, that a temperature needs
HIGHEST = 10.0  # temperature; the lowest is one over it


class Recalibration(NamedTuple):
    """A temperature, and the log loss on test samples before and after it."""

    temperature: float
    samples: int  # validation samples
    before: float
    after: float


def federation_of(config: Config, seed: int, fingerprint: str) -> Federation | None:
    """The clients of a run, read again; None where its data is gone or is not the same any more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CoterieWarning)
            assembly = assemble(config)
    except CoterieError:
        return None
    assembly.close()
    found = assembly.federations.get(seed)
    return found if found is not None and found.fingerprint == fingerprint else None


def validation_answers(
    model: FlatModel,
    predictor: Mixture,
    preprocessing: Preprocessing,
    federation: Federation,
    client: int,
) -> Answers | None:
    """The model's answers to the client's own validation samples; None if it has none."""
    data, rows = federation.source or federation.dataset, federation.own_val[client]
    if not len(rows):
        return None
    x = preprocessing.inputs(data.x[rows], predictor.models.dtype)
    y = data.y[rows]
    y = y if federation.relabel is None else federation.relabel[client, y]
    with torch.no_grad():
        p = outputs(model, predictor, x, regression=False)
    return Answers(p.double().numpy(), y.numpy(), np.arange(len(rows)))


def tempered(p: Tensor, temperature: float) -> Tensor:
    """Probabilities at a temperature; 1 leaves them as they are."""
    if temperature == 1.0:
        return p
    return (p.clamp(min=LEAST_CHANCE).log() / temperature).softmax(-1)


def cooled(answers: Answers, temperature: float) -> Answers:
    """Answers whose probabilities have this temperature."""
    p = answers.chances
    if p is None:
        return answers
    new = tempered(torch.from_numpy(p.astype(np.float64)), temperature).numpy()
    return answers._replace(**{"values" if answers.values.ndim == 2 else "probabilities": new})


def recalibrated(validation: Answers | None, test: Answers | None) -> Recalibration:
    """The temperature that validation samples ask for; refuses too few of them."""
    found = 0 if validation is None else len(validation.targets)
    if validation is None or found < FEWEST or len(np.unique(validation.targets)) < 2:
        raise ConfigError(
            f"--recalibrate: found {found} usable validation samples of the client; expected "
            f"{FEWEST} or more, of two classes or more, that were not trained on, and the run's "
            "data at its place; leave the option out"
        )

    def loss(log_temperature: float) -> float:
        return _log_loss(cooled(validation, float(np.exp(log_temperature))))

    ends = -np.log(HIGHEST), np.log(HIGHEST)
    t = float(np.exp(minimize_scalar(loss, bounds=ends, method="bounded").x))
    before, after = (
        float("nan") if test is None or test.chances is None else _log_loss(cooled(test, at))
        for at in (1.0, t)
    )
    return Recalibration(t, found, before, after)


def _log_loss(answers: Answers) -> float:
    p = answers.chances
    assert p is not None
    return float(log_losses(p, answers.targets).mean())
