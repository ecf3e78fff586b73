"""A recording that does not train as its call does is refused, however small the step."""

import json
import os
import stat
from functools import partial

import pytest
import torch
from torch import nn

import coterie
from coterie.algorithms.fedavg import FedAvg
from coterie.commands.live import events
from coterie.compiled.executor import Executor
from coterie.compiled.kernels import native
from coterie.compiled.trace import InDouble, doubled, native_loop, replay, rewrite
from coterie.compiled.trace.cpp_writer import OPERATIONS
from coterie.compiled.trust import TraceTrial, passed, passed_compiled
from coterie.core.calls import COMPILED, REPLAYED, WRITTEN, Form
from coterie.core.optim import Recipe
from coterie.engines.simulator import Simulator
from coterie.engines.vmap import VmapBackend
from coterie.errors import EngineError, MismatchError, StoreError
from coterie.runs.listeners import slowly
from coterie.storage import cache
from coterie.training.rounds import train
from hostile import unfinished
from support import METHODS, cnn, federation, mlp, normed, task, whole_round, with_a_compiler

aten = torch.ops.aten
RATES = (1e-4, 1e-2, 1.0)
MOMENTUM = 0.9
LAYER = slice(-27, -3)  # the weights of the last layer


def trained(lr, *, compiled=False, network=mlp, momentum=MOMENTUM, device="cpu"):
    """One played round and one as it is written, in float32; the executor's forms."""
    method, sizes = FedAvg(), (31,) * 3
    recipe = Recipe(lr=lr, epochs=2, batch=10, momentum=momentum)
    how = {"merge": False, "dtype": torch.float32, "device": device}
    on = task(method, network, federation(sizes), recipe, **how)
    played = VmapBackend(on.problem, on.shards, chunk=3, compiled=compiled)
    plain = VmapBackend(on.problem, on.shards, chunk=3, trace=False)
    start, round = on.problem.start.expand(3, -1), whole_round(on)
    found, expected = (e.local(method, start, (), round)[0].w for e in (played, plain))
    moved, off = (expected - start).norm(), (found - expected).norm()
    assert off <= 0.05 * moved  # whatever is refused, the result is right
    (form,) = played._executor.forms
    return form


@pytest.mark.parametrize("network", [mlp, cnn])
@pytest.mark.parametrize("lr", RATES)
def test_an_honest_recording_is_played(lr, network):
    form = trained(lr, network=network)
    assert (form.way, form.why) == (REPLAYED, "")


def wide():
    """With convolutions of many channels, which are torch's."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 3), nn.ReLU(), nn.Conv2d(20, 18, 3, padding=1), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(72, 3)),
    )


def grouped():
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 3), nn.GroupNorm(2, 20), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(20, 3)),
    )


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("network", [wide, grouped, normed])
def test_honest_recordings_of_other_layers_are_played(network, compiled):
    form = trained(1e-2, network=network, compiled=compiled)
    assert form.way == REPLAYED
    assert "gives something else" not in form.why


@with_a_compiler
@pytest.mark.parametrize("lr", RATES)
def test_honest_steps_are_compiled(lr):
    assert trained(lr, compiled=True).way == COMPILED


@with_a_compiler
def test_layers_may_be_torchs_in_float64(monkeypatch):
    def single(name, dtype, **sizes):
        return native.library(name, dtype, **sizes) if dtype == torch.float32 else None

    for kernels in ("conv", "pool"):  # as on a GPU
        monkeypatch.setattr(f"coterie.compiled.kernels.{kernels}.library", single)
    form = trained(1e-2, network=cnn)
    assert (form.way, form.why) == (REPLAYED, "")


# ---- recordings that are wrong -------------------------------------------------------------------


def spoilt_loop(change):
    """Loops, played by torch, whose first result is changed."""
    original = replay.TracedLoop.__call__

    def call(self, held, destinations=replay._ANYWHERE):
        made = list(original(self, held, destinations))
        made[0] = change(held[self._begin[0]], made[0])
        return made

    return "TracedLoop.__call__", call


def identity():
    return spoilt_loop(lambda begin, end: begin.clone())


def one_layer_frozen():
    def change(begin, end):
        end = end.clone()
        end[..., LAYER] = begin[..., LAYER]
        return end

    return spoilt_loop(change)


def wrong_sign_in_one_layer():
    def change(begin, end):
        end = end.clone()
        end[..., LAYER] = 2 * begin[..., LAYER] - end[..., LAYER]
        return end

    return spoilt_loop(change)


def one_client_frozen():
    return spoilt_loop(lambda begin, end: torch.cat([begin[:1], end[1:]]))


def without_the_last_batch():
    original = replay.TracedLoop.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self._numbers, self._order = self._numbers[:-1], self._order[:-1]

    return "TracedLoop.__init__", init


def without_momentum():
    original = replay.LoopBody.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        for node in self.module.graph.nodes:
            if MOMENTUM in node.args:
                node.args = tuple(0.0 if arg == MOMENTUM else arg for arg in node.args)
        self.module.recompile()
        self.replay = self.module.forward

    return "LoopBody.__init__", init


def without_the_descent():
    """A pass over the graph that leaves a model which trains nothing."""

    def fuse_nothing(graph):
        for node in graph.nodes:
            if node.target is aten.addcmul.default:
                node.replace_all_uses_with(node.args[0])
        rewrite.drop_unused(graph)

    return "fuse_descent", fuse_nothing


def in_the_source(old, new):
    """C++ with something else in the place of some text."""
    original = native_loop.compiled

    def compiled(name, source, macros):
        assert old in source
        return original(name, source.replace(old, new), macros)

    return "compiled", compiled


def in_the_result(change):
    """Compiled steps whose first result is changed."""
    original = native_loop.NativeLoop.__call__

    def call(self, begin, beside, destinations):
        before = begin[0].clone()
        outs = original(self, begin, beside, destinations)
        change(before, outs[0])
        return outs

    return "NativeLoop.__call__", call


def negated(begin, end):
    end[..., LAYER] = 2 * begin[..., LAYER] - end[..., LAYER]


WRONG_CODE = {
    "identity": lambda: in_the_source("step < steps;", "step < 0;"),
    "without the last batch": lambda: in_the_source("step < steps;", "step < steps - 1;"),
    "without momentum": lambda: in_the_source(")0.9)", ")0.0)"),
    "one layer frozen": lambda: in_the_result(
        lambda begin, end: end[..., LAYER].copy_(begin[..., LAYER])
    ),
    "wrong sign in one layer": lambda: in_the_result(negated),
    "one client frozen": lambda: in_the_result(lambda begin, end: end[-1].copy_(begin[-1])),
}


# module, what is wrong in it, how it is trained, and what is done instead
WRONG = [
    *(
        pytest.param("replay", wrong, {}, WRITTEN, id=wrong.__name__)
        for wrong in (
            *(identity, one_layer_frozen, wrong_sign_in_one_layer, one_client_frozen),
            *(without_the_last_batch, without_momentum),
        )
    ),
    pytest.param("rewrite", without_the_descent, {"momentum": 0.0}, WRITTEN, id="descent"),
    *(
        pytest.param(
            "native_loop", wrong, {"compiled": True}, REPLAYED, id=name, marks=with_a_compiler
        )
        for name, wrong in WRONG_CODE.items()
    ),
]


@pytest.mark.parametrize("lr", RATES)
@pytest.mark.parametrize(("module", "wrong", "how", "instead"), WRONG)
def test_what_does_not_train_as_the_call_does_is_refused(
    module, wrong, how, instead, lr, monkeypatch
):
    where, broken = wrong()
    monkeypatch.setattr(f"coterie.compiled.trace.{module}.{where}", broken)
    form = trained(lr, **how)
    assert form.way == instead
    assert "gives something else" in form.why


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_played_in_float32(name):
    method = METHODS[name]()
    recipe = Recipe(lr=1e-3, epochs=2, batch=10)
    on = task(method, mlp, federation((17, 17, 24)), recipe, dtype=torch.float32)
    engine = VmapBackend(on.problem, on.shards, chunk=3)
    for _ in train(method, on.problem, Simulator(engine), 1):
        pass
    assert {(form.way, form.why) for form in engine._executor.forms} == {(REPLAYED, "")}


def test_a_call_in_float64_is_the_call_without_rounding():
    def call(x, table):
        picked = table[torch.tensor([1, 0])].to(torch.float32)
        total = torch.zeros(2, dtype=torch.float32) + x.sum(1)
        return total.float() / 3 + picked.sum(1), x.argmax(1)

    x, table = torch.randn(2, 5), torch.randn(3, 4)
    with InDouble():
        found, places = call(doubled(x), table)
    expected = x.double().sum(1) / 3 + table.double()[[1, 0]].sum(1)
    assert found.dtype == torch.float64
    assert torch.equal(found, expected)
    assert torch.equal(places, x.argmax(1))


def test_a_graph_that_gives_something_else_than_its_recording_is_refused():
    trial = TraceTrial(lambda w: w - 1e-3 * w.sin(), (torch.randn(4, 6),), (2, 4))

    def played(w):
        return w - (1e-3 * w.double().sin()).float()

    trial.captured(played, played)
    for wrong in (lambda w: w, lambda w: torch.cat([played(w)[:, :2], w[:, 2:]], 1)):
        with pytest.raises(MismatchError, match="gives something else"):
            trial.captured(wrong, played)


def descent(w):
    return w - 1e-3 * w.sin()


def replayed(wrong):
    """A replay of :func:`descent` that is wrong in some float32 calls, and a list of such calls."""
    made = []

    def replay(w):
        if w.dtype == torch.float64:
            return descent(w)
        made.append(len(made))
        return w.clone() if wrong(made[-1]) else descent(w)

    return replay, made


def test_a_trace_that_rounding_fails_once_is_tried_on_other_numbers():
    trial = TraceTrial(descent, (torch.randn(4, 6),), (2, 4))
    honest, _ = replayed(lambda call: False)
    assert passed(trial, honest) is trial
    unlucky, made = replayed(lambda call: call == 0)
    other = passed(trial, unlucky)
    assert other is not trial
    assert not torch.equal(other._few[0], trial._few[0])
    assert len(made) == 2
    for never in (lambda call: True, lambda call: call < 2):
        with pytest.raises(MismatchError, match="gives something else"):
            passed(trial, replayed(never)[0])


def test_compiled_steps_that_rounding_fails_once_are_compiled_and_tried_again():
    trial = TraceTrial(descent, (torch.randn(4, 6),), (2, 4))
    for wrong, works in (((1,), True), ((1, 3), False)):  # calls 0 and 2 are the trace's own
        replay, _ = replayed(lambda call, wrong=wrong: call in wrong)
        said = []
        trial.traced(replay)
        again = partial(said.append, "uncompiled"), partial(said.append, "compiled")
        if works:
            other, _ = passed_compiled(trial, replay, *again)
            assert other is not trial
        else:
            with pytest.raises(MismatchError, match="gives something else"):
                passed_compiled(trial, replay, *again)
        assert said == ["uncompiled", "compiled"]


# ---- errors that are named, and others -----------------------------------------------------------


@pytest.mark.parametrize("error", [KeyError, AssertionError, TypeError, IndexError, RuntimeError])
@pytest.mark.parametrize(
    "where",
    [
        *("replay.TracedLoop.__init__", "replay.Trace.__call__"),
        pytest.param("cpp_writer.Writer.body", marks=with_a_compiler),
    ],
)
def test_a_bug_of_the_recorder_or_of_the_compiler_is_seen(where, error, monkeypatch):
    """So is a failure of torch in what it made."""

    def broken(*args, **kwargs):
        raise error("a bug")

    monkeypatch.setattr(f"coterie.compiled.trace.{where}", broken)
    with pytest.raises(AssertionError if error is RuntimeError else error) as caught:
        trained(0.1, compiled="cpp_writer" in where)
    told = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "a bug" in told
    assert "engine.trace = false" in told


def test_an_error_of_the_call_itself_keeps_its_words():
    def call(w):
        raise EngineError("client 'a' has no data")

    with pytest.raises(EngineError, match=r"^client 'a' has no data$"):
        Executor()("some", call, (torch.ones(2, 3),))


def test_what_cannot_be_computed_in_float64_is_done_as_it_is_written():
    def call(w):
        if w.dtype == torch.float64:
            raise RuntimeError("only float32")
        return w + 1

    executor = Executor()
    assert torch.equal(executor("some", call, (torch.ones(2, 3),)), torch.full((2, 3), 2.0))
    (form,) = executor.forms
    assert form.way == WRITTEN
    assert "only float32" in form.why


# ---- a run that goes on --------------------------------------------------------------------------


def ways(before, call=lambda w: w * 2):
    executor = Executor(before=before)
    executor("some", call, (torch.ones(2, 3),))
    return {form.id: form.way for form in executor.forms}


def test_a_form_is_done_as_it_was_before():
    ((form, way),) = ways(None).items()
    assert way == REPLAYED
    assert ways({form: WRITTEN}) == {form: WRITTEN}
    with pytest.raises(EngineError, match=r"was compiled when the run began.*start a new run"):
        ways({form: COMPILED})


def test_a_form_that_was_forgotten_is_done_as_before_and_compared_once(monkeypatch):
    monkeypatch.setattr("coterie.compiled.executor.KEPT", 1)
    executor, works, trials = Executor(), [True], []
    monkeypatch.setattr(
        "coterie.compiled.executor.TraceTrial",
        lambda *given: trials.append(given) or TraceTrial(*given),
    )

    def call(w):
        return w * 2 if works[0] else w * float(w.sum())

    for rows in (2, 3, 2, 3):
        executor("some", call, (torch.ones(rows, 3),))
    assert len(trials) == len(executor.forms) == 2
    works[0] = False
    with pytest.raises(EngineError, match="was replayed when the run began"):
        executor("some", call, (torch.ones(2, 3),))


# a run on data of bytes, whose steps are compiled
RUN = {
    "partition": {"name": "iid", "clients": 3},
    "model": {"name": "linear"},
    "train": {"batch": 100},
    "engine": {"name": "vmap", "chunk": 3, "trace": True, "compiled": True, "threads": 1},
    "run": {"rounds": 3, "checkpoint_every": 1},
    "algorithm": {"name": "fedavg"},
}


def called(summary):
    return {call["stage"]: (call["way"], call["why"]) for call in summary["ran"]["calls"]}


@with_a_compiler
def test_what_really_ran_is_told_and_kept_by_resume(tmp_path):
    out = unfinished(tmp_path / "run", "fedavg", RUN)
    summary = coterie.resume(out).summary
    whole = coterie.run(RUN).summary
    assert summary["digest"] == whole["digest"]
    assert summary["ran"] == whole["ran"]
    assert (whole["ran"]["engine"], whole["ran"]["chunk"]) == ("vmap", 3)
    assert whole["ran"]["compiler"] == native.version()
    assert called(whole)["FedAvg.local"] == (COMPILED, None)  # digits are bytes


@with_a_compiler
def test_a_run_that_was_compiled_does_not_go_on_without_a_compiler(tmp_path, named_compiler):
    out = unfinished(tmp_path / "run", "fedavg", RUN)
    before = (out / "rounds.jsonl").read_bytes()
    named_compiler("")
    with pytest.raises(StoreError, match=r"were compiled by c\+\+.*name it with CXX"):
        coterie.resume(out)
    assert (out / "rounds.jsonl").read_bytes() == before


@pytest.mark.parametrize("ran", [[], {"1": 2}, {"1": {"stage": "x", "way": 3, "why": ""}}])
def test_a_tampered_record_of_what_ran_is_refused(ran, tmp_path):
    (tmp_path / "config.json").write_text('{"format": 1, "asked": {}, "resolved": {}, "hash": ""}')
    (tmp_path / "environment.json").write_text(json.dumps({"ran": ran}))
    with pytest.raises(StoreError, match="not as a run writes them"):
        coterie.resume(tmp_path)


def test_without_a_compiler_nothing_is_said_to_be_compiled(named_compiler):
    named_compiler("")
    found = coterie.run(RUN)
    assert found.config["resolved"]["compiled"] is False
    assert found.summary["ran"]["compiler"] is None
    assert called(found.summary)["FedAvg.local"] == (REPLAYED, None)


@with_a_compiler
def test_what_is_not_compiled_and_why_is_told(monkeypatch):
    monkeypatch.delitem(OPERATIONS, aten._log_softmax.default)
    told = []
    summary = coterie.run(RUN, progress=told.append).summary
    assert called(summary)["FedAvg.local"] == (REPLAYED, "aten._log_softmax.default")
    assert all("log_softmax" in line for line in told[-1].slow)
    assert slowly(Took(1.0), 6.0) == ()
    (line,) = slowly(Took(1.0), 3.0)
    assert line == "FedAvg.local took 33% of the time: it is replayed, not faster: unknown"
    assert events(told[-1]._replace(slow=(line,)))[0] == f"fedavg, seed 0: {line}"


class Took:
    """An engine whose only form took so many seconds on each of two threads."""

    def __init__(self, seconds):
        self.choice = {"threads": 2}
        self.forms = (Form("1", "FedAvg.local", REPLAYED, "unknown", 2 * seconds),)


# ---- machine code in the cache -------------------------------------------------------------------

SOURCE = 'extern "C" int answer() { return NUMBER; }\n'


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that was compiled and is in the cache, which is asked for anew each time."""
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "mine"))

    def asked():
        native._compiled.cache_clear()
        return native.compiled("answer", SOURCE, ("NUMBER=41",)).answer()

    assert asked() == 41
    (path,) = (tmp_path / "mine" / "native").glob("*.so")
    # what is loaded already is not touched: the next process would read the file
    path.replace(path.with_suffix(".loaded"))
    path.write_bytes(path.with_suffix(".loaded").read_bytes())
    path.chmod(0o600)
    return path, asked


@pytest.fixture
def compiled(monkeypatch):
    """How often something is compiled."""
    count, original = [], native._compile

    def noted(*args):
        count.append(args)
        original(*args)

    monkeypatch.setattr(native, "_compile", noted)
    return count


@with_a_compiler
def test_machine_code_is_kept(library, compiled):
    path, asked = library
    assert cache.flaw(path) is None
    assert asked() == 41
    assert not compiled


def truncated(path):
    path.write_bytes(path.read_bytes()[:1000])


def without_its_sha256(path):
    path.with_name(path.name + cache.SEAL).unlink()


def with_another_sha256(path):
    path.with_name(path.name + cache.SEAL).write_text("0" * 64)


def a_link(path):
    other = path.with_suffix(".other")
    path.replace(other)
    path.symlink_to(other)


def writable(path):
    path.chmod(0o666)


def of_another_user(path):
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, 12345)


SPOILT = [truncated, without_its_sha256, with_another_sha256, a_link, writable, of_another_user]


@with_a_compiler
@pytest.mark.parametrize("spoil", SPOILT)
def test_machine_code_that_is_not_as_it_was_written_is_compiled_again(
    spoil, library, compiled, caplog
):
    path, asked = library
    spoil(path)
    assert cache.flaw(path)
    assert asked() == 41
    assert len(compiled) == 1
    assert "compiled again" in caplog.text
    assert cache.flaw(path) is None
    assert asked() == 41
    assert len(compiled) == 1


@with_a_compiler
def test_no_flipped_bit_is_loaded(library):
    path, _ = library
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 24)):
        changed = bytearray(whole)
        changed[at] ^= 1 << (at % 8)
        path.write_bytes(changed)
        assert cache.flaw(path)
    path.write_bytes(whole)
    assert cache.flaw(path) is None


@with_a_compiler
def test_a_folder_that_others_can_write_to_is_closed(library, compiled):
    path, asked = library
    path.parent.chmod(0o777)
    assert asked() == 41
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not compiled


@with_a_compiler
@pytest.mark.parametrize("how", ["owner", "link", "file"])
def test_a_folder_of_somebody_else_is_not_used(how, library, compiled, tmp_path, monkeypatch):
    path, asked = library
    monkeypatch.setattr(native, "_for_this_process", lambda: tmp_path)
    if how == "owner":
        monkeypatch.setattr("os.geteuid", lambda: 12345)
    else:
        elsewhere = tmp_path / "elsewhere"
        path.parent.replace(elsewhere)
        path.parent.symlink_to(elsewhere) if how == "link" else path.parent.write_text("")
    assert asked() == 41
    assert len(compiled) == 1
    (made,) = (args[-1] for args in compiled)
    assert made.parent not in (path.parent, tmp_path / "elsewhere")


@with_a_compiler
@pytest.mark.parametrize("fact", ["_said", "machine"])  # the compiler's version, the processor
def test_another_compiler_or_processor_has_other_code(fact, library, compiled, monkeypatch):
    _, asked = library
    monkeypatch.setattr(native, fact, lambda *_: "another 99.1")
    assert asked() == 41
    assert len(compiled) == 1


@pytest.mark.parametrize(
    "line",
    ["flags\t\t: fpu avx2", "Features\t: fp asimd sve", "isa\t: rv64imafdcv", "cpu\t: POWER9"],
)
def test_the_instructions_of_every_architecture_are_told(line, tmp_path, monkeypatch):
    native.machine.cache_clear()
    monkeypatch.setattr(native, "_CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor : 0\ncpu MHz\t\t: 2000.1\n{line}\n")
    told = native.machine("no compiler at all")
    native.machine.cache_clear()
    assert line in told
    assert "2000.1" not in told
