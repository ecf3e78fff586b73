"""Our convolutions, pools and norms against torch's, with their derivatives and under vmap."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck
from torch.func import grad, vmap

from coterie.compiled import kernels
from coterie.compiled.kernels import ManyClients, convolve, max_pool, native
from support import assert_close, with_a_compiler

# channels, filters, image, filter's size, stride, padding
SHAPES = {
    "plain": (1, 2, (5, 5), (3, 3), 1, 0),
    "channels": (3, 2, (5, 6), (3, 3), 1, 1),
    "wide": (2, 3, (4, 7), (3, 2), 1, 2),
    "strided": (2, 2, (7, 6), (3, 3), 2, 1),
    "left over": (1, 2, (6, 6), (3, 3), 2, 0),  # the last row and column are not seen
    "uneven": (2, 1, (7, 5), (2, 3), (2, 1), (0, 2)),
    "a pixel": (3, 4, (3, 3), (1, 1), 1, 0),
    "more filters than images": (260, 220, (2, 3), (3, 3), 1, 1),  # laid out otherwise on a CPU
}


def numbers(*shape, seed=0, **options):
    options = {"dtype": torch.float64} | options
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(**options)


def pair(value):
    return value if isinstance(value, tuple) else (value, value)


def ours(x, w, stride, padding):
    return convolve(x, w, pair(stride), pair(padding))


def slopes(f):
    """The gradients of a function of images and filters, of a loss that weighs every entry."""

    def loss(x, w):
        out = f(x, w)
        return (out * torch.arange(1.0, out.numel() + 1).to(out).view_as(out).sin()).sum()

    return grad(loss, (0, 1))


def assert_same(call, reference, *inputs, tolerance=1e-9):
    for a, b in zip(call(*inputs), reference(*inputs), strict=True):
        assert_close(a, b, tolerance)


# ---- convolution -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_convolutions_and_their_derivatives_are_torchs(name):
    channels, filters, image, size, *how = SHAPES[name]
    x, w = numbers(2, channels, *image), numbers(filters, channels, *size)
    assert_close(ours(x, w, *how), F.conv2d(x, w, None, *how))
    assert_same(
        slopes(lambda x, w: ours(x, w, *how)), slopes(lambda x, w: F.conv2d(x, w, None, *how)), x, w
    )


@pytest.mark.parametrize("name", ["channels", "strided", "uneven"])
def test_convolutions_have_second_derivatives(name):
    channels, filters, image, size, *how = SHAPES[name]
    x = numbers(1, channels, *image).requires_grad_()
    w = numbers(filters, channels, *size).requires_grad_()
    assert gradcheck(lambda x, w: ours(x, w, *how), (x, w))
    assert gradgradcheck(lambda x, w: ours(x, w, *how), (x, w))


CLIENTS = {  # in_dims: everybody's own, one image for all, one filter for all
    "own": ((0, 0), lambda x, w: (x, w)),
    "shared images": ((None, 0), lambda x, w: (x[0], w)),
    "shared filters": ((0, None), lambda x, w: (x, w[0])),
    "turned": ((2, 3), lambda x, w: (x.movedim(0, 2), w.movedim(0, 3))),
}


@pytest.mark.parametrize("how", CLIENTS)
@pytest.mark.parametrize("name", ["channels", "strided", "more filters than images"])
def test_convolutions_of_many_clients(name, how):
    channels, filters, image, size, *rest = SHAPES[name]
    x, w = numbers(3, 2, channels, *image), numbers(3, filters, channels, *size)
    dims, given = CLIENTS[how]
    call, reference = (
        vmap(slopes(lambda x, w, f=f: f(x, w, *rest)), dims)
        for f in (ours, lambda x, w, *rest: F.conv2d(x, w, None, *rest))
    )
    assert_same(call, reference, *given(x, w))


def test_gradients_of_every_sample_of_every_client():
    """Inner vmap over samples, filters shared among them and own for each client."""
    x, w = numbers(3, 4, 2, 5, 5), numbers(3, 2, 2, 3, 3)

    def each(f):
        def of_one(w, x):
            return slopes(lambda x, w: f(x, w, 1, 1))(x.unsqueeze(0), w)

        return vmap(vmap(of_one, (None, 0)), (0, 0))

    assert_same(each(ours), each(lambda x, w, *how: F.conv2d(x, w, None, *how)), w, x)


def test_models_of_every_client():
    """Inner vmap over filters, images shared among them: a client that judges others' models."""
    x, w = numbers(3, 4, 2, 5, 5), numbers(3, 5, 2, 2, 3, 3)

    def each(f):
        return vmap(vmap(lambda x, w: (f(x, w, 1, 1),), (None, 0)), (0, 0))

    assert_same(each(ours), each(lambda x, w, *how: F.conv2d(x, w, None, *how)), x, w)


# ---- pooling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("image", [(6, 6), (7, 5), (4, 9)])
def test_pools_and_their_derivatives_are_torchs(image, size):
    x, weigh = numbers(2, 3, *image), numbers(2, 3, *(side // size for side in image))
    assert_close(max_pool(x, size), F.max_pool2d(x, size))
    assert_same(
        lambda x: (grad(lambda x: (max_pool(x, size) * weigh).sum())(x),),
        lambda x: (grad(lambda x: (F.max_pool2d(x, size) * weigh).sum())(x),),
        x,
    )


def test_of_equal_entries_the_first_takes_the_gradient():
    x = torch.tensor([[1.0, 3.0, 0.0, 0.0], [3.0, 3.0, 0.0, 0.0]]).double().view(1, 1, 2, 4)
    g = grad(lambda x: max_pool(x, 2).sum())(x)
    assert g.flatten().tolist() == [0, 1, 1, 0, 0, 0, 0, 0]
    x = numbers(2, 3, 9, 6).round()  # many ties
    g = grad(lambda x: max_pool(x, 3).sum())(x)
    assert torch.equal(g, grad(lambda x: F.max_pool2d(x, 3).sum())(x))


def test_pools_have_second_derivatives():
    x = numbers(1, 2, 5, 4).requires_grad_()
    assert gradcheck(lambda x: max_pool(x, 2), (x,))
    assert gradgradcheck(lambda x: max_pool(x, 2) ** 2, (x,))


def test_pools_of_many_clients_and_of_every_sample():
    x = numbers(3, 4, 2, 5, 5)

    def each(f):
        def of_one(x):
            return grad(lambda x: (f(x, 2) ** 2).sum())(x)

        return lambda x: (vmap(of_one)(x), vmap(vmap(of_one))(x), vmap(of_one, 2)(x))

    assert_same(each(max_pool), each(F.max_pool2d), x)


# ---- other processors ------------------------------------------------------------------------

PROCESSORS = {"x86-64": (), "haswell": ("avx2", "fma"), "skylake-avx512": ("avx512f", "avx512vl")}


@with_a_compiler
@pytest.mark.parametrize("processor", PROCESSORS)
def test_layers_are_right_on_other_processors(processor, monkeypatch):
    """A compiler has dropped entries for one of them and not for the others."""
    here = native.machine(native.compiler()).split()
    if here[0] != "x86_64" or not set(PROCESSORS[processor]) <= set(here):
        pytest.skip(f"this machine is no {processor}")
    options = tuple(option.replace("native", processor) for option in native._OPTIONS)
    monkeypatch.setattr(native, "_OPTIONS", options)
    native._compiled.cache_clear()
    try:
        for name in ("plain", "channels", "wide"):
            test_convolutions_and_their_derivatives_are_torchs(name)
        test_pools_and_their_derivatives_are_torchs((7, 5), 2)
    finally:
        native._compiled.cache_clear()


# ---- what is put in torch's place ------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """Which of ours were called."""
    calls = []
    for name in ("convolve", "max_pool"):
        real = getattr(kernels, name)
        monkeypatch.setattr(
            kernels, name, lambda *a, name=name, real=real: calls.append(name) or real(*a)
        )
    return calls


PLAIN = {
    "function": lambda x, w: F.conv2d(x, w, padding=1),
    "bias": lambda x, w: F.conv2d(x, w, w[:, 0, 0, 0], (2, 2), [1, 0]),
    "pool": lambda x, w: F.max_pool2d(x, 2),
    "pool of a pair": lambda x, w: F.max_pool2d(x, (2, 2), stride=[2, 2]),
    "module": lambda x, w: torch.nn.MaxPool2d(2, 2)(x),
}
OTHERS = {
    "groups": lambda x, w: F.conv2d(x, w[:, :1], groups=2),
    "dilation": lambda x, w: F.conv2d(x, w, dilation=2),
    "padding by name": lambda x, w: F.conv2d(x, w, padding="same"),
    "one image": lambda x, w: F.conv2d(x[0], w),
    "overlapping": lambda x, w: F.max_pool2d(x, 3, stride=2),
    "padded pool": lambda x, w: F.max_pool2d(x, 2, padding=1),
    "window not square": lambda x, w: F.max_pool2d(x, (2, 3)),
    "window of one": lambda x, w: F.max_pool2d(x, 1),
    "ceil": lambda x, w: F.max_pool2d(x, 2, ceil_mode=True),
    "indices": lambda x, w: F.max_pool2d(x, 2, return_indices=True)[1],
    "spread pool": lambda x, w: F.max_pool2d(x, 2, dilation=2),
}


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_ours_take_the_place_of_what_is_plain_only(name, seen):
    call, (x, w) = (PLAIN | OTHERS)[name], (numbers(2, 2, 7, 7), numbers(4, 2, 3, 3))
    with ManyClients():
        found = call(x, w)
    assert_close(found, call(x, w))
    assert bool(seen) == (name in PLAIN)


# ---- on a GPU --------------------------------------------------------------------------------


def gpu(test):
    absent = not torch.cuda.is_available()
    return pytest.mark.gpu(
        pytest.mark.skipif(absent, reason="torch sees no CUDA device here")(test)
    )


@pytest.fixture
def exact():
    """Products in float32 as they are, not in tf32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def on_gpu(*shape):
    return numbers(*shape, dtype=torch.float32, device="cuda")


@gpu
@pytest.mark.parametrize("image", [(7, 9), (28, 28)])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("filters", [6, 16, 32, 64, 65])
@pytest.mark.parametrize("channels", [1, 3, 6, 32])
def test_triton_convolves_as_torch_does(channels, filters, size, padding, image, exact):
    x, w = on_gpu(3, 4, channels, *image), on_gpu(3, filters, channels, size, size)

    def reference(x, w):
        return F.conv2d(x, w, None, 1, padding)

    def call(x, w):
        return ours(x, w, 1, padding)

    for a, b in ((vmap(call), vmap(reference)), (vmap(slopes(call)), vmap(slopes(reference)))):
        for found, expected in zip(a(x, w), b(x.double(), w.double()), strict=True):
            error = (found - expected).norm() / expected.norm()
            assert error < 1e-4


@gpu
@pytest.mark.parametrize("image", [(7, 9), (28, 28)])
def test_triton_pools_as_torch_does(image, exact):
    x = on_gpu(3, 4, 6, *image)
    x[0] = x[0].round()  # with ties

    def each(f):
        return lambda x: (vmap(f)(x), vmap(grad(lambda x: (f(x) ** 2).sum()))(x))

    assert_same(each(lambda x: max_pool(x, 2)), each(lambda x: F.max_pool2d(x, 2)), x)


@gpu
def test_triton_reads_a_bias_that_is_part_of_a_longer_vector(exact):
    x, w, vector = on_gpu(3, 4, 2, 8, 8), on_gpu(3, 6, 2, 3, 3), on_gpu(3, 50)
    bias = vector[:, 10:16]
    found = torch.ops.coterie.convolve(x, w, bias, [1, 1], [0, 0], False)
    assert_close(found, vmap(F.conv2d)(x, w) + bias[:, None, :, None, None])
