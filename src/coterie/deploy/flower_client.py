"""The ClientApp of coterie on Flower: passes a message to the site's own process, and its answer.

A SuperNode runs whatever app the SuperLink sends it. So this one has no data and no key: both are
with ``coterie site serve``, under another user, behind a unix socket.
"""

import socket

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

RECORD, BODY = "coterie", "body"  # where the bytes lie in Flower's message
SOCKETS = "sockets"  # beside them in a simulation: the folder of the simulated sites' sockets

app = ClientApp()


@app.query()
def pass_on(message: Message, context: Context) -> Message:
    """The site's answer to a message; Flower reports an error if there is no site."""
    asked, node = message.content.config_records[RECORD], context.node_config
    with socket.socket(socket.AF_UNIX) as site:
        site.connect(str(node.get("socket") or f"{asked[SOCKETS]!s}/{node['partition-id']}"))
        site.sendall(bytes(asked[BODY]))  # type: ignore[arg-type]
        site.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: site.recv(1 << 20), b""))
    return Message(RecordDict({RECORD: ConfigRecord({BODY: answer})}), reply_to=message)
