"""The door between the sites and the SuperLink: passes on a site's own fleet calls, nothing else.

The link serves its Control, Runtime and Fleet interfaces on one port, and Control has no
authentication: whoever reaches that port can register keys and start runs. So the link listens on
loopback, and sites reach this door instead, over TLS with the certificate that the coordinator has
pinned. A call passes if it is one of CALLS and is made with the key of that certificate. The door
sends the path that it has in its own list, never the caller's, and no header that it does not know.
"""

import ssl
from base64 import b64encode
from collections.abc import Callable, Mapping

from .flower_api import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    PROTOBUF_MEDIA_TYPE,
    TIMESTAMP_HEADER,
    httpx,
)
from .flower_calls import MOST

from starlette.types import Receive, Scope, Send  # isort: skip
