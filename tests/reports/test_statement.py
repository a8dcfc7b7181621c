"""A privacy statement: what it says, and that no one else can have said it."""

from __future__ import annotations

import json

import pytest

import veilstream as vs
from tests.browser.samples import AUDIT
from tests.cli.test_plan import veilstream
from tests.support.run_folders import federation_folder, simulated_folder
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.identity import PrivateKey, make_keys
from veilstream.plans.released_model import plan_digest
from veilstream.reports.statement import make_statement, verify_statement


@pytest.fixture
def folder(tmp_path):
    return federation_folder(tmp_path / "run")


KEY = PrivateKey(bytes(range(32)))


def test_it_says_promise_plan_heads_and_that_there_was_no_audit(folder):
    run = vs.Run(folder)
    text = " ".join(make_statement(run, KEY, now=0.0).text.split())
    assert "ε = 1, δ = 10⁻⁶" in text
    assert plan_digest(run.plan) in text
    assert f"west: epoch 0, 5 rounds, ledger head 2{5:063x}" in text
    assert "Stated 1970-01-01" in text
    assert "None lies in the run's folder" in text


def test_an_audit_counts_only_if_it_says_that_it_is_of_this_plan(folder):
    run = vs.Run(folder)

    def stated(**about):
        (folder / "audit.json").write_text(json.dumps(json.loads(AUDIT) | about))
        return " ".join(make_statement(run, KEY).text.split())

    made = {"made": "2026-01-02T03:04:05Z"}
    text = stated(plan_sha256=plan_digest(run.plan), **made)
    assert "KEPT, as far as messages tell" in text
    assert "Made 2026-01-02T03:04:05Z, of this plan, from 400 runs" in text
    assert "It cannot see: - how long things take" in text
    text = stated(plan_sha256="ab" * 32, **made)
    assert f"of another plan ({'ab' * 32}), so it says nothing of this run" in text
    assert "KEPT" not in text
    text = stated()
    assert "does not say of which plan" in text
    assert "KEPT" not in text


def test_only_the_text_that_was_signed_verifies_with_that_key(folder):
    content = make_statement(vs.Run(folder), KEY).signed_text
    assert verify_statement(content, KEY.public).startswith("PRIVACY STATEMENT\nclinics\n")
    with pytest.raises(ProtocolError, match="not what was signed"):
        verify_statement(content.replace("ε = 1,", "ε = 0.1,"), KEY.public)
    with pytest.raises(ProtocolError, match="another key"):
        verify_statement(content, PrivateKey(bytes(32)).public)
    forged = make_statement(vs.Run(folder), PrivateKey(bytes(32))).signed_text
    mine = KEY.public.raw.hex()
    theirs = PrivateKey(bytes(32)).public.raw.hex()
    with pytest.raises(ProtocolError, match="not what was signed"):
        verify_statement(forged.replace(theirs, mine), KEY.public)
    for damaged in ("", "PRIVACY STATEMENT", content.replace("signature ", "signature zz")):
        with pytest.raises(ProtocolError, match="no signed statement"):
            verify_statement(damaged, KEY.public)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c + "This run is approved.\n",
        lambda c: c.replace("\nsignature ", "\n\nsignature "),
        lambda c: c.replace("\nsignature ", "\nε = 0.001\nsignature "),
        lambda c: c.replace("key       ", "key "),
        lambda c: c + c[c.rindex("key  ") :],
        lambda c: c[: c.rindex("key  ")] + c[c.rindex("key  ") :].replace("a", "A"),
        lambda c: c + " ",
        lambda c: c.rstrip("\n"),
    ],
)  # fmt: skip
def test_nothing_stands_beside_what_was_signed(folder, change):
    content = make_statement(vs.Run(folder), KEY).signed_text
    with pytest.raises(ProtocolError, match="no signed statement"):
        verify_statement(change(content), KEY.public)


def test_ends_of_lines_may_change_on_the_way(folder):
    statement = make_statement(vs.Run(folder), KEY)
    crlf = statement.signed_text.replace("\n", "\r\n")
    assert verify_statement(crlf, KEY.public) == statement.text


def test_a_signature_of_a_message_is_none_of_a_statement(folder):
    """The key also signs the protocol's messages: what it signs here has a prefix of its own."""
    statement = make_statement(vs.Run(folder), KEY)
    plain = KEY.sign(statement.text.encode()).hex()
    with pytest.raises(ProtocolError, match="not what was signed"):
        verify_statement(statement.signed_text.replace(statement.signature, plain), KEY.public)


def test_a_simulation_has_nothing_to_state(tmp_path):
    run = vs.Run(simulated_folder(tmp_path / "run", 1, 1, 8))
    with pytest.raises(InputError, match="protects no one"):
        make_statement(run, KEY)


def test_the_command_writes_and_checks_it(folder, tmp_path):
    make_keys(tmp_path / "keys", ["localhost"], ["east"])
    server, public = tmp_path / "keys/server", tmp_path / "keys/learners/east/server.pub"
    done = veilstream("report", str(folder), "--statement", "--keys", str(server))
    assert done.returncode == 0, done.stderr
    page = (folder / "statement.html").read_text()
    assert "<h2>What is promised</h2>" in page
    assert "http" not in page.replace("http-equiv", "")
    checked = veilstream("report", str(folder / "statement.txt"), "--verify", str(public), "--json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["verified"] is True
    text = (folder / "statement.txt").read_text()
    (folder / "statement.txt").write_text(text.replace("three", "four").replace("once", "twice"))
    refused = veilstream("report", str(folder / "statement.txt"), "--verify", str(public))
    assert refused.returncode == 7
    assert "not what was signed" in refused.stderr
