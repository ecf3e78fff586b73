"""An admitted site may answer anything: the others' result is as if it had been silent."""

import json
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from coterie.core import tree
from coterie.core.algorithm import Mixture
from coterie.core.messages import Rejection, layout
from coterie.core.metrics import METRICS
from coterie.deploy.protocol import gain_answered, setup_message
from coterie.engines.codec import LENGTH, Message, decode, encode, read_head, refusal, vocabulary
from coterie.engines.remote import Assessment, judged_answer, read_answer, trained_answer
from coterie.errors import EngineError
from coterie.runs.config.loading import merge
from coterie.runs.plan import Plan
from fuzz.answers import mutated
from sites import FAST, InProcess, executed, handler_of, setting_of, site_folders, write_tables
from support import METHODS

METHOD, FLOAT = "ditto", torch.float32
ASKED = merge(FAST, {"algorithm.name": METHOD, "run.rounds": 2})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("hostile")
    return site_folders(home / "fed", write_tables(home / "data"))


def run_with(folders, spoil, asked=ASKED):
    """A run in which ``spoil`` changes every answer of 'ash' in rounds."""

    def spoiled(name, round, answer):
        return spoil(answer) if name == "ash" and round >= 0 else answer

    handlers = {name: handler_of(folder) for name, folder in folders.items()}
    return executed(setting_of(asked, InProcess(handlers, spoiled)))


@pytest.fixture(scope="module")
def silent(folders):
    return run_with(folders, lambda answer: "lost").summary["digest"]


def with_header(answer, header):
    end = LENGTH + int.from_bytes(answer[:LENGTH], "little")
    text = header(answer[LENGTH:end])
    return len(text).to_bytes(LENGTH, "little") + text + answer[end:]


def changed(answer, **values):
    message = decode(answer, vocabulary(METHODS[METHOD]()))
    return encode(Message({**message.head, **values}, message.body))


def rebuilt(answer, change):
    """An evaluation's answer with other scores and another predictor; others as they are."""
    message = decode(answer, vocabulary(METHODS[METHOD]()))
    if "state" in message.head:
        return answer
    return encode(Message(message.head, change(*message.body)))


ATTACKS = {
    "nested": lambda a: with_header(a, lambda h: b'{"head":' + b"[" * 400_000 + b"]" * 400_000),
    "text body": lambda a: with_header(
        a, lambda h: json.dumps({**json.loads(h), "body": "x"}).encode()
    ),
    "huge round": lambda a: with_header(
        a, lambda h: h.replace(b'"round": ', b'"round": 1e999, "r": ')
    ),
    "round as text": lambda a: changed(a, round="0"),
    "no state": lambda a: changed(a, state="zz") if b'"state"' in a[:200] else b"",
    "refused by a list": lambda a: changed(a, refused=[[["x"]]]),
}


@pytest.fixture(scope="module")
def answers(folders):
    """What 'ash' answered in the rounds of a run: to training, to an evaluation."""
    said = []
    run_with(folders, lambda answer: said.append(answer) or answer)
    return [next(a for a in said if ("state" in read_head(a)) == of) for of in (True, False)]


def read_by_the_operator(answer):
    """What the operator makes of an answer of a round."""
    types, asked = vocabulary(METHODS[METHOD]()), Assessment(1, METRICS["accuracy"], 50, FLOAT)
    if "state" in read_head(answer):
        return read_answer(0, answer, types, lambda m: trained_answer(m, 0, layout(())))
    return read_answer(0, answer, types, lambda m: judged_answer(m, 0, asked))


def test_what_a_site_answered_can_be_read(answers):
    assert not any(isinstance(read_by_the_operator(answer), Rejection) for answer in answers)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_answer_that_cannot_be_read_is_a_reason(answers, attack):
    for answer in answers:
        assert isinstance(read_by_the_operator(attack(answer)), Rejection)


def test_an_answer_that_cannot_be_read_is_as_silence(folders, silent):
    assert run_with(folders, ATTACKS["nested"]).summary["digest"] == silent


SCORES = {
    "one weight, two models": lambda s, p: (s, Mixture(p.weights, p.models.expand(2, -1))),
    "many weights": lambda s, p: (s, Mixture(torch.ones(10**5), torch.zeros(10**5, 0))),
    "infinite": lambda s, p: (s.fill_(np.inf), p),
    "huge": lambda s, p: (s.fill_(1e300), p),
    "above 100 %": lambda s, p: (s + 200, p),
    "negative losses": lambda s, p: (torch.cat([s[:2], s[2:] - 1e3]), p),
    "integers": lambda s, p: (s.long(), p),
    "no predictor": lambda s, p: (s, ()),
    "huge losses": lambda s, p: (torch.cat([s[:2], s[2:] * 0 + 1e300]), p),
    "another type": lambda s, p: (s, Mixture(p.weights, p.models.half())),
    "integer weights": lambda s, p: (s, Mixture(p.weights.long(), p.models)),
    "no weights": lambda s, p: (s, Mixture(p.weights * np.nan, p.models)),
}


@pytest.mark.parametrize("attack", SCORES.values(), ids=SCORES)
def test_scores_that_cannot_be_are_a_reason(answers, attack):
    assert isinstance(read_by_the_operator(rebuilt(answers[1], attack)), Rejection)


def test_scores_that_cannot_be_are_no_scores(folders):
    found = run_with(folders, lambda answer: rebuilt(answer, SCORES["infinite"]))
    assert np.isnan(found.last[0])
    assert np.isfinite(found.last[1:]).all()
    assert np.isfinite(found.summary["accuracy_last"])


SETUP = [  # the kind of a question, and what a hostile site answers in place of a field
    ("who", {"name": "birch"}),
    ("who", {"columns": {"x" * 10**6: -1}}),
    ("ask", {"request": "0"}),
    ("describe", {"versions": {"coterie": "\x1b[2J", "source": "\x1b" * 99}}),
    ("describe", {"schema": "{}"}),
    ("divide", {"counts": {"train": -5, "val": 10, "test": 10}}),
    ("divide", {"counts": {"train": 10, "val": -1, "test": 10}}),
    ("divide", {"counts": {"train": 10**30, "val": 10, "test": 10}}),
    ("divide", {"data": "../../x", "partition": "\x1b"}),
    ("divide", {"weak": "\x1b[2J" + "x" * 10**6}),
    ("divide", {"classes": [-1] * 1000}),
    ("divide", {"sums": ["f" * 176] * 6}),
    ("divide", {"sums": ["-1", " 7", "0x1", "1_0", "\u0661", "1"]}),
    ("divide", {"sums": ["1"]}),
    ("divide", {"sums": ["26", "26", "0", "0", "7" + "f" * 160, "7" + "f" * 160]}),
    ("divide", {"masked": True}),
    ("agree", {"experiment": "0" * 64}),
    ("agree", {"state": "\u0661" * 64}),
]


@pytest.mark.parametrize(("kind", "values"), SETUP, ids=range(len(SETUP)))
def test_a_hostile_answer_before_the_rounds_is_one_message_that_names_its_site(
    folders, kind, values, recwarn
):
    """Or it changes nothing for the others: nothing of it reaches them, a file or a terminal."""

    def spoil(name, round, answer):
        if name != "ash" or read_head(answer).get("kind") != kind:
            return answer
        (body,) = decode(answer, {}).body
        return setup_message(kind, json.loads(bytes(body.numpy())) | values)

    handlers = {name: handler_of(folder) for name, folder in folders.items()}
    said = None
    try:
        setting = setting_of(ASKED, InProcess(handlers, spoil))
        setting.agreed(Plan.single(setting.config, None).cells[0])
    except EngineError as error:
        said = str(error)
    if said is None:
        assert kind in ("who", "ask", "describe")
    else:
        assert "ash" in said
        assert "birch" not in said.replace("calls itself 'birch'", "")
        assert len(said) < 1000
    assert not any("\x1b" in str(one.message) for one in recwarn)


def test_a_run_that_every_site_refuses_is_an_error(folders):
    handlers = {name: handler_of(folder) for name, folder in folders.items()}

    for answer, said in ((refusal("stale_state"), "every site refuses"), ("lost", "no site took")):
        spoil = lambda name, round, own, answer=answer: answer if round >= 0 else own  # noqa: E731
        with pytest.raises(EngineError, match=said):
            executed(setting_of(ASKED, InProcess(handlers, spoil)))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_mutated_answers_are_as_silence(folders, silent, seed):
    draws = random.Random(seed)
    found = run_with(folders, lambda answer: mutated(answer, draws))
    assert found.summary["digest"] == silent


def test_a_choice_that_does_not_exist_is_rejected(folders):
    """A site answers IFCA by a cluster that there is none of."""
    types = vocabulary(METHODS["ifca"]())

    def spoil(answer):
        message = decode(answer, types)
        if "state" not in message.head:
            return answer
        body = tree.map_leaves(
            lambda leaf: leaf if leaf.is_floating_point() else leaf * 0 + 10**6, message.body
        )
        return encode(Message(message.head, body))

    asked = merge(ASKED, {"algorithm.name": "ifca"})
    found = run_with(folders, spoil, asked)
    reasons = {one["reason"] for line in found.lines for one in line["rejected"]}
    assert reasons & {"values", "samples"}
    assert np.isfinite(found.last[1:]).all()


def test_the_models_of_others_are_their_own_whatever_type_one_site_sends(tmp_path):
    """The first site's type was everybody's: their final models were rounded to it."""
    folders = site_folders(tmp_path / "fed", write_tables(tmp_path / "data"), ("models",))
    asked = merge(ASKED, {"run.collect": True})
    half = lambda s, p: (s, Mixture(p.weights.half(), p.models.half()))  # noqa: E731
    found = run_with(folders, lambda answer: rebuilt(answer, half), asked)
    gone = lambda answer: answer if "state" in read_head(answer) else "lost"  # noqa: E731
    silent = run_with(folders, gone, asked)
    assert found.summary["digest"] == silent.summary["digest"]


def test_a_bank_without_models_takes_no_memory():
    """A message of 300 bytes could name a model of any width."""
    body = json.dumps({"head": {}, "body": {"coterie.core.tree.Bank": [0, 0, 0]}}).encode()
    named = {"0": torch.zeros(0, 10**13), "1": torch.tensor([-1]), "2": torch.tensor([0])}
    data = len(body).to_bytes(LENGTH, "little") + body + save(named)
    found = decode(data, {}).body
    assert found.models.untyped_storage().nbytes() < 1000


GAIN = {"gain": 1.0, "variance": 1.0, "low": -1.0, "high": 3.0, "p": 0.5, "samples": 10}
GAIN |= {"freedom": 3.0, "counts": [2, 1, 10]}


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({}, True),
        ({"gain": 300.0, "high": 400.0}, False),
        ({"gain": 5.0}, False),
        ({"samples": -5}, False),
        ({"samples": 1e300}, False),
        ({"counts": [-1, 1, 10]}, False),
        ({"counts": [1, 1, 1e300]}, False),
        ({"p": "inf"}, False),
    ],
)
def test_a_gain_that_cannot_be_says_nothing(values, fits):
    told = GAIN | values
    answer = setup_message("judge", {"each": [told], "together": told})
    assert (gain_answered(answer, 1, "accuracy").together is not None) == fits
