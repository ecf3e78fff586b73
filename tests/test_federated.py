"""A federation of sites gives what the simulator gives, and nothing else leaves a site."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coterie
from coterie.core import tree
from coterie.deploy import federated as sites_of
from coterie.deploy.federated import federated
from coterie.deploy.folders import FederationFolder
from coterie.deploy.handler import SiteHandler
from coterie.deploy.holdings import Holdings, told_counts
from coterie.deploy.protocol import Nothing, Proposal, Signed, setup_message
from coterie.deploy.site_folder import SiteFolder
from coterie.deploy.terms import SiteCounts
from coterie.engines.codec import Message, decode, digest, encode, read_head, refused_by, vocabulary
from coterie.errors import ConfigError, EngineError, StoreError
from coterie.runs.config.loading import load, merge
from coterie.runs.plan import Plan
from coterie.storage import faults
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


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    return write_tables(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize(
    ("method", "participation"), [("fedfomo", 1.0), ("fedper", 0.67), ("federico", 0.67)]
)
def test_sites_give_the_digest_of_the_simulator(tables, tmp_path, method, participation):
    asked = merge(FAST, {"algorithm.name": method, "run.participation": participation})
    folders = site_folders(tmp_path, tables)
    here = simulated(exported(folders, tmp_path / "exported"), asked)
    there = executed(setting_of(asked, InProcess({n: handler_of(f) for n, f in folders.items()})))
    assert there.summary["digest"] == here.summary["digest"]


@pytest.mark.slow
@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("method", sorted({*METHODS} - {"fedavg_data"}))
def test_every_method_gives_the_digest_of_the_simulator(tables, tmp_path, method, participation):
    asked = merge(FAST, {"algorithm.name": method, "run.participation": participation})
    asked = merge(asked, {"run.rounds": 4})
    folders = site_folders(
        tmp_path, tables, ("shown", METHODS[method]().traits.discloses or "shown")
    )
    here = simulated(exported(folders, tmp_path / "exported"), asked)
    there = executed(setting_of(asked, InProcess({n: handler_of(f) for n, f in folders.items()})))
    assert there.summary["digest"] == here.summary["digest"]
    for name in ("bytes_up", "bytes_down"):
        assert there.summary[name] == here.summary[name]
    assert len(there.matrices) == len(here.matrices)
    for ours, theirs in zip(there.matrices, here.matrices, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("what", ["a peer", "the state"])
def test_the_digest_is_sensitive_to_what_peers_send_and_to_the_state(tables, tmp_path, what):
    """Without this, sites that train alone or forget would pass as equal."""
    asked = merge(FAST, {"algorithm.name": "ditto"})
    folders = site_folders(tmp_path, tables)
    handlers = {n: handler_of(f) for n, f in folders.items()}
    whole = simulated(exported(folders, tmp_path / "exported"), asked).summary["digest"]

    def spoil(name, round, answer):
        if name != "birch" or round != 1 or "state" not in read_head(answer):
            return answer
        if what == "a peer":
            return "lost"
        message = decode(answer, vocabulary(METHODS["ditto"]()))
        first = min((tmp_path / "birch" / "experiments").rglob("states/*.bin"))
        head = {**message.head, "state": first.stem.partition("-")[2]}
        return encode(Message(head, message.body))

    there = executed(setting_of(asked, InProcess(handlers, spoil)))
    assert there.summary["digest"] != whole


# ---- a run's folder, a comparison, a resumed run -------------------------------------------------


class Joined:
    """Sites in this process that ``coterie.run(federation=...)`` reaches."""

    def __init__(self, home, tables, monkeypatch, consent=("shown", "scores")):
        self.folders = site_folders(home, tables, consent)
        self.transport = None
        self.spoil = None
        self.fed = str(home / "fed")
        monkeypatch.setattr(sites_of, "federation_of", self.connect)

    def connect(self, config, transport=None):
        handlers = {name: handler_of(folder) for name, folder in self.folders.items()}
        self.transport = InProcess(handlers, self.spoil)
        return federated(config, signed(self.transport), "in_process", "fed")

    @property
    def exported(self):
        """The sites' data as they divided it, as one folder for a simulation."""
        place = next(iter(self.folders.values())).path.parent / "exported"
        return exported(self.folders, place)


@pytest.fixture
def joined(tables, tmp_path, monkeypatch):
    return Joined(tmp_path, tables, monkeypatch)


def test_a_run_leaves_the_folder_of_a_simulation_without_models(joined, tables, tmp_path):
    asked = merge(FAST, {"algorithm.name": "fedfomo"})
    there = coterie.run(asked, federation=joined.fed, out=tmp_path / "there")
    here = simulated(joined.exported, asked, out=tmp_path / "here")
    names = {p.name for p in there.path.iterdir()}
    assert {p.name for p in here.path.iterdir()} - names == {
        "models.safetensors",
        "predictions.npz",
    }
    assert coterie.verify(there.path) == {str(there.path): []}
    for name in ("clients.csv",):
        assert (there.path / name).read_text() == (here.path / name).read_text()
    for ours, theirs in zip(there.matrices, here.matrices, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(StoreError, match="at the sites"):
        there.mixture()
    assert coterie.read(there.path).summary == there.summary


def test_models_are_collected_only_with_the_sites_consent(tables, tmp_path, monkeypatch):
    asked = merge(FAST, {"algorithm.name": "fedper"})
    consenting = Joined(tmp_path / "a", tables, monkeypatch, ("shown", "models"))
    there = coterie.run(asked, federation=consenting.fed, collect=True)
    here = simulated(consenting.exported, asked)
    assert torch.equal(there.mixture().models, here.mixture().models)
    silent = Joined(tmp_path / "b", tables, monkeypatch)
    there = coterie.run(asked, federation=silent.fed, collect=True)
    assert there.held is None
    assert there.summary["digest"] == simulated(silent.exported, asked).summary["digest"]


def test_a_method_that_shares_raw_samples_is_refused(joined):
    with pytest.raises(ConfigError, match="sends raw samples of every site"):
        coterie.run(merge(FAST, {"algorithm.name": "fedavg_data"}), federation=joined.fed)


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name]().traits.discloses])
def test_statistics_of_the_data_leave_only_with_consent_by_name(
    tables, tmp_path, monkeypatch, method
):
    asked, name = merge(FAST, {"algorithm.name": method}), METHODS[method]().traits.discloses
    silent = Joined(tmp_path / "a", tables, monkeypatch, ("shown",))
    with pytest.raises(EngineError, match=rf"'ash' refused: .*\[consent\] {name} is false"):
        coterie.run(asked, federation=silent.fed)
    consenting = Joined(tmp_path / "b", tables, monkeypatch, ("shown", name))
    there = coterie.run(asked, federation=consenting.fed)
    assert there.summary["digest"] == simulated(consenting.exported, asked).summary["digest"]


def test_a_comparison_judges_at_the_sites(joined, tables, tmp_path):
    asked = merge(FAST, {"run.methods": ["fedamp"], "run.seeds": 2})
    there = coterie.compare(asked, federation=joined.fed, out=tmp_path / "there")
    here = coterie.compare(
        asked,
        data=str(joined.exported),
        engine="loop",
        set={"data.target": "label", "data.split": "part"},
    )
    assert there.judgements == here.judgements
    assert there.verdict == here.verdict
    assert coterie.read(there.path).judgements == here.judgements
    assert not any(coterie.verify(there.path).values())


def test_folds_are_judged_at_the_sites(tables, tmp_path, monkeypatch):
    """Each row tests once; the sites answer about all of them, and send sums and classes once."""
    joined = Joined(tmp_path, tables, monkeypatch, ("shown", "counts"))
    asked = merge(FAST, {"run.methods": ["fedamp"], "run.folds": 3})
    found = coterie.compare(asked, federation=joined.fed, out=tmp_path / "out")
    tested = {one.client: one.gain.samples for one in found.judgements["fedamp"].clients}
    assert tested == {"ash": 60, "birch": 47, "cedar": 80}
    assert "the models of 3 folds" in found.verdict
    lines = (joined.folders["ash"].path / "sent.jsonl").read_text()
    assert lines.count("sums") == lines.count("samples of each class") == 1
    assert "of each of 3 trainings and of all" in lines
    assert coterie.read(found.path).judgements == found.judgements


def test_the_automatic_metric_comes_from_counts_that_may_leave(tmp_path):
    """AUC where both classes of a site may be counted and one is rare; accuracy otherwise."""
    for rare, consent, metric in (
        (25, ("counts",), "auc"),
        (25, ("shown",), "accuracy"),
        (120, ("counts",), "accuracy"),
    ):
        data = tmp_path / f"{rare}{consent[0]}"
        for path in write_tables(data, rows=(240,) * 3).glob("*.csv"):
            head, *lines = path.read_text().splitlines()
            cut = [line.rpartition(",")[0] for line in lines]
            told = [f"{row},{'ill' if at < rare else 'well'}" for at, row in enumerate(cut)]
            path.write_text("\n".join([head, *told]) + "\n")
        folders = site_folders(data / "home", data, consent)
        found = setting_of(FAST, InProcess({n: handler_of(f) for n, f in folders.items()}))
        assert found.config.run.metric == metric


def test_no_count_of_a_class_follows_from_the_others():
    assert told_counts([30, 12, 4, 0], [True, True, False, False]) == (30, 0, 0, 0)
    assert told_counts([30, 4], [True, False]) == (0, 0)
    assert told_counts([30, 4, 3], [True, False, False]) == (30, 0, 0)
    assert told_counts([30, 0], [True, False]) == (30, 0)


@pytest.mark.parametrize("point", ["round.aggregated", "log.done", "finish.models"])
def test_a_dead_coordinator_goes_on_where_it_was(joined, tables, tmp_path, monkeypatch, point):
    asked = merge(FAST, {"algorithm.name": "scaffold", "run.rounds": 4})
    whole = simulated(joined.exported, asked)
    monkeypatch.setattr(faults, "at", dies_at(point, 3 if point != "finish.models" else 1))
    with pytest.raises(Died):
        coterie.run(asked, federation=joined.fed, out=tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(sites_of, "federation_of", joined.connect)
    again = coterie.resume(tmp_path / "out")
    assert again.summary["digest"] == whole.summary["digest"]
    assert not any(coterie.verify(again.path).values())


class Died(BaseException):
    pass


def dies_at(point, time):
    seen = []

    def at(name):
        seen.append(name)
        if name == point and seen.count(name) == time:
            raise Died

    return at


# ---- what goes wrong at sites and on the way -----------------------------------------------------


def test_a_site_that_is_lost_for_a_round_keeps_its_state_and_comes_back(joined):
    asked = merge(FAST, {"algorithm.name": "scaffold"})
    joined.spoil = lambda name, round, answer: "lost" if (name, round) == ("birch", 1) else answer
    found = coterie.run(asked, federation=joined.fed)
    lines = found.lines
    assert {"client": "birch", "reason": "lost"} in lines[1]["rejected"]
    assert lines[2]["rejected"] == []
    assert np.isfinite(found.last).all()


@pytest.mark.parametrize("how", ["noise", "cut", "empty", "other"])
def test_a_bad_reply_never_takes_the_coordinator_down(joined, how):
    spoilt = {
        "noise": lambda answer: bytes(range(256)),
        "cut": lambda answer: answer[: len(answer) // 2],
        "empty": lambda answer: b"",
        "other": lambda answer: encode(Message({"round": 0}, (torch.ones(2),))),
    }[how]
    joined.spoil = lambda name, round, answer: (
        spoilt(answer) if name == "ash" and round >= 0 else answer
    )
    found = coterie.run(merge(FAST, {"algorithm.name": "fedavg"}), federation=joined.fed)
    reasons = {r["reason"] for line in found.lines for r in line["rejected"]}
    assert reasons <= {"unreadable", "fields", "wrong_round"}
    assert reasons
    assert np.isnan(found.last[0])
    assert np.isfinite(found.last[1:]).all()


def test_poison_is_refused_as_in_the_simulator(joined):
    def spoil(name, round, answer):
        head = read_head(answer)
        if name != "ash" or "state" not in head or round != 1:
            return answer
        message = decode(answer, vocabulary(METHODS["fedavg"]()))
        upload, shown = message.body
        spoilt = tree.map_leaves(
            lambda leaf: leaf * torch.nan if leaf.is_floating_point() else leaf, upload
        )
        return encode(Message(message.head, (spoilt, shown)))

    joined.spoil = spoil
    found = coterie.run(merge(FAST, {"algorithm.name": "fedavg"}), federation=joined.fed)
    assert {"client": "ash", "reason": "not_finite"} in found.lines[1]["rejected"]
    assert found.lines[2]["rejected"] == []


@pytest.mark.parametrize("how", ["lost", "flipped"])
def test_a_state_that_is_not_as_it_was_is_a_reason_and_never_a_new_start(joined, how):
    done = []

    def spoil(name, round, answer):
        if (name, round) == ("cedar", 1) and "state" in read_head(answer):
            for path in joined.folders["cedar"].experiments.rglob("states/*.bin"):
                data = path.read_bytes()
                path.unlink() if how == "lost" else path.write_bytes(data[:-1] + b"\x00")
                done.append(path)
        return answer

    joined.spoil = spoil
    found = coterie.run(merge(FAST, {"algorithm.name": "ditto"}), federation=joined.fed)
    assert done
    assert {"client": "cedar", "reason": "stale_state"} in found.lines[2]["rejected"]
    assert np.isnan(found.last[2])


def test_a_message_that_comes_again_is_answered_alike(joined):
    asked = merge(FAST, {"algorithm.name": "fedfomo"})
    kept = {}

    class Twice(InProcess):
        def ask(self, requests, round):
            first, second = super().ask(requests, round), super().ask(requests, round)
            if round >= 0:
                assert first == second
                kept[round] = first
            return second

    handlers = {name: handler_of(folder) for name, folder in joined.folders.items()}
    twice = executed(setting_of(asked, Twice(handlers)))
    once = coterie.run(asked, federation=joined.fed)
    assert twice.summary["digest"] == once.summary["digest"]
    assert len(kept) == 4


def operator(joined, message, site="ash"):
    """A message to a site that the federation's operator has signed."""
    key = FederationFolder.open(Path(joined.fed)).operator_key()
    return Signed(None, key, "fed")._signed(site, message)


# ---- a site's own rules --------------------------------------------------------------------------


def refused(joined, message):
    answer = handler_of(joined.folders["ash"]).answer(operator(joined, message))
    found = refused_by(answer)
    assert found is not None
    return found


def test_foreign_names_of_code_are_never_imported(joined, tmp_path, monkeypatch):
    (tmp_path / "evil.py").write_text("open('canary', 'w').close()\nclass Net: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    for field, value in (("model.name", "evil:Net"), ("algorithm.name", "evil:Net")):
        agreement = proposal(joined, {field: value})
        reason, why = refused(joined, agreement)
        assert reason == "refused"
        assert "evil" in why
    assert not (tmp_path / "canary").exists()


def proposal(joined, changes, **fields):
    """An agreement as the coordinator makes it, with a changed config."""
    setting = joined.connect(load(FAST, {"run.federation": joined.fed}))
    made = setting._agreement(Plan.single(setting.config, None).cells[0])
    config = merge(json.loads(made.config), changes)
    return setup_message(
        "agree", Proposal(replace(made, config=json.dumps(config), **fields).to_json())
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data.name": "/etc/passwd"}, "cannot set at a site"),
        ({"partition.name": "iid"}, "cannot set at a site"),
        ({"run.out": "/tmp/x"}, "cannot set at a site"),
        ({"engine.name": "loop"}, "cannot set at a site"),
        ({"model.hidden": [90_000, 90_000]}, "bytes"),
        ({"train.lr": -1}, "train.lr"),
        ({"algorithm.name": "fedavg_data"}, "raw samples"),
    ],
)
def test_a_site_refuses_what_is_not_the_coordinators_to_say(joined, changes, why):
    reason, told = refused(joined, proposal(joined, changes))
    assert reason == "refused"
    assert why in told


def test_a_site_refuses_other_counts_and_other_clients(joined):
    counts = (SiteCounts(1, 1, 1),) * 3
    assert "its data gives" in refused(joined, proposal(joined, {}, counts=counts))[1]
    names = ("oak", "birch", "cedar")
    assert refused(joined, proposal(joined, {}, clients=names))[0] == "wrong_client"


@pytest.mark.parametrize("kind", ["local", "predict"])
def test_an_experiment_that_was_not_agreed_to_is_refused(joined, kind):
    for name in ("", "0" * 64, "../../etc", "A" * 64):
        head = {"kind": kind, "experiment": name, "client": 0, "base": "0" * 64}
        head |= {"round": 0, "horizon": 1, "metric": "accuracy", "last": False}
        assert refused(joined, encode(Message(head)))[0] in ("not_agreed", "unreadable")


@given(data=st.binary(max_size=300))
@settings(max_examples=50, deadline=None)
def test_bytes_of_strangers_are_refused_and_fill_no_disk(data, site):
    assert refused_by(site.handler.answer(data))[0] == "unsigned"
    assert not site.folder.sent.exists()


@pytest.fixture(scope="module")
def site(tmp_path_factory, tables):
    folder = site_folders(tmp_path_factory.mktemp("one"), tables)["ash"]
    return SimpleNamespace(folder=folder, handler=handler_of(folder))


def test_a_cell_of_the_data_is_never_told(joined, tables, tmp_path):
    """A site whose file is broken says so in its own log; the coordinator learns no cell."""
    folder = joined.folders["ash"]
    broken = tmp_path / "broken.csv"
    broken.write_text((tables / "ash.csv").read_text() + "SECRET-CELL,1,x,ill\n")
    handler = SiteHandler(folder, Holdings(folder, str(broken), {"target": "label"}))
    answer = handler.answer(operator(joined, setup_message("who", Nothing())))
    assert refused_by(answer) is not None
    assert b"SECRET" not in answer


def test_every_answer_is_in_the_sites_log_with_its_size_and_hash(joined):
    sent = []
    joined.spoil = lambda name, round, answer: (
        (sent.append((len(answer), digest(answer))) if name == "birch" else None) or answer
    )
    coterie.run(merge(FAST, {"algorithm.name": "fedavg"}), federation=joined.fed)
    lines = [json.loads(x) for x in joined.folders["birch"].sent.read_text().splitlines()]
    assert [(line["bytes"], line["sha256"]) for line in lines] == sent
    assert [line["kind"] for line in lines if line["round"] is not None] == [
        "local",
        "predict",
    ] * 3


def test_noise_comes_from_the_sites_own_secret(tables, tmp_path, monkeypatch):
    """What a server could predict from the shared seed would protect nothing."""
    asked = merge(FAST, {"algorithm.name": "federico", "privacy.noise": 0.5})
    digests = set()
    for name in ("a", "b"):
        made = Joined(tmp_path / name, tables, monkeypatch)
        digests.add((run := coterie.run(asked, federation=made.fed)).summary["digest"])
    alike = simulated(made.exported, asked)
    assert len(digests | {alike.summary["digest"]}) == 3
    assert not run.summary["privacy"].pop("simulated")
    assert alike.summary["privacy"].pop("simulated")
    assert run.summary["privacy"] == alike.summary["privacy"]


def test_two_agreements_share_no_noise(joined):
    """Else two runs with other noise multipliers would differ by known shares of the same draw."""
    sent, found = {}, {}
    joined.spoil = lambda name, round, answer: (
        sent.setdefault(name, answer)
        if name == "birch" and "state" in read_head(answer)
        else answer
    )
    for noise in (0.0, 1.0, 2.0):
        sent.clear()
        asked = merge(FAST, {"algorithm.name": "fedavg", "privacy.noise": noise, "run.rounds": 1})
        coterie.run(merge(asked, {"train.batch": 1000}), federation=joined.fed)
        upload, _ = decode(sent["birch"], vocabulary(METHODS["fedavg"]())).body
        found[noise] = upload.w
    guess = 2 * found[1.0] - found[2.0]  # free of noise, if both drew the same
    assert (guess - found[0.0]).norm() > 0.5 * (found[1.0] - found[0.0]).norm()


def test_other_data_draws_other_noise_within_the_same_agreement(joined, tmp_path):
    """Else a round that is asked for again would tell what one changed row contributes."""
    table = tmp_path / "rows.csv"
    lines = Path(joined.folders["ash"].data.name).read_text()
    table.write_text(lines)
    place = joined.folders["ash"].path / "site.toml"
    place.write_text(place.read_text().replace(joined.folders["ash"].data.name, str(table)))
    joined.folders["ash"] = SiteFolder.open(place.parent)
    asked = {"algorithm.name": "fedavg", "privacy.noise": 1.0, "run.rounds": 1}
    coterie.run(merge(FAST, asked), federation=joined.fed)
    (agreed,) = joined.folders["ash"].experiments.iterdir()

    def secret():
        return handler_of(joined.folders["ash"]).experiment(agreed.name).experiment.problem.secret

    before = secret()
    assert secret() == before
    head, first, *rest = lines.splitlines()
    other = first.replace("ill", "well") if "ill" in first else first.replace("well", "ill")
    table.write_text("\n".join([head, other, *rest]) + "\n")
    assert secret() != before


@pytest.mark.parametrize("method", ["fedper", "lgfedavg", "local"])
def test_no_byte_of_what_stays_at_a_site_is_in_a_message_or_elsewhere(
    joined, tables, tmp_path, method
):
    """Private heads are in no message, not in the run's folder, and at no other site."""
    messages = []
    joined.spoil = lambda name, round, answer: messages.append((name, answer)) or answer
    asked = merge(FAST, {"algorithm.name": method, "train.precision": "float64"})
    found = coterie.run(asked, federation=joined.fed, out=tmp_path / "out")
    models = simulated(joined.exported, asked).mixture().models[:, 0]  # [K, P]: the same bits
    setting = joined.connect(load(asked, {"run.federation": joined.fed}))
    problem = setting.prepare(METHODS[method](), setting.config).problem
    private = private_places(method, problem.model)
    for at, name in enumerate(found.roster.clients):
        trained = models[at] != problem.start  # every site knows the numbers it starts from
        pairs = [slice(i, i + 2) for i in private if trained[i : i + 2].all()]
        windows = [models[at, pair].numpy().tobytes() for pair in pairs]
        assert windows
        elsewhere = [answer for _, answer in messages]
        for other, folder in joined.folders.items():
            if other != name:
                elsewhere += [p.read_bytes() for p in folder.path.rglob("*") if p.is_file()]
        elsewhere += [p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()]
        assert not any(window in data for window in windows for data in elsewhere)
        own = [p.read_bytes() for p in joined.folders[name].path.rglob("*") if p.is_file()]
        assert all(any(window in data for data in own) for window in windows)  # a real search


def private_places(method, model):
    """Places of the vector whose pairs of neighbours never leave a site."""
    layers = model.layers()
    own = {"local": layers, "lgfedavg": layers[:-1]}.get(method, layers[-1:])
    inside = [s for s in model.slots if model.owner(s) in own]
    return [i for slot in inside for i in range(slot.start, slot.stop - 1)]
