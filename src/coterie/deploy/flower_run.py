"""The coordinator's own run on the SuperLink: sends messages to nodes, collects their answers.

Flower carries messages for runs, and a run has an app. Ours is an empty bundle that nobody
executes: the coordinator takes the run's task itself, with a secret that only it and the link
have, and uses the task's token for the calls that a ServerApp's Grid makes. No process on the
coordinator loads a bundle, so that a run which somebody else starts never executes.
"""

import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .flower_agent import UNREADABLE
from .flower_api import (
    SUPERLINK_NODE_ID,
    AcquireTaskRequest,
    AcquireTaskResponse,
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    Fab,
    ListNodesRequest,
    ListNodesResponse,
    MessageProto,
    Node,
    ObjectTree,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PullObjectRequest,
    PullObjectResponse,
    PullTaskInputRequest,
    PullTaskInputResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
    PushObjectRequest,
    PushObjectResponse,
    RegisterNodeRequest,
    RegisterNodeResponse,
    SendTaskHeartbeatRequest,
    SendTaskHeartbeatResponse,
    StartRunRequest,
    StartRunResponse,
    StopRunRequest,
    StopRunResponse,
    TaskType,
    UnregisterNodeRequest,
    UnregisterNodeResponse,
    httpx,
)
from .flower_calls import Calls, LinkLostError, as_executor, as_task, nobody
from .flower_message import UnreadableError, parts, request, unpacked

_BUNDLE = """\
[project]
name = "coterie"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "coterie"
[tool.flwr.app.components]
serverapp = "nothing:app"
clientapp = "nothing:app"
[tool.flwr.app.config]
"""
_ANY_TASK = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
_SELF = Node(node_id=SUPERLINK_NODE_ID)


class NodeState(NamedTuple):
    """What the link knows of a site's node."""

    id: int
    online: bool
    activated: str  # when it last connected: another value means that its process is another


class Arrived(NamedTuple):
    """An answer that waits at the link, or the link's word that there will be none."""

    asked: str  # the id of the request
    proto: MessageProto
    tree: ObjectTree


class FlowerRun:
    """A run on a link, from :meth:`begin` to :meth:`end`. Its methods are called from threads."""

    def __init__(self, control: Calls, calls: Calls, run: int) -> None:
        self._control, self._calls, self._run = control, calls, run

    @classmethod
    def begin(cls, http: httpx.Client, secret: bytes) -> "FlowerRun":
        """Start a run with an empty bundle and take its task."""
        control, bundle = Calls(http, nobody), _bundle()
        fab = Fab(hash_str=hashlib.sha256(bundle).hexdigest(), content=bundle)
        run = control("/v1/control/start-run", StartRunRequest(fab=fab), StartRunResponse).run_id
        executor, wanted = Calls(http, as_executor(secret)), _ANY_TASK
        while True:
            taken = executor("/v1/runtime/acquire-task", wanted, AcquireTaskResponse)
            if not taken.token:
                raise LinkLostError("the link gave no task for our run")
            if taken.task.run_id == run:
                break
        calls = Calls(http, as_task(taken.token))
        calls("/v1/runtime/pull-task-input", PullTaskInputRequest(), PullTaskInputResponse)
        return cls(control, calls, run)

    def end(self) -> None:
        """Stop the run; the link deletes what it still has of its messages."""
        path = "/v1/control/stop-run"
        self._control(path, StopRunRequest(run_id=self._run), StopRunResponse)

    def beat(self) -> None:
        """Keep the run's task."""
        path = "/v1/runtime/send-task-heartbeat"
        self._calls(path, SendTaskHeartbeatRequest(), SendTaskHeartbeatResponse)

    def nodes(self, admitted: Mapping[str, bytes]) -> dict[str, NodeState]:
        """The nodes of the admitted sites, given by name and public key.

        Registers keys that are new, and removes every other key that the link knows.
        """
        names = {key: name for name, key in admitted.items()}
        path = "/v1/control/list-nodes"
        listed = self._control(path, ListNodesRequest(), ListNodesResponse).nodes_info
        known = [info for info in listed if info.status != "unregistered"]
        for info in known:
            if info.public_key not in names:
                self._unregister(info.node_id)
        for key in names.keys() - {info.public_key for info in listed}:
            self._register(names[key], key)
        return {
            names[info.public_key]: NodeState(
                info.node_id, info.status == "online", info.last_activated_at
            )
            for info in known
            if info.public_key in names
        }

    def _register(self, name: str, key: bytes) -> None:
        wanted = RegisterNodeRequest(public_key=key, name=name)
        self._control("/v1/control/register-node", wanted, RegisterNodeResponse)

    def _unregister(self, node: int) -> None:
        wanted = UnregisterNodeRequest(node_id=node)
        self._control("/v1/control/unregister-node", wanted, UnregisterNodeResponse)

    def send(self, node: int, body: bytes, token: str, seconds: float) -> str:
        """Send a request that is given up after this time; the id by which it is answered."""
        sent = parts(request(body, self._run, node, token, seconds))
        wanted = PushAppMessagesRequest(
            messages_list=[sent.proto], message_object_trees=[sent.tree]
        )
        told = self._calls("/v1/runtime/push-messages", wanted, PushAppMessagesResponse)
        if list(told.message_ids) != [sent.id]:
            raise LinkLostError("the link did not take the message: the node is not known")
        for key in sent.order(told.objects_to_push):
            piece = PushObjectRequest(
                node=_SELF,
                run_id=self._run,
                object_id=key,
                object_content=sent.objects[key],
                session_id=told.session_id,
            )
            self._calls("/v1/runtime/push-object", piece, PushObjectResponse)
        return sent.id

    def arrived(self, asked: Sequence[str]) -> list[Arrived]:
        """The answers to these requests that the link has now."""
        wanted = PullAppMessagesRequest(message_ids=asked)
        told = self._calls("/v1/runtime/pull-messages", wanted, PullAppMessagesResponse)
        found = zip(told.messages_list, told.message_object_trees, strict=True)
        return [Arrived(proto.metadata.reply_to_message_id, proto, tree) for proto, tree in found]

    def fetched(self, answer: Arrived, token: str, limit: int) -> bytes | None:
        """The bytes of an answer, which the link then deletes; None if there is no answer.

        Raises UnreadableError for an answer of another form, of another sender, or too large.
        """
        try:
            if answer.proto.HasField("error"):
                if answer.proto.error.code == UNREADABLE:
                    raise UnreadableError("the site could not read the request")
                return None
            return unpacked(answer.tree, token, self._pull, limit)
        finally:
            self.delete(answer.proto.metadata.message_id)

    def _pull(self, key: str) -> PullObjectResponse:
        wanted = PullObjectRequest(node=_SELF, run_id=self._run, object_id=key)
        return self._calls("/v1/runtime/pull-object", wanted, PullObjectResponse)

    def delete(self, message: str) -> None:
        """Have the link delete a message's objects."""
        wanted = ConfirmMessageReceivedRequest(
            node=_SELF, run_id=self._run, message_object_id=message
        )
        path = "/v1/runtime/confirm-message-received"
        self._calls(path, wanted, ConfirmMessageReceivedResponse)


def _bundle() -> bytes:
    """An app bundle that names components and holds no code."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(zipfile.ZipInfo("pyproject.toml"), _BUNDLE)
    return made.getvalue()
