"""What ``[train]`` asks of a client's batches: clipping, augmentation, class weights, dropout."""

from dataclasses import replace

import pytest
import torch
from sklearn.utils.class_weight import compute_sample_weight
from torch import nn

from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local import Local
from coterie.core.batches import PADDING, crop_flip
from coterie.core.optim import Recipe, shortened
from coterie.core.shards import Scaling
from coterie.errors import ConfigError
from support import RECIPE, assert_close, cnn, last, mlp, one_client, predictors, task

LOCAL = Local()


def dropped() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(36, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
    )


FIELDS = {
    "clip": (mlp, {"clip": 0.05}),
    "augment": (cnn, {"augment": "crop_flip"}),
    "class_weights": (mlp, {"class_weights": "balanced"}),
    "dropout": (dropped, {}),
}


def models_of(name, engine="vmap", seed=0, method=LOCAL, **options):
    network, fields = FIELDS[name]
    on = task(method, network, recipe=replace(RECIPE, **fields), seed=seed)
    return predictors(last(method, on, engine, **options)).models


@pytest.mark.parametrize("method", [LOCAL, FedAvg()])
@pytest.mark.parametrize("name", FIELDS)
def test_engines_agree(name, method):
    reference = models_of(name, "loop", method=method)
    for engine, chunk in (("vmap", 2), ("vmap", 5), ("wire", None)):
        assert_close(models_of(name, engine, method=method, chunk=chunk), reference)


@pytest.mark.parametrize("name", FIELDS)
def test_same_seed_same_bits_and_torchs_generator_is_no_part_of_it(name):
    torch.manual_seed(1)
    first = models_of(name)
    torch.manual_seed(2)
    assert torch.equal(models_of(name), first)


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_shows(name):
    network, _ = FIELDS[name]
    off = {"dropout": 0.0} if name == "dropout" else {}
    plain = predictors(last(LOCAL, task(LOCAL, network, recipe=replace(RECIPE, **off)))).models
    assert (models_of(name) - plain).abs().max() > 1e-4


@pytest.mark.parametrize("name", FIELDS)
def test_evaluation_sees_samples_as_they_are(name):
    network, fields = FIELDS[name]
    changed = task(LOCAL, network, recipe=replace(RECIPE, **fields))
    plain = task(LOCAL, network, recipe=replace(RECIPE, dropout=0.0 if name == "dropout" else None))
    for split in ("train", "val"):
        found, usual = (one_client(on, 0).loss(on.problem.start, split) for on in (changed, plain))
        assert torch.equal(found, usual)


# ---- clip --------------------------------------------------------------------------------------


def test_a_gradient_is_shortened_as_torch_does_it():
    g = torch.randn(7, dtype=torch.float64)
    parameter = nn.Parameter(torch.zeros(7, dtype=torch.float64))
    parameter.grad = g.clone()
    nn.utils.clip_grad_norm_([parameter], 0.3)
    assert_close(shortened(g, 0.3), parameter.grad, 1e-5)
    assert torch.equal(shortened(g, 100.0), g)
    assert torch.equal(shortened(g, 0.0), g)
    assert torch.equal(shortened(torch.zeros(3), 0.3), torch.zeros(3))


def test_no_step_is_longer_than_the_rate_times_the_limit():
    on = task(LOCAL, recipe=Recipe(lr=0.1, batch=10, clip=0.05))
    client = one_client(on, 0)
    batch = client.batch(0)
    w, _ = client.step(
        on.problem.start,
        client.gradient(on.problem.start, batch),
        client.begin(on.problem.start),
        batch,
    )
    assert_close((w - on.problem.start).norm(), torch.tensor(0.005).double())


# ---- crop and flip -----------------------------------------------------------------------------


def luck(down: int, right: int, mirror: bool) -> torch.Tensor:
    """The draw that moves the window so far."""
    span = 2 * PADDING + 1
    return torch.tensor([[(down + 4.5) / span, (right + 4.5) / span, 0.1 if mirror else 0.9]])


def test_a_crop_is_a_window_of_the_framed_image():
    x = torch.arange(1.0, 37.0).view(1, 1, 6, 6)
    framed = nn.functional.pad(x, (4, 4, 4, 4))
    for down, right in ((-4, -4), (4, 4), (0, 0), (2, -3)):
        window = framed[..., 4 + down : 10 + down, 4 + right : 10 + right]
        assert torch.equal(crop_flip(x, luck(down, right, False)), window)
    assert torch.equal(crop_flip(x, luck(0, 0, True)), x.flip(-1))


def test_every_image_moves_by_itself_and_anew_in_every_step():
    on = task(LOCAL, cnn, recipe=replace(RECIPE, augment="crop_flip"))
    plain = task(LOCAL, cnn)
    first, second = (one_client(on, 0).batch(i).x for i in (0, 4))
    x = one_client(plain, 0).batch(0).x
    assert (first != x).flatten(1).any(1).sum() >= len(x) - 1
    assert len({tuple(image.ne(0).flatten().tolist()) for image in first}) > 3
    draws = [one_client(on, 0).draw("augment", (10, 3), at=i) for i in (0, 4)]
    assert not torch.equal(*draws)
    assert first.shape == second.shape == x.shape


def test_the_frame_is_black_before_scaling():
    on = task(LOCAL, cnn, recipe=replace(RECIPE, augment="crop_flip"))
    two, three = torch.tensor(2.0).double(), torch.tensor(3.0).double()
    shards = replace(on.shards, scaling=Scaling(two, three))
    x = one_client(on._replace(shards=shards), 0).batch(0).x
    assert (x == 3.0).any()
    assert not (x == 0.0).any()


def test_what_is_no_image_is_not_cropped():
    on = task(LOCAL)
    with pytest.raises(ConfigError, match=r"train\.augment.*shape \[36\]; use 'none'"):
        replace(on.problem, shape=torch.Size([36]), recipe=replace(RECIPE, augment="crop_flip"))


# ---- class weights -----------------------------------------------------------------------------


def test_balanced_weights_are_those_of_scikit_learn_and_of_the_clients_own_labels():
    on = task(LOCAL, recipe=replace(RECIPE, class_weights="balanced"), merge=False)
    plain = task(LOCAL, merge=False)
    for i in range(5):
        (block,) = one_client(on, i).blocks("train")
        by_place = torch.from_numpy(compute_sample_weight("balanced", block.y.numpy()))
        batch = one_client(on, i).batch(1 if i != 3 else 0)
        found = one_client(on, i).losses(on.problem.start, batch)
        usual = one_client(plain, i).losses(on.problem.start, batch)
        assert_close(found, usual * by_place[batch.position])
        assert_close(by_place.mean(), torch.tensor(1.0).double())


def test_numbers_have_no_class_weights():
    on = task(LOCAL)
    with pytest.raises(ConfigError, match=r"train\.class_weights.*use 'none'"):
        replace(on.problem, classes=0, recipe=replace(RECIPE, class_weights="balanced"))


# ---- dropout -----------------------------------------------------------------------------------


def test_masks_have_their_rate_and_keep_the_mean():
    on = task(LOCAL, dropped, recipe=replace(RECIPE, dropout=0.3))
    mask = on.problem.model._training[2]
    mask.begin(torch.tensor(5))
    x = torch.ones(200, 50)
    first, again = mask(x), mask(x)
    assert abs((first == 0).double().mean() - 0.3) < 0.02
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.7])
    assert not torch.equal(first, again)  # used twice in a pass, it draws twice


def test_masks_differ_between_steps_clients_and_rounds():
    on = task(LOCAL, dropped)
    client = one_client(on, 0)
    batch = client.batch(0)
    seen = [
        client.outputs(on.problem.start, batch, training=True),
        client.outputs(on.problem.start, batch._replace(step=1), training=True),
        one_client(on, 1).outputs(on.problem.start, batch, training=True),
        one_client(on, 0, 1).outputs(on.problem.start, batch, training=True),
    ]
    assert all(not torch.equal(seen[0], other) for other in seen[1:])
    assert torch.equal(seen[0], client.outputs(on.problem.start, batch, training=True))


def test_dropout_for_a_network_that_has_none_is_refused():
    with pytest.raises(ConfigError, match=r"train\.dropout: found 0.5.*no nn.Dropout"):
        task(LOCAL, recipe=replace(RECIPE, dropout=0.5))


def test_a_network_that_draws_from_torch_is_refused():
    def noisy() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.AlphaDropout(0.2), nn.Linear(36, 3))

    with pytest.raises(ConfigError, match=r"torch's generator.*expected nn\.Dropout"):
        task(LOCAL, noisy)
