"""FedCollab's search for coalitions, its classifiers, and a method inside each coalition."""

import itertools

import pytest
import torch

import coterie
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedcollab import UNFIT, FedCollab, coalitions, error
from coterie.algorithms.local import Local
from coterie.errors import ConfigError
from coterie.training.rounds import train
from coterie.views.page import page
from support import (
    assert_close,
    backend_of,
    engine_of,
    federation,
    last,
    predictors,
    task,
    whole_round,
)


def slow_error(coalition, D, n, strength):
    total = 0.0
    for i in range(len(n)):
        mates = [j for j in range(len(n)) if coalition[j] == coalition[i]]
        m, mine = sum(n), sum(n[j] for j in mates)
        alpha = {j: (n[j] / m) / (mine / m) for j in mates}
        spread = sum(alpha[j] ** 2 / (n[j] / m * m) for j in mates)
        total += strength * spread**0.5 + sum(alpha[j] * float(D[i, j]) for j in mates)
    return total / len(n)


def partitions(count):
    for labels in itertools.product(range(count), repeat=count):
        if all(label <= max(labels[:k], default=-1) + 1 for k, label in enumerate(labels)):
            yield torch.tensor(labels)


def random_case(seed, count=4):
    generator = torch.Generator().manual_seed(seed)
    D = torch.rand(count, count, generator=generator).double() / 2
    return ((D + D.T) / 2).fill_diagonal_(0), torch.randint(5, 200, (count,), generator=generator)


def test_the_error_equals_a_slow_double_loop():
    D, n = random_case(0)
    for coalition in partitions(4):
        found = float(error(coalition, D, n, 3.0))
        assert found == pytest.approx(slow_error(coalition.tolist(), D, n.tolist(), 3.0))


@pytest.mark.parametrize("seed", range(12))
def test_the_search_finds_the_best_partition_of_few_clients(seed):
    D, n = random_case(seed)
    best = min(float(error(one, D, n, 3.0)) for one in partitions(4))
    assert float(error(coalitions(D, n, 3.0), D, n, 3.0)) == pytest.approx(best)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_alike_clients_are_one_coalition_and_strangers_are_alone(count):
    n = torch.arange(10, 10 + count)
    none = torch.zeros(count, count).double()
    assert coalitions(none, n).tolist() == [0] * count
    infinite = torch.full((count, count), torch.inf).double().fill_diagonal_(0)
    assert coalitions(infinite, n).tolist() == list(range(count))


def test_hidden_groups_are_coalitions():
    group = torch.tensor([0, 1, 0, 2, 1, 0, 2])
    D = (group[:, None] != group).double()
    assert coalitions(D, torch.full((7,), 40)).tolist() == group.tolist()


# ---- as a method -----------------------------------------------------------------------------


def rounds_of(method, rounds=5, **options):
    on = task(method, **options)
    return on, list(train(method, on.problem, engine_of("loop", on), rounds, participation=1.0))


@pytest.mark.parametrize("divergence", ["discriminator", "updates"])
def test_divergence_is_larger_between_clients_of_other_groups(divergence):
    """Odd and even clients read the labels differently."""
    method = FedCollab(divergence=divergence, rounds_before=2)
    big = federation(sizes=(60, 60, 60, 60))
    on = task(method, federated=big)
    engine = backend_of("loop", on)
    server, states = method.init(on.problem)
    for index in range(3):
        round = whole_round(on, index)
        if int(server.coalition.max()) >= 0:
            break
        received = method.download(server, round)
        uploads, states = engine.local(method, received, states, round)
        server = method._collected(server, uploads, round.clients)
    found = method.divergences(server, round)
    assert_close(found, found.T)
    other = (torch.arange(4)[:, None] % 2) != (torch.arange(4) % 2)
    same = ~other & ~torch.eye(4, dtype=torch.bool)
    assert found[other].min() > found[same].max()
    assert ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize(
    ("strength", "plain"), [(1e6, FedAvg()), (0.0, Local(budget="matched", keep="last"))]
)
def test_one_coalition_is_the_method_inside_and_coalitions_of_one_are_local(strength, plain):
    """But for the rounds that it takes to find them."""
    method = FedCollab(strength=strength)
    on = task(method)
    *_, record = train(method, on.problem, engine_of("loop", on), 5, participation=1.0)
    assert len(record.server.coalition.unique()) == (1 if strength else 5)
    later = task(plain)
    server, states = plain.init(later.problem)
    backend = backend_of("loop", later)
    for index in range(2, 5):
        round = whole_round(later, index, horizon=5)
        uploads, states = backend.local(plain, plain.download(server, round), states, round)
        server = plain.aggregate(server, uploads, round)
    models = predictors(record).models[:, 0]
    expected = server.expand(5, -1) if strength else states.w
    assert_close(models, expected, 1e-9)


@pytest.mark.parametrize("inside", ["fedprox", "ditto", "scaffold", "fedper", "qfedavg"])
def test_any_method_may_train_the_coalitions(inside):
    method = FedCollab(inside=inside, divergence="updates")
    record = last(method, task(method), rounds=4, participation=0.6)
    assert predictors(record).models.isfinite().all()


@pytest.mark.parametrize("inside", ["fedfomo", "cobo"])
def test_a_method_that_sends_a_choice_of_models_is_refused(inside):
    method = FedCollab(inside=inside)
    with pytest.raises(ConfigError, match="a choice of models"):
        method.check(task(method).problem, 3)


def test_the_coalitions_are_on_the_page_and_in_the_json():
    """By the clients' names, as the last line of the run has them."""
    asked = {"partition": {"clients": 4, "groups": 2}, "model": {"name": "linear"}}
    asked["algorithm"] = {"fedcollab": {"divergence": "updates"}}
    data = {"data": {"name": "digits"}, "engine": {"name": "loop"}}
    asked["partition"]["name"] = "concept_shift"
    found = coterie.compare({**asked, **data}, methods=["fedcollab"], rounds=3)
    (run,) = found.of_method("fedcollab")
    (formed,) = found.to_dict()["coalitions"].values()
    numbers = [next(i for i, some in enumerate(formed) if c in some) for c in run.roster.clients]
    assert numbers == run.lines[-1]["coalition"]
    told = "; ".join(", ".join(some) for some in formed)
    assert f"formed before training: {told}." in page(found)


@pytest.mark.parametrize("inside", sorted(UNFIT))
def test_a_method_that_cannot_train_a_coalition_says_why(inside):
    with pytest.raises(ConfigError, match=UNFIT[inside]):
        FedCollab(inside=inside)


def test_a_method_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'fedavg'"):
        FedCollab(inside="fedavgg")


def test_coalitions_wait_until_all_have_been_heard():
    method = FedCollab(divergence="updates")
    on = task(method)
    records = list(train(method, on.problem, engine_of("loop", on), 20, participation=0.4))
    heard = set()
    for record in records:
        before = set(heard)
        heard |= set(record.clients)
        if record.server.coalition.max() >= 0:
            assert heard == set(range(5)) or record.index >= 3
            break
        assert before != set(range(5))
