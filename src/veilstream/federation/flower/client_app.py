"""What a SuperNode runs: it passes bytes to the learner's daemon and back, and checks nothing.

The daemon answers only what the server has signed, and signs its answers. `--node-config` names its
socket; nodes of Flower's simulation have only numbers, so there the run names a folder of sockets.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from veilstream.federation.flower import RECORD, REPLY, REQUEST
from veilstream.federation.protocol import frames

_TIMEOUT_S = 3600.0
_HEAD_BYTES = 1 << 17

app = ClientApp()


@app.query()  # type: ignore[untyped-decorator]
def carry(message: Message, context: Context) -> Message:
    """The daemon's reply; empty if it did not answer."""
    request = message.content[RECORD][REQUEST]
    try:
        # A release has eight bytes for each number, a model four.
        limit = _HEAD_BYTES + 2 * len(request)
        reply = frames.ask(_socket(context), request, _TIMEOUT_S, limit)
    except OSError:
        reply = b""
    return Message(RecordDict({RECORD: packed(REPLY, reply)}), reply_to=message)


def packed(name: str, content: bytes) -> ConfigRecord:
    """A record with these bytes, unlike any other: Flower stores equal ones once and forgets them with the first."""
    return ConfigRecord({name: content, "nonce": secrets.token_bytes(16)})


def _socket(context: Context) -> Path:
    told = context.node_config.get("socket")
    if told is not None:
        return Path(os.fsdecode(str(told)))
    folder, place = context.run_config.get("sockets"), context.node_config.get("partition-id")
    if not folder or place is None:
        raise ConnectionError("--node-config: a SuperNode needs the path of the learner's socket, as in socket=PATH")
    return Path(str(folder)) / f"{int(place)}.sock"
