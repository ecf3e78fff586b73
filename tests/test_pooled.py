"""Gradients of convolutions whose results were pooled, without the pool's gradient in between."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from coterie.compiled.kernels import ManyClients, native
from coterie.compiled.trace import Trace, Tracer
from support import assert_close, with_a_compiler

ours = torch.ops.coterie

# channels, filters, image, filter's size, padding, window
LAYERS = {
    "one channel": (1, 3, (8, 8), (5, 5), (2, 2), 2),
    "uneven": (3, 5, (9, 7), (3, 2), (1, 0), 2),
    "windows of nine": (2, 4, (11, 8), (3, 3), (1, 1), 3),
    "all but a pixel is border": (4, 3, (1, 2), (3, 3), (2, 2), 2),
    "a row of registers": (32, 6, (14, 14), (5, 5), (2, 2), 2),
    "more than a row of registers": (70, 3, (6, 6), (3, 7), (0, 3), 2),
    "more than the nearest cache": (64, 2, (20, 20), (3, 3), (1, 1), 2),
}
CLIENTS, IMAGES = 2, 3


def numbers(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def lying(value, last):
    return value.movedim(-3, -1).contiguous().movedim(-1, -3) if last else value.contiguous()


def pooled_layer(name, dtype, positive, rounded=False):
    """What the gradients are made of, and what they are by torch."""
    channels, filters, image, size, padding, window = LAYERS[name]
    x = numbers(CLIENTS, IMAGES, channels, *image).to(dtype).requires_grad_()
    w = numbers(CLIENTS, filters, channels, *size).to(dtype).requires_grad_()
    b = numbers(CLIENTS, filters).to(dtype).requires_grad_()
    y = torch.stack([F.conv2d(*one, 1, padding) for one in zip(x, w, b, strict=True)])
    if rounded:
        y = y + (y.round() - y).detach()
    y = y.relu() if positive else y
    out = F.max_pool2d(y.flatten(0, 1), window).unflatten(0, (CLIENTS, IMAGES))
    g = numbers(*out.shape, seed=1).to(dtype)
    slopes = torch.autograd.grad(out, (x, w, b), g)
    return (g, y.detach(), out.detach()), (x.detach(), w.detach()), slopes


def by_ours(name, entries, inputs, positive):
    _, _, image, size, padding, window = LAYERS[name]
    g, y, out = entries
    x, w = inputs
    spread = g, y, out, window, positive
    how = [1, 1], list(padding)
    to_x = ours.pooled_images_gradient(*spread, w, list(image), *how)
    return to_x, *ours.pooled_filters_gradient(*spread, x, list(size), *how)


@with_a_compiler
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "float"])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_pooled_convolutions_are_torchs(name, dtype, positive):
    entries, inputs, expected = pooled_layer(name, dtype, positive)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for g, y, x in product([False, True], repeat=3):
        lies = [lying(value, last) for value, last in zip(entries, (g, y, y), strict=True)]
        found = by_ours(name, lies, (lying(inputs[0], x), inputs[1]), positive)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b, tolerance)


@with_a_compiler
@pytest.mark.parametrize("last", [False, True])
def test_of_equal_entries_the_first_takes_the_gradient(last):
    entries, inputs, expected = pooled_layer("uneven", torch.float64, True, rounded=True)
    found = by_ours("uneven", [lying(value, last) for value in entries], inputs, True)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


def test_without_a_compiler_the_pools_gradient_is_written_out(monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: None)
    _, _, image, size, padding, window = LAYERS["uneven"]
    (g, y, _), (x, w), expected = pooled_layer("uneven", torch.float64, True)
    spread = g, y, ours.pool(y, window), window, True
    how = [1, 1], list(padding)
    to_x = ours.pooled_images_gradient(*spread, w, list(image), *how)
    found = to_x, *ours.pooled_filters_gradient(*spread, x, list(size), *how)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)


# ---- in a tracer --------------------------------------------------------------------------


def network(w, x, *, bias=True, relu=True, stride=1, see=lambda y: y):
    """Two pooled layers; ``see`` may do something else with what is pooled."""
    first, second, shifts = w.split([54, 72, 7])
    y = F.conv2d(x, first.view(3, 2, 3, 3), shifts[:3] if bias else None, 1, 1)
    y = see(y.relu() if relu else y)
    y = F.max_pool2d(y, 2)
    y = F.conv2d(y, second.view(4, 3, 3, 2), shifts[3:] if bias else None, stride)
    return F.max_pool2d(y.relu() if relu else y, 2)


def slope(w, x, **how):
    return grad(lambda w: network(w, x, **how).square().sum())(w)


def both_slopes(w, x):
    return grad(lambda w, x: network(w, x).square().sum(), (0, 1))(w, x)


def twice(w, x):
    return grad(lambda w: slope(w, x).square().sum())(w)


def seen(w, x, *size):
    """The gradient of what is pooled first, added up where it has one entry for several."""

    def loss(w, more):
        return network(w, x, relu=False, see=lambda y: y + more).square().sum()

    by_w, by_more = grad(loss, (0, 1))(w, torch.zeros(IMAGES, *size).to(w))
    return by_more + by_w.sin().sum()


def of_gradients(w, x):
    """The filters' gradient of a convolution whose images are a pool's gradient."""
    images = grad(lambda x: F.max_pool2d(x, 2).sin().sum())(x)
    return grad(lambda w: F.conv2d(images, w[:54].view(3, 2, 3, 3)).sum())(w)


def glued(parts):
    return torch.cat([part.flatten() for part in parts])


def of_models(of, w, x):
    """Of every sample and model: models are taken within samples, and used by all of them."""
    models = torch.stack([w, 2 * w])
    return vmap(lambda one: vmap(lambda w: of(w, one[None]))(models))(x)


CALLS = {  # what is differentiated; pools' gradients that are written out, and filters' without
    "relu": (slope, 0, 2),
    "no relu": (lambda w, x: slope(w, x, relu=False), 0, 2),
    "no bias": (lambda w, x: slope(w, x, bias=False), 0, 2),
    "every sample": (lambda w, x: vmap(lambda one: slope(w, one[None]))(x), 0, 2),
    "two models of every sample": (lambda w, x: of_models(slope, w, x), 2, 0),
    "images of two models": (lambda w, x: of_models(lambda *a: both_slopes(*a)[1], w, x), 2, 0),
    "images too": (lambda w, x: glued(both_slopes(w, x)), 0, 2),
    "images only": (lambda w, x: both_slopes(w, x)[1], 0, 0),
    "a stride": (lambda w, x: slope(w, x, stride=2), 1, 1),
    "what was pooled is read, too": (lambda w, x: slope(w, x, see=lambda y: y + y.sin()), 1, 1),
    "the pool's gradient is read, too": (lambda w, x: seen(w, x, 3, 12, 13), 1, 1),
    "a bias for each image, too": (lambda w, x: seen(w, x, 3, 1, 1), 1, 1),
    "images that are a pool's gradient": (of_gradients, 1, 0),
    "second derivatives": (twice, None, None),
}


@with_a_compiler
@pytest.mark.parametrize("name", CALLS)
def test_a_recording_has_both_gradients_put_together(name):
    one, written_out, without = CALLS[name]

    def call(w, x):
        with ManyClients():
            return vmap(one)(w, x)

    def drawn(seed):
        return numbers(CLIENTS, 133, seed=seed), numbers(CLIENTS, IMAGES, 2, 12, 13, seed=seed)

    inputs = drawn(0)
    with Tracer(inputs) as tracer:
        result = call(*inputs)
    trace = Trace(tracer, [result])
    assert_close(trace(drawn(1))[0], vmap(one)(*drawn(1)))
    targets = [node.target for part in trace.segments for node in part.module.graph.nodes]
    if written_out is not None:
        assert targets.count(ours.pool_gradient.default) == written_out
        assert targets.count(ours.pooled_filters_gradient.default) == without
