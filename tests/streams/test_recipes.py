"""The recipes of docs/your-data.md for Kafka and MQTT, each against something that speaks the protocol."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs/your-data.md"
ROWS = [{"person": f"p{i}", "x": i} for i in range(5)]
MESSAGES = [
    *(json.dumps(row).encode() for row in ROWS[:3]),
    b"no JSON",
    b"[1]",
    *(json.dumps(r).encode() for r in ROWS[3:]),
]
READ = [*ROWS[:3], None, [1], *ROWS[3:]]


@pytest.fixture(scope="module")
def clinic() -> dict[str, Any]:
    (code,) = re.findall(r"```python\n(# clinic\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def test_kafka_commits_before_it_hands_over(clinic, monkeypatch):
    kafka = pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    producer = kafka.Producer({"bootstrap.servers": "nowhere", "test.mock.num.brokers": 1})  # brings its own broker
    (broker,) = producer.list_topics(timeout=20).brokers.values()
    monkeypatch.setenv("KAFKA", f"{broker.host}:{broker.port}")
    for message in MESSAGES:
        producer.produce("visits", message, partition=0)
    assert producer.flush(20) == 0
    stream = clinic["kafka"](0)
    assert list(islice(stream, 4)) == READ[:4]
    stream.close()  # as a kill would: what was handed over is committed, the rest is not
    assert list(islice(clinic["kafka"](4), 3)) == READ[4:]


class Broker:
    """MQTT 3.1.1 for one subscriber: gives every message once and notes what is acknowledged."""

    def __init__(self) -> None:
        self.acknowledged: list[int] = []
        self.clean: bool | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with self._listener, self._listener.accept()[0] as peer:
            while (packet := self._packet(peer)) is not None:
                kind, body = packet
                if kind == 1:  # CONNECT: "MQTT", level 4, flags
                    assert body[:7] == b"\x00\x04MQTT\x04"
                    self.clean = bool(body[7] & 2)
                    peer.sendall(b"\x20\x02\x00\x00")
                elif kind == 8:  # SUBSCRIBE
                    assert body[2:] == b"\x00\x08visits/#\x01"
                    peer.sendall(b"\x90\x03" + body[:2] + b"\x01")
                    for number, message in enumerate(MESSAGES, 1):
                        content = b"\x00\x08visits/n" + struct.pack(">H", number) + message
                        peer.sendall(bytes([0x32, len(content)]) + content)
                elif kind == 4:  # PUBACK
                    self.acknowledged.append(struct.unpack(">H", body)[0])
                elif kind == 12:  # PINGREQ
                    peer.sendall(b"\xd0\x00")
                elif kind == 14:  # DISCONNECT
                    return

    @staticmethod
    def _packet(peer: socket.socket) -> tuple[int, bytes] | None:
        head = peer.recv(1)
        if not head:
            return None
        length = shift = 0
        while True:
            (digit,) = peer.recv(1)
            length |= (digit & 127) << shift
            shift += 7
            if digit < 128:
                break
        body = b""
        while len(body) < length:
            body += peer.recv(length - len(body))
        return head[0] >> 4, body


def test_mqtt_acknowledges_what_it_hands_over_and_no_more(clinic, monkeypatch):
    pytest.importorskip("paho.mqtt.client", reason="paho-mqtt is not installed")
    broker = Broker()
    monkeypatch.setenv("MQTT", broker.address)
    stream = clinic["mqtt"](0)
    assert list(islice(stream, 4)) == READ[:4]
    assert broker.clean is True
    from tests.support.federation import wait_for

    wait_for(lambda: broker.acknowledged == [1, 2, 3, 4])
    assert list(islice(stream, 3)) == READ[4:]
    wait_for(lambda: broker.acknowledged == [1, 2, 3, 4, 5, 6, 7])
