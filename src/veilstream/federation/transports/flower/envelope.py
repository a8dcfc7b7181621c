"""Bytes in Flower's messages, and out of them.

Flower stores a message as a tree of objects (message, record dictionary, record), each under the
hash of its content, and announces the message before its objects have come. The record is sent
last and is all that the receiver fetches: when it is there, everything is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from flwr.app import ConfigRecord, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.date import now
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)

__all__ = ["Envelope", "record_of", "unwrap"]

_TTL_S = 3600.0
_RECORD, _FIELD, _ONLY = "v", "b", "n"
_UNREACHABLE = "the learner's daemon cannot be reached"
_CLIENT_APP_CRASHED = 1  # of Flower's error codes, the one that fits


class Envelope:
    """A message ready to be pushed."""

    def __init__(self, message: Message) -> None:
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            objects = get_all_nested_objects(message)
            self.tree = get_object_tree(message)
            self.announcement = message_to_proto(remove_content_from_message(message))
        self.id: str = message.metadata.message_id
        last = record_of(self.tree) or self.id
        names = [name for name in objects if name != last]
        self.objects: list[tuple[str, bytes]] = [
            (name, objects[name].deflate()) for name in [*names, last]
        ]

    @classmethod
    def to(cls, node_id: int, run_id: int, task_id: int, data: bytes) -> Envelope:
        """From the server."""
        metadata = Metadata(
            run_id=run_id, message_id="", src_node_id=SUPERLINK_NODE_ID, dst_node_id=node_id,
            reply_to_message_id="", group_id="", created_at=now().timestamp(), ttl=_TTL_S,
            message_type="query", src_task_id=task_id,
        )  # fmt: skip
        return cls(make_message(metadata=metadata, content=_wrapped(data)))

    @classmethod
    def answer(cls, announcement: Any, data: bytes | None) -> Envelope:
        """From a learner; None says, always in the same words, that its daemon did not answer."""
        question = message_from_proto(announcement)
        if data is None:
            return cls(Message(Error(_CLIENT_APP_CRASHED, _UNREACHABLE), reply_to=question))
        return cls(Message(_wrapped(data), reply_to=question))

    def push(self, wanted: set[str], push_object: Callable[[str, bytes, bool], None]) -> None:
        """Push those objects that the SuperLink lacks; the flag marks the last."""
        lacking = [(name, content) for name, content in self.objects if name in wanted]
        for place, (name, content) in enumerate(lacking, 1):
            push_object(name, content, place == len(lacking))


def record_of(tree: Any) -> str | None:
    """Name of the object that holds the bytes; None in an error message."""
    for dictionary in tree.children:
        for record in dictionary.children:
            return str(record.object_id)
    return None


def unwrap(content: bytes) -> bytes:
    """The bytes in a record; ValueError if it is not one of ours."""
    try:
        data = ConfigRecord.inflate(content)[_FIELD]
    except Exception as error:  # whatever Flower's parser may raise on what a stranger sent
        raise ValueError("a message of unknown form") from error
    if not isinstance(data, bytes):
        raise ValueError("a message of unknown form")
    return data


def _wrapped(data: bytes) -> RecordDict:
    # Flower keeps equal contents once and forgets them with the first message that had them.
    return RecordDict({_RECORD: ConfigRecord({_FIELD: data, _ONLY: secrets.token_bytes(16)})})
