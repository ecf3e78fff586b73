"""``coterie.testing``: each law, broken once by a little method, is told in words and alone."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from coterie.adapt import Adapted, FineTune
from coterie.algorithms.fedavg import FedAvg
from coterie.core.algorithm import Algorithm, GlobalModel, Mixture, OwnModel, Traits, rows, single
from coterie.core.client import Batch, Client
from coterie.core.ranges import Share
from coterie.core.tree import Bank, bank
from coterie.errors import ConfigError, CoterieError
from coterie.testing import LAWS, BrokenLawsError, check_method


class Sent(NamedTuple):
    w: Tensor
    size: Tensor


def mean(uploads: Sent) -> Tensor:
    share = uploads.size / uploads.size.sum()
    return share.to(uploads.w.dtype) @ uploads.w


@dataclass(frozen=True)
class Plain(GlobalModel[Any, Any, Any, Any]):
    """A lawful method: the mean of the clients' models."""

    share: Share = 1.0

    def init(self, problem):
        return problem.start, ()

    def download(self, server, round):
        return rows(server, len(round.clients))

    def local(self, client, received, state):
        return Sent(client.train(received), client.size), state

    def aggregate(self, server, uploads, round):
        return server + self.share * (mean(uploads) - server)

    def model(self, server):
        return server


@dataclass(frozen=True)
class Alone(OwnModel[Any, Any, Any, Any]):
    """A lawful method: clients train alone, and the server remembers who drew on whom."""

    def init(self, problem):
        K = problem.population
        return torch.eye(K, dtype=problem.start.dtype), (problem.start.expand(K, -1),)

    def download(self, server, round):
        return ()

    def local(self, client, received, state):
        w = client.train(state[0])
        return (w,), (w,)

    def aggregate(self, server, uploads, round):
        return server.clone()

    def model(self, state):
        return state[0]

    def collaboration(self, server, shown, round):
        return server


def remember(method: Any, **values: Any) -> None:
    """Keep something on a frozen object, as no method should."""
    for name, value in values.items():
        object.__setattr__(method, name, value)


# ---- form ----------------------------------------------------------------------------------------


@dataclass
class NotFrozen(GlobalModel[Any, Any, Any, Any]):
    init, download, local, model = Plain.init, Plain.download, Plain.local, Plain.model

    def aggregate(self, server, uploads, round):
        return mean(uploads)


@dataclass(frozen=True)
class NoRange(Plain):
    rate: float = 1.0


class Unchecked(Plain):
    def __post_init__(self):
        pass


class NoDefault(Plain):
    def __post_init__(self):
        raise ConfigError("needs a rate")


class StateOfOne(Plain):
    def init(self, problem):
        return problem.start, (torch.zeros(1),)


class ServerOfADict(Plain):
    def init(self, problem):
        return {"w": problem.start}, ()


class OneRow(Plain):
    def download(self, server, round):
        return server[None]


class UploadsADict(Plain):
    def local(self, client, received, state):
        return {"w": received}, state


class UploadsOfManyForms(Plain):
    def local(self, client, received, state):
        return received[: int(client.size)], state

    def aggregate(self, server, uploads, round):
        return server


class TwiceTheWeight(Plain):
    def predictor(self, client, served, state):
        return Mixture(2 * torch.ones_like(served[:1]), served[None])


# ---- purity --------------------------------------------------------------------------------------


class AggregatesInPlace(Plain):
    def aggregate(self, server, uploads, round):
        return server.add_(mean(uploads) - server)


class TrainsInPlace(Plain):
    def local(self, client, received, state):
        upload, _ = super().local(client, received.clone(), state)
        received.mul_(0.5)
        return upload, state


class DrawsFromTorch(Plain):
    def local(self, client, received, state):
        upload, _ = super().local(client, received, state)
        return upload._replace(w=upload.w + torch.randn(())), state


class CountsCalls(Plain):
    def download(self, server, round):
        remember(self, calls=getattr(self, "calls", 0) + 1)
        return super().download(server, round) + self.calls


class FollowsTheFirst(Plain):
    """All clients of a round start where its first client did, scaled by that client's size."""

    def local(self, client, received, state):
        if getattr(self, "first", (-1,))[0] != client.round:
            remember(self, first=(client.round, client.size / 100))
        return super().local(client, received * (1 + self.first[1]), state)


class ReadsTestData(Plain):
    def local(self, client, received, state):
        private = client._shards
        test = private.splits["test"]
        seen = private.x[test._flat[test._offset[client.id]]].double().mean()
        return super().local(client, received * (1 + seen / 100), state)


# ---- participation -------------------------------------------------------------------------------


class ExpectsEverybody(Plain):
    def aggregate(self, server, uploads, round):
        everybody = torch.arange(round.population)
        return mean(Sent(uploads.w[everybody], uploads.size[everybody]))


class SendsToAll(Plain):
    def download(self, server, round):
        return rows(server, round.population)


class ExpectsAllReplies(Plain):
    def aggregate(self, server, uploads, round):
        asked = torch.ones(len(round.asked), dtype=server.dtype)
        return asked @ uploads.w / len(asked)


class Late(NamedTuple):
    w: Tensor
    replies: Tensor


class DividesByReplies(Plain):
    """The server divides by the replies so far: none, where no reply arrived in round 0."""

    def init(self, problem):
        return Late(problem.start, torch.zeros(())), ()

    def download(self, server, round):
        scale = server.replies / server.replies if round.index else torch.ones(())
        return rows(server.w * scale, len(round.clients))

    def aggregate(self, server, uploads, round):
        return Late(mean(uploads), server.replies + len(round.clients))

    def model(self, server):
        return server.w


# ---- agreement -----------------------------------------------------------------------------------


class DecidesOnANumber(Plain):
    def local(self, client, received, state):
        if client.loss(received, "train") > 0:
            return super().local(client, received, state)
        return Sent(received, client.size), state


class ForgetsTheMask(Plain):
    def local(self, client: Client, received, state):
        def loss(w: Tensor, batch: Batch) -> Tensor:
            return client.losses(w, batch).mean()

        return Sent(client.train(received, loss=loss), client.size), state


class PrefersTheFirst(Plain):
    def aggregate(self, server, uploads, round):
        return mean(uploads._replace(size=round.clients + 1))


class CountsEvaluations(Plain):
    def init(self, problem):
        remember(self, served=0)
        return super().init(problem)

    def serve(self, server, round):
        remember(self, served=getattr(self, "served", 0) + 1)
        return super().serve(server, round)

    def download(self, server, round):
        return super().download(server, round) * (1 + getattr(self, "served", 0) / 100)


class SmugglesTheRound(Plain):
    """The server half leaves a number on self that the client half reads."""

    def download(self, server, round):
        remember(self, index=round.index)
        return super().download(server, round)

    def local(self, client, received, state):
        scale = 1 + getattr(self, "index", 0) / 10
        return super().local(client, received * scale, state)


class RemembersOnSelf(Plain):
    def init(self, problem):
        remember(self, last=None)
        return super().init(problem)

    def aggregate(self, server, uploads, round):
        remember(self, last=server)
        return super().aggregate(server, uploads, round)

    def download(self, server, round):
        last = getattr(self, "last", None)
        return super().download(server if last is None else server + last, round)


class ChangesItsServer(Plain):
    def init(self, problem):
        return (problem.start, torch.zeros((), dtype=torch.int64)), ()

    def download(self, server, round):
        return super().download(server[0], round)

    def aggregate(self, server, uploads, round):
        return mean(uploads), server[1] + 0.5

    def model(self, server):
        return server[0]


class ClaimsTooMuch(Plain):
    def local(self, client, received, state):
        return Sent(client.train(received), 10 * client.size), state


# ---- declarations --------------------------------------------------------------------------------


class ReadsValidation(Plain):
    def local(self, client, received, state):
        upload, _ = super().local(client, received, state)
        return upload._replace(w=upload.w * (1 + client.loss(upload.w, "val") / 100)), state


class SaysItReadsValidation(Plain):
    @property
    def traits(self):
        return Traits(uses_validation=True)


class HidesARound(Plain):
    def trace_key(self, index: int, horizon: int) -> Hashable:
        return "always the same"

    def local(self, client, received, state):
        return super().local(client, received * (1 + client.round / 10), state)


class HidesARoundOfThePredictor(Plain):
    def trace_key(self, index: int, horizon: int) -> Hashable:
        return index > 1

    def predictor(self, client, served, state):
        return single(served * (1 + client.round / 10))


class Raw(NamedTuple):
    w: Tensor
    size: Tensor
    x: Tensor


class SendsSamples(Plain):
    def local(self, client, received, state):
        return Raw(client.train(received), client.size, client.batch(0).x[0].flatten()), state


class ReadsUnsentModels(Plain):
    """Each client is sent its own last model and reads the mean of all."""

    def init(self, problem):
        return rows(problem.start, problem.population), ()

    def download(self, server, round):
        return bank(server, round.clients[:, None])

    def local(self, client, received: Bank, state):
        upload = client.train(received.models.mean(0))
        return upload, state

    def aggregate(self, server, uploads, round):
        return server.index_copy(0, round.clients, uploads)

    def model(self, server):
        return server.mean(0)


class SmallMatrix(Alone):
    def collaboration(self, server, shown, round):
        return server[round.clients][:, :2]


class MadeUpMatrix(Alone):
    def collaboration(self, server, shown, round):
        return torch.full_like(server, 1 / len(server))


class FreshMatrix(Alone):
    """The diagonal of absent clients changes in every round."""

    def aggregate(self, server, uploads, round):
        return server / 2


class NoMatrixToReadWith(Plain):
    @property
    def traits(self):
        return Traits(models_change_hands=True)


class Fails(Plain):
    def aggregate(self, server, uploads, round):
        raise KeyError("no such client")


BROKEN: list[tuple[type[Algorithm[Any, Any, Any, Any]], str, str]] = [
    (NotFrozen, "fields", "not a frozen dataclass"),
    (NoRange, "fields", r"the field NoRange\.rate has no range"),
    (Unchecked, "fields", r"Unchecked\.share accepts nan; expected a number from 0 to 1"),
    (NoDefault, "fields", r"NoDefault\(\) cannot be made: ConfigError: needs a rate"),
    (StateOfOne, "init", r"init\(\).* returned a tensor of shape \[1\].*one row per client: \[5"),
    (ServerOfADict, "init", "a dict in its server"),
    (OneRow, "messages", r"OneRow\.download\(\).*expected one row per client: \[5"),
    (UploadsADict, "messages", "a dict in its upload; expected tensors"),
    (UploadsOfManyForms, "messages", "expected one form for all clients"),
    (Fails, "rounds", r"aggregate\(\) raised KeyError: 'no such client' \(test_testing\.py, line"),
    (TwiceTheWeight, "predictor", r"\[2\.0\] sum to 2"),
    (AggregatesInPlace, "inputs", r"aggregate\(\).* changed its argument server in place"),
    (TrainsInPlace, "inputs", r"local\(\).* changed its argument received in place"),
    (DrawsFromTorch, "repeatable", "random generator of torch: use client.draw"),
    (
        CountsCalls,
        "repeatable",
        r"download\(\).* gives other numbers .* keep nothing between calls",
    ),
    (
        FollowsTheFirst,
        "isolation",
        r"local\(\).* of client \d gives other numbers when other clients",
    ),
    (ReadsTestData, "test_data", "training changes when only the clients' test data change"),
    (ExpectsEverybody, "participation", r"aggregate\(\) raised IndexError.*test_testing\.py, line"),
    (SendsToAll, "participation", r"expected one row per client: \[2"),
    (
        ExpectsAllReplies,
        "replies",
        r"1 of 5 replies arrived fails: aggregate\(\) raised RuntimeError",
    ),
    (DividesByReplies, "replies", "no reply arrived, an honest reply .* rejected as 'not_finite'"),
    (DecidesOnANumber, "engines", r"vmap engine.*cannot run it: local\(\) raised .*torch\.where"),
    (ForgetsTheMask, "engines", "vmap engine, .* gives other numbers than the loop .*batch.mask"),
    (PrefersTheFirst, "order", "another order changes the result"),
    (CountsEvaluations, "evaluation", "evaluating more or less often changes the result"),
    (SmugglesTheRound, "replay", "traced once and replayed give other numbers"),
    (RemembersOnSelf, "resume", "stopped after round 0 and resumed ends with other predictors"),
    (ChangesItsServer, "resume", r"server\[1\] is torch.float32 .* and began as torch.int64"),
    (ClaimsTooMuch, "guard", "rejected an honest reply, of client . in round 0, as 'samples'"),
    (ReadsValidation, "validation", "reads validation data and does not say so"),
    (SaysItReadsValidation, "validation", r"declares traits\.uses_validation, but other"),
    (HidesARound, "trace_key", r"local\(\).* acts on client\.round .*rounds 0 and 1 of 5"),
    (HidesARoundOfThePredictor, "trace_key", r"predictor\(\).* acts on client\.round"),
    (SendsSamples, "sharing", r"uploads raw training samples of client 0 in upload\.x"),
    (ReadsUnsentModels, "engines", "wire engine, .* travels as bytes, gives other numbers"),
    (SmallMatrix, "matrix", r"a matrix \[\d, 2\]; expected finite numbers \[5, 5\]"),
    (MadeUpMatrix, "matrix", "client 1 draws on client 0 with weight 0.2, but"),
    (FreshMatrix, "matrix", "shows another row for client . after round 1, in which it was absent"),
    (NoMatrixToReadWith, "matrix", r"declares traits\.models_change_hands but has no"),
]


SLOW = ("replies", "replay", "guard", "test_data", "validation", "matrix")  # checked where broken


@pytest.mark.parametrize("lawful", [Plain, Alone])
def test_a_lawful_method_passes(lawful):
    report = check_method(lawful)
    assert {*report.held, *report.not_applicable} == set(LAWS)
    assert not report.broken
    assert not report.not_checked
    assert str(report).startswith(f"{lawful.__name__}: {len(report.held)} laws hold")


def marked(method, law, words):
    """One row of BROKEN as a case; without the compiler nothing is traced and replayed."""
    marks = [pytest.mark.compiled] if law == "replay" else []
    return pytest.param(method, law, words, marks=marks, id=method.__name__)


@pytest.mark.parametrize(("method", "law", "words"), [marked(*row) for row in BROKEN])
def test_a_broken_law_is_told_in_words_and_no_other(method, law, words):
    with pytest.raises(BrokenLawsError, match=f"(?s){words}") as found:
        check_method(method, laws=[name for name in LAWS if name == law or name not in SLOW])
    assert set(found.value.report.broken) == {law}


def test_every_law_is_broken_once():
    assert {law for _, law, _ in BROKEN} == set(LAWS)


def test_the_error_suits_pytest_and_the_command_line():
    assert issubclass(BrokenLawsError, AssertionError)
    assert issubclass(BrokenLawsError, CoterieError)


def test_an_instance_and_chosen_laws():
    report = check_method(Adapted(FedAvg(), FineTune()), laws=["order", "fields"])
    assert report.held == ("order",)
    assert list(report.not_applicable) == ["fields"]
    with pytest.raises(ConfigError, match="did you mean 'order'"):
        check_method(FedAvg, laws=["ordr"])


@pytest.mark.parametrize("something", [object, 3, "fedavg"])
def test_what_is_no_method_is_refused(something):
    with pytest.raises(ConfigError, match=r"check_method: found .*; expected a"):
        check_method(something)


def test_an_exception_is_told_once_with_its_line():
    with pytest.raises(BrokenLawsError) as found:
        check_method(Fails)
    told = str(found.value)
    assert told.count("no such client") == 1
    assert "not checked: engines" in told
