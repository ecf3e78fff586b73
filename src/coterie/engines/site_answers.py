"""Reads the answers of sites: nothing in them is trusted, and whatever is wrong is a reason."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..core.algorithm import Mixture
from ..core.messages import REASONS, Layout, Rejection, Reply, layout
from ..core.metrics import LARGEST_SCORE, Metric
from ..core.tree import Tree
from ..errors import EngineError
from .base import Evaluation, Predicted
from .codec import Message, Types, decode, is_digest, refused_by

WIDEST = 1024  # models of one site's predictor
SCORES = 2  # of the metric, before the losses: see Evaluation
Read = TypeVar("Read")


class _WrongError(Exception):
    """An answer that is rejected for this reason."""


def read_answer(
    client: int, data: bytes | str, types: Types, read: Callable[[Message], Read]
) -> Read | Rejection:
    """What ``read`` finds in the answer of a site; a rejection whatever is wrong with it.

    ``data`` is a text if there is no answer: the reason.
    """
    if isinstance(data, str):
        return Rejection(client, data if data in REASONS else "lost")
    try:
        answer, refused = decode(data, types), refused_by(data)
        return read(answer) if refused is None else Rejection(client, refused[0])
    except EngineError:
        return Rejection(client, "unreadable")
    except _WrongError as error:
        return Rejection(client, str(error))
    except Exception:  # whatever a stranger's answer brings about
        return Rejection(client, "fields")


class TrainedAnswer(NamedTuple):
    """One client's answer to a round of training."""

    reply: Reply
    state: str  # sha256 of its new state
    shown: Tree | None  # None where it is not of the layout that was agreed


def trained_answer(answer: Message, client: int, shown: Layout) -> TrainedAnswer:
    """One client's answer; ``shown`` is the layout of what its state showed before."""
    upload, told = answer.body
    layout(upload)  # refuses whatever is no tree of arrays
    round = _round(answer.head, client)
    state = _sha256(answer.head["state"])
    fits = layout(told) == shown and all(_finite(leaf) for leaf in _arrays(told))
    return TrainedAnswer(Reply(client, round, upload), state, told if fits else None)


class JudgedAnswer(NamedTuple):
    """One client's answer to an evaluation."""

    scores: list[float]
    predictor: Mixture
    digest: str


class Assessment(NamedTuple):
    """What a site was asked to evaluate."""

    round: int
    metric: Metric
    width: int  # numbers of a model
    dtype: torch.dtype  # of a model's numbers


def judged_answer(answer: Message, client: int, asked: Assessment) -> JudgedAnswer:
    if _round(answer.head, client) != asked.round:
        raise _WrongError("wrong_round")
    scores, predictor = answer.body
    weights, models = predictor
    fits = isinstance(predictor, Mixture) and scores.shape == (len(Evaluation._fields),)
    fits &= weights.dim() == 1 and 1 <= len(weights) <= WIDEST
    fits &= models.shape in ((len(weights), 0), (len(weights), asked.width))
    if not fits or not scores.is_floating_point():
        raise _WrongError("shape")
    if not weights.is_floating_point() or models.dtype != asked.dtype:
        raise _WrongError("dtype")
    if not _finite(weights):
        raise _WrongError("not_finite")
    told = scores.double().tolist()
    wrong = [loss < 0 or LARGEST_SCORE < loss < math.inf for loss in told[SCORES:]]
    if not all(map(asked.metric.possible, told[:SCORES])) or any(wrong):
        raise _WrongError("range")
    digest = answer.head.get("digest")
    return JudgedAnswer(told, predictor, "" if digest is None else _sha256(digest))


def _round(head: Mapping[str, Any], client: int) -> int:
    """The round that an answer is of; it must be a number, and the client's own."""
    round = head["round"]
    if type(round) is not int:
        raise _WrongError("fields")
    if type(head["client"]) is not int or head["client"] != client:
        raise _WrongError("wrong_client")
    return round


def _sha256(text: Any) -> str:
    if not is_digest(text):
        raise _WrongError("fields")
    return str(text)


def _finite(leaf: Tensor) -> bool:
    return not leaf.is_floating_point() or bool(leaf.isfinite().all())


def _arrays(part: Tree) -> list[Tensor]:
    return [part] if isinstance(part, Tensor) else [leaf for each in part for leaf in _arrays(each)]


def gathered_predictions(
    clients: Sequence[int],
    found: Mapping[int, JudgedAnswer],
    lost: tuple[Rejection, ...],
    *,
    keep: bool,
) -> Predicted:
    """The scores of all clients; NaN and no predictor for a client that did not answer."""
    table = np.full((len(clients), len(Evaluation._fields)), np.nan)
    predictors: list[Mixture | None] = []
    for at, client in enumerate(clients):
        one = found.get(client)
        predictors.append(None if one is None else one.predictor)
        if one is not None and bool((one.predictor.weights != 0).any()):
            table[at] = one.scores
    digests = tuple(found[c].digest if c in found else "" for c in clients)
    mixture = _padded(predictors)
    return Predicted(Evaluation(*table.T), mixture, None, digests if keep else None, lost)


def _padded(predictors: Sequence[Mixture | None]) -> Mixture:
    """Predictors of different widths in one mixture; models only if every client sent its own."""
    known = [one for one in predictors if one is not None]
    width = max((len(one.weights) for one in known), default=1)
    sizes = {one.models.shape[1] for one in known}
    size = sizes.pop() if len(sizes) == 1 and len(known) == len(predictors) else 0
    first = known[0] if known else Mixture(torch.zeros(1), torch.zeros(1, 0))
    types = Counter(one.weights.dtype for one in known)  # one site does not decide for all
    dtype = max(types, key=lambda kind: (types[kind], kind.itemsize), default=torch.float32)
    weights = torch.zeros(len(predictors), width, dtype=dtype)
    models = first.models.new_zeros(len(predictors), width, size)
    for at, one in enumerate(predictors):
        if one is not None:
            weights[at, : len(one.weights)] = one.weights
            models[at, : len(one.models)] = one.models[:, :size]
    return Mixture(weights, models)
