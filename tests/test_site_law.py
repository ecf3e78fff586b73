"""The coordinator, its operator and other sites attack a site: its owner's word stands."""

import json
import logging
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import coterie
from coterie.core.tree import map_leaves
from coterie.data.partition import Fold
from coterie.deploy import approval, keys
from coterie.deploy.approval import Approvals
from coterie.deploy.division import ChangedError, SiteDivision
from coterie.deploy.federated import federated
from coterie.deploy.folders import FederationFolder, SiteFolder
from coterie.deploy.holdings import Holdings
from coterie.deploy.protocol import (
    HEAD,
    MAGIC,
    Approved,
    Ask,
    Description,
    DivisionReport,
    DivisionRequest,
    Nothing,
    Proposal,
    Signed,
    payload_of,
    setup_message,
)
from coterie.deploy.running import withdraw
from coterie.deploy.site_model import codes_beside, export_site
from coterie.deploy.sums import MODULUS, masked, moments_of, sums_of, to_hex, total_of
from coterie.deploy.terms import Request
from coterie.engines.codec import Message, decode, encode, read_head, refused_by, vocabulary
from coterie.engines.site import MODEL
from coterie.errors import CoterieWarning
from coterie.runs.config.loading import merge
from coterie.runs.plan import Plan
from fuzz.answers import mutated
from hostile import contents
from sites import (
    FAST,
    InProcess,
    executed,
    exported,
    handler_of,
    setting_of,
    signed,
    simulated,
    site_folders,
    write_tables,
)
from support import METHODS

ASKED = merge(FAST, {"algorithm.name": "fedavg"})


def edited(folder, *changes):
    """The site's folder after its owner changed site.toml."""
    path = folder.path / "site.toml"
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return SiteFolder.open(folder.path)


class Attacker:
    """An operator with the right key, who asks one site whatever he likes."""

    def __init__(self, folders, site="ash"):
        self.folders, self.site = folders, site
        key = FederationFolder.open(folders[site].path.parent / "fed").operator_key()
        self.signed = Signed(None, key, "fed")
        self.restart()

    def restart(self):
        self.handler = handler_of(self.folders[self.site])

    def ask(self, message):
        return self.handler.answer(self.signed._signed(self.site, message))

    def reason(self, message):
        found = refused_by(self.ask(message))
        return None if found is None else found[0]

    @property
    def request(self):
        return Request("fed", tuple(self.folders), ("fedavg", "local"), 3, 1)

    def approved(self):
        answer = self.ask(setup_message("ask", Ask(self.request.to_json())))
        assert refused_by(answer) is None
        return self.request.id

    def schema(self):
        answer = self.ask(setup_message("describe", Approved(self.request.id)))
        return payload_of(answer, Description).schema

    def divide(self, **more):
        asked = vars(DivisionRequest(self.request.id, self.schema(), "auto")) | more
        return self.ask(setup_message("divide", asked))

    def report(self):
        return payload_of(self.divide(), DivisionReport)


@pytest.fixture
def folders(tmp_path):
    return site_folders(tmp_path / "fed", write_tables(tmp_path / "data"))


@pytest.fixture
def attacker(folders):
    made = Attacker(folders)
    made.approved()
    return made


# ---- before an approval --------------------------------------------------------------------------


def test_before_an_approval_nothing_leaves_but_the_name_and_the_shape(folders):
    folders["ash"] = edited(folders["ash"], ('automatic = ["*"]', "automatic = []"))
    attacker = Attacker(folders)
    said = attacker.ask(setup_message("who", Nothing()))
    text = bytes(decode(said, {}).body[0].numpy()).decode()
    told = json.loads(text)
    assert told == {
        "name": "ash",
        "kind": "table",
        "target": "texts",
        "columns": {"levels": 1, "numbers": 2},
        "shape": [],
    }
    assert not re.search("label|ill|well|rows", text)
    name, schema = attacker.request.id, "{}"
    asked = setup_message("ask", Ask(attacker.request.to_json()))
    for message in (
        asked,
        setup_message("describe", Approved(name)),
        setup_message("divide", DivisionRequest(name, schema, "auto")),
    ):
        assert attacker.reason(message) == "not_approved"
    folder = folders["ash"]
    (waiting,) = Approvals(folder).waiting()
    texts = Holdings(folder, folder.data.name, folder.data.options).unnamed_texts()
    Approvals(folder).approve(waiting.id[:12], texts)
    attacker.restart()
    assert attacker.reason(asked) is None
    assert "label" in attacker.schema()


def test_texts_that_the_owner_has_not_seen_do_not_leave(folders, tmp_path):
    """A patient with a new text, or a column of names, appears after the approval."""
    folder = edited(
        folders["ash"], ('kind = "named"\n', ""), ('automatic = ["*"]', "automatic = []")
    )
    folders["ash"] = folder
    attacker = Attacker(folders)
    asked = setup_message("ask", Ask(attacker.request.to_json()))
    attacker.ask(asked)
    texts = Holdings(folder, folder.data.name, folder.data.options).unnamed_texts()
    assert set(texts) == {"kind"}
    Approvals(folder).approve(attacker.request.id[:12], texts)
    attacker.restart()
    assert '"kind"' in attacker.schema()
    path = tmp_path / "data" / "ash.csv"
    path.write_text(path.read_text() + "0.1,0.2,SMITH,ill\n")
    attacker.restart()
    refused = refused_by(attacker.ask(setup_message("describe", Approved(attacker.request.id))))
    assert refused[0] == "not_approved"
    assert "SMITH" not in refused[1]


@pytest.mark.parametrize("how", ['"hashed"', '["x"]', '{ x = "one", y = "two" }'])
def test_texts_leave_hashed_or_merged(folders, how, tmp_path):
    """And the site's model at home reads its own texts by the file that is written beside it."""
    change = ('kind = "named"', f"kind = {how}"), ('salt = ""', 'salt = "between the owners"')
    sites = {name: edited(folder, *change) for name, folder in folders.items()}
    attacker = Attacker(sites)
    attacker.approved()
    (column,) = (c for c in json.loads(attacker.schema())["columns"] if c["name"] == "kind")
    assert "y" not in column["levels"]
    told = {'["x"]': ["other", "x"], '{ x = "one", y = "two" }': ["one", "two"]}
    assert column["levels"] == told.get(how, column["levels"])
    assert len(column["levels"]) == 2
    handlers = {name: handler_of(folder) for name, folder in sites.items()}
    there = executed(setting_of(ASKED, InProcess(handlers)))
    here = simulated(exported(sites, folders["ash"].path.parent / "exported"), ASKED)
    assert there.summary["digest"] == here.summary["digest"]
    home = coterie.load_export(export_site(sites["ash"], tmp_path / "home"))
    rows = {"a": [0.1, 0.1], "b": [0.2, 0.2], "kind": ["x", "y"]}
    x, y = home.predict(rows, codes=codes_beside(tmp_path / "home")).values  # no warning: known
    assert (x != y).any()
    with pytest.warns(CoterieWarning, match="taken as unknown"):
        home.predict({**rows, "kind": ["y", "z"]})


def test_a_column_of_names_never_leaves(folders, tmp_path):
    path = tmp_path / "data" / "ash.csv"
    head, *lines = path.read_text().splitlines()
    named = [f"{line},patient {at % 45}" for at, line in enumerate(lines)]
    path.write_text("\n".join([f"{head},who", *named]) + "\n")
    attacker = Attacker(folders)
    answer = attacker.ask(setup_message("who", Nothing()))
    assert refused_by(answer) is not None
    assert b"patient" not in answer
    assert b"who" not in refused_by(answer)[1].encode()


# ---- sums ----------------------------------------------------------------------------------------


def test_nobody_chooses_the_division(attacker):
    for more in ({"test": 0.985}, {"val": 0.9, "seed": 7}, {"means": [0.0, 0.0]}):
        assert refused_by(attacker.divide(**more)) is not None
    first = attacker.divide()
    for _ in range(5):
        attacker.restart()
        assert attacker.divide() == first
    assert attacker.reason(setup_message("squares", {"means": [1e30, 0.0]})) == "unreadable"


def test_folds_are_the_sites_own_and_every_row_tests_in_one(attacker, tmp_path):
    """Of no other number than was approved; kept when rows come; train and test never meet."""
    assert refused_by(attacker.divide(fold=(0, 4)))[0] == "not_approved"
    folder, path = attacker.folders["ash"], tmp_path / "data" / "ash.csv"

    def tested():
        held = Holdings(folder, folder.data.name, folder.data.options)
        parts = [held.division.fold(held._plain, held.keys, Fold(at, 4)) for at in range(4)]
        assert sum((one == 2).int() for one in parts).tolist() == [1] * len(held.keys)
        classes = [np.bincount(held._plain.y[one == 2].numpy()) for one in parts]
        assert np.ptp(classes, axis=0).max() <= 2
        assert all((one == 1).any() and (one == 0).any() for one in parts)
        at = torch.stack(parts).eq(2).int().argmax(0)
        return dict(zip(held.keys, at.tolist(), strict=True))

    before = tested()
    assert tested() == before
    path.write_text(path.read_text() + "".join(f"{i / 7:.4f},1.5,x,ill\n" for i in range(60)))
    assert before.items() <= tested().items()


@pytest.mark.parametrize("rows", [1, 19])
def test_sums_that_differ_by_a_few_rows_never_leave(attacker, tmp_path, rows):
    """Rows are appended or removed between two questions; a row in a hurry is read off at once."""
    path, before = tmp_path / "data" / "ash.csv", attacker.report()
    original = path.read_text()
    lines = original.splitlines(keepends=True)
    path.write_text("".join(lines[:-rows]))
    attacker.restart()
    after = attacker.divide()
    trained = before.counts.train - len_of_train(attacker)
    assert refused_by(after) is not None or trained == 0
    path.write_text(original)
    attacker.restart()
    assert attacker.report() == before


def len_of_train(attacker):
    folder = attacker.folders["ash"]
    holdings = Holdings(folder, folder.data.name, folder.data.options)
    return int((holdings.parts == 0).sum())


def test_many_new_rows_are_divided_apart_and_no_test_row_ever_trains(attacker, tmp_path):
    path = tmp_path / "data" / "ash.csv"
    lines, before = path.read_text(), attacker.report()
    folder = attacker.folders["ash"]
    held = Holdings(folder, folder.data.name, folder.data.options)
    parts = dict(zip(held.keys, held.parts.tolist(), strict=True))
    path.write_text(lines + "".join(f"{i / 7:.4f},1.5,x,ill\n" for i in range(60)))
    attacker.restart()
    after = attacker.report()
    assert after.counts.train > before.counts.train + 20
    held = Holdings(folder, folder.data.name, folder.data.options)
    now = dict(zip(held.keys, held.parts.tolist(), strict=True))
    assert parts.items() <= now.items()
    path.write_text(lines.replace(lines.splitlines()[1] + "\n", ""))  # and one of the old ones goes
    attacker.restart()
    found = attacker.divide()
    assert refused_by(found) is not None or len_of_train(attacker) == before.counts.train


def test_a_column_with_a_value_for_a_few_patients_has_no_sum(folders, tmp_path):
    path = tmp_path / "data" / "ash.csv"
    head, *lines = path.read_text().splitlines()
    rare = [f"{line},{'17.25' if at < 3 else ''}" for at, line in enumerate(lines)]
    path.write_text("\n".join([f"{head},rare", *rare]) + "\n")
    attacker = Attacker(folders)
    attacker.approved()
    numbers = [int(text, 16) for text in attacker.report().sums]
    assert len(numbers) == 9
    assert numbers[2::3] == [0, 0, 0]
    assert numbers[0] == numbers[1] > 0


def test_masks_hide_each_site_and_cancel(folders):
    """The coordinator sees the total alone; a smaller set has other masks, and no sum is left."""
    made = {name: keys.make_box() for name in ("a", "b", "c", "d")}
    rows = {name: torch.randn(30, 2) for name in made}

    def sent(name, names, context):
        shared = {o: keys.shared_secret(made[name][0], made[o][1]) for o in names if o != name}
        sums = sums_of(rows[name], np.array([True, True]))
        return to_hex(masked(sums, name, shared, context)), to_hex(sums.numbers)

    for names in (("a", "b", "c", "d"), ("a", "b", "c")):
        context = "".join(names).encode()
        hidden = {name: sent(name, names, context) for name in names}
        assert not any({*mask} & {*plain} for mask, plain in hidden.values())
        total = total_of([mask for mask, _ in hidden.values()], 2, 30 * len(names))
        assert total == total_of([plain for _, plain in hidden.values()], 2, 30 * len(names))
        x = torch.cat([rows[name] for name in names]).double()
        found = moments_of(total, torch.tensor([True, True]), False)
        assert found.mean == pytest.approx(x.mean(0).tolist(), rel=1e-12)
        assert found.std == pytest.approx(x.std(0, correction=0).tolist(), rel=1e-12)
    four, three = sent("a", "abcd", b"abcd")[0], sent("a", "abc", b"abc")[0]
    assert not {*four} & {*three}


def test_masked_sites_give_the_digest_and_answer_no_set_that_shows_one_of_them(folders):
    boxes = {name: folder.public_part().box for name, folder in folders.items()}
    lines = "\n".join(f'{name} = "{box}"' for name, box in boxes.items())
    change = ("\n[partners]\n", f"\n[partners]\n{lines}\n"), ("masked = false", "masked = true")
    sites = {name: edited(folder, *change) for name, folder in folders.items()}
    handlers = {name: handler_of(folder) for name, folder in sites.items()}
    there = executed(setting_of(ASKED, InProcess(handlers)))
    here = simulated(exported(sites, folders["ash"].path.parent / "exported"), ASKED)
    assert there.summary["digest"] == here.summary["digest"]
    attacker = Attacker(sites)
    small = replace(attacker.request, clients=("ash", "birch"))
    attacker.ask(setup_message("ask", Ask(small.to_json())))
    answer = attacker.ask(setup_message("describe", Approved(small.id)))
    schema = payload_of(answer, Description).schema
    message = setup_message("divide", DivisionRequest(small.id, schema, "auto"))
    assert refused_by(attacker.ask(message)) is not None


def test_masks_never_hide_two_different_sums(folders):
    """The owner cuts a column: it is left out from then on, and the difference would be its sum."""
    lines = "\n".join(f'{n} = "{one.public_part().box}"' for n, one in folders.items())
    change = ("\n[partners]\n", f"\n[partners]\n{lines}\n"), ("masked = false", "masked = true")
    attacker = Attacker({**folders, "ash": edited(folders["ash"], *change)})
    attacker.approved()
    first = attacker.report()
    attacker.folders["ash"] = edited(folders["ash"], ("\n[ranges]\n", "\n[ranges]\na = [-1, 1]\n"))
    attacker.restart()
    assert attacker.reason(setup_message("describe", Approved(attacker.request.id))) is None
    assert refused_by(attacker.divide())[0] == "policy"
    assert first.masked


def in_another_order(schema):
    told = json.loads(schema)
    return json.dumps({**told, "columns": told["columns"][::-1]})


@pytest.mark.parametrize("rule", ["masked", "noise"])
def test_another_schema_shows_no_sum_behind_masks_or_noise(folders, rule):
    """The numbers are in other places: equal masks or noise at a place would be subtracted."""
    boxes = {name: folder.public_part().box for name, folder in folders.items()}
    lines = "\n".join(f'{name} = "{box}"' for name, box in boxes.items())
    change = {
        "masked": (
            ("masked = false", "masked = true"),
            ("\n[partners]\n", f"\n[partners]\n{lines}\n"),
        ),
        "noise": (
            ("noise = 0.0", "noise = 1.5"),
            ("\n[ranges]\n", "\n[ranges]\na = [-1, 1]\nb = [-1, 1]\n"),
        ),
    }[rule]
    attacker = Attacker({**folders, "ash": edited(folders["ash"], *change)})
    attacker.approved()
    first = [int(number, 16) for number in attacker.report().sums]
    answer = attacker.divide(schema=in_another_order(attacker.schema()))
    assert refused_by(answer) is None, refused_by(answer)
    second = [int(number, 16) for number in payload_of(answer, DivisionReport).sums]
    if rule == "masked":
        between = [(a - b) % MODULUS for a in first for b in second]
        assert all(1 << 400 < number < MODULUS - (1 << 400) for number in between)
    else:  # a column has the same noise wherever it stands
        assert sorted(first) == sorted(second)
        assert first != second


def test_masked_sums_of_two_sets_never_show_one_site(tmp_path):
    (tmp_path / "division").mkdir()
    division = SiteDivision(tmp_path, "a", (0.2, 0.2))
    division.mask("first", "abcd", "of some rows", by_hand=False)
    division.mask("first", "abcd", "of some rows", by_hand=False)
    for others in ("abc", "abce", "abef"):  # all sets of three of four sites show each of them
        with pytest.raises(ChangedError, match="may see single sites'"):
            division.mask("second", others, "of some rows", by_hand=False)
    with pytest.raises(ChangedError, match="have changed"):
        division.mask("first", "abcd", "of others", by_hand=False)
    division.mask("second", "abc", "of some rows", by_hand=True)  # 'd' left before it had answered


def test_noise_is_the_same_whenever_it_is_asked_for(folders):
    change = (
        ("noise = 0.0", "noise = 1.5"),
        ("\n[ranges]\n", "\n[ranges]\na = [-1, 1]\nb = [-1, 1]\n"),
    )
    attacker = Attacker({**folders, "ash": edited(folders["ash"], *change)})
    attacker.approved()
    first = attacker.report()
    attacker.restart()
    assert attacker.report() == first
    plain = Attacker({**folders, "ash": edited(folders["ash"], ("noise = 1.5", "noise = 0.0"))})
    assert plain.report().sums[:2] == first.sums[:2]
    assert not {*plain.report().sums[2:]} & {*first.sums[2:]}
    more = Attacker({**folders, "ash": edited(folders["ash"], ("noise = 0.0", "noise = 3.0"))})
    told = [[int(n, 16) for n in one.sums[2:]] for one in (plain.report(), first, more.report())]
    off = [(2 * once - twice - exact) % MODULUS for exact, once, twice in zip(*told, strict=True)]
    assert all(2**100 < n < MODULUS - 2**100 for n in off)  # twice the noise is another draw


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)
)
def test_sums_are_exact(values):
    sums = sums_of(torch.tensor(values)[:, None], np.array([True]))
    (mean,) = moments_of(sums, torch.tensor([True]), False).mean
    assert mean == pytest.approx(math.fsum(values) / len(values), rel=1e-12, abs=1e-300)
    assert sums.known == (len(values),)


# ---- the agreement -------------------------------------------------------------------------------


class Recorded(InProcess):
    """Keeps what one site was asked in rounds."""

    def __init__(self, handlers):
        super().__init__(handlers)
        self.kept, self.every = [], False

    def ask(self, requests, round):
        wanted = round >= 0 or self.every
        self.kept += [requests[name] for name in ("ash",) if name in requests and wanted]
        return super().ask(requests, round)


@pytest.fixture
def finished(folders):
    """An attacker after an agreed run, and the messages of its rounds."""
    transport = Recorded({name: handler_of(folder) for name, folder in folders.items()})
    executed(setting_of(ASKED, transport))
    return Attacker(folders), [message[HEAD:] for message in transport.kept]


def changed(message, **values):
    found = decode(message, vocabulary(METHODS["fedavg"]()))
    return encode(Message({**found.head, **values}, found.body))


def test_no_round_outside_of_the_agreement_is_answered(finished):
    attacker, messages = finished
    assert attacker.reason(messages[-1]) is None  # it comes again after a lost answer
    for round in (500, 10**9, -5, 3):
        assert attacker.reason(changed(messages[0], round=round)) == "wrong_round"
    for round in (0.0, True, None, "1"):
        assert attacker.reason(changed(messages[0], round=round)) == "refused"
    assert attacker.reason(changed(messages[0], horizon=10**6)) == "wrong_round"
    assert attacker.reason(changed(messages[2], metric="f1")) == "ended"
    assert attacker.reason(changed(messages[1], metric="f1")) in ("ended", "policy")


def test_a_run_in_rounds_answers_only_so_many_other_forms_of_a_round(folders):
    """Each form is another model on which the site's update is seen."""
    transport = Recorded({name: handler_of(folder) for name, folder in folders.items()})

    class StopError(Exception):
        pass

    def stop(name, round, answer):
        if round == 1:
            raise StopError
        return answer

    transport.spoil = stop
    with pytest.raises(StopError):
        executed(setting_of(ASKED, transport))
    attacker = Attacker(folders)
    first = transport.kept[0][HEAD:]
    answered = [attacker.reason(changed(first, metric=str(at))) for at in range(40)]
    assert answered.count(None) <= 3 + 20
    assert answered[-1] == "wrong_round"


def test_an_old_message_that_comes_again_takes_no_state_away(folders):
    """Whoever carries messages, without the operator's key, sends round 0 once more in round 4."""

    class StopError(Exception):
        pass

    def stop(name, round, answer):
        if round == 4:
            raise StopError
        return answer

    transport = Recorded({name: handler_of(folder) for name, folder in folders.items()})
    transport.spoil = stop
    with pytest.raises(StopError):
        executed(setting_of(merge(ASKED, {"algorithm.name": "ditto", "run.rounds": 5}), transport))
    local = [one for one in transport.kept if b'"kind": "local"' in one[:200]]
    attacker, last = Attacker(folders), local[-1]
    before = attacker.handler.answer(last)
    assert refused_by(before) is None
    assert refused_by(attacker.handler.answer(local[0])) is None
    after = attacker.handler.answer(last)
    assert read_head(after)["state"] == read_head(before)["state"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"rounds": 10**6}, "rounds"),
        ({"epochs": 10**6}, "epochs"),
        ({"clients": ("ash",)}, "other sites"),
        ({"clients": ("birch", "cedar")}, "is not one of"),
        ({"federation": "other"}, "is not one of"),
    ],
)
def test_a_request_beyond_the_policy_is_refused_with_the_reason(folders, changes, what):
    attacker = Attacker(folders)
    asked = replace(attacker.request, **changes)
    reason, why = refused_by(attacker.ask(setup_message("ask", Ask(asked.to_json()))))
    assert (reason, what in why) == ("policy", True)


def test_an_agreement_beyond_the_request_is_refused(folders):
    handlers = {name: handler_of(folder) for name, folder in folders.items()}
    setting = setting_of(ASKED, InProcess(handlers))
    made = setting._agreement(Plan.single(setting.config, None).cells[0])
    attacker = Attacker(folders)
    for changes, reason in (
        ({"run.rounds": 4}, "policy"),
        ({"train.epochs": 9}, "policy"),
        ({"train.steps": 900}, "policy"),
        ({"algorithm.name": "ditto"}, "not_approved"),
        ({"model.hidden": [5000, 5000]}, "policy"),
        ({"model.hidden": [90_000, 90_000]}, "refused"),
    ):
        terms = replace(made, config=json.dumps(merge(json.loads(made.config), changes)))
        folders["ash"] = (
            edited(folders["ash"], ("parameters = ", "parameters = 1000 # "))
            if ("parameters = 1000 #" not in (folders["ash"].path / "site.toml").read_text())
            else folders["ash"]
        )
        attacker.restart()
        found = attacker.reason(setup_message("agree", Proposal(terms.to_json())))
        assert found == reason, changes
    few = replace(made, clients=made.clients[:2], counts=made.counts[:2])
    assert attacker.reason(setup_message("agree", Proposal(few.to_json()))) == "not_approved"


def test_a_site_that_withdraws_answers_no_more_and_keeps_its_model(finished):
    attacker, messages = finished
    folder = attacker.folders["ash"]
    (line, *_) = withdraw(folder)
    assert "3 rounds of this site's updates were sent" in line
    assert attacker.reason(messages[-1]) == "withdrawn"
    assert not [*folder.experiments.glob("*/states/*.bin")]
    assert [*folder.experiments.glob(f"*/{MODEL}")]


def test_an_approval_ends(finished):
    attacker, messages = finished
    for path in (attacker.folders["ash"].path / "approvals").glob("*.json"):
        kept = json.loads(path.read_text())
        kept["until"] = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
        path.write_text(json.dumps(kept))
    attacker.restart()
    assert attacker.reason(messages[-1]) == "ended"
    assert attacker.reason(setup_message("describe", Approved(attacker.request.id)))


def test_only_the_operator_is_read(folders):
    attacker = Attacker(folders)
    message = setup_message("who", Nothing())
    other, _ = keys.make_operator()
    strangers = (
        message,
        Signed(None, other, "fed")._signed("ash", message),
        attacker.signed._signed("birch", message),
        replace_last(attacker.signed._signed("ash", message)),
        MAGIC,
    )
    for data in strangers:
        assert refused_by(attacker.handler.answer(data))[0] == "unsigned"
    assert attacker.reason(message) is None


def replace_last(data):
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("killed", [1, 2, 3])
def test_the_same_config_twice_and_a_resumed_second_run_give_one_digest(
    folders, tmp_path, monkeypatch, killed
):
    """Equal agreements had one folder at a site, and states that were needed were removed."""
    from coterie.deploy import federated as sites_of
    from coterie.storage import faults

    def connect(config, _):
        handlers = {name: handler_of(folder) for name, folder in folders.items()}
        return federated(config, signed(InProcess(handlers)), "in_process", "fed")

    monkeypatch.setattr(sites_of, "federation_of", connect)
    asked = merge(FAST, {"algorithm.name": "scaffold", "run.rounds": 4})
    first = coterie.run(asked, federation="fed", out=tmp_path / "first")
    seen = []

    class DiedError(BaseException):
        pass

    def at(name):
        seen.append(name)
        if name == "round.aggregated" and seen.count(name) == killed:
            raise DiedError

    with monkeypatch.context() as patch:
        patch.setattr(faults, "at", at)
        with pytest.raises(DiedError):
            coterie.run(asked, federation="fed", out=tmp_path / "second")
    again = coterie.resume(tmp_path / "second")
    assert again.summary["digest"] == first.summary["digest"]
    assert not any(line["rejected"] for line in again.lines)


# ---- hostile requests ----------------------------------------------------------------------------


class Told(logging.Handler):
    """What a site's log says."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.records = []

    def emit(self, record):
        self.records.append(record)


def other_arrays(message, draws):
    """The same head with arrays of other types and shapes."""
    head, body = decode(message, vocabulary(METHODS["fedavg"]()))

    def other(leaf):
        how = draws.randrange(4)
        if how == 0:
            return leaf.to(draws.choice([torch.bfloat16, torch.int64, torch.bool]))
        return leaf[None] if how == 1 else leaf.flatten()[:1] if how == 2 else leaf

    return encode(Message(head, map_leaves(other, body)))


def deep(message, draws):
    """A head whose fields are nested almost as deeply as Python can follow."""
    head = read_head(message)
    nested = draws.randrange(300, 1000)
    text = json.dumps(dict(head) | {draws.choice([*head]): "HERE"})
    text = text.replace('"HERE"', "[" * nested + "]" * nested)
    whole = f'{{"head": {text}, "body": {{"()": []}}}}'.encode()
    return len(whole).to_bytes(8, "little") + whole + save({})


KINDS = ("who", "ask", "describe", "divide", "agree", "judge", "local", "predict")


@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_request_of_every_kind_is_refused_without_a_traceback(
    asked_of_a_site, kind, count
):
    attacker, messages = asked_of_a_site
    log, told = logging.getLogger("coterie.deploy"), Told()
    log.addHandler(told)
    draws = random.Random(kind)
    of_kind = [one for one in messages if read_head(one)["kind"] == kind]
    try:
        for at in range(count):
            change = (mutated, mutated, other_arrays, deep)[at % 4]
            reply = attacker.ask(change(draws.choice(of_kind), draws))
            found = refused_by(reply)
            assert found is not None or change is other_arrays
            assert found is None or "Traceback" not in found[1]
    finally:
        log.removeHandler(told)
    assert len(told.records) > count / 4
    assert not any(record.exc_info for record in told.records)


@pytest.fixture(scope="module")
def asked_of_a_site(tmp_path_factory):
    home = tmp_path_factory.mktemp("requests")
    folders = site_folders(home / "fed", write_tables(home / "data"))
    transport = Recorded({name: handler_of(folder) for name, folder in folders.items()})
    transport.every = True
    done = setting_of(ASKED, transport)
    executed(done)
    messages = [one[HEAD:] for one in transport.kept]
    (name,) = (path.name for path in folders["ash"].experiments.iterdir())
    messages.append(setup_message("judge", {"metric": "accuracy", "pairs": [[name, name]]}))
    return Attacker(folders), messages


# ---- what one could still ask for ----------------------------------------------------------------


def without_names(path):
    path.write_text(path.read_text().replace(",ill", ",1").replace(",well", ",0"))


def test_classes_are_counted_for_nobody_who_calls_them_a_quantity(folders, tmp_path):
    """The sum of a target of 0 and 1 is the number of ones, which needs [consent] counts."""
    for path in (tmp_path / "data").glob("*.csv"):
        without_names(path)
    attacker = Attacker(folders)
    attacker.approved()
    schema = json.loads(attacker.schema())
    schema["target"] |= {"kind": "quantity", "classes": []}
    answer = attacker.divide(schema=json.dumps(schema))
    assert "counts" in refused_by(answer)[1]
    folders["ash"] = edited(folders["ash"], ("counts = false", "counts = true"))
    attacker.restart()
    assert refused_by(attacker.divide(schema=json.dumps(schema))) is None


def images_of(home, consent):
    """Two sites of 120 images of three classes."""
    draws = np.random.default_rng(0)
    x, y = draws.integers(0, 255, (120, 1, 4, 4)).astype("uint8"), np.arange(120) % 3
    fed, made = FederationFolder.create(home / "fed", "localhost:9092"), {}
    for name in ("ash", "birch"):
        np.savez(home / f"{name}.npz", x_train=x, y_train=y)
        folder = SiteFolder.create(home / name, fed.invite, name)
        fed.add_site(folder.public, name)
        made[name] = edited(
            folder,
            ("[data]\n", f'[data]\nname = "{home / name}.npz"\n'),
            ("automatic = []", 'automatic = ["*"]'),
            (f"{consent} = false", f"{consent} = true"),
        )
    return made, x, y


@pytest.mark.parametrize("rows", [1, 30])
def test_counts_of_classes_never_differ_by_a_few_rows(tmp_path, rows):
    """Images have no sums that would be refused: the class of the newest patient was read off."""
    folders, x, y = images_of(tmp_path, "counts")
    attacker = Attacker(folders)
    attacker.approved()
    before = attacker.report().classes
    assert sum(before) == 96
    np.savez(
        tmp_path / "ash.npz",
        x_train=np.concatenate([x, x[:rows] ^ 1]),
        y_train=np.concatenate([y, np.full(rows, 2)]),
    )
    attacker.restart()
    answer = attacker.divide()
    if rows == 1:
        trained = len_of_train(attacker) + len_of_val(attacker)
        assert refused_by(answer) is not None or trained == 96
        return
    after = payload_of(answer, DivisionReport).classes
    assert after[:2] == before[:2]
    assert after[2] >= before[2] + 20


def len_of_val(attacker):
    folder = attacker.folders["ash"]
    holdings = Holdings(folder, folder.data.name, folder.data.options)
    return int((holdings.parts == 1).sum())


def test_a_set_of_rows_is_one_release_whatever_it_is_asked_by(folders, tmp_path):
    """Empty columns may be named in many ways; each was a release, with noise of its own."""
    path = tmp_path / "data" / "ash.csv"
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([f"{head},e,f", *(f"{line},," for line in lines)]) + "\n")
    attacker = Attacker(folders)
    attacker.approved()
    for kinds in (("numbers", "levels"), ("levels", "numbers"), ("numbers", "numbers")):
        schema = json.loads(attacker.schema())
        for column, kind in zip(schema["columns"][-2:], kinds, strict=True):
            column |= {"kind": kind, "levels": ["(missing)"] if kind == "levels" else []}
            column |= {"missing": kind == "numbers"}
        answer = attacker.divide(schema=json.dumps(schema))
        assert refused_by(answer) is None, refused_by(answer)
    assert len([*(folders["ash"].path / "division").glob("release-*")]) == 1


def test_a_table_without_numbers_is_divided(folders, tmp_path):
    for path in (tmp_path / "data").glob("*.csv"):
        lines = [line.split(",")[2:] for line in path.read_text().splitlines()]
        path.write_text("\n".join(map(",".join, lines)) + "\n")
    handlers = {name: handler_of(folder) for name, folder in folders.items()}
    there = executed(setting_of(ASKED, InProcess(handlers)))
    here = simulated(exported(folders, tmp_path / "exported"), ASKED)
    assert there.summary["digest"] == here.summary["digest"]


def test_what_is_wrong_with_a_sites_own_options_stays_there(folders):
    """The names of its columns were in the answer to the first question, before any approval."""
    folders["ash"] = edited(folders["ash"], ('target = "label"', ""))
    reply = Attacker(folders).ask(setup_message("who", Nothing()))
    assert refused_by(reply) is not None
    assert not re.search(rb"label|kind|ash\.csv", reply)


@pytest.mark.parametrize(
    "changes",
    [
        {"adapt.name": "ft", "adapt.epochs": 10**6},
        {"algorithm.name": "fedrep", "algorithm.head_epochs": 10**6},
        {"algorithm.name": "pfedme", "algorithm.inner_steps": 10**6},
        {"algorithm.name": "ditto"},
    ],
)
def test_passes_of_a_methods_own_are_within_the_request(folders, changes):
    """The last one is within it: the agreement is made."""
    asked = merge(ASKED, changes)
    setting = setting_of(
        merge(ASKED, {"algorithm.name": asked["algorithm"]["name"]}),
        InProcess({name: handler_of(folder) for name, folder in folders.items()}),
    )
    made = setting._agreement(Plan.single(setting.config, None).cells[0])
    terms = replace(made, config=json.dumps(merge(json.loads(made.config), changes)))
    reply = refused_by(Attacker(folders).ask(setup_message("agree", Proposal(terms.to_json()))))
    if len(changes) > 1:
        assert reply[0] == "policy"
        assert "epochs" in reply[1]
    else:
        assert reply is None


@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": 10**400},
        {"epochs": -1},
        {"folds": 10**6},
        {"methods": ("\x1b[2J",)},
        {"clients": ("ash", "x" * 10**5)},
    ],
)
def test_a_request_of_numbers_and_names_that_cannot_be_is_not_kept(folders, changes):
    attacker = Attacker(folders)
    told = json.dumps(json.loads(attacker.request.to_json()) | changes)
    assert attacker.reason(setup_message("ask", Ask(told))) == "refused"
    assert not [*folders["ash"].path.glob("requests/*"), *folders["ash"].path.glob("approvals/*")]


def test_requests_that_are_approved_by_themselves_share_their_number_of_experiments(folders):
    folders["ash"] = edited(folders["ash"], ("experiments = 100000 ", "experiments = 2 "))
    handlers = {name: handler_of(folder) for name, folder in folders.items()}
    agreed = 0
    for rounds in range(3, 8):
        setting = setting_of(merge(ASKED, {"run.rounds": rounds}), InProcess(handlers))
        made = setting._agreement(Plan.single(setting.config, None).cells[0])
        answer = Attacker(folders).ask(setup_message("agree", Proposal(made.to_json())))
        agreed += refused_by(answer) is None
    assert agreed == 2


def test_a_line_that_was_cut_off_when_the_power_failed_was_not_answered(finished):
    attacker, messages = finished
    (path,) = attacker.folders["ash"].experiments.glob("*/asked.jsonl")
    whole = path.read_text()
    path.write_text(whole + '["local", 2, "ab')
    attacker.restart()
    assert attacker.reason(messages[-1]) is None
    lines = path.read_text().splitlines()
    assert lines[: whole.count("\n")] == whole.splitlines()
    assert all(len(json.loads(line)) == 5 for line in lines)


@pytest.mark.parametrize("method", ["federico", "fedem", "circle"])
def test_whose_models_a_site_uses_leaves_with_its_consent_alone(folders, method):
    """The weights of its predictor left with its scores, whatever [consent] shown said."""
    folders["ash"] = edited(folders["ash"], ("shown = true", "shown = false"))
    types, told = vocabulary(METHODS[method]()), []

    def seen(name, round, answer):
        if name == "ash" and round >= 0:
            _, found = decode(answer, types).body
            told.append(found if "state" in read_head(answer) else found.weights.tolist())
        return answer

    handlers = {name: handler_of(folder) for name, folder in folders.items()}
    executed(setting_of(merge(ASKED, {"algorithm.name": method}), InProcess(handlers, seen)))
    assert all(one in ((), [1.0]) for one in told)
    assert [1.0] in told


def test_a_private_round_is_answered_in_one_form(folders):
    """Another form would cost an epsilon that nobody counts."""
    transport = Recorded({name: handler_of(folder) for name, folder in folders.items()})
    asked = merge(ASKED, {"privacy": {"noise": 1.0}})

    def stop(name, round, answer):
        if round == 1:
            raise KeyboardInterrupt
        return answer

    transport.spoil = stop
    with pytest.raises(KeyboardInterrupt):
        executed(setting_of(asked, transport))
    first, attacker = transport.kept[0][HEAD:], Attacker(folders)
    assert attacker.reason(first) is None
    assert attacker.reason(changed(first, metric="f1")) == "wrong_round"


def test_an_older_end_that_comes_again_replaces_no_model(finished):
    attacker, messages = finished
    last = messages[-1]
    (model,) = attacker.folders["ash"].experiments.glob(f"*/{MODEL}")
    model.write_bytes(b"that of a later form")
    (model.parent / "reply.bin").unlink()
    assert attacker.reason(last) is None
    assert model.read_bytes() == b"that of a later form"


# ---- memory and disk -----------------------------------------------------------------------------


def test_messages_that_come_again_fill_no_disk(finished):
    """Whoever passes a site's messages on may repeat them for ever."""
    attacker, messages = finished
    experiments = attacker.folders["ash"].experiments
    before = contents(experiments)
    for _ in range(3):
        for message in messages:
            assert attacker.reason(message) is None
    assert contents(experiments) == before


def test_a_full_site_answers_no_more_and_writes_nothing(finished):
    attacker, messages = finished
    attacker.folders["ash"] = edited(attacker.folders["ash"], ("disk_mib = 50000", "disk_mib = 1"))
    attacker.restart()
    folder = attacker.folders["ash"]
    assert attacker.reason(messages[-1]) is None
    (folder.experiments / "states.bin").write_bytes(bytes(2**20))
    before = contents(folder.path)
    for message in (messages[-1], setup_message("who", Nothing())):
        assert attacker.reason(message) == "policy"
    assert contents(folder.path) == before


def test_requests_that_are_approved_by_themselves_are_bounded(folders, monkeypatch):
    monkeypatch.setattr(approval, "MOST_APPROVED", 3)
    attacker = Attacker(folders)
    for rounds in range(1, 4):
        asked = replace(attacker.request, rounds=rounds)
        assert attacker.reason(setup_message("ask", Ask(asked.to_json()))) is None
    asked = replace(attacker.request, rounds=4)
    assert attacker.reason(setup_message("ask", Ask(asked.to_json()))) == "policy"


def test_before_an_approval_only_small_messages_are_read(folders):
    folders["ash"] = edited(folders["ash"], ('automatic = ["*"]', "automatic = []"))
    attacker = Attacker(folders)
    asked = setup_message("ask", Ask(attacker.request.to_json()))
    assert attacker.reason(asked) == "not_approved"
    assert attacker.handler.largest() == 2**20
    Approvals(folders["ash"]).approve(attacker.request.id, {})
    assert attacker.handler.largest() == 2**30


TAKES = """
import sys
sys.path.insert(0, sys.argv[1])
import json, os
from dataclasses import replace
from pathlib import Path
from coterie.deploy import running
from test_site_law import *
running.SHARE = 1.5 * 2**30 / (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
running._leave_memory()
folders = site_folders(Path(sys.argv[2]) / "fed", write_tables(Path(sys.argv[2]) / "data"))
handlers = {name: handler_of(folder) for name, folder in folders.items()}
asked = merge(ASKED, {"algorithm.name": "ifca"})
setting = setting_of(asked, InProcess(handlers))
made = setting._agreement(Plan.single(setting.config, None).cells[0])
large = {"algorithm.ifca": {"k": 200, "start": "redraw"}, "model.hidden": [880, 880]}
terms = replace(made, config=json.dumps(merge(json.loads(made.config), large)))
attacker = Attacker(folders)
said = attacker.ask(setup_message("agree", Proposal(terms.to_json())))
print(refused_by(said))
"""


def test_an_agreement_that_needs_more_memory_than_there_is_is_refused(tmp_path):
    """Two gigabytes of models here; of a machine's size, and its other programs were killed."""
    command = [sys.executable, "-c", TAKES, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "failed (RuntimeError)" in done.stdout, (done.returncode, done.stdout, done.stderr)
