"""What a collaboration matrix shows is what was applied in that round, for every method with one.

Row i of round r is what client i's model of round r was made with; who was absent, or whose reply
was rejected, keeps its last row. Each rule below rebuilds a model of the round from the matrix and
from what travelled, and compares it with the model itself.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from coterie.algorithms import ALGORITHMS
from coterie.algorithms.fedamp import FedAMP
from coterie.algorithms.heurfedamp import HeurFedAMP
from coterie.algorithms.ifca import IFCA
from coterie.core import tree
from coterie.core.algorithm import round_of
from coterie.core.rows import dense
from coterie.training.rounds import train
from support import (
    METHODS,
    RECIPE,
    assert_close,
    backend_of,
    engine_of,
    federation,
    task,
    whole_round,
)

SIZES = (31, 17, 24, 9, 40, 22)
ATTRIBUTED = {"fedem"}  # clients weigh components there: the matrix says who uses the same ones


class Play(NamedTuple):
    """One round: what went in, what travelled, what came out. Rows of messages: ``clients``."""

    server: Any
    states: Any
    received: Any
    uploads: Any
    after: Any
    kept: Any  # states of everybody
    clients: torch.Tensor  # who replied
    matrix: torch.Tensor


def a_mix_of_what_was_there(play, method):
    """u_i, formed of the uploads before the round; a first-timer has the common start."""
    for row, i in enumerate(play.clients.tolist()):
        if play.server.seen[i]:
            u = play.matrix[i] @ dense(play.server.models)
            assert (play.matrix[i][~play.server.seen] == 0).all()
        else:
            u, alone = play.server.start, torch.eye(len(play.matrix)).double()[i]
            assert torch.equal(play.matrix[i], alone)
        assert_close(play.received.u[row], u)


def fomo_mix(play, method):
    """θ before training: others' uploads, and for its own weight θ_i or what it was before it."""
    for i in play.clients.tolist():
        A = play.matrix[i].clone()
        A[i] = 0
        own = play.kept.old[i] - A @ dense(play.server.models)
        old, new = play.states.old[i], play.states.theta[i]
        apart = new - old
        share = (own - play.matrix[i, i] * old) @ apart / (apart @ apart).clamp(min=1e-300)
        assert -1e-9 <= share <= play.matrix[i, i] + 1e-9
        assert_close(own, play.matrix[i, i] * old + share * apart)


def average_mix(play, method):
    """The rate is zero: what is uploaded is the mix itself."""
    there = play.server.uploaded
    for row, i in enumerate(play.clients.tolist()):
        expected = play.matrix[i] @ play.server.models if there.any() else play.server.start
        assert_close(play.uploads.theta[row], expected)


def peers_weights(play, method):
    """The weight with which each model in sight was trained."""
    for row, i in enumerate(play.clients.tolist()):
        assert_close(play.matrix[i, play.uploads.owner[row]], play.uploads.weight[row])


def cluster_average(play, method):
    """The cluster's new model is this average of the members' replies."""
    sent = play.received + play.uploads.w
    models = play.after.models[play.after.member[play.clients]]
    assert_close(play.matrix[play.clients][:, play.clients] @ sent, models)


def choice_average(play, method):
    if len(play.after.changes):  # still listening to those who begin: no model is made
        return
    models = play.after.theta[play.after.choice[play.clients]]
    at = play.matrix[play.clients]
    if len(play.server.changes):  # the first models, of all who were heard
        everybody = play.server.theta[0] + dense(play.server.changes)
        everybody = everybody.index_copy(0, play.clients, play.uploads.w)
        assert_close(at @ everybody, models)
    else:
        assert_close(at[:, play.clients] @ play.uploads.w, models)


def requesters_average(play, method):
    for k in range(len(play.after.x)):
        if k in play.clients:
            step = play.matrix[k, play.clients] @ play.uploads.dy[:, k]
            assert_close(play.after.x[k], play.server.x[k] + step)


def graph_mixture(play, method):
    """u_i after the round, of the uploads that came."""
    u = dense(play.after.u)[play.clients]
    assert_close(play.matrix[play.clients][:, play.clients] @ play.uploads.w, u)


def pull_of_others(play, method):
    """What pulled a client, in units of its own weight."""
    for row, i in enumerate(play.clients.tolist()):
        W = play.matrix[i] / play.matrix[i, i]
        W[i] = 0
        assert_close(W @ play.server.x, play.received.pull[row])
        assert_close(W.sum(), play.received.total[row])


def head_mixture(play, method):
    """The heads after the round, of those that came."""
    heads = dense(play.after.heads)[play.clients]
    assert_close(play.matrix[play.clients][:, play.clients] @ play.uploads.head, heads)


def coalition_average(play, method):
    """The coalition's new model is this average of its members' replies."""
    if play.server.coalition.max() < 0:
        return
    models = play.after.inner[play.after.coalition[play.clients]]
    sent = play.uploads.inner.w
    assert_close(play.matrix[play.clients][:, play.clients] @ sent, models)


def circles_mean(play, method):
    """What a client is served next is this average of everybody's last models."""
    served = method.serve(play.after, SimpleNamespace(clients=play.clients))
    assert_close(play.matrix[play.clients] @ dense(play.after.w), served)


LAWS = {
    "circle": (METHODS["circle"](), circles_mean),
    "fedamp": (FedAMP(), a_mix_of_what_was_there),
    "fedamp, printed": (FedAMP(sigma=2.0, alpha=0.3), a_mix_of_what_was_there),
    "heurfedamp": (HeurFedAMP(), a_mix_of_what_was_there),
    "heurfedamp, printed": (HeurFedAMP(sigma=50.0), a_mix_of_what_was_there),
    "fedfomo": (METHODS["fedfomo"](), fomo_mix),
    "fedfomo_ma": (METHODS["fedfomo_ma"](), average_mix),
    "federico": (METHODS["federico"](), peers_weights),
    "cfl": (METHODS["cfl"](), cluster_average),
    "cfl_mean": (METHODS["cfl_mean"](), cluster_average),
    "ifca": (IFCA(), choice_average),
    "ifca, redraw": (IFCA(start="redraw", k=2, min_share=0.0), choice_average),
    "pfedgraph": (METHODS["pfedgraph"](), graph_mixture),
    "fedpac": (METHODS["fedpac"](), head_mixture),
    "fedcollab": (METHODS["fedcollab"](), coalition_average),
    "cobo": (METHODS["cobo"](), pull_of_others),
    "waffle": (METHODS["waffle"](), requesters_average),
    "waffle_stable": (METHODS["waffle_stable"](), requesters_average),
    "erosion": (METHODS["erosion"](), requesters_average),
}


def plays(method, still, rounds=5):
    """Half of the clients take part, and one reply a round is rejected; the last has rate zero."""
    on = task(method, federated=federation(SIZES, groups=2))
    at_rest = task(
        method, federated=federation(SIZES, groups=2), recipe=replace(RECIPE, lr=0.0, floor=0.0)
    )
    server, states = method.init(on.problem)
    states = tree.map_leaves(torch.clone, states)
    matrix = None
    for index in range(rounds):
        here = at_rest if still and index == rounds - 1 else on
        chosen = torch.randperm(6, generator=torch.Generator().manual_seed(index))[:4].sort().values
        asked = torch.arange(6) if method.traits.everybody else chosen
        round = round_of(here.problem, index, rounds, asked)
        received = method.download(server, round)
        engine = backend_of("loop", here)
        uploads, new = engine.local(method, received, tree.take(states, asked), round)
        replied = torch.arange(len(asked)) != index % len(asked)
        narrow = round._replace(clients=asked[replied], sent_to=asked)
        received, uploads, new = (
            tree.take(part, replied.nonzero().flatten()) for part in (received, uploads, new)
        )
        after = method.aggregate(server, uploads, narrow)
        kept = tree.map_leaves(
            lambda old, rows, at=narrow.clients: old.index_copy(0, at, rows), states, new
        )
        A = method.collaboration(after, method.shown(kept), round).double()
        yield Play(server, states, received, uploads, after, kept, narrow.clients, A), matrix
        server, states, matrix = after, kept, A


@pytest.mark.parametrize("name", LAWS)
def test_the_matrix_of_a_round_is_what_was_applied(name):
    method, law = LAWS[name]
    mixed = False
    for play, before in plays(method, still=law is average_mix):
        if law is not average_mix or play.after.uploaded.all():
            law(play, method)
        absent = ~torch.isin(torch.arange(6), play.clients)
        if before is not None and not (law is choice_average and len(play.server.changes)):
            assert torch.equal(play.matrix[absent], before[absent])
        mixed |= bool((play.matrix - torch.diag(play.matrix.diagonal())).sum() > 1e-3)
    assert mixed  # somebody drew on somebody


def test_every_method_with_a_matrix_is_looked_at():
    def has_one(method):
        on = task(method)
        server, states = method.init(on.problem)
        return method.collaboration(server, method.shown(states), whole_round(on)) is not None

    with_one = {name for name in ALGORITHMS if has_one(ALGORITHMS[name]())}
    assert with_one == {name.split(",")[0] for name in LAWS} | ATTRIBUTED


def test_the_run_records_what_the_method_says():
    """A run with half of the clients records the rows of its participants and keeps the rest."""
    method = FedAMP()
    on = task(method, federated=federation(SIZES))
    before = None
    for record in train(method, on.problem, engine_of("loop", on), 5, participation=0.5):
        A = torch.from_numpy(record.collaboration)
        absent = [i for i in range(6) if i not in record.clients]
        if before is not None:
            assert torch.equal(A[absent], before[absent])
        before = A
    assert (before - torch.diag(before.diagonal())).sum() > 0
