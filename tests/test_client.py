"""One client's data: batches, losses, training, randomness."""

import torch

from coterie.algorithms.local import Local
from coterie.core.batches import shape_of
from coterie.core.optim import Recipe
from support import RAGGED, RECIPE, assert_close, federation, mlp, one_client, task

LOCAL = Local()


def seen(client):
    """The places of the client's samples in the order in which training meets them."""
    return client.scan(lambda places, batch: [*places, batch.position.tolist()], [])


def test_an_epoch_meets_every_sample_once_and_keeps_the_short_batch():
    on = task(LOCAL, merge=False)
    for i, size in enumerate(RAGGED):
        batches = seen(one_client(on, i))
        per = -(-size // 10)
        assert len(batches) == 2 * per == int(one_client(on, i).steps)
        for epoch in (batches[:per], batches[per:]):
            places = [p for batch in epoch for p in batch]
            assert sorted(places) == list(range(size))
            assert len(epoch[-1]) == (size - 1) % 10 + 1
        if size > 10:
            assert batches[:per] != batches[per:]


def test_batches_differ_between_rounds_and_clients_with_equal_sizes():
    on = task(LOCAL, federated=federation(sizes=(20, 20)), merge=False)
    assert seen(one_client(on, 0)) != seen(one_client(on, 1))
    assert seen(one_client(on, 0, 0)) != seen(one_client(on, 0, 1))


def test_a_fixed_number_of_steps_goes_on_into_further_epochs():
    on = task(LOCAL, merge=False, recipe=Recipe(steps=7, batch=10))
    batches = seen(one_client(on, 1))  # 17 samples: two batches an epoch
    assert len(batches) == 7
    assert sorted(p for b in batches[2:4] for p in b) == list(range(17))


def test_validation_is_merged_only_where_asked():
    apart, merged = task(LOCAL, merge=False), task(LOCAL, merge=True)
    assert apart.problem.sizes.tolist() == list(RAGGED)
    assert merged.problem.sizes.tolist() == [size + 6 for size in RAGGED]


def test_a_split_loss_is_the_mean_over_samples_not_over_blocks(monkeypatch):
    on = task(LOCAL, merge=False)
    client = one_client(on, 0)
    whole = client.loss(on.problem.start, "train")
    monkeypatch.setattr("coterie.core.client.EVALUATION_BLOCK", 7)
    assert_close(client.loss(on.problem.start, "train"), whole, 1e-12)


def test_training_is_what_torch_does():
    on = task(LOCAL, merge=False)
    client = one_client(on, 2)
    module = mlp().double()
    vector = on.problem.start.clone()
    for slot, parameter in zip(on.problem.model.slots, module.parameters(), strict=True):
        parameter.data = vector[slot.start : slot.stop].view(slot.shape).clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5, weight_decay=1e-3)

    def step(carry, batch):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(batch.x), batch.y).backward()
        optimizer.step()
        return carry

    client.scan(step, ())
    assert_close(client.train(on.problem.start), on.problem.model.flatten(module), 1e-12)


def test_labels_are_read_as_the_client_reads_them():
    on = task(LOCAL, merge=False)
    (block,) = one_client(on, 1).blocks("train")
    raw = on.shards.y[on.federation.train[1]]
    assert torch.equal(block.y, (raw - 1) % 3)  # relabel is arange(3).roll(1): class c reads c − 1


def test_draws_belong_to_purpose_round_client_and_place():
    on = task(LOCAL)
    base = one_client(on, 0).draw("noise", (3,))
    assert torch.equal(base, one_client(on, 0).draw("noise", (3,)))
    others = [
        one_client(on, 1).draw("noise", (3,)),
        one_client(on, 0, 1).draw("noise", (3,)),
        one_client(on, 0).draw("dropout", (3,)),
        one_client(on, 0).draw("noise", (3,), at=1),
    ]
    assert all(not torch.equal(base, other) for other in others)


def test_tuned_changes_epochs_and_rate_and_nothing_else():
    on = task(LOCAL, merge=False)
    client = one_client(on, 0)
    assert len(seen(client.tuned(epochs=1))) * 2 == len(seen(client))
    assert client.tuned(lr=0.5).lr == 0.5
    assert client.recipe == RECIPE
    assert_close(
        client.tuned(epochs=2, lr=0.1).train(on.problem.start), client.train(on.problem.start)
    )


def test_a_client_without_validation_borrows_its_training_data():
    bare = federation()
    empty = (torch.arange(0), *bare.val[1:])
    on = task(LOCAL, federated=type(bare)(**{**vars(bare), "val": empty}), merge=False)
    client = one_client(on, 0)
    assert_close(
        client.loss(on.problem.start, "val"), client.loss(on.problem.start, "train"), 1e-12
    )
    assert not on.problem.counts.validated[0]
    assert on.problem.counts.val[0] == on.problem.counts.train[0]


def test_the_rate_decays_to_its_floor():
    recipe = Recipe(lr=1.0, decay=0.5, floor=0.2)
    assert [recipe.rate(t) for t in range(4)] == [1.0, 0.5, 0.25, 0.2]


def test_clients_of_one_size_need_no_padding():
    on = task(LOCAL, federated=federation(sizes=(20, 20, 9)), merge=False)
    assert shape_of(on.shards, [0, 1], batched=True).even["train"]
    assert not shape_of(on.shards, [0, 2], batched=True).even["train"]
