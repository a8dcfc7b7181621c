"""Signed messages and keys: what is accepted is what was signed."""

from __future__ import annotations

import hashlib
import json
import stat
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilstream.errors import InputError, ProtocolError
from veilstream.federation.keys.identity import LearnerKeys, PrivateKey, ServerKeys
from veilstream.federation.keys.new_keys import add_learner, make_keys, remove_learner, renew_server
from veilstream.federation.protocol.messages import Reply, Request, body_hash, digest

KEY = PrivateKey(bytes(range(32)))
REQUEST = Request("round", "run", "north", "nonce", 3, (2, "ab" * 32), {"d": 5}, b"model")
REPLY = Reply("release", "north", "cd", {}, b"bytes")


def test_messages_survive_the_way():
    assert Request.read(REQUEST.sign(KEY), KEY.public) == REQUEST
    assert Reply.read(REPLY.sign(KEY), KEY.public) == REPLY
    assert Reply.claimed_learner(REPLY.sign(KEY)) == "north"


@given(st.data())
def test_any_change_is_refused(data):
    for message, read in ((REQUEST, Request.read), (REPLY, Reply.read)):
        sent = bytearray(message.sign(KEY))
        place = data.draw(st.integers(0, len(sent) - 1))
        sent[place] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(ProtocolError):
            read(bytes(sent), KEY.public)


@given(st.binary(max_size=300))
def test_anything_else_is_refused(noise):
    with pytest.raises(ProtocolError):
        Request.read(noise, KEY.public)
    with pytest.raises(ProtocolError):
        Reply.read(noise, KEY.public)


def signed(head, body: bytes = b"") -> bytes:
    """Whatever a holder of the key may say; text is taken as it is."""
    text = head.encode() if isinstance(head, str) else json.dumps(head).encode()
    start = struct.pack("<4sI", b"VSM2", len(text)) + text
    return start + KEY.sign(hashlib.sha256(start).digest()) + body


NO_BODY = hashlib.sha256(b"").hexdigest()
ROUND = {
    "kind": "round",
    "run": "",
    "learner": "",
    "nonce": "",
    "round": 0,
    "acknowledged": None,
    "settings": {},
    "time": 0,
    "follows": [],
    "epoch": 0,
    "body": NO_BODY,
}
ENROLLED = {
    "kind": "enrolled",
    "learner": "north",
    "answers": "ab",
    "body": NO_BODY,
    "facts": {"epoch": 0, "round": 0, "daemon": "d", "settings": {}, "time": 1},
}


def test_the_forms_that_the_next_tests_damage_are_read():
    assert Request.read(signed(ROUND), KEY.public).round == 0  # as 0.6 wrote it
    assert Request.read(signed(ROUND | {"published": 7}), KEY.public).published == 7
    for wrong in (-1, "7", True, 2**32):
        with pytest.raises(ProtocolError, match="unknown form"):
            Request.read(signed(ROUND | {"published": wrong}), KEY.public)
    assert Reply.read(signed(ENROLLED), KEY.public).facts["time"] == 1


UNREADABLE = {
    "kind": ["other", []],
    "run": [1, "x" * 201],
    "learner": ["x" * 64],
    "nonce": ["x" * 65, None],
    "round": [-1, True, 2**32, 1.0, "3"],
    "acknowledged": [[1], [1, 2], ["1", "ab"], {"0": 1}, [1, "ab"], [1, "\ud800" * 64], [1, "A" * 64]],
    "settings": [[]],
    "time": [1.5],
    "body": ["0" * 64, 3],
    "more": [1],
    "follows": ["run", [1], ["x" * 201], None],
    "epoch": [-1, None],
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_signed_request_of_unknown_form_is_refused_too(name):
    heads = [ROUND | {name: said} for said in UNREADABLE[name]]
    heads += [{k: v for k, v in ROUND.items() if k != name}] if name in ROUND else []
    for head in heads:
        with pytest.raises(ProtocolError):
            Request.read(signed(head), KEY.public)


@pytest.mark.parametrize("name", ["epoch", "round", "time"])
@pytest.mark.parametrize(
    "said",
    ["Infinity", "-Infinity", "NaN", "1e400", "4294967296", "-1", "true", '"3"', "1.0", "null", "[]", "9" * 5000],
)
def test_only_whole_numbers_below_two_to_32_are_read(name, said):
    facts = json.dumps(ENROLLED["facts"] | {name: "here"}).replace('"here"', said)
    text = json.dumps(ENROLLED | {"facts": "there"}).replace('"there"', facts)
    with pytest.raises(ProtocolError):
        Reply.read(signed(text), KEY.public)


@pytest.mark.parametrize(
    "head",
    [
        "[]",
        '"text"',
        "{}",
        "null",
        "",
        "{",
        "[" * 60_000,
        "\x00",
        '{"kind": "release"}',
        json.dumps(ENROLLED | {"facts": {}}),
        json.dumps(ENROLLED | {"facts": None}),
        json.dumps(ENROLLED | {"kind": "release"}),
        json.dumps(ENROLLED | {"kind": ["enrolled"]}),
        json.dumps(ENROLLED | {"kind": "refusal", "facts": {"why": "x" * 2001}}),
        json.dumps(ENROLLED | {"kind": "refusal", "facts": {"why": 3}}),
        json.dumps(ENROLLED | {"learner": 3}),
        json.dumps(ENROLLED | {"answers": "x" * 65}),
        json.dumps(ENROLLED)[:-1] + ', "kind": "enrolled"}',
        json.dumps(ENROLLED | {"facts": ENROLLED["facts"] | {"more": 1}}),
        json.dumps(ENROLLED | {"facts": ENROLLED["facts"] | {"settings": {"a": "x" * 70_000}}}),
    ],
)
def test_a_signed_reply_of_unknown_form_is_refused_too(head):
    with pytest.raises(ProtocolError):
        Reply.read(signed(head), KEY.public)


def test_a_body_is_bound_to_its_head_and_hashed_once_for_all():
    model = bytes(range(200))
    hashed = body_hash(model)
    requests = [Request("round", "run", name, "n", body=model) for name in ("a", "b")]
    for request in requests:
        whole = request.sign(KEY)
        assert request.sign(KEY, hashed) == whole == request.sign_head(KEY, hashed) + model
        assert Request.read(whole, KEY.public).body == model
        for other in (model[:-1], model + b"x", b"", bytes(200)):
            with pytest.raises(ProtocolError, match="a body that the server did not sign"):
                Request.read(request.sign_head(KEY, hashed) + other, KEY.public)
    assert digest(requests[0].sign(KEY)) == digest(requests[0].sign_head(KEY, hashed))
    assert digest(requests[0].sign(KEY)) != digest(requests[1].sign(KEY))


def test_a_head_that_no_one_would_read_is_not_sent():
    with pytest.raises(ProtocolError, match="head"):
        Request("enrol", "run", "", "n", settings={"a": "x" * 70_000}).sign(KEY)


def test_another_key_is_refused_by_name():
    with pytest.raises(ProtocolError, match="not signed by learner 'north'"):
        Reply.read(REPLY.sign(PrivateKey(bytes(32))), KEY.public)
    with pytest.raises(ProtocolError, match="not signed by the server"):
        Request.read(REQUEST.sign(PrivateKey(bytes(32))), KEY.public)


def test_keys_fit_together_and_secrets_are_for_their_owner(tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys, ["fl.example.org", "127.0.0.1"], ["north", "south"])
    server = ServerKeys.load(keys / "server")
    north = LearnerKeys.load(keys / "learners/north")
    assert north.name == "north"
    assert north.server.raw == server.identity.public.raw
    assert server.learners["north"].raw == north.identity.public.raw
    assert Reply.read(REPLY.sign(north.identity), server.learners["north"]) == REPLY
    for path in keys.rglob("*.key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not list((keys / "server").rglob("ca.key"))
    assert not list((keys / "learners").rglob("ca.key"))


def test_the_servers_certificate_is_what_tls_wants(tmp_path):
    """A handshake by the standard library, with the right CA, a wrong one, a wrong name."""
    import socket
    import ssl
    import threading

    make_keys(tmp_path / "a", ["127.0.0.1", "localhost"], [])
    make_keys(tmp_path / "b", ["127.0.0.1"], [])

    def handshake(ca, name):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "a/server/tls.pem", tmp_path / "a/server/tls.key")
        ours, theirs = socket.socketpair()

        def answer():
            try:
                with context.wrap_socket(ours, server_side=True) as held:
                    held.recv(1)
            except OSError:
                ours.close()

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            trust = ssl.create_default_context(cafile=str(ca))
            with trust.wrap_socket(theirs, server_hostname=name) as held:
                return held.version()
        finally:
            theirs.close()
            thread.join()

    assert handshake(tmp_path / "a/server/ca.pem", "127.0.0.1") == "TLSv1.3"
    assert handshake(tmp_path / "a/server/ca.pem", "localhost") == "TLSv1.3"
    renew_server(tmp_path / "a", ["127.0.0.1"])
    assert handshake(tmp_path / "a/server/ca.pem", "127.0.0.1") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "a/server/ca.pem", "localhost")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "b/server/ca.pem", "127.0.0.1")


def test_learners_are_added_and_removed(tmp_path):
    keys = tmp_path / "keys"
    make_keys(keys, ["127.0.0.1"], ["north"])
    add_learner(keys, "south")
    assert set(ServerKeys.load(keys / "server").learners) == {"north", "south"}
    with pytest.raises(InputError, match="a learner without keys"):
        add_learner(keys, "south")
    remove_learner(keys, "south")
    assert set(ServerKeys.load(keys / "server").learners) == {"north"}
    with pytest.raises(InputError, match="one of north"):
        remove_learner(keys, "south")
    old = (keys / "removed/south-1/identity.key").read_text()
    add_learner(keys, "south")  # a stolen key: the same name with another
    assert LearnerKeys.load(keys / "learners/south").identity.public.raw.hex() != old


def test_a_renewed_certificate_keeps_its_names_and_does_not_outlive_the_ca(tmp_path):
    from cryptography import x509

    make_keys(tmp_path, ["fl.example.org", "127.0.0.1"], [])
    renew_server(tmp_path, [])
    certificate = x509.load_pem_x509_certificate((tmp_path / "server/tls.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org"]
    with pytest.raises(InputError, match="which the CA has left"):
        renew_server(tmp_path, [], days=5000)


def test_a_folder_of_keys_keeps_its_name(tmp_path):
    make_keys(tmp_path, ["127.0.0.1"], ["north"])
    (tmp_path / "learners/north").rename(tmp_path / "mykeys")
    with pytest.raises(InputError, match="a folder called north"):
        LearnerKeys.load(tmp_path / "mykeys")


@pytest.mark.parametrize("bad", ["", "../up", "a b", "-x", "ä", "x" * 64, "a/b", "a\n"])
def test_names_that_cannot_be(bad, tmp_path):
    with pytest.raises(InputError, match="learner"):
        make_keys(tmp_path / "keys", ["127.0.0.1"], [bad])
    assert not (tmp_path / "keys").exists()


def test_existing_keys_are_not_overwritten(tmp_path):
    make_keys(tmp_path, ["127.0.0.1"], ["north"])
    with pytest.raises(InputError, match="new or empty"):
        make_keys(tmp_path, ["127.0.0.1"], ["north"])


def test_missing_and_broken_key_files_are_named(tmp_path):
    make_keys(tmp_path, ["127.0.0.1"], ["north"])
    with pytest.raises(InputError, match="keys"):
        LearnerKeys.load(tmp_path / "learners/south")
    (tmp_path / "learners/north/identity.key").write_text("zz")
    with pytest.raises(InputError, match=r"identity\.key"):
        LearnerKeys.load(tmp_path / "learners/north")
