"""Every kind of message, changed in both directions: a value within bounds or a reason.

``COTERIE_FUZZ=10000 pytest tests/fuzz/test_messages.py`` tries each kind so often.
"""

import logging
import os
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.core import tree
from coterie.core.messages import REASONS
from coterie.deploy import keys
from coterie.deploy.peer_part import checked_change, checked_model
from coterie.deploy.peers import _at_fault, _read
from coterie.deploy.protocol import Signed, announced, gain_answered, unsigned
from coterie.engines.codec import Message, decode, encode, refused_by
from coterie.engines.remote import RemoteEngine
from coterie.errors import CoterieError
from coterie.runs.plan import Plan
from coterie.training.guard import Guard
from coterie.training.rounds import train
from fuzz.messages import (
    ASKED,
    HOSTILE,
    ROUNDS,
    SETUP,
    STEPS,
    Replay,
    federation,
    mutations,
    peers,
)
from sites import NAMES, setting_of

TRIES = int(os.environ.get("COTERIE_FUZZ", "25"))
often = settings(
    max_examples=TRIES, deadline=None, database=None, suppress_health_check=[*HealthCheck]
)
OTHERS = [at for at, name in enumerate(NAMES) if name != HOSTILE]


@contextmanager
def no_traceback():
    """A site that fails says so in a line; an exception with its trace is a finding."""
    found = []

    class Kept(logging.Handler):
        def emit(self, record):
            found.append(record)

    log, kept = logging.getLogger("coterie"), Kept(logging.WARNING)
    log.addHandler(kept)
    try:
        yield
    finally:
        log.removeHandler(kept)
    assert not any(record.exc_info for record in found)
    assert not any("\x1b" in record.getMessage() for record in found)


@pytest.mark.parametrize("kind", [*SETUP, *ROUNDS, *STEPS])
@often
@given(draws=st.data())
def test_a_site_answers_whatever_its_operator_asks(kind, draws):
    made = peers() if kind in STEPS else federation()
    message = draws.draw(st.sampled_from(made.said.questions[kind]))
    with no_traceback():
        answer = made.answer(draws.draw(mutations(message)))
    refused = refused_by(answer)
    assert refused is None or refused[0] in REASONS
    assert refused is None or "Traceback" not in refused[1]


@often
@given(data=st.binary(max_size=200))
def test_a_site_reads_nothing_that_is_not_signed(data):
    folder = federation().folders[HOSTILE]
    assert unsigned(data, folder.operator, "fed", HOSTILE) is None
    assert announced(data, folder.operator, "fed", HOSTILE) is None


@pytest.mark.parametrize("kind", ["who", "ask", "describe", "divide", "agree"])
@often
@given(draws=st.data())
def test_before_the_rounds_an_operator_reads_or_names_the_site(kind, draws, recwarn):
    made = federation()
    right = made.said.answers[HOSTILE, kind, -1]
    spoiled, said = draws.draw(mutations(right)), HOSTILE
    try:
        setting = setting_of(ASKED, Replay(made, kind, spoiled))
        cell = Plan.single(setting.config, None).cells[0]
        on = setting.prepare(cell.method.build(), cell.config)
        setting.engine(cell, on, None)
    except CoterieError as error:
        said = str(error)
    assert HOSTILE in said
    assert len(said) < 4000
    assert "\x1b" not in said
    assert not any("\x1b" in str(one.message) for one in recwarn)
    recwarn.clear()


@often
@given(draws=st.data())
def test_a_gain_is_one_that_can_be(draws):
    right = federation().said.answers[HOSTILE, "judge", -1]
    found = gain_answered(draws.draw(mutations(right)), 1, "accuracy")
    assert all(one is None or abs(one.gain) <= 200 for one in (*found.each, found.together))


@pytest.mark.parametrize("kind", ROUNDS)
@often
@given(draws=st.data())
def test_in_a_round_an_answer_is_a_value_or_a_reason(kind, draws):
    """What is rejected is as silence; what is taken leaves finite numbers."""
    made = federation()
    right = made.said.answers[HOSTILE, kind, 0 if kind == "local" else 1]
    record = _rounds(kind, draws.draw(mutations(right)))
    for one in record.rejected:
        assert one.reason in REASONS
    assert all(bool(leaf.isfinite().all()) for leaf in _floats(record.server))
    assert all(torch.tensor(record.evaluation[0])[OTHERS].isfinite())
    if any(one.client == NAMES.index(HOSTILE) for one in record.rejected):
        silent = _silent(kind)
        assert all(map(torch.equal, tree.leaves(record.server), tree.leaves(silent.server)))


def _floats(part):
    return [leaf for leaf in tree.leaves(part) if leaf.is_floating_point()]


def _setting():
    return setting_of(ASKED, Replay(federation(), "none", ""))


@cache
def _method():
    setting = _setting()
    cell = Plan.single(setting.config, None).cells[0]
    method = cell.method.build()
    return method, setting.prepare(method, cell.config).problem


def _rounds(kind, spoiled):
    """The first round of a run in which the hostile site answers so."""
    method, problem = _method()
    engine = RemoteEngine(
        Signed(Replay(federation(), kind, spoiled), bytes(32), "fed"),
        label={},
        experiment="0" * 64,
        starts=["0" * 64] * len(NAMES),
    )
    return next(train(method, problem, engine, 2))


@cache
def _silent(kind):
    return _rounds(kind, "lost")


@pytest.mark.parametrize("kind", STEPS)
@often
@given(draws=st.data())
def test_among_peers_an_operator_reads_or_says_why(kind, draws):
    answers = peers().said.answers
    right = next(a for (name, k, _), a in answers.items() if (name, k) == (HOSTILE, kind))
    found = _read(draws.draw(mutations(right)), NAMES, HOSTILE)
    if isinstance(found, str):
        assert found in REASONS
    else:
        assert {*found[0]} <= {*NAMES} - {HOSTILE}
        assert {*_at_fault({HOSTILE: found[2]}, 2)} <= {*NAMES}


@often
@given(draws=st.data())
def test_what_a_peer_seals_is_a_model_or_a_change_or_left_out(draws):
    own = torch.linspace(-1, 1, 40)
    told = draws.draw(st.sampled_from([own, (torch.tensor(0.5).double(), own), ()]))
    data = draws.draw(mutations(encode(Message({}, told))))
    try:
        body = decode(data, {}).body
    except CoterieError:
        return
    model, reason = checked_model(body, own, Guard())
    assert reason in REASONS or (model.shape == own.shape and model.isfinite().all())
    change, reason = checked_change(body, own)
    assert change is None or change.vector.shape == own.shape
    assert reason is None or reason in REASONS


@often
@given(data=st.binary(max_size=200))
def test_what_nobody_sealed_is_not_opened(data):
    with pytest.raises(CoterieError):
        keys.opened(bytes(32), b"", data)
