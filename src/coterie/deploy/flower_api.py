"""Every name of flwr that coterie uses. flwr's modules are private: `flwr>=1.41,<1.42`.

A new version of flwr is met here: a name that moved or went shows when this module is imported.
"""

from ..errors import ConfigError

try:
    import httpx
    from flwr.app import ConfigRecord, Error, Metadata, RecordDict
    from flwr.app import Message as FlowerMessage
    from flwr.app.message import make_message, remove_content_from_message
    from flwr.common.constant import (
        HEARTBEAT_MIN_INTERVAL,
        HEARTBEAT_PATIENCE,
        SUPERLINK_NODE_ID,
        TIMESTAMP_HEADER,
    )
    from flwr.common.serde import message_from_proto, message_to_proto
    from flwr.proto.control_pb2 import (
        ListNodesRequest,
        ListNodesResponse,
        RegisterNodeRequest,
        RegisterNodeResponse,
        StartRunRequest,
        StartRunResponse,
        StopRunRequest,
        StopRunResponse,
        UnregisterNodeRequest,
        UnregisterNodeResponse,
    )
    from flwr.proto.fab_pb2 import Fab
    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        ActivateNodeResponse,
        DeactivateNodeRequest,
        DeactivateNodeResponse,
        PullMessagesRequest,
        PullMessagesResponse,
        PushMessagesRequest,
        PushMessagesResponse,
    )
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
    from flwr.proto.message_pb2 import (
        ConfirmMessageReceivedRequest,
        ConfirmMessageReceivedResponse,
        ObjectTree,
        PullObjectRequest,
        PullObjectResponse,
        PushObjectRequest,
        PushObjectResponse,
    )
    from flwr.proto.message_pb2 import Message as MessageProto
    from flwr.proto.node_pb2 import Node, NodeInfo
    from flwr.proto.runtime_pb2 import (
        AcquireTaskRequest,
        AcquireTaskResponse,
        GetNodesRequest,
        GetNodesResponse,
        PullAppMessagesRequest,
        PullAppMessagesResponse,
        PullTaskInputRequest,
        PullTaskInputResponse,
        PushAppMessagesRequest,
        PushAppMessagesResponse,
        SendTaskHeartbeatRequest,
        SendTaskHeartbeatResponse,
    )
    from flwr.supercore.auth import create_superexec_auth_metadata, derive_auth_secret
    from flwr.supercore.constant import (
        FLEET_HTTP_PUBLIC_KEY_HEADER,
        FLEET_HTTP_SIGNATURE_HEADER,
        TASK_TOKEN_HEADER,
        TaskType,
    )
    from flwr.supercore.date import now
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.primitives.asymmetric import (
        bytes_to_private_key,
        public_key_to_bytes,
        sign_message,
    )
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
    from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata
    from google.protobuf.message import DecodeError
    from google.protobuf.message import Message as Proto
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send
except ImportError as error:  # pragma: no cover - the extra is installed where tests run
    raise ConfigError(
        f"the package flwr cannot be imported ({error}); expected version 1.41 where transport = "
        "'flower'; pip install 'coterie[flower]'"
    ) from error

__all__ = [
    "FLEET_HTTP_PUBLIC_KEY_HEADER",
    "FLEET_HTTP_SIGNATURE_HEADER",
    "HEARTBEAT_MIN_INTERVAL",
    "HEARTBEAT_PATIENCE",
    "PROTOBUF_MEDIA_TYPE",
    "SUPERLINK_NODE_ID",
    "TASK_TOKEN_HEADER",
    "TIMESTAMP_HEADER",
    "AcquireTaskRequest",
    "AcquireTaskResponse",
    "ActivateNodeRequest",
    "ActivateNodeResponse",
    "ClientDisconnect",
    "ConfigRecord",
    "ConfirmMessageReceivedRequest",
    "ConfirmMessageReceivedResponse",
    "DeactivateNodeRequest",
    "DeactivateNodeResponse",
    "DecodeError",
    "Error",
    "Fab",
    "FlowerMessage",
    "GetNodesRequest",
    "GetNodesResponse",
    "ListNodesRequest",
    "ListNodesResponse",
    "MessageProto",
    "Metadata",
    "Node",
    "NodeInfo",
    "ObjectTree",
    "Proto",
    "PullAppMessagesRequest",
    "PullAppMessagesResponse",
    "PullMessagesRequest",
    "PullMessagesResponse",
    "PullObjectRequest",
    "PullObjectResponse",
    "PullTaskInputRequest",
    "PullTaskInputResponse",
    "PushAppMessagesRequest",
    "PushAppMessagesResponse",
    "PushMessagesRequest",
    "PushMessagesResponse",
    "PushObjectRequest",
    "PushObjectResponse",
    "Receive",
    "RecordDict",
    "RegisterNodeRequest",
    "RegisterNodeResponse",
    "Request",
    "Response",
    "RuntimeVersionMetadata",
    "Scope",
    "Send",
    "SendNodeHeartbeatRequest",
    "SendNodeHeartbeatResponse",
    "SendTaskHeartbeatRequest",
    "SendTaskHeartbeatResponse",
    "StartRunRequest",
    "StartRunResponse",
    "StopRunRequest",
    "StopRunResponse",
    "TaskType",
    "UnregisterNodeRequest",
    "UnregisterNodeResponse",
    "bytes_to_private_key",
    "create_superexec_auth_metadata",
    "derive_auth_secret",
    "get_all_nested_objects",
    "get_object_tree",
    "httpx",
    "make_message",
    "message_from_proto",
    "message_to_proto",
    "no_object_id_recompute",
    "now",
    "public_key_to_bytes",
    "remove_content_from_message",
    "sign_message",
]
