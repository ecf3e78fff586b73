"""Reads the answers of sites: nothing in them is trusted."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..core.algorithm import Mixture
from ..core.messages import REASONS, Rejection
from ..errors import EngineError
from .base import Evaluation, Predicted
from .codec import Message, Types, decode


def read_answer(client: int, data: bytes | str, types: Types) -> Message | Rejection:
    """The answer of a site; a rejection if it refused, did not answer, or cannot be read."""
    if isinstance(data, str):
        return Rejection(client, data if data in REASONS else "lost")
    try:
        answer = decode(data, types)
    except EngineError:
        return Rejection(client, "unreadable")
    if "refused" in answer.head:
        reason = str(answer.head["refused"])
        return Rejection(client, reason if reason in REASONS else "refused")
    return answer


class JudgedAnswer(NamedTuple):
    """One client's answer to an evaluation."""

    scores: list[float]
    predictor: Mixture
    digest: str


def judged_answer(answer: Message, scored: int) -> JudgedAnswer | None:
    """One client's scores and predictor; None if the answer has another form.

    ``scored`` is the number of scores that were asked for.
    """
    try:
        scores, predictor = answer.body
        whole = isinstance(predictor, Mixture) and scores.shape == (scored,)
        if not whole or predictor.weights.dim() != 1 or predictor.models.dim() != 2:
            return None
        return JudgedAnswer(scores.double().tolist(), predictor, str(answer.head.get("digest", "")))
    except (TypeError, ValueError, AttributeError):
        return None


def gathered_predictions(
    clients: Sequence[int],
    found: Mapping[int, JudgedAnswer],
    lost: tuple[Rejection, ...],
    scored: int,
    *,
    keep: bool,
) -> Predicted:
    """The scores of all clients; NaN and no predictor for a client that did not answer."""
    table = np.full((len(clients), scored), np.nan)
    predictors: list[Mixture | None] = []
    for at, client in enumerate(clients):
        one = found.get(client)
        predictors.append(None if one is None else one.predictor)
        if one is not None and bool((one.predictor.weights != 0).any()):
            table[at] = one.scores
    digests = tuple(found[c].digest if c in found else "" for c in clients)
    mixture = _padded(predictors)
    scores = Evaluation(*table.T[: len(Evaluation._fields)])
    loss = table[:, -1] if scored > len(scores) else None
    return Predicted(scores, mixture, None, digests if keep else None, lost, loss)


def _padded(predictors: Sequence[Mixture | None]) -> Mixture:
    """Predictors of different widths in one mixture; models only if every client sent its own."""
    known = [one for one in predictors if one is not None]
    width = max((len(one.weights) for one in known), default=1)
    sizes = {one.models.shape[1] for one in known}
    size = sizes.pop() if len(sizes) == 1 and len(known) == len(predictors) else 0
    first = known[0] if known else Mixture(torch.zeros(1), torch.zeros(1, 0))
    weights = first.weights.new_zeros(len(predictors), width)
    models = first.models.new_zeros(len(predictors), width, size)
    for at, one in enumerate(predictors):
        if one is not None:
            weights[at, : len(one.weights)] = one.weights
            models[at, : len(one.models)] = one.models[:, :size]
    return Mixture(weights, models)
