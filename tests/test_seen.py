"""Who had whose own model: every method, every engine, from the folder as from memory."""

import json

import pytest

import coterie
from coterie.errors import StoreError
from coterie.views.reliance import raw_rounds, seen_by

SMALL = {"rounds": 3, "seed": 1, "set": {"partition.clients": 5}}


def ran(method, **given):
    return coterie.run(None, method=method, **{**SMALL, **given})


@pytest.mark.parametrize("method", ["local", "fedavg", "fedamp", "cfl", "waffle", "ditto"])
def test_what_the_server_averages_is_nobodys_own_model(method):
    assert not raw_rounds(ran(method)).any()


@pytest.mark.parametrize("method", ["fedfomo", "federico"])
def test_whoever_asks_for_models_has_at_most_as_many_a_round_and_everybody_has_a_count(method):
    run = ran(method)
    found = raw_rounds(run)
    assert found.any()
    assert (found.diagonal() == 0).all()
    assert found.max() <= len(run.lines)
    for line in run.lines:
        for client, of in line.get("raw", ()):
            assert client not in of
            assert len(of) == len(set(of)) <= 4
    assert (seen_by(run) == [sum(found[i, j] > 0 for i in range(5)) for j in range(5)]).all()


def test_fewer_downloads_show_fewer_models():
    few = ran("fedfomo", set={**SMALL["set"], "algorithm.fedfomo.downloads": 1})
    assert all(len(of) <= 2 for line in few.lines for _, of in line.get("raw", ()))
    assert raw_rounds(few).sum() < raw_rounds(ran("fedfomo")).sum()


def test_the_count_is_that_of_messages_and_of_the_folder_and_is_checked(tmp_path):
    run = ran("fedfomo", out=tmp_path / "run")
    again = coterie.read(tmp_path / "run")
    assert (raw_rounds(again) == raw_rounds(run)).all()
    wire = ran("fedfomo", set={**SMALL["set"], "engine.name": "wire"})
    assert (raw_rounds(wire) == raw_rounds(run)).all()
    path = tmp_path / "run" / "rounds.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    lines[-1]["raw"] = [["a", [1]]]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(StoreError):
        coterie.read(tmp_path / "run")


def test_a_comparison_says_how_many_others_ever_had_a_clients_own_model():
    found = coterie.compare(None, methods=["fedavg", "fedfomo"], seeds=1, **SMALL | {"seed": 0})
    told = {(one["method"], one["own_model_seen_by"]) for one in found.to_dict()["clients"]}
    assert ("fedavg", 0) in told
    assert all(seen > 0 for method, seen in told if method == "fedfomo")
