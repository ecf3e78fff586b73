"""Differential privacy: clipped samples, noise, Poisson samples, what methods declare, ε."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad

import coterie
from coterie.algorithms import ALGORITHMS
from coterie.algorithms.apfl import APFL
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedem import FedEM
from coterie.algorithms.federico import FedeRiCo
from coterie.algorithms.scaffold import Scaffold
from coterie.core import random, tree
from coterie.core.algorithm import round_of
from coterie.core.optim import Recipe
from coterie.core.policies import declared, governed
from coterie.core.privacy import Mechanism, Privacy, When, room
from coterie.errors import ConfigError, EngineError
from coterie.runs.accounting import epsilon, foreseen
from support import assert_close, backend_of, cnn, mlp, normed, one_client, task, whole_round

U = np.uint64
QUIET = Privacy(noise=0.0, clip=0.3)


def private(method, privacy=QUIET, factory=mlp, **options):
    """A simulation in which the method is private, and the method as it runs there."""
    on = task(method, factory, privacy=privacy, **options)
    return on, governed(method, on.problem)


def grouped() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, stride=2),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, bias=False),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def rowwise() -> nn.Module:
    """Linear layers at six positions: one of many weights, and one of few."""
    return nn.Sequential(
        nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 2), nn.Flatten(), nn.Linear(12, 3)
    )


class Shared(nn.Module):
    """A network that uses one layer twice: its samples are computed one by one."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(36, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.first(x.flatten(1)))
        return self.last(torch.tanh(self.again(torch.tanh(self.again(h)))))


@pytest.mark.parametrize(
    ("factory", "ghostly"),
    [(mlp, True), (cnn, True), (grouped, True), (rowwise, True), (Shared, False)],
)
def test_clipped_sums_are_those_of_explicit_gradients_of_each_sample(factory, ghostly):
    on, _ = private(FedAvg(), factory=factory)
    assert (on.problem.model.taps is not None) == ghostly
    client = one_client(on, 0).private()
    batch, w = client.batch(0), on.problem.start
    total = torch.zeros_like(w)
    for i in batch.mask.nonzero().flatten():
        alone = batch._replace(x=batch.x[i, None], y=batch.y[i, None], mask=None)
        g = grad(client.loss)(w, alone)
        total += g * min(1.0, QUIET.clip / float(g.norm()))
    assert_close(client.gradient(w, batch), total / 10, 1e-9)
    taught = client.gradient(w, batch, loss=client.loss, penalty=lambda w: 0.5 * (w**2).sum())
    assert_close(taught, total / 10 + w, 1e-9)  # any other loss, and a penalty after clipping


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_method_declares_the_gradients_that_it_takes(name, monkeypatch):
    method = ALGORITHMS[name]()
    plain, found = declared(method)
    if found.refusal(plain):
        with pytest.raises(ConfigError, match=plain.__class__.__name__):
            private(method)
        return
    on, made = private(method)
    taken = Counter()

    def counted(self, client, w, batch, *_):
        models = tuple(int(model) for model in self.models)
        places = tuple(batch.position.tolist())  # which minibatch, whoever drew it
        taken[int(client.id), self.scan, models, batch.step, places] += 1
        return torch.zeros_like(w)

    monkeypatch.setattr(Mechanism, "gradient", counted)
    ids = torch.arange(5)
    server, states = made.init(on.problem)
    backend = backend_of("loop", on)
    for index in (0, 2):
        taken.clear()
        round = round_of(on.problem, index, 4, ids)
        backend.local(made, made.download(server, round), states, round)
        for client, size in enumerate(on.problem.counts.train):
            declares = Counter()
            for query in found.of(plain, When(index, 4, 5)):
                declares[query.gradients] += query.steps(on.problem.recipe, size)[1]
            mine = [count for query, count in taken.items() if query[0] == client]
            assert Counter(mine) == +declares, (index, client)


EXACT = {"cobo", "fedala", "fedavg_data", "fedcollab", "feddbe", "fedpac", "fedrod", "pafl_ewc"}


def test_what_sends_samples_or_exact_numbers_of_them_is_refused():
    made = {name: declared(kind()) for name, kind in ALGORITHMS.items()}
    assert {name for name, (method, found) in made.items() if found.refusal(method)} == EXACT
    for method in (FedeRiCo(step="gradient"), Scaffold(control="full_gradient")):
        with pytest.raises(ConfigError, match="exact gradient"):
            private(method)


def test_gradients_of_one_minibatch_count_as_one_with_less_noise():
    pytest.importorskip("opacus", reason="pip install 'coterie[dp]'")
    one = private(FedAvg(), Privacy(noise=1.0))[0].problem
    two = private(APFL(), Privacy(noise=math.sqrt(2)))[0].problem
    assert foreseen(two, APFL(), 3) == pytest.approx(foreseen(one, FedAvg(), 3))
    assert foreseen(one, APFL(), 3) > 1.1 * foreseen(one, FedAvg(), 3)


def test_an_undeclared_method_and_uncovered_settings_are_refused():
    class Mine(FedAvg):
        private = None

    for method, options, word in (
        (Mine(), {}, "does not declare"),
        (FedAvg(), {"recipe": Recipe(class_weights="balanced")}, "class_weights"),
        (FedAvg(), {"factory": normed}, "norm = 'group'"),
    ):
        with pytest.raises(ConfigError, match=word):
            private(method, **options)
    on, _ = private(FedAvg())
    with pytest.raises(EngineError, match="not of a minibatch"):
        one_client(on, 0).private().gradient(on.problem.start, "train")


def test_the_engines_agree_and_models_side_by_side_get_other_noise():
    noisy = Privacy(noise=1.0, clip=0.3)
    for method in (FedAvg(), FedeRiCo(), FedEM()):
        on, made = private(method, noisy)
        server, states = made.init(on.problem)
        round = whole_round(on)
        received = made.download(server, round)
        uploads = [
            backend_of(name, on).local(made, received, states, round)[0]
            for name in ("loop", "vmap")
        ]
        for a, b in zip(*map(tree.leaves, uploads), strict=True):
            assert_close(a, b, 1e-9)
    _, components = uploads[0][0][0], uploads[0][0]
    assert not torch.equal(components[:, 0], components[:, 1])


def test_samples_are_poisson_and_noise_has_its_deviation():
    on, _ = private(FedAvg(), Privacy(noise=2.0, clip=0.5))
    client, zero = one_client(on, 0).private(), torch.zeros(on.problem.model.size)
    n, steps = int(client.size), 500
    masks = torch.zeros(steps, n)
    for step in range(steps):
        batch = client.batch(step)
        masks[step, batch.position[batch.mask > 0]] = 1
    q = 10 / n
    deviation = math.sqrt(q * (1 - q) / steps)
    assert ((masks.mean(0) - q).abs() < 5 * deviation).all()
    pairs = masks.T @ masks / steps
    assert ((pairs - q * q).fill_diagonal_(0).abs() < 6 * deviation).all()
    draws = [client.gradient(zero.double(), client.batch(0)) for _ in range(100)]
    spread = torch.stack(draws).std(0).mean() * 10  # B
    assert abs(float(spread) - 2.0 * 0.5) < 0.03
    assert room(10) < 3 * 10


def test_opacus_takes_the_same_step():
    """Its optimiser, given the gradients of each sample: the same clipping and scale of noise."""
    opacus = pytest.importorskip("opacus.optimizers", reason="pip install 'coterie[dp]'")
    on, _ = private(FedAvg(), Privacy(noise=0.0, clip=0.3))
    client, w = one_client(on, 0).private(), on.problem.start
    batch = client.batch(0)
    parameter = nn.Parameter(torch.zeros_like(w))
    theirs = opacus.DPOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=0.3,
        expected_batch_size=10,
    )
    alone = [
        grad(client.loss)(w, batch._replace(x=x[None], y=y[None], mask=None))
        for x, y, there in zip(batch.x, batch.y, batch.mask, strict=True)
        if there
    ]
    parameter.grad_sample = torch.stack(alone)
    theirs.step()
    assert_close(-parameter.data, client.gradient(w, batch), 1e-5)  # it adds 1e-6 to a length
    loud = opacus.DPOptimizer(
        torch.optim.SGD([parameter], lr=1.0),
        noise_multiplier=2.0,
        max_grad_norm=0.5,
        expected_batch_size=10,
    )
    parameter.grad_sample, parameter.summed_grad = torch.zeros(1, len(w)).double(), None
    parameter.data.zero_()
    loud.step()
    assert abs(float(parameter.data.std()) * 10 - 2.0 * 0.5) < 0.15  # as ours, above


# ---- ε -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "q", "steps"), [(1.0, 0.02, 500), (2.0, 0.1, 1000), (0.8, 1, 3)])
def test_epsilon_agrees_with_dp_accounting(sigma, q, steps):
    pytest.importorskip("opacus", reason="pip install 'coterie[dp]'")
    dp = pytest.importorskip("dp_accounting", reason="pip install dp-accounting")
    found, way = epsilon(((sigma, q, steps),), 1e-5)
    accountant = dp.pld.PLDAccountant()
    event = dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma))
    accountant.compose(dp.SelfComposedDpEvent(event, steps))
    expected = accountant.get_epsilon(1e-5)
    assert way == "PRV"
    assert abs(found - expected) < max(0.02, 0.02 * expected)


def test_what_prv_cannot_do_renyi_does_and_no_noise_is_infinite():
    pytest.importorskip("opacus", reason="pip install 'coterie[dp]'")
    assert epsilon(((0.0, 0.1, 10),), 1e-5) == (math.inf, "none")
    found, way = epsilon(((0.5, 0.5, 1000),), 1e-5)
    assert math.isfinite(found)
    assert way == "RDP"
    assert epsilon((), 1e-5)[0] == 0.0


ASKED = {
    "data": {"name": "sine", "clients": 4, "samples": 30},
    "train": {"lr": 0.01, "batch": 5},
    "engine": {"name": "loop"},
    "run": {"rounds": 3, "participation": 0.5},
    "privacy": {"noise": 1.0, "clip": 0.5},
}


def test_a_resumed_run_spends_what_an_uninterrupted_one_does(tmp_path, monkeypatch):
    pytest.importorskip("opacus", reason="pip install 'coterie[dp]'")
    whole = coterie.run(ASKED, method="fedavg")
    other = coterie.run(ASKED, method="fedfomo")
    spent = whole.summary["privacy"]
    assert spent["simulated"]
    assert other.summary["privacy"]["epsilon"] == spent["epsilon"]  # as many queries
    each = Counter(client for line in whole.lines for client in line["clients"])
    by_rounds = {each[i]: spent["epsilon"][name] for i, name in enumerate(whole.roster.clients)}
    assert [by_rounds[n] for n in sorted(by_rounds)] == sorted(by_rounds.values())
    with monkeypatch.context() as patched:
        patched.setattr("coterie.runs.interrupt.here", stopped_after(1))
        with pytest.raises(KeyboardInterrupt):
            coterie.run(ASKED, method="fedavg", out=tmp_path / "a", set={"run.checkpoint_every": 1})
    again = coterie.resume(tmp_path / "a")
    assert again.summary["privacy"] == spent
    assert again.summary["digest"] == whole.summary["digest"]


def stopped_after(rounds):
    calls = iter(range(100))

    def here():
        if next(calls) == rounds:
            raise KeyboardInterrupt

    return here


def test_epsilon_solves_for_the_noise():
    pytest.importorskip("opacus", reason="pip install 'coterie[dp]'")
    asked = {**ASKED, "privacy": {"epsilon": 4.0}, "run": {"rounds": 1}}
    found = coterie.run(asked, method="ditto").summary["privacy"]
    assert 3.9 < max(found["epsilon"].values()) <= 4.0


# ---- a site's secret -----------------------------------------------------------------------------


def test_a_sites_noise_comes_from_its_secret_and_from_what_it_was_asked():
    on, _ = private(FedAvg(), Privacy(noise=1.0))
    secret = replace(on.problem, secret=bytes(range(32)))
    on = on._replace(problem=secret)
    w = on.problem.start

    def answer(*asked, **changes):
        site = on._replace(problem=replace(on.problem, privacy=Privacy(noise=1.0), **changes))
        client = one_client(site, 0).private(*asked)
        return client.gradient(w, client.batch(0)._replace(mask=torch.zeros(1)))

    once = answer(w)
    assert torch.equal(once, answer(w))  # a repeated question
    for other in (answer(w + 1), answer(w, secret=bytes(32)), answer(w, secret=None)):
        assert (once - other).norm() > 0.5 * once.norm()


def mixed(z):
    """SplitMix64's finaliser, on unsigned numbers."""
    z = (z ^ (z >> U(30))) * U(random._FIRST)
    z = (z ^ (z >> U(27))) * U(random._SECOND)
    return z ^ (z >> U(31))


def unmixed(z):
    """Its inverse."""
    z = (z ^ (z >> U(31)) ^ (z >> U(62))) * U(pow(random._SECOND, -1, 2**64))
    z = (z ^ (z >> U(27)) ^ (z >> U(54))) * U(pow(random._FIRST, -1, 2**64))
    return z ^ (z >> U(30)) ^ (z >> U(60))


def stripped(draws):
    """What is left of normal draws by one who computes the generator's state from one of them."""
    at = int(draws.abs().argmin())
    top = round(float((1 + torch.erf(draws[at] / math.sqrt(2))) / 2) * 2**53)
    highs = np.arange(top - 8, top + 9, dtype=np.uint64) << U(11)
    states = unmixed((highs[:, None] | np.arange(2**11, dtype=np.uint64)).ravel())
    keys = (states ^ mixed(np.array([at], dtype=np.uint64))) - U(random._GOLDEN)
    for other in (0, 1, 2):
        told = mixed((keys + U(random._GOLDEN)) ^ mixed(np.array([other], dtype=np.uint64)))
        luck = torch.from_numpy((told >> U(11)) * 2.0**-53)
        error = (torch.erfinv(2 * luck + 2.0**-53 - 1) * math.sqrt(2) - draws[other]).abs()
        keys = keys[(error <= error.min() + 1e-9).numpy()]
    found = torch.from_numpy(keys[:1].view(np.int64))
    state = random._mix(
        random._mix(torch.arange(len(draws))) ^ (found + random._signed(random._GOLDEN))
    )
    luck = random._shifted(state, 11).double() * 2.0**-53
    return draws - torch.erfinv(2 * luck + 2.0**-53 - 1) * math.sqrt(2)


def test_no_normal_draw_is_infinite(monkeypatch):
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    monkeypatch.setattr(random, "uniform", lambda *words: ends)
    assert random.normal(0).isfinite().all()


def test_known_zeros_under_a_sites_noise_do_not_reveal_the_secret():
    """20,000 dead pixels show the noise itself; the public generator gives itself away by them."""
    count, words = 20_000, (11, "noise 0", 1, 3)
    public = random.normal(torch.tensor(11), *words[1:], torch.arange(count))
    assert stripped(public).abs().max() < 1e-5
    drawn = random.secret_normal(bytes(range(32)), count, *words)
    assert stripped(drawn).abs().mean() > 0.5
    assert drawn.isfinite().all()
    assert abs(float(drawn.std()) - 1) < 0.03
