"""The reference of every verdict: all of the training, or the early-stopped model where better."""

from dataclasses import replace

import pytest
import torch

from coterie.algorithms.local import Early, Local, Own
from coterie.core.optim import Recipe
from coterie.data.federation import Federation
from coterie.training.rounds import train
from support import assert_close, engine_of, federation, last, one_client, predictors, task

WILD = Recipe(lr=0.9, epochs=3, batch=10)  # goes up and down: the last model is not always the best
ROUNDS = 6
KEEPS = ("better", "last")


def noisy() -> Federation:
    """Labels of which a third are random, so that training for long does harm."""
    made = federation((12, 9, 15, 10, 14), groups=1)
    y, draw = made.dataset.y, torch.Generator().manual_seed(4)
    other = torch.randint(0, 3, y.shape, generator=draw)
    y = torch.where(torch.rand(y.shape, generator=draw) < 0.35, other, y)
    return replace(made, dataset=replace(made.dataset, y=y))


def models_by_round(on):
    """Every client's model after each round of training alone ``[rounds, K, P]``."""
    records = train(Local(keep="last"), on.problem, engine_of("loop", on), ROUNDS)
    return torch.stack([record.states.w.clone() for record in records])


def expected(on, history):
    """Per client the last model, or that of lowest validation loss where it errs less."""
    chosen = []
    for i in range(on.problem.population):
        client = one_client(on, i)
        losses = [float(client.loss(w, "val")) for w in history[:, i]]
        early = history[losses.index(min(losses)), i]
        final = history[-1, i]
        chosen.append(early if errors(on, i, early) < errors(on, i, final) else final)
    return torch.stack(chosen)


def errors(on, i, w):
    """Wrong answers on the client's own validation samples, counted one by one."""
    held, wrong = on.federation.val[i], 0
    for sample in held.tolist():
        said = int(on.problem.model(w, on.shards.x[[sample]].double()).argmax())
        wrong += said != int(on.shards.relabel[i, on.shards.y[sample]])
    return wrong


@pytest.mark.parametrize("engine", ["loop", "vmap", "wire"])
def test_it_keeps_the_better_model_of_each_client(engine):
    on = task(Local(), federated=noisy(), recipe=WILD, merge=False)
    history = models_by_round(on)
    wanted = expected(on, history)
    found = predictors(last(Local(), on, engine, ROUNDS, chunk=3)).models[:, 0]
    assert_close(found, wanted)
    stopped = (wanted != history[-1]).any(1)
    assert stopped.any()  # or this would show nothing
    assert not stopped.all()


def test_it_trains_in_every_round_however_few_are_sampled():
    on = task(Local(), merge=False)
    rarely, always = (last(Local(keep="last"), on, participation=p) for p in (0.2, 1.0))
    assert torch.equal(predictors(rarely).models, predictors(always).models)
    matched = last(Local("matched", keep="last"), on, participation=0.2)
    assert not torch.equal(predictors(matched).models, predictors(always).models)


def test_who_has_no_validation_data_of_its_own_keeps_the_last_model():
    whole = noisy()
    lent = replace(whole, val=tuple(torch.zeros(0, dtype=torch.int64) for _ in whole.val))
    for federated, merge in ((lent, False), (whole, True)):
        on = task(Local(), federated=federated, recipe=WILD, merge=merge)
        assert not on.problem.validated.any()
        better, final = (predictors(last(Local(keep=k), on, rounds=ROUNDS)).models for k in KEEPS)
        assert torch.equal(better, final)


def test_a_model_that_diverged_is_not_kept_where_an_earlier_one_is_good():
    on = task(Local(), merge=False)
    client, lost = one_client(on, 0), torch.full_like(on.problem.start, torch.nan)
    assert float(client.error(lost, "val")) == 1.0
    assert float(client.error(on.problem.start, "val")) < 1.0
    state = Own(lost, Early(on.problem.start, torch.tensor(1.0)))
    assert torch.equal(Local().predictor(client, (), state).models[0], on.problem.start)


def test_an_error_is_the_share_of_wrong_answers():
    on = task(Local(), federated=noisy(), recipe=WILD, merge=False)
    for i, client in enumerate(one_client(on, i) for i in range(on.problem.population)):
        share = errors(on, i, on.problem.start) / len(on.federation.val[i])
        assert float(client.error(on.problem.start, "val")) == pytest.approx(share)
