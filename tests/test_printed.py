"""A paper's name is the paper's rule: whole runs equal an independent reading, written in loops.

Clients take plain full-batch steps, so that local training is a loop of gradients too. What a
reading takes from the code is the network, the data and the start.
"""

from itertools import combinations
from math import exp

import pytest
import torch
from torch.nn.functional import cross_entropy

from coterie.algorithms.cfl import CFL
from coterie.algorithms.fedamp import FedAMP
from coterie.algorithms.heurfedamp import HeurFedAMP
from coterie.algorithms.pafl_ewc import PaFLEWC
from coterie.algorithms.pafl_kd import PaFLKD
from coterie.algorithms.qfedavg import QFedAvg
from coterie.algorithms.waffle import Waffle
from coterie.core.optim import Recipe
from support import RAGGED, assert_close, last, one_client, predictors, task

LR, STEPS, K = 0.5, 2, len(RAGGED)
FULL = Recipe(lr=LR, epochs=STEPS, batch=100)


class Sites:
    """What the clients of a simulation compute, in plain PyTorch."""

    def __init__(self, method):
        self.on = task(method, recipe=FULL)
        self.start = self.on.problem.start
        data = [next(iter(one_client(self.on, i).blocks("train"))) for i in range(K)]
        self.data = [(block.x, block.y) for block in data]
        self.sizes = [len(y) for _, y in self.data]
        self.p = [n / sum(self.sizes) for n in self.sizes]

    def loss(self, i, w):
        x, y = self.data[i]
        return cross_entropy(self.on.problem.model(w, x), y)

    def descended(self, i, w, objective=None, correction=0.0):
        """The model after the steps of a round, and the mean of their gradients."""
        total = torch.zeros_like(w)
        for _ in range(STEPS):
            v = w.detach().requires_grad_()
            (self.loss(i, v) if objective is None else objective(v)).backward()
            w, total = w - LR * (v.grad + correction), total + v.grad
        return w, total / STEPS

    def equals(self, method, rounds, expected):
        """Compare what the clients predict with after so many rounds."""
        record = last(method, self.on, "loop", rounds=rounds, participation=1.0)
        found = predictors(record).models[:, 0]
        for i, w in enumerate(expected):
            if w is not None:
                assert_close(found[i], w)
        return record


def apart(a, b):
    return float(((a - b) ** 2).sum())


def cosine(a, b):
    return float(a @ b) / float((a @ a) ** 0.5 * (b @ b) ** 0.5)


def median(values):
    return sorted(values)[(len(values) - 1) // 2]


# ---- FedAMP and HeurFedAMP -----------------------------------------------------------------------


def attention(w, alpha, sigma):
    """P5's Eq. 5 and 7 with A(s) = 1 − exp(−s/σ)."""
    xi = [[0.0] * K for _ in range(K)]
    for i in range(K):
        for j in range(K):
            if i != j:
                xi[i][j] = alpha * exp(-apart(w[i], w[j]) / sigma) / sigma
        xi[i][i] = 1 - sum(xi[i])
    return xi


def scale_free(w):
    """The defaults: a width from the median distance, α_k from how close models are."""
    sigma = 0.1 * median([apart(w[i], w[j]) for i in range(K) for j in range(K) if i != j])
    closest = [
        sum(exp(-apart(w[i], w[j]) / sigma) / sigma for j in range(K) if j != i) for i in range(K)
    ]
    return attention(w, 1 / (1 / sigma + max(closest)), sigma)


def heuristic(w, sigma, own):
    """P5's Eq. 8."""
    xi = [[own] * K for _ in range(K)]
    for i in range(K):
        total = sum(exp(sigma * cosine(w[i], w[h])) for h in range(K) if h != i)
        for j in range(K):
            if i != j:
                xi[i][j] = (1 - own) * exp(sigma * cosine(w[i], w[j])) / total
    return xi


def scale_free_heuristic(w):
    unlike = median([1 - cosine(w[i], w[j]) for i in range(K) for j in range(K) if i != j])
    return heuristic(w, 1 / (0.1 * unlike), 1 / K)


@pytest.mark.parametrize(
    ("method", "prox", "weigh"),
    [
        (FedAMP(), 1e-4, scale_free),
        (FedAMP(sigma=2.0, alpha=0.5, lam=0.2), 0.4, lambda w: attention(w, 0.5, 2.0)),
        (HeurFedAMP(), 1e-4, scale_free_heuristic),
        (HeurFedAMP(sigma=30.0, self_weight=0.3, prox=0.4), 0.4, lambda w: heuristic(w, 30, 0.3)),
    ],
    ids=["fedamp", "fedamp given", "heurfedamp", "heurfedamp given"],
)
def test_attentive_message_passing(method, prox, weigh):
    """Algorithm 1: u_i = Σ_j ξ_ij w_j, then w_i = argmin F_i(w) + λ/(2α_k) ‖w − u_i‖²."""
    sites = Sites(method)
    u = [sites.start] * K
    for _ in range(3):
        w = []
        for i in range(K):

            def objective(v, i=i, near=u[i]):
                return sites.loss(i, v) + prox / 2 * ((v - near) ** 2).sum()

            w.append(sites.descended(i, u[i], objective)[0])
        xi = weigh(w)
        u = [sum(xi[i][j] * w[j] for j in range(K)) for i in range(K)]
    sites.equals(method, 3, w)
    assert 0.01 < max(xi[i][j] for i in range(K) for j in range(K) if i != j) < 0.99
    assert any(apart(u[i], w[i]) > 1e-6 for i in range(K))


# ---- WAFFLE --------------------------------------------------------------------------------------


def raw_weights(d, me, turn):
    """Algorithm 1, lines 3 to 6 and 9."""
    others = [d[i] for i in range(K) if i != me]
    most, least = max(others), min(others)
    own = least * (1 - (most - least) / most * (1 - turn))
    d = [own if i == me else d[i] for i in range(K)]
    a = [max(turn - (d[i] - own) / (most - min(d)), 0) for i in range(K)]
    return [x / sum(a) for x in a]


@pytest.mark.parametrize("distance", ["update", "gradient"])
def test_waffle(distance):
    me, R = 2, 8
    method = Waffle(requesters=(me,), distance=distance)
    sites = Sites(method)
    x, c = sites.start, torch.zeros_like(sites.start)
    controls = [torch.zeros_like(c) for _ in range(K)]
    raws = [[1 / K] * K, [1 / K] * K]
    without = 0
    for r in range(1, R + 1):
        dy, dc = [], []
        for i in range(K):  # SCAFFOLD's client step
            y, gradient = sites.descended(i, x, correction=c - controls[i])
            dy.append(y - x)
            dc.append(gradient - controls[i])
            controls[i] = gradient
        compared = dy if distance == "update" else controls
        turn = 1 / (1 + exp(3.2 * (r / (R / 2) - 1)))
        raw = raw_weights([apart(v, compared[me]) ** 0.5 for v in compared], me, turn)
        raws.append([float(i == me) for i in range(K)] if r >= 0.95 * R else raw)
        weights = [sum(each) / 3 for each in zip(*raws[-3:], strict=True)]
        without += weights.count(0.0)
        x = x + sum(a * v for a, v in zip(weights, dy, strict=True))
        c = c + sum(a * v for a, v in zip(weights, dc, strict=True))
    assert without > 0  # somebody of weight zero was corrected like the others
    record = sites.equals(method, R, [x if i == me else None for i in range(K)])
    assert_close(record.server.c[0], c)


# ---- CFL -----------------------------------------------------------------------------------------


def best_cut(members, change):
    """The bipartition whose largest similarity across is smallest."""
    cuts = [
        (part, [i for i in members if i not in part])
        for size in range(1, len(members))
        for part in combinations(members, size)
    ]
    return min(
        cuts, key=lambda cut: max(cosine(change[i], change[j]) for i in cut[0] for j in cut[1])
    )


@pytest.mark.parametrize("mode", ["relative", "absolute"])
def test_clustered_learning(mode):
    eps1, eps2, first, rounds = 0.2, 0.2, 2, 8
    method = CFL(eps_mode=mode, eps1=eps1, eps2=eps2, t_min=first)
    sites = Sites(method)
    clusters, waited = [(list(range(K)), sites.start)], 0
    for t in range(rounds):
        new = []
        for members, model in clusters:
            change = {i: sites.descended(i, model)[0] - model for i in members}
            lengths = [apart(change[i], 0 * model) ** 0.5 for i in members]
            if t == 0:
                unit = max(lengths) if mode == "relative" else 1.0

            def mean(part, change=change):
                return sum(sites.sizes[i] * change[i] for i in part) / sum(
                    sites.sizes[i] for i in part
                )

            rests = apart(mean(members), 0 * model) ** 0.5 < eps1 * unit
            parts = [members]
            waited += t >= first and len(members) > 2 and not rests
            if t >= first and len(members) > 2 and rests and max(lengths) > eps2 * unit:
                parts = best_cut(members, change)
            new += [(list(part), model + mean(part)) for part in parts]
        clusters = new
    assert len(clusters) > 1
    assert waited
    assert any(len(members) > 1 for members, _ in clusters)
    expected = [next(model for members, model in clusters if i in members) for i in range(K)]
    sites.equals(method, rounds, expected)


# ---- q-FedAvg and PaFL ---------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0.0, 1.0, 5.0])
def test_q_fedavg(q):
    """Δ_i = F_i^q g_i, h_i = q F_i^(q−1) ‖g_i‖² + L F_i^q, with L = 1/η."""
    method = QFedAvg(q=q)
    sites, L = Sites(method), 1 / LR
    theta = sites.start
    for _ in range(3):
        up, down = torch.zeros_like(theta), 0.0
        for i in range(K):
            F = float(sites.loss(i, theta))
            g = L * (theta - sites.descended(i, theta)[0])
            up = up + sites.p[i] * F**q * g
            down += sites.p[i] * (q * F ** (q - 1) * float(g @ g) + L * F**q)
        theta = theta - up / down
    record = last(method, sites.on, "loop", rounds=3, participation=1.0)
    assert_close(record.server, theta, 1e-8)  # the code adds 1e-10 to every loss


def distilled(sites, i, v, G, tau=6.0, alpha=0.95):
    """(1 − α) CE + α τ² KL(G, C)."""
    x, _ = sites.data[i]
    student, teacher = (sites.on.problem.model(w, x) / tau for w in (v, G))
    p = teacher.softmax(1)
    kl = (p * (p.log() - student.softmax(1).log())).sum(1).mean()
    return (1 - alpha) * sites.loss(i, v) + alpha * tau**2 * kl


def consolidated(sites, i, v, G, lam=5000.0):
    """CE + (λ/2) Σ_k M_k (C_k − G_k)², M the Fisher information on the client's own samples."""
    x, y = sites.data[i]
    M = torch.zeros_like(G)
    for one, label in zip(x, y, strict=True):
        w = G.detach().requires_grad_()
        cross_entropy(sites.on.problem.model(w, one[None]), label[None]).backward()
        M = M + w.grad**2 / len(y)
    return sites.loss(i, v) + lam / 2 * (M * (v - G) ** 2).sum()


@pytest.mark.parametrize(
    ("method", "personal"),
    [(PaFLKD(), distilled), (PaFLEWC(lam=3.0), lambda *given: consolidated(*given, lam=3.0))],
)
def test_pafl(method, personal):
    """FedAvg until T/2; from then on clients minimise the loss of an adaptation alone."""
    sites, T = Sites(method), 4
    theta = sites.start
    for t in range(T):
        models = []
        for i in range(K):

            def objective(v, i=i, G=theta):
                return personal(sites, i, v, G)

            models.append(sites.descended(i, theta, objective if t >= T / 2 else None)[0])
        theta = sum(p * w for p, w in zip(sites.p, models, strict=True))
    record = last(method, sites.on, "loop", rounds=T, participation=1.0)
    assert_close(record.server.theta, theta)
