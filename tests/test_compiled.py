"""Steps in C++ do what torch does, operation by operation; what they cannot, torch does."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from coterie.algorithms.fedavg import FedAvg
from coterie.compiled.executor import Allocator, Executor
from coterie.compiled.kernels import convolve, max_pool
from coterie.core.calls import COMPILED, REPLAYED, scan
from coterie.core.policies import governed
from coterie.core.privacy import Privacy
from support import assert_close, backend_of, cnn, task, whole_round, with_a_compiler

CLIENTS, STEPS = 3, 3


def numbers(seed, *shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def squeezed(w):
    """So that no number grows from step to step."""
    return w / (1 + w.abs().sum())


def small(w):
    return (w * 1000).to(torch.int64)


# what a step makes of w [24], its number, and x [4, 6], which is the same in every step
OPERATIONS = {
    "sums": lambda w, n, x: w + 2 * w - w / 3 - (0.5 - w),
    "by a number": lambda w, n, x: w * (n + 1) + n,
    "products of entries": lambda w, n, x: torch.addcmul(w, w, x.flatten(), value=-0.1),
    "quotients": lambda w, n, x: torch.addcdiv(w, w, 1 + x.flatten() ** 2, value=0.2),
    "powers": lambda w, n, x: (w**2 + 1).sqrt() + 0.9 ** (n + 1.0) + (w**2 + 1).rsqrt(),
    "functions": lambda w, n, x: w.tanh() + w.exp() + w.abs() + (1 + w.abs()).log(),
    "sigmoid": lambda w, n, x: w.sigmoid() + w.reciprocal().clamp(-1, 1),
    "bounds": lambda w, n, x: w.clamp(min=-0.5) + w.clamp(max=0.5) + w.clamp(-0.1, 0.1),
    "the larger": lambda w, n, x: torch.maximum(w, x.flatten()) - torch.minimum(w, -w),
    "choices": lambda w, n, x: torch.where((w < 0) & (x.flatten() >= w), w, 2 * w),
    "comparisons": lambda w, n, x: (
        w + (w > 0).double() + (w <= x.flatten()).double() + (small(w) == 3).double()
    ),
    "whole numbers": lambda w, n, x: (
        w
        + (
            small(w) % 7 + small(w) // 5 + (small(w) >> 2) + (small(w) ^ 12) + (small(w) & 6)
        ).double()
    ),
    "views": lambda w, n, x: w.view(4, 6).t().reshape(3, 8).t().reshape(24),
    "parts": lambda w, n, x: torch.cat([w[12:], w[:12].view(3, 4).t().flatten()]),
    "a part of a gradient": lambda w, n, x: grad(lambda w: (w[3:9] ** 2).sum() + w[1] ** 3)(w),
    "sums of rows": lambda w, n, x: w + w.view(4, 6).sum(1).repeat_interleave(6),
    "sums of columns": lambda w, n, x: w + w.view(4, 6).sum(0).expand(4, 6).flatten(),
    "sums of some": lambda w, n, x: (
        w + w.view(2, 3, 4).mean((0, 2))[None, :, None].expand(2, 3, 4).flatten()
    ),
    "sums of all": lambda w, n, x: w + w.sum() + w.mean(),
    "norms": lambda w, n, x: w / w.norm() + w.view(4, 6).norm(dim=1).sum(),
    "log softmax": lambda w, n, x: w.view(4, 6).log_softmax(1).flatten(),
    "log softmax down": lambda w, n, x: w.view(4, 6).log_softmax(0).flatten(),
    "its gradient": lambda w, n, x: grad(
        lambda w: -w.view(4, 6).log_softmax(1).gather(1, torch.tensor([[1], [5], [0], [1]])).mean()
    )(w),
    "rows by place": lambda w, n, x: w.view(4, 6)[torch.tensor([3, 0, -1, 1])].flatten(),
    "places that change": lambda w, n, x: w + x[(torch.arange(4) + n) % 4].flatten(),
    "gathered": lambda w, n, x: w.view(4, 6).gather(1, torch.tensor([[0, 3]] * 4)).sum() + w,
    "fills": lambda w, n, x: torch.zeros_like(w) + torch.full_like(w, 0.25) + w.new_ones(24),
    "x W'": lambda w, n, x: w + (x @ w.view(4, 6).t()).sum(),
    "x W": lambda w, n, x: (x @ w.view(6, 4) @ x).flatten(),
    "x' W": lambda w, n, x: (x.t() @ w.view(4, 6)).sum(0).repeat(4),
    "neither in rows": lambda w, n, x: (x.t() @ w.view(6, 4).t()).flatten()[:24],
    "a product onto": lambda w, n, x: w - 0.1 * (x.t()[:4, :] @ x).flatten(),
    "long products": lambda w, n, x: w + (w.repeat(3)[None] @ w.repeat(3)[:, None]).sum(),
    "products longer than a stack": lambda w, n, x: (
        w + (w.repeat(9999)[None] @ w.repeat(9999)[:, None]).sum() / 9999
    ),
    "wide products": lambda w, n, x: w + (w[:, None] @ w.repeat(2)[None]).sum(1),
}


@with_a_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["double", "float"])
def test_operations_are_torchs(dtype):
    def one(ws, x):
        def step(number, kind, ws):
            made = (of(w, number, x) for of, w in zip(OPERATIONS.values(), ws, strict=True))
            return tuple(squeezed(w.to(dtype)) for w in made)

        return scan(step, [0] * STEPS, ws.unbind())

    ws = numbers(0, CLIENTS, len(OPERATIONS), 24, dtype=dtype)
    assert_compiled(one, OPERATIONS, ws, numbers(1, CLIENTS, 4, 6, dtype=dtype))


def assert_compiled(one, names, *inputs):
    """Compiled, it gives what it gives as it is written, for numbers that it was not tried with."""
    executor, call = Executor(compiled=True), vmap(one)
    tolerance = 1e-9 if inputs[0].dtype == torch.float64 else 1e-5
    for factor in (1.0, 0.3):
        given = tuple(leaf * factor for leaf in inputs)
        parts = zip(names, executor("some", call, given), call(*given), strict=True)
        wrong = [name for name, a, b in parts if not torch.allclose(a, b, tolerance, tolerance)]
        assert not wrong
    assert {form.way for form in executor.forms} == {COMPILED}


# channels, filters, image, filter's size, padding
LAYERS = {
    "one": (1, 6, (9, 9), (5, 5), 2),
    "some": (3, 8, (7, 6), (3, 2), 1),
    "unpadded": (6, 5, (8, 12), (3, 3), 0),
    "a pixel": (2, 3, (5, 5), (1, 1), 0),
    "sixteen": (8, 16, (20, 20), (5, 5), 0),
}


ENDS = {  # what becomes of a convolution's result, given biases
    "pooled": lambda y, b: max_pool((y + b).relu(), 2).square().mean(),
    "pooled as it is": lambda y, b: max_pool(y + b, 2).square().mean(),
    "read twice": lambda y, b: max_pool(y.relu() + b, 2).square().mean() + y.relu().sum() / 50,
}


@with_a_compiler
@pytest.mark.parametrize(
    ("end", "dtype"), [*((end, torch.float64) for end in ENDS), ("pooled", torch.float32)]
)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_their_gradients_are_torchs(name, end, dtype):
    channels, filters, image, size, padding = LAYERS[name]
    shape = (filters, channels, *size)
    length = torch.Size(shape).numel()

    def loss(w, x):
        y = convolve(x, w[:length].view(shape), (1, 1), (padding, padding))
        return ENDS[end](y, w[length:, None, None])

    def one(w, x):
        def step(number, kind, carry):
            w, x = carry
            by_w, by_x = grad(loss, (0, 1))(w, x)
            return w - 0.1 * by_w, x - 0.1 * by_x

        return scan(step, [0] * STEPS, (w, x))

    inputs = numbers(0, CLIENTS, length + filters), numbers(1, CLIENTS, 2, channels, *image)
    assert_compiled(one, "wx", *(leaf.to(dtype) for leaf in inputs))


@with_a_compiler
def test_private_steps_are_compiled():
    """Clipped gradients of samples, of a convolution, its pool and a linear layer."""
    on = task(FedAvg(), cnn, privacy=Privacy(noise=0.0, clip=0.3), merge=False)
    made = governed(FedAvg(), on.problem)
    server, states = made.init(on.problem)
    round = whole_round(on)
    asked = made, made.download(server, round), states, round
    backend = backend_of("vmap", on, trace=True, compiled=True)
    for a, b in zip(*(e.local(*asked)[0] for e in (backend, backend_of("loop", on))), strict=True):
        assert_close(a, b, 1e-9)
    assert {form.way for form in backend.forms} == {COMPILED}


@with_a_compiler
def test_images_of_bytes_are_scaled_as_torch_does():
    images = torch.randint(0, 256, (9, 6), dtype=torch.uint8)
    scale, shift = torch.full((6,), 1 / 255), torch.linspace(-1, 1, 6)

    def one(w, places):
        def step(number, kind, w):
            x = images[(places + number) % 9].to(w.dtype) * scale.to(w.dtype) + shift.to(w.dtype)
            return squeezed(w + (x @ w.view(6, 4)).sum())

        return scan(step, [0] * STEPS, w)

    executor, call = Executor(compiled=True), vmap(one)
    for seed in range(2):
        given = numbers(seed, CLIENTS, 24), torch.arange(4).expand(CLIENTS, 4) + seed
        assert_close(executor("some", call, given), call(*given))
    assert {form.way for form in executor.forms} == {COMPILED}


@pytest.mark.parametrize("why", ["unknown", "no compiler", "a compiler that fails"])
def test_torch_plays_what_is_not_compiled(why, named_compiler):
    if why != "unknown":
        named_compiler("" if why == "no compiler" else "false")

    def one(w):
        def step(number, kind, w):
            return torch.erf(w) if why == "unknown" else w * 0.7123

        return scan(step, [0] * STEPS, w)

    executor, w = Executor(compiled=True), numbers(0, CLIENTS, 5)
    assert_close(executor("some", vmap(one), (w,)), vmap(one)(w))
    assert {form.way for form in executor.forms} == {REPLAYED}


def test_layers_need_no_compiler(named_compiler):
    named_compiler("")
    x, w = numbers(0, 2, 2, 11, 13), numbers(1, 3, 2, 3, 3)
    assert_close(convolve(x, w, (1, 1), (1, 1)), F.conv2d(x, w, None, 1, 1))
    assert_close(max_pool(x, 2), F.max_pool2d(x, 2))


# ---- buffers ------------------------------------------------------------------------------------


def test_a_large_buffer_can_be_written():
    buffer = Allocator().empty(torch.Size((5, 300_000)), torch.float32, torch.device("cpu"))
    assert buffer.shape == (5, 300_000)
    buffer.fill_(1.0)
    assert buffer.sum() == buffer.numel()


def test_a_large_buffer_is_used_again_once_nothing_refers_to_it():
    allocator = Allocator()

    def one():
        return allocator.empty(torch.Size((3, 700_001)), torch.float32, torch.device("cpu"))

    buffer = one().fill_(1.0)
    part = buffer[1:]
    del buffer
    other = one().fill_(2.0)  # part of the first is still in use
    assert part.eq(1.0).all()
    place = other.data_ptr()
    del other
    assert one().data_ptr() == place
