"""The section on who helps whom: a graph and a matrix per method, averaged and round by round."""

import base64
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from ..core.metrics import Floats
from ..results.collaboration import ZERO_WITHIN
from ..results.history import History
from ..results.reliance import Reliance, on_others, took_part
from . import graph, matrices, share_matrix, words
from .grouping import discovered

MOST_ROUNDS = 20  # rounds whose matrices a page holds
# Bytes of the matrices of all rounds on a page, at most; with many methods it holds fewer rounds.
OF_RUN, OF_COMPARISON = 500_000, 3_000_000


class HelpCard(NamedTuple):
    """One method's graph and matrix, and the numbers that the page's script draws."""

    method: str
    graph: Markup | None
    matrix: Markup
    inside: Markup | None
    order: str  # JSON list of clients in the order of the matrix
    largest: float  # the share that the number 255 stands for
    top: float  # the share that is drawn darkest
    frames: str  # base64 of uint8 [2 + rounds, K, K]: clear, mean, rounds; empty for many clients


class Helping(NamedTuple):
    """The section of a page: one card per method, and what they have in common."""

    cards: tuple[HelpCard, ...]
    names: str  # JSON list of the clients' names
    rounds: str  # JSON list of the rounds, counted from 1


def helping(
    relied: Mapping[str, Reliance],
    first: Mapping[str, History],
    strokes: Mapping[str, str],
    most: int,
) -> Helping | None:
    """The section for methods with these mean weights; rounds are those of the first seed.

    ``most`` limits the bytes of the matrices; without room for any, the page has only the mean as a
    picture.
    """
    if not relied:
        return None
    some = first[next(iter(relied))]
    room = int(most / (len(relied) * len(some.roster) ** 2 * 4 / 3)) - 2
    rounds = None if room < 0 else _rounds(some.matrix_rounds, room)
    cards = tuple(_card(relied[m], first[m], rounds, strokes[m]) for m in relied)
    names = json.dumps(some.roster.clients, ensure_ascii=False)
    return Helping(cards, names, json.dumps([index + 1 for index in rounds or []]))


def _rounds(known: Sequence[int], room: int) -> list[int]:
    """Rounds to show, evenly spaced, as many as there is room for."""
    most = min(MOST_ROUNDS, room, len(known))
    places = np.linspace(0, len(known) - 1, most).round().astype(int)
    return [known[place] for place in dict.fromkeys(places.tolist())]


def _card(
    relied: Reliance, history: History, rounds: Sequence[int] | None, stroke: str
) -> HelpCard:
    name, roster, found = words.label(history.method), history.roster, discovered(relied.share)
    frames = np.stack([relied.share, *(_frame(history, index) for index in rounds or ())])
    largest = float(frames.max()) or 1.0
    numbers = np.round(255 * frames / largest)
    packed = np.concatenate([255 * relied.clear[None], numbers]).astype(np.uint8)
    packed = packed[:, found.order][:, :, found.order]
    return HelpCard(
        name,
        graph.graph(relied, roster, found, f"{name}: who helps whom, as a graph"),
        share_matrix.matrix(relied, roster, found, f"{name}: who helps whom, as a matrix"),
        matrices.inside_curve(history, stroke),
        json.dumps(found.order.tolist()),
        largest,
        float(relied.share.max()) or 1.0,
        "" if rounds is None else base64.b64encode(packed.tobytes()).decode("ascii"),
    )


def _frame(history: History, index: int) -> Floats:
    """The shares in one round; rows of zeros for clients that relied on nobody in it."""
    at: NDArray[np.int64] = np.flatnonzero(np.array(history.matrix_rounds) == index)
    if not len(at):
        return np.zeros((len(history.roster), len(history.roster)))
    weight = on_others(history.matrices[int(at[0])], history.swaps)
    line = next((line for line in history.lines if line["round"] == index), None)
    here = (weight.sum(1) > ZERO_WITHIN) & took_part(line, history.roster)
    weight = weight * here[:, None]
    share: Floats = weight / np.maximum(weight.sum(1, keepdims=True), ZERO_WITHIN)
    return share
