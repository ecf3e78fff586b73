"""Decentralised FedeRiCo among sites: as the simulator, while the operator sees no model."""

import re

import pytest
import torch
from safetensors.torch import load_file

from coterie import cli
from coterie.core.algorithm import Mixture, client_digest
from coterie.deploy import peer_site, peers
from coterie.deploy.peer_site import PeerSite
from coterie.deploy.peers import run_among_peers
from coterie.deploy.protocol import HEAD, MAGIC
from coterie.deploy.site_folder import SiteFolder
from coterie.deploy.site_model import export_site
from coterie.engines.codec import Message, decode, encode, refusal, refused_by
from coterie.engines.site import MODEL
from coterie.errors import ConfigError, EngineError
from coterie.runs.config.loading import load, merge
from coterie.runs.stored import combined_digest
from sites import (
    FAST,
    NAMES,
    InProcess,
    exported,
    handler_of,
    simulated,
    site_folders,
    write_tables,
)

METHOD = {"name": "federico", "downloads": 2, "loss_reduction": "mean"}
ASKED = merge(FAST, {"algorithm": METHOD})


def partners(folders):
    """Every owner writes the other sites' box keys into site.toml."""
    boxes = {name: folder.public_part().box for name, folder in folders.items()}
    for folder in folders.values():
        path = folder.path / "site.toml"
        lines = "".join(f'{n} = "{box}"\n' for n, box in boxes.items() if n != folder.name)
        path.write_text(path.read_text().replace("\n[partners]\n", f"\n[partners]\n{lines}"))
    return {name: SiteFolder.open(folder.path) for name, folder in folders.items()}


@pytest.fixture(autouse=True)
def never_waits(monkeypatch):
    """No round here waits for more sites."""

    def waits(seconds):
        raise AssertionError("a round waits")

    monkeypatch.setattr(peers.time, "sleep", waits)


@pytest.fixture
def folders(tmp_path):
    return partners(site_folders(tmp_path / "fed", write_tables(tmp_path / "data")))


class Wire(InProcess):
    """Sites behind an operator who keeps all bytes that pass, and may do something with them."""

    def __init__(self, folders, attack=None):
        super().__init__({name: handler_of(folder) for name, folder in folders.items()}, attack)
        self.folders, self.seen, self.turns = folders, [], 0

    def ask(self, requests, round):
        found = super().ask(requests, round)
        self.seen += [*requests.values(), *(one for one in found.values() if one != "lost")]
        return found

    def close(self):
        """Sites stay when an operator ends."""

    def restart(self, name):
        self.handlers[name] = handler_of(self.folders[name])


def run(wire, out, asked=ASKED, notes=None):
    fed = next(iter(wire.folders.values())).path.parent / "fed"
    note = (lambda line: None) if notes is None else notes.append
    config = load(asked, {"run.federation": str(fed)})
    return run_among_peers(config, out, note, wire)


def predictors(folders):
    found = {}
    for name, folder in folders.items():
        (path,) = folder.experiments.glob(f"*/{MODEL}")
        tensors = load_file(path)
        found[name] = Mixture(tensors["weights"], tensors["models"])
    return found


def digest(folders):
    return combined_digest(client_digest(one) for one in predictors(folders).values())


def expected(folders, asked=ASKED):
    place = next(iter(folders.values())).path.parent / "exported"
    return simulated(exported(folders, place), asked).summary["digest"]


@pytest.mark.parametrize(
    "more",
    [{}, {"run.participation": 0.67}, {"algorithm.step": "gradient"}],
    ids=["whole", "part", "gradient"],
)
def test_sites_give_the_simulators_digests_and_the_operator_sees_no_model(folders, tmp_path, more):
    asked, wire = merge(ASKED, more), Wire(folders)
    run(wire, tmp_path / "out", asked)
    assert digest(folders) == expected(folders, asked)
    seen = b"".join(wire.seen)
    for name, one in predictors(folders).items():
        data = one.models.numpy().tobytes()
        pieces = [data[at : at + 16] for at in range(0, len(data) - 16, 64)]
        assert len(pieces) > 5
        assert not any(piece in seen for piece in pieces)
        export_site(folders[name], tmp_path / f"export-{name}")
        lines = folders[name].sent.read_text()
        assert '"messages for other sites, sealed"' in lines
        assert '"local"' not in lines


@pytest.mark.parametrize("turn", [3, 6, 9, 14])
def test_a_site_and_an_operator_that_are_killed_continue_and_nothing_changes(
    folders, tmp_path, turn
):
    """The site forgets what it has not written; the operator dies and begins again."""

    class DiedError(Exception):
        pass

    def attack(name, round, answer):
        wire.turns += round >= 0 and name == "birch"
        if name == "birch" and wire.turns == turn:
            wire.turns += 1
            wire.restart("birch")
            return "lost"
        if name == "cedar" and wire.turns == turn + 2 and not died:
            died.append(True)
            raise DiedError
        return answer

    died = []
    wire = Wire(folders, attack)
    with pytest.raises(DiedError):
        run(wire, tmp_path / "out")
    assert run(wire, tmp_path / "out").ended
    assert digest(folders) == expected(folders)


def test_a_site_that_is_lost_is_left_out_and_comes_back(folders, tmp_path):
    def attack(name, round, answer):
        return "lost" if (name, round) == ("ash", 1) else answer

    done = run(Wire(folders, attack), tmp_path / "out")
    assert done.rounds == (NAMES, ("birch", "cedar"), NAMES)


def test_a_site_that_accuses_all_others_is_left_out_itself(folders, tmp_path):
    """All whom a site could not open were left out, so that one site held a run up for ever."""

    def attack(name, round, answer):
        accuses = encode(Message({"missing": ["birch", "cedar"]}))
        return accuses if name == "ash" and round >= 1 else answer

    done = run(Wire(folders, attack), tmp_path / "out")
    assert done.ended
    assert done.rounds[1:] == (("birch", "cedar"),) * (len(done.rounds) - 1)


def test_a_run_among_peers_that_all_refuse_is_an_error(folders, tmp_path):
    wire = Wire(folders, lambda name, round, own: refusal("ended") if round >= 0 else own)
    with pytest.raises(EngineError, match="every site refuses"):
        run(wire, tmp_path / "out")


def flipped(answer):
    return answer[:-1] + bytes([answer[-1] ^ 1])


@pytest.mark.parametrize("how", ["flip", "redirect", "replay"])
def test_an_operator_who_changes_redirects_or_replays_changes_nothing(folders, tmp_path, how):
    """What is sealed opens for one step between two sites of one round; else all begin again."""
    old, done = [], []

    def attack(name, round, answer):
        if round < 0 or refused_by(answer) is not None or not decode(answer, {}).body:
            return answer
        head, body = decode(answer, {})
        old.append(body)
        if name != "cedar" or len(old) < 8 or done:
            return answer
        done.append(True)
        if how == "flip":
            return flipped(answer)
        return encode(Message(head, body[::-1] if how == "redirect" else old[2]))

    notes = []
    run(Wire(folders, attack), tmp_path / "out", notes=notes)
    assert done
    assert re.search("cannot open what|what it sealed cannot be opened", notes[0])
    assert digest(folders) == expected(folders)


ONE = torch.ones((), dtype=torch.float64)
LIES = {
    "not_finite": lambda like: (ONE, like * torch.nan),
    "shape": lambda like: (ONE, like[:1]),
    "dtype": lambda like: (ONE, like.double()),
    "outsized": lambda like: (5 * ONE, like),
    "fields": lambda like: ((),),
}


@pytest.mark.parametrize("reason", LIES)
def test_what_a_peer_lies_about_is_left_out(folders, tmp_path, monkeypatch, caplog, reason):
    whole = peer_site.change_of
    wire = Wire(folders)
    liar = {"on": False}

    def lying(reply, slot):
        return LIES[reason](whole(reply, slot)[1]) if liar["on"] else whole(reply, slot)

    def train(self, *arguments):
        liar["on"] = self._me == "cedar"
        return honest(self, *arguments)

    honest = PeerSite._train
    monkeypatch.setattr(PeerSite, "_train", train)
    monkeypatch.setattr(peer_site, "change_of", lying)
    run(wire, tmp_path / "out", merge(ASKED, {"run.rounds": 1}))
    assert f"what 'cedar' sent is left out ({reason})" in caplog.text
    assert all(one.models.isfinite().all() for one in predictors(folders).values())


def test_what_was_agreed_to_be_sealed_never_travels_open(folders, tmp_path):
    """After an agreement among peers the operator asks for a round of training, and more rounds."""
    wire = Wire(folders)
    run(wire, tmp_path / "out")
    asked = [one[HEAD:] for one in wire.seen if one.startswith(MAGIC)]
    (step,) = [one for one in asked if b'"train"' in one[:400]][:1]
    head, body = decode(step, {})
    from test_site_law import Attacker

    attacker = Attacker(folders)
    plain = {k: head[k] for k in ("experiment", "round", "horizon", "base")}
    for changes, reason in (
        ({**plain, "kind": "local", "client": 0}, "not_approved"),
        ({**head, "round": 3}, "refused"),
        ({**head, "round": 4}, "wrong_round"),
        ({**head, "names": ["ash"]}, "refused"),
        ({**head, "names": 7}, "refused"),
        ({**head, "step": "close"}, "stale_state"),
    ):
        assert attacker.reason(encode(Message(changes, body))) == reason
    with pytest.raises(EngineError, match="waits for the owner"):
        open_request(folders, wire)


def open_request(folders, wire):
    """The same experiment without seals is another request."""
    path = folders["ash"].path / "site.toml"
    path.write_text(path.read_text().replace('automatic = ["*"]', "automatic = []"))
    wire = Wire({**folders, "ash": SiteFolder.open(folders["ash"].path)})
    run(wire, path.parent / "again", merge(ASKED, {"run.rounds": 2}))


def test_a_partner_without_a_key_and_another_method_are_refused(folders, tmp_path):
    path = folders["ash"].path / "site.toml"
    path.write_text(path.read_text().replace("birch = ", "elm = "))
    changed = {**folders, "ash": SiteFolder.open(folders["ash"].path)}
    with pytest.raises(EngineError, match=r"box key of each other site .* none of birch"):
        run(Wire(changed), tmp_path / "out")
    for method in ({"name": "fedavg"}, {"name": "federico", "form": "centralised"}):
        with pytest.raises(ConfigError, match="only federico"):
            run(Wire(folders), tmp_path / "out", merge(FAST, {"algorithm": method}))


def test_the_operators_command(folders, tmp_path, monkeypatch, capsys):
    open_folder = peers.federation_of
    wired = lambda config, _, **more: open_folder(config, Wire(folders), **more)  # noqa: E731
    monkeypatch.setattr(peers, "federation_of", wired)
    config, fed = tmp_path / "asked.toml", folders["ash"].path.parent / "fed"
    config.write_text('[algorithm]\nname = "federico"\n[run]\nrounds = 1\n')
    with pytest.raises(SystemExit) as ended:
        cli.main(["deploy", "peers", str(fed), str(config), "--out", str(tmp_path / "run")])
    assert ended.value.code in (0, None)
    assert "1 rounds are over" in capsys.readouterr().out
    assert len(predictors(folders)) == len(NAMES)
