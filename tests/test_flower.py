"""The Flower transport in one process: flwr's own SuperLink application, without sockets."""

import asyncio
import hashlib
import threading
import time
from base64 import b64encode
from itertools import pairwise
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.common.serde import message_from_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from coterie.deploy import flower_agent, flower_mailbox, flower_message, keys
from coterie.deploy.flower_agent import FlowerAgent, is_request
from coterie.deploy.flower_calls import (
    MOST,
    Calls,
    LinkLostError,
    LinkRefusedError,
    as_node,
    nobody,
)
from coterie.deploy.flower_door import CALLS, Door
from coterie.deploy.flower_link import QUIET, FlowerLink
from coterie.deploy.flower_mailbox import FlowerMailbox
from coterie.deploy.flower_message import UnreadableError, packed, parts, request, unpacked
from coterie.deploy.flower_run import FlowerRun, NodeState
from coterie.errors import EngineError, StoreError

SECRET = b"a secret of the link and of the coordinator"
LIMIT = 2**20


class Echo:
    def answer(self, data):
        return data[::-1]


class InProcess(httpx.BaseTransport):
    """Gives requests to an application of this process."""

    def __init__(self, app):
        self._app = httpx.ASGITransport(app, raise_app_exceptions=False)

    def handle_request(self, request):
        async def answer():
            request.read()
            found = await self._app.handle_async_request(request)
            return httpx.Response(
                found.status_code,
                headers=found.headers,
                stream=httpx.ByteStream(await found.aread()),
            )

        return asyncio.run(answer())


class Link:
    """flwr's SuperLink in memory, as the coordinator starts it, called without a network."""

    def __init__(self):
        self.app = create_app(settings(), SuperLinkLifespan)
        self.http = httpx.Client(transport=InProcess(self.app), base_url="https://link")
        self.state = self.app.state.linkstate_factory.state()
        self.run = FlowerRun.begin(self.http, SECRET)
        self.keys = {}

    def agent(self, name, handler=None):
        """The agent of a new site, whose key is registered."""
        certificate, key = keys.make_site(name)
        sign, public = as_node(key)
        assert keys.public_pem(certificate) == public
        self.keys[name] = public
        self.run.nodes(self.keys)
        calls = Calls(self.http, sign)
        return FlowerAgent(calls, public, handler or Echo(), LIMIT, threading.Event())

    def online(self, name, handler=None):
        """The same, online."""
        agent = self.agent(name, handler)
        agent._presence.node = agent._presence._activated()
        return agent

    def node(self, name):
        return self.run.nodes(self.keys)[name]

    def left(self):
        """How many objects and messages the link has."""
        state = self.state
        return len(state.object_store), state.num_message_ins(), state.num_message_res()


def settings():
    none = dict.fromkeys(("health_server_address", "certificates", "event_log_plugin"))
    none |= dict.fromkeys(("fleet_event_log_plugin", "artifact_provider", "fleet_api_address"))
    none |= dict.fromkeys(("ssl_ca_certfile", "ssl_certfile", "ssl_keyfile"))
    off = dict.fromkeys(("insecure", "enable_event_log", "simulation"), False)
    return SuperLinkLifespanConfig(
        **none,
        **off,
        control_address="",
        host="127.0.0.1",
        port=1,
        superexec_auth_secret=SECRET,
        authn_plugin=NoOpControlAuthnPlugin(),
        enable_supernode_auth=True,
        fleet_api_type="grpc-rere",
        database=":flwr-in-memory:",
        isolation="process",
        runtime_dependency_install=False,
    )


@pytest.fixture
def link():
    return Link()


# ---- what arrives --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 5000])
def test_bytes_arrive_at_a_site_and_its_answer_comes_back_and_nothing_is_left(
    link, monkeypatch, size
):
    monkeypatch.setattr(flower_message, "PIECE", 1000)
    agent, body = link.online("a"), bytes(range(256)) * 20
    asked = link.run.send(link.node("a").id, body[:size], "token", 60.0)
    assert link.run.arrived([asked]) == []
    assert agent._once()
    (answer,) = link.run.arrived([asked])
    assert answer.asked == asked
    assert link.run.fetched(answer, "token", LIMIT) == body[:size][::-1]
    assert link.left() == (0, 0, 0)
    assert link.left() == (0, 0, 0)


def test_what_was_given_up_is_deleted_with_its_run_and_the_site_goes_on(link):
    class Late(Echo):
        def answer(self, data):
            link.run.end()
            return b"too late"

    agent = link.online("a", Late())
    link.online("b")
    for name in "ab":
        link.run.send(link.node(name).id, b"a body of some bytes", f"token of {name}", 60.0)
    assert link.left()[0] == 6
    assert agent._once()  # its answer is refused, because the run has ended
    assert link.left() == (0, 0, 0)
    assert agent._presence.node is not None
    link.run = FlowerRun.begin(link.http, SECRET)
    assert agent._once()


def test_an_answer_after_the_deadline_is_dropped_and_the_site_goes_on(link):
    class Slow(Echo):
        def answer(self, data):
            time.sleep(0.3)
            return data

    agent = link.online("a", Slow())
    link.run.send(link.node("a").id, b"?", "token", 0.2)
    assert agent._once()
    assert link.left()[0] == 0
    assert agent._presence.node is not None


def test_an_agent_that_the_link_has_forgotten_comes_back(link):
    agent = link.online("a")
    agent._calls = agent._presence._calls = Calls(Link().http, as_node(keys.make_site("x")[1])[0])
    assert agent._once()
    assert agent._presence.node is None


def test_an_answer_without_its_token_or_from_another_node_is_unreadable(link):
    agent, other = link.online("a"), link.online("b")
    asked = link.run.send(link.node("a").id, b"?", "token", 60.0)
    agent._once()
    (answer,) = link.run.arrived([asked])
    with pytest.raises(UnreadableError):
        link.run.fetched(answer, "another token", LIMIT)
    assert link.left() == (0, 0, 0)
    asked = link.run.send(link.node("a").id, b"?", "token", 60.0)
    pulled = agent._calls("/v1/fleet/pull-messages", pull_request(agent), pull_response())
    forged = message_from_proto(pulled.messages_list[0])
    answer = parts(FlowerMessage(packed(b"forged", "guessed"), reply_to=forged))
    other._push(other._presence.node, forged.metadata.run_id, answer)
    (answer,) = link.run.arrived([asked])  # flwr takes it: it does not ask who the sender is
    with pytest.raises(UnreadableError):
        link.run.fetched(answer, "token", LIMIT)


def pull_request(agent):
    from flwr.proto.fleet_pb2 import PullMessagesRequest
    from flwr.proto.node_pb2 import Node

    return PullMessagesRequest(node=Node(node_id=agent._presence.node))


def pull_response():
    from flwr.proto.fleet_pb2 import PullMessagesResponse

    return PullMessagesResponse


def test_a_message_that_a_site_cannot_read_is_unreadable(link):
    agent = link.online("a")
    agent._limit = 10
    agent.answered = []
    asked = link.run.send(link.node("a").id, bytes(11), "token", 60.0)
    agent._once()
    (answer,) = link.run.arrived([asked])
    with pytest.raises(UnreadableError):
        link.run.fetched(answer, "token", LIMIT)


def test_a_handler_that_fails_gives_an_empty_answer(link, caplog):
    class Failing:
        def answer(self, data):
            raise ValueError("a fault of the handler")

    agent = link.online("a", Failing())
    asked = link.run.send(link.node("a").id, b"?", "token", 60.0)
    agent._once()
    (answer,) = link.run.arrived([asked])
    assert link.run.fetched(answer, "token", LIMIT) == b""
    assert "a message could not be answered" in caplog.text


def test_an_agent_answers_until_it_is_stopped_and_leaves(link):
    agent = link.agent("a")
    running = threading.Thread(target=agent.run)
    running.start()
    try:
        wait_for(lambda: link.node("a").online)
        asked = link.run.send(link.node("a").id, b"?", "token", 60.0)
        (answer,) = wait_for(lambda: link.run.arrived([asked]))
        assert link.run.fetched(answer, "token", LIMIT) == b"?"
    finally:
        agent._stop.set()
        running.join(20.0)
    assert not running.is_alive()
    assert not link.node("a").online


def test_an_agent_that_fails_says_so(link, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    agent = link.agent("a")
    agent._once = lambda: 1 / 0
    with pytest.raises(EngineError, match="log"):
        agent.run()
    agent._stop.set()


def wait_for(found):
    end = time.monotonic() + 20.0
    while not (value := found()):
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)
    return value


# ---- who is admitted -----------------------------------------------------------------------------


def test_keys_are_registered_and_removed_as_the_coordinator_says(link):
    agent = link.online("a")
    outsider = FlowerAgent(
        Calls(link.http, as_node(keys.make_site("a")[1])[0]),
        as_node(keys.make_site("a")[1])[1],
        Echo(),
        LIMIT,
        threading.Event(),
    )
    with pytest.raises(LinkRefusedError):
        outsider._presence._activated()
    assert link.node("a").online
    revoked = link.keys.pop("a")
    assert link.run.nodes(link.keys) == {}
    with pytest.raises(LinkRefusedError):
        agent._presence._beat(agent._presence.node)
    with pytest.raises(LinkRefusedError):
        agent._presence._activated()
    assert link.run.nodes({}) == {}
    assert revoked not in {key for key, _ in link.keys.items()}


def test_a_key_that_somebody_else_registers_is_removed(link):
    from flwr.proto.control_pb2 import RegisterNodeRequest, RegisterNodeResponse

    link.online("a")
    foreign = as_node(keys.make_site("a")[1])[1]
    wanted = RegisterNodeRequest(public_key=foreign, name="a")
    Calls(link.http, nobody)("/v1/control/register-node", wanted, RegisterNodeResponse)
    link.node("a")
    assert link.state.get_node_id_by_public_key(foreign) is None
    assert link.state.get_node_id_by_public_key(link.keys["a"]) == link.node("a").id


def test_tasks_of_runs_are_for_those_who_have_the_secret(link):
    with pytest.raises(LinkRefusedError):
        FlowerRun.begin(link.http, b"another secret")


def test_a_node_that_is_online_is_not_activated_twice(link):
    agent = link.online("a")
    with pytest.raises(LinkRefusedError):
        agent._presence._activated()
    agent._presence._leave()
    assert agent._presence._activated() == agent._presence.node


# ---- screening -----------------------------------------------------------------------------------


def fetched(message, limit=LIMIT, token="token", spoil=lambda key, content: content):
    sent = parts(message)

    def pull(key):
        content = spoil(key, sent.objects[key])
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    return unpacked(sent.tree, token, pull, limit)


def made(content):
    message = request(b"", 1, 2, "token", 60.0)
    message.content = content
    return message


def test_the_bytes_are_those_that_were_sent_up_to_the_limit(monkeypatch):
    monkeypatch.setattr(flower_message, "PIECE", 100)
    body = bytes(range(250))
    assert fetched(request(body, 1, 2, "token", 60.0), limit=250) == body
    with pytest.raises(UnreadableError):
        fetched(request(body, 1, 2, "token", 60.0), limit=249)
    with pytest.raises(UnreadableError, match="limit"):
        fetched(request(body, 1, 2, "token", 60.0), limit=200)


def good():
    return {"bytes": b"?", "token": "token-0"}


OTHERS = {
    "no record": RecordDict(),
    "another name": RecordDict({"x": ConfigRecord(good())}),
    "another token": RecordDict({"0": ConfigRecord(good() | {"token": "token-1"})}),
    "no token": RecordDict({"0": ConfigRecord({"bytes": b"?"})}),
    "text for bytes": RecordDict({"0": ConfigRecord(good() | {"bytes": "?"})}),
    "one field more": RecordDict({"0": ConfigRecord(good() | {"more": 1})}),
    "an array": RecordDict({"0": ArrayRecord({"a": Array("uint8", (1,), "x", b"?")})}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_message_of_another_form_is_refused(what):
    assert fetched(made(RecordDict({"0": ConfigRecord(good())}))) == b"?"
    with pytest.raises(UnreadableError):
        fetched(made(OTHERS[what]))


def test_objects_that_are_not_what_was_asked_for_are_refused():
    def flipped(key, content):
        return content[:-1] + bytes([content[-1] ^ 1])

    with pytest.raises(UnreadableError, match="sha256"):
        fetched(request(b"?", 1, 2, "token", 60.0), spoil=flipped)
    nothing = PullObjectResponse(object_found=False)
    with pytest.raises(UnreadableError, match="gone"):
        unpacked(parts(request(b"?", 1, 2, "t", 60.0)).tree, "t", lambda key: nothing, LIMIT)


def test_no_object_of_a_wrong_tree_is_fetched():
    def tree(*children):
        return ObjectTree(object_id="a" * 64, children=children)

    def never(key):
        raise AssertionError("an object was fetched")

    leaf = tree()
    for wrong in (leaf, tree(leaf), tree(tree(leaf), tree(leaf)), tree(tree(tree(leaf)))):
        with pytest.raises(UnreadableError):
            unpacked(wrong, "token", never, LIMIT)


def test_two_messages_have_no_object_in_common():
    one, two = (parts(request(b"same", 1, 2, token, 60.0)) for token in ("x", "y"))
    assert not one.objects.keys() & two.objects.keys()


def test_only_requests_of_coterie_for_this_node_are_answered():
    sent = parts(request(b"?", 1, 2, "token", 60.0)).proto
    assert is_request(sent, 2)
    assert not is_request(sent, 3)
    wrong = {"message_type": "train", "src_node_id": 5, "group_id": "", "reply_to_message_id": "x"}
    for name, value in wrong.items():
        changed = type(sent)()
        changed.CopyFrom(sent)
        setattr(changed.metadata, name, value)
        assert not is_request(changed, 2), name


def test_other_messages_are_dropped_and_their_bundles_never_asked_for(link, caplog):
    agent = link.online("a")
    message = request(b"?", link.run._run, link.node("a").id, "token", 60.0)
    message.metadata.message_type = "train"
    sent, paths = parts(message), []
    link.run._calls("/v1/runtime/push-messages", push_request(sent), push_response())
    called = agent._calls

    def recording(path, *arguments):
        paths.append(path)
        return called(path, *arguments)

    agent._calls = recording
    assert agent._once()
    assert "dropped" in caplog.text
    assert paths == ["/v1/fleet/pull-messages", "/v1/fleet/confirm-message-received"]


def push_request(sent):
    from flwr.proto.runtime_pb2 import PushAppMessagesRequest

    return PushAppMessagesRequest(messages_list=[sent.proto], message_object_trees=[sent.tree])


def push_response():
    from flwr.proto.runtime_pb2 import PushAppMessagesResponse

    return PushAppMessagesResponse


# ---- the door ------------------------------------------------------------------------------------

KEY = b"a public key"


class Noted:
    """The mailbox as the door sees it."""

    def __init__(self):
        self.told = []

    async def mail(self, site, seconds):
        self.told.append(f"wait for {site}")

    def answered(self):
        self.told.append("answered")


class Behind:
    """A link that takes note of every call."""

    def __init__(self):
        self.calls = []

    async def __call__(self, scope, receive, send):
        self.calls.append((scope["path"], dict(scope["headers"])))
        head = [(b"content-type", b"application/x-protobuf")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b"from the link"})


def passed(path, *, key=KEY, site="a", method="POST", body=b"", headers=()):
    """The status of a call at the door, and what the link sees of it."""
    status, calls, _ = seen_at_the_door(path, key, site, method, body, headers)
    return status, calls


def seen_at_the_door(path, key=KEY, site="a", method="POST", body=b"", headers=()):
    behind, noted = Behind(), Noted()
    link = httpx.AsyncClient(transport=httpx.ASGITransport(behind), base_url="https://link")
    door = Door(link, lambda: {"a": KEY, "b": b"another"}, noted)

    async def gate(scope, receive, send):
        await door({**scope, "state": {"site": site}}, receive, send)

    async def call():
        front = httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="https://door")
        given = {"flwr-public-key": b64encode(key).decode(), **dict(headers)}
        async with link, front:
            return await front.request(method, path, content=body, headers=given)

    return asyncio.run(call()).status_code, behind.calls, noted.told


def test_the_door_passes_its_list_of_fleet_calls_and_nothing_else_of_flwr(link):
    served = {path for _, path in PROTOBUF_REQUEST_TYPES} | set(every_path(link.app))
    assert {path for path in served if path.startswith("/v1/fleet/")} > CALLS
    assert len(served) > 70
    for path in served:
        status, calls = passed(path)
        assert (status, len(calls)) == ((200, 1) if path in CALLS else (404, 0)), path
    for name in ("register-node", "unregister-node", "get-run", "get-fab"):
        assert f"/v1/fleet/{name}" in served - CALLS


def every_path(app):
    from fastapi.routing import iter_route_contexts

    return [context.route.path for context in iter_route_contexts(app.routes)]


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//v1/fleet/pull-messages",
        "/v1/fleet/pull-messages/",
        "/v1/fleet/pull-messages?x=1",
        "/v1/fleet/pull-messages/../register-node",
        "/v1/fleet/PULL-MESSAGES",
        "/v1/fleet/new-call-of-a-later-version",
        "/v1/fleet/pull-messages%00",
        "/v1/fleet/pull-messages/%2e%2e/%2e%2e/control/start-run",
    ],
)
def test_the_door_has_no_other_spelling(path):
    assert passed(path) == (404, [])


def test_the_door_passes_posts_with_the_key_of_the_connection_alone():
    path = "/v1/fleet/pull-messages"
    assert passed(path, method="GET") == (404, [])
    assert passed(path, key=b"another") == (403, [])  # that of site b
    assert passed(path, site="revoked") == (403, [])
    assert passed(path, body=bytes(MOST + 1)) == (413, [])
    status, ((seen, headers),) = passed(
        path, headers={"flwr-task-token": "x", "cookie": "x", "flwr-timestamp": "now"}
    )
    assert (status, seen) == (200, path)
    assert {name for name in headers if name.startswith(b"flwr")} == {
        b"flwr-public-key",
        b"flwr-timestamp",
    }
    assert b"cookie" not in headers


def test_a_pull_waits_for_mail_and_a_push_is_announced():
    for call in CALLS:
        told = {"/v1/fleet/pull-messages": ["wait for a"], "/v1/fleet/push-messages": ["answered"]}
        assert seen_at_the_door(call)[2] == told.get(call, [])


def test_a_link_that_is_away_is_told_as_such():
    def refuse(request):
        raise httpx.ConnectError("refused")

    link = httpx.AsyncClient(transport=httpx.MockTransport(refuse), base_url="https://link")
    door = Door(link, lambda: {"a": KEY}, Noted())

    async def call():
        front = httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="https://door")
        async with link, front:
            header = {"flwr-public-key": b64encode(KEY).decode()}
            return await front.post("/v1/fleet/pull-messages", headers=header)

    async def gate(scope, receive, send):
        await door({**scope, "state": {"site": "a"}}, receive, send)

    assert asyncio.run(call()).status_code == 503


# ---- the calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "content", "error"),
    [
        (503, b"", LinkLostError),
        (429, b"", LinkLostError),
        (500, b"", LinkLostError),
        (200, bytes(MOST + 1), LinkLostError),
        (200, b"\xff\xff\xff", LinkLostError),
        (401, b"", LinkRefusedError),
        (403, b"", LinkRefusedError),
        (307, b"", LinkRefusedError),
    ],
)
def test_what_is_no_answer_is_an_error_and_ends_no_process(status, content, error):
    def answer(request):
        headers = {"location": "https://elsewhere"}
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(content))

    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="https://link")
    calls = Calls(http, nobody)
    with pytest.raises(error) as raised:
        calls("/v1/fleet/pull-messages", pull_response()(), pull_response())
    assert getattr(raised.value, "unknown", False) == (status == 401)
    assert ("more than" in str(raised.value)) == (len(content) > MOST)


# ---- the mailbox ---------------------------------------------------------------------------------


class Run:
    """A run on a link that never was: answers as it is told."""

    def __init__(self, answers):
        self.answers, self.sent, self.ended = list(answers), [], 0
        self.node = NodeState(7, True, "first")
        self.unanswered = set()  # messages without an answer for ever

    def beat(self):
        pass

    def nodes(self, admitted):
        return dict.fromkeys(admitted, self.node)

    def send(self, node, body, token, seconds):
        self.sent.append(body)
        return str(len(self.sent))

    def arrived(self, asked):
        there = (key for key in asked if len(self.answers) >= int(key))
        return [SimpleNamespace(asked=key) for key in there if key not in self.unanswered]

    def fetched(self, answer, token, limit):
        found = self.answers[int(answer.asked) - 1]
        if isinstance(found, Exception):
            raise found
        return found

    def end(self):
        self.ended += 1


def asked(run, seconds=5.0, silence=5.0, meanwhile=None):
    """What a mailbox with this run answers, and the mailbox."""

    async def work():
        mailbox = FlowerMailbox(silence, LIMIT)
        serving = asyncio.create_task(mailbox.serve(lambda: run, lambda: {"a": b"key"}))
        try:
            if meanwhile:
                asyncio.get_running_loop().call_later(0.3, meanwhile)
            answer = await mailbox.ask("a", b"?", seconds)
            end = time.monotonic() + 5
            while mailbox._given_up and time.monotonic() < end:
                await asyncio.sleep(0.01)
            return answer
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    return asyncio.run(work())


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(flower_mailbox, "WATCH", 0.05)


@pytest.mark.usefixtures("hasty")
def test_an_answer_comes_back_and_a_lost_one_is_asked_for_again():
    run = Run([b"!"])
    assert asked(run) == b"!"
    assert (run.sent, run.ended) == ([b"?"], 0)
    run = Run([None, LinkLostError("cut"), LinkRefusedError("run over", 403), b"!"])
    assert asked(run) == b"!"
    assert run.sent == [b"?"] * 4


@pytest.mark.usefixtures("hasty")
def test_an_answer_that_is_being_fetched_is_not_asked_for_again():
    run, fetches = Run([b"!"]), []

    def slowly(answer, token, limit):
        fetches.append(answer.asked)
        time.sleep(0.3)
        return b"!" if len(fetches) == 1 else None

    run.fetched = slowly
    assert asked(run) == b"!"
    assert fetches == ["1"]


@pytest.mark.usefixtures("hasty")
def test_an_unreadable_answer_is_said_to_be_one():
    assert asked(Run([UnreadableError("too large")])) == "unreadable"


@pytest.mark.usefixtures("hasty")
def test_a_message_to_a_former_process_of_a_site_is_sent_again():
    run = Run([])

    def restarted():
        run.node = run.node._replace(activated="second")
        run.unanswered, run.answers = {"1"}, [b"!"] * 9

    assert asked(run, meanwhile=restarted) == b"!"
    assert len(run.sent) > 1


@pytest.mark.usefixtures("hasty")
def test_a_site_without_an_answer_is_lost_and_its_message_deleted():
    run = Run([])
    assert asked(run, seconds=0.2) == "lost"
    assert (len(run.sent), run.ended) == (1, 1)


@pytest.mark.usefixtures("hasty")
def test_a_silent_site_is_lost_long_before_the_deadline():
    run = Run([])
    run.node = run.node._replace(online=False)
    assert asked(run, seconds=1000.0, silence=0.2) == "lost"
    assert run.sent == []


@pytest.mark.usefixtures("hasty")
def test_sites_that_cannot_be_read_for_a_moment_end_nothing(caplog):
    run, refused = Run([]), [StoreError("the folder is being written")]

    def nodes(admitted):
        if refused:
            raise refused.pop()
        run.answers = [b"!"]
        return dict.fromkeys(admitted, run.node)

    run.nodes = nodes
    assert asked(run) == b"!"
    assert "cannot be read" in caplog.text


@pytest.mark.usefixtures("hasty")
def test_a_link_that_was_started_anew_gets_a_new_run_and_the_message_again():
    run, refused = Run([]), []

    def beat():
        if refused:
            refused.clear()
            raise LinkRefusedError("no such task", 401)

    def killed():
        refused.append(1)
        run.unanswered, run.answers = {"1"}, [b"!"] * 9

    run.beat = beat
    assert asked(run, meanwhile=killed) == b"!"
    assert len(run.sent) > 1


def test_a_site_waits_for_its_own_mail_and_once_for_each_message(monkeypatch):
    monkeypatch.setattr(flower_mailbox, "WATCH", 60.0)  # an answer is looked for when announced
    run = Run([b"!", b"!"])

    async def work():
        mailbox = FlowerMailbox(5.0, LIMIT)
        serving = asyncio.create_task(mailbox.serve(lambda: run, lambda: {"a": b"key"}))
        pulls = [asyncio.create_task(mailbox.mail("a", 60.0)) for _ in range(3)]
        other = asyncio.create_task(mailbox.mail("b", 60.0))
        for _ in range(2):
            asking = asyncio.create_task(mailbox.ask("a", b"?", 5.0))
            while len(run.sent) == 0 or not mailbox._sent:
                await asyncio.sleep(0.001)
            mailbox.answered()
            assert await asking == b"!"
        await asyncio.sleep(0)
        done = [task.done() for task in (*pulls, other)]
        for task in (*pulls, other, serving):
            task.cancel()
        await asyncio.gather(*pulls, other, serving, return_exceptions=True)
        return done

    assert asyncio.run(work()) == [True, True, False, False]


# ---- the link's process --------------------------------------------------------------------------


def test_the_link_is_on_loopback_in_memory_and_loads_no_code(tmp_path, monkeypatch):
    for name in ("FLWR_DATABASE", "FLWR_TRACING_ENABLED", "FLWR_INTERNAL_GRPC_FLEET_API"):
        monkeypatch.setenv(name, "1")
    link = FlowerLink.create(tmp_path / "link")
    command = link.command()
    settings = dict(pairwise(command))
    assert settings["--host"] == "127.0.0.1"
    assert settings["--isolation"] == "process"
    assert {"--enable-supernode-auth", "--disable-runtime-dependency-installation"} <= set(command)
    assert not {"--database", "--insecure"} & set(command)
    flwr = {k: v for k, v in link.environment().items() if k.startswith("FLWR_")}
    assert flwr == {**QUIET, "FLWR_HOME": str(tmp_path / "link")}
    assert (tmp_path / "link").stat().st_mode & 0o777 == 0o700
    for name in ("secret", "server.key"):
        assert (tmp_path / "link" / name).stat().st_mode & 0o777 == 0o600
    again = FlowerLink.create(tmp_path / "link")
    assert again.secret != link.secret
    assert hashlib.sha256(again.secret) != hashlib.sha256(link.secret)


def test_a_message_is_kept_by_the_agent_while_the_connection_is_gone(link, monkeypatch):
    monkeypatch.setattr(flower_agent, "SOON", 0.01)
    agent, failing = link.online("a"), []
    called = agent._calls

    def sometimes(path, *arguments):
        if path not in failing:
            failing.append(path)
            raise LinkLostError("cut")
        return called(path, *arguments)

    asked = link.run.send(link.node("a").id, b"question", "token", 60.0)
    failing.append("/v1/fleet/pull-messages")
    agent._calls = sometimes
    assert agent._once()
    (answer,) = link.run.arrived([asked])
    assert link.run.fetched(answer, "token", LIMIT) == b"noitseuq"
    assert len(failing) == 5
