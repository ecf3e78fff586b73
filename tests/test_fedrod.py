"""FedRoD's balanced softmax and its two heads."""

import math

import pytest
import torch
from torch import nn

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedrod import ABSENT, FedRoD, Own, balanced
from coterie.core.optim import Recipe
from coterie.errors import ConfigError
from coterie.training.rounds import train
from support import assert_close, engine_of, last, mlp, one_client, predictors, task

HEAD = 8 * 3 + 3  # the last layer of support.mlp


class BalancedFedAvg(FedAvg):
    """FedAvg whose clients train with the balanced softmax, written without FedRoD's code."""

    def local(self, client, received, state):
        counts = torch.zeros(3).double()
        for block in client.blocks("train"):
            for y in block.y.tolist():
                counts[y] += 1

        def loss(w, batch):
            logits = client.outputs(w, batch, training=True) + counts.clamp(min=1e-8).log()
            return nn.functional.cross_entropy(logits, batch.y)

        upload, state = super().local(client, received, state)
        return upload._replace(w=client.train(received, loss=loss)), state


def test_the_balanced_softmax_equals_a_slow_double_loop():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 4, generator=generator).double()
    counts = torch.tensor([3.0, 0.0, 10.0, 1.0]).double()
    found = balanced(logits, counts).softmax(-1)
    for s in range(5):
        each = [max(float(counts[c]), ABSENT) * math.exp(logits[s, c]) for c in range(4)]
        for c in range(4):
            assert float(found[s, c]) == pytest.approx(each[c] / sum(each))


def test_without_its_personal_head_it_is_fedavg_with_the_balanced_softmax():
    method, other = FedRoD(predict_with="generic"), BalancedFedAvg()
    found = predictors(last(method, task(method), "loop", rounds=4))
    expected = predictors(last(other, task(other), "loop", rounds=4))
    assert_close(found.models, expected.models, 1e-9)


def test_a_round_equals_two_torch_optimisers():
    """The personal head learns on the features and logits of the model before the step."""
    method, recipe = FedRoD(), Recipe(lr=0.1, epochs=2, batch=10, momentum=0.5, weight_decay=1e-3)
    on = task(method, recipe=recipe)
    client, generator = one_client(on, 0), torch.Generator().manual_seed(1)
    begin = torch.randn(HEAD, generator=generator).double()
    update, own = method.local(client, on.problem.start, Own(begin))
    module, vector = mlp().double(), on.problem.start.clone()
    for p in module.parameters():
        p.data, vector = vector[: p.numel()].view(p.shape).clone(), vector[p.numel() :]
    personal = nn.Linear(8, 3).double()
    personal.weight.data, personal.bias.data = begin[:24].view(3, 8).clone(), begin[24:].clone()
    options = {"lr": 0.1, "momentum": 0.5, "weight_decay": 1e-3}
    rules = [torch.optim.SGD(m.parameters(), **options) for m in (module, personal)]
    for number in range(int(client.steps)):
        batch = client.batch(number)
        features = module[:3](batch.x)
        generic = module[3](features)
        of_personal = generic.detach() + personal(features.detach())
        shifted = generic + client.class_counts.log()
        for rule in rules:
            rule.zero_grad()
        for logits in (shifted, of_personal):
            nn.functional.cross_entropy(logits, batch.y).backward()
        for rule in rules:
            rule.step()
    for found, expected in ((update.w, module), (own.head, personal)):
        flat = torch.cat([p.detach().reshape(-1) for p in expected.parameters()])
        assert_close(found, flat, 1e-9)


def test_a_client_predicts_with_the_sum_of_both_heads():
    method = FedRoD()
    on = task(method)
    *_, record = train(method, on.problem, engine_of("loop", on), 2, participation=1.0)
    models = predictors(record).models[:, 0]
    assert_close(models[:, :-HEAD], record.server[:-HEAD].expand(5, -1), 0)
    assert (models[0, -HEAD:] - models[1, -HEAD:]).abs().max() > 1e-3


def test_a_network_without_a_linear_last_layer_is_refused():
    on = task(FedRoD(), lambda: nn.Sequential(nn.Conv2d(1, 3, 6), nn.Flatten()))
    with pytest.raises(ConfigError, match="a Conv2d, as the network's last layer"):
        FedRoD().check(on.problem, 3)
