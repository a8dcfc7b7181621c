"""A privacy statement: what it says, and that no one else can have said it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest

import veilstream as vs
from tests.browser.samples import AUDIT
from tests.cli.test_plan import veilstream
from tests.support.run_folders import (
    FEDERATION,
    SERVER_KEY,
    enrolment,
    federation_folder,
    last_message,
    learner_key,
    simulated_folder,
)
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, ProtocolError
from veilstream.federation.keys.identity import PrivateKey, ServerKeys
from veilstream.federation.keys.new_keys import make_keys
from veilstream.reports.statement import make_statement, verify_statement
from veilstream.runs.released_model import plan_digest, rest_digest


@pytest.fixture
def folder(tmp_path):
    return federation_folder(tmp_path / "run")


KEY = SERVER_KEY


def keys_of(key: PrivateKey, *learners: str) -> ServerKeys:
    known = {name: learner_key(i).public for i, name in enumerate(learners)}
    return ServerKeys(Path("keys/server"), key, known)


KEYS = keys_of(KEY, "east", "north", "west")


def test_it_says_promise_plan_heads_and_that_there_was_no_audit(folder):
    run = vs.Run(folder)
    text = " ".join(make_statement(run, KEYS, now=0.0).text.split())
    assert "ε = 1, δ = 10⁻⁶" in text
    assert plan_digest(run.plan) in text
    head = hashlib.sha256(last_message(Terms.of(run.plan, 4), 2, 4)).hexdigest()
    assert f"west: epoch 0, 5 rounds, ledger head {head}" in text
    assert "3 of 3 learners have enrolled." in text
    assert "Stated 1970-01-01" in text
    assert "Run clinics-1, started" in text
    assert "What is not covered - That someone came at all" in text
    assert "There is none in the run's folder" in text


def test_an_audit_counts_only_if_it_says_that_it_is_of_this_plan(folder):
    run = vs.Run(folder)

    def stated(**about):
        claimed = {"mu": 0.2, "epsilon": 1.0, "delta": 1e-6}
        (folder / "audit.json").write_text(json.dumps(json.loads(AUDIT) | {"claimed": claimed} | about))
        return " ".join(make_statement(run, KEYS).text.split())

    made = {"made": "2026-01-02T03:04:05Z"}
    text = stated(plan_sha256=plan_digest(run.plan), **made)
    assert "KEPT, as far as messages tell" in text
    assert "Made 2026-01-02T03:04:05Z, for this plan, from 400 runs" in text
    assert "It cannot see: - how long things take" in text
    text = stated(plan_sha256="ab" * 32, **made)
    assert f"is for another plan ({'ab' * 32}), so it says nothing about this run" in text
    assert "KEPT" not in text
    more = {"rest_sha256": rest_digest(run.plan), "rounds": 3, **made}
    text = stated(plan_sha256="ab" * 32, **more)
    assert f"for this plan, with 3 of its {run.plan.learning.rounds} rounds and all else the same" in text
    for lie in ({"rest_sha256": "cd" * 32}, {"rounds": run.plan.learning.rounds + 1}):
        assert "KEPT" not in stated(plan_sha256="ab" * 32, **more | lie)
    other = dataclasses.replace(run.plan, learning=dataclasses.replace(run.plan.learning, rounds=3))
    assert rest_digest(other) == rest_digest(run.plan)
    louder = dataclasses.replace(run.plan, privacy=dataclasses.replace(run.plan.privacy, epsilon=9.0))
    assert rest_digest(louder) != rest_digest(run.plan)
    text = stated()
    assert "does not say which plan it is for" in text
    assert "KEPT" not in text


def changed(path: Path, **keys: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.mark.parametrize("lie", [{"epsilon": 0.1}, {"noise_std": 1e9}, {"telemetry": None}])
def test_a_guarantee_that_the_plan_does_not_give_is_not_signed(folder, lie):
    changed(folder / "guarantee.json", **lie)
    told = json.loads((folder / "guarantee.json").read_text())
    changed(folder / "summary.json", guarantee=told)
    with pytest.raises(InputError, match=r"the guarantee that plan\.toml gives"):
        make_statement(vs.Run(folder), KEYS)


def test_a_plan_that_was_changed_afterwards_is_not_signed(folder):
    plan = (folder / "plan.toml").read_text()
    assert "epsilon = 1.0" in plan
    (folder / "plan.toml").write_text(plan.replace("epsilon = 1.0", "epsilon = 0.5"))
    with pytest.raises(InputError, match=r"the guarantee that plan\.toml gives"):
        make_statement(vs.Run(folder), KEYS)


@pytest.mark.parametrize("other", [{"run": "clinics-2"}, {"rounds": 5}])
def test_a_summary_of_another_run_is_not_signed(folder, other):
    changed(folder / "summary.json", **other)
    with pytest.raises(InputError, match="summary of run clinics-1 after 6 rounds"):
        make_statement(vs.Run(folder), KEYS)


def test_releases_that_the_checkpoint_has_must_be_listed(folder):
    """A list that was cut to its header does not become "nothing was sent"."""
    header, *rows = (folder / "releases.csv").read_text().splitlines()
    for kept in ([], rows[:-1]):
        (folder / "releases.csv").write_text("\n".join([header, *kept]) + "\n")
        with pytest.raises(InputError, match="has as accepted"):
            make_statement(vs.Run(folder), KEYS)


def test_a_learner_that_never_sent_is_named(tmp_path):
    text = make_statement(vs.Run(federation_folder(tmp_path / "run", silent=True)), KEYS).text
    assert "west: has never sent anything." in text
    assert "6 rounds are done." in text
    assert "east: epoch 0, 6 rounds, ledger head" in text


def test_a_copy_without_its_checkpoint_is_not_signed(folder):
    (folder / "checkpoint.bin").unlink()
    assert vs.Run(folder).is_federation  # its report can still be made
    with pytest.raises(InputError, match="the server's checkpoint"):
        make_statement(vs.Run(folder), KEYS)


def test_keys_of_another_federation_are_refused(folder):
    with pytest.raises(InputError, match="none of them is there"):
        make_statement(vs.Run(folder), keys_of(KEY, "paris", "rome"))


def test_a_simulation_gets_none_even_if_it_looks_like_a_federation(folder, tmp_path):
    """Neither a federation's guarantee nor a server's checkpoint beside it makes it one."""
    simulated = simulated_folder(tmp_path / "simulated", 1, 1, 8)
    with pytest.raises(InputError, match="protects no one"):
        make_statement(vs.Run(simulated), KEYS)
    for name in ("guarantee.json", "checkpoint.bin", "releases.csv"):
        (simulated / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(InputError, match="protects no one"):
        make_statement(vs.Run(simulated), KEYS)


def test_only_the_text_that_was_signed_verifies_with_that_key(folder):
    content = make_statement(vs.Run(folder), KEYS).signed_text
    text = verify_statement(content, KEY.public)
    assert text.startswith("PRIVACY STATEMENT\nclinics\n")
    assert verify_statement(content.replace("\n", "\r\n"), KEY.public) == text  # ends of lines may change on the way
    with pytest.raises(ProtocolError, match="not what was signed"):
        verify_statement(content.replace("ε = 1,", "ε = 0.1,"), KEY.public)
    with pytest.raises(ProtocolError, match="another key"):
        verify_statement(content, PrivateKey(bytes(32)).public)
    theirs = PrivateKey(bytes(32)).sign(b"veilstream privacy statement 1\n" + text.encode()).hex()
    with pytest.raises(ProtocolError, match="not what was signed"):
        verify_statement(
            content[: content.index("signature ", content.index("key  "))] + f"signature {theirs}\n", KEY.public
        )
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
)
def test_nothing_stands_beside_what_was_signed(folder, change):
    content = make_statement(vs.Run(folder), KEYS).signed_text
    with pytest.raises(ProtocolError, match="no signed statement"):
        verify_statement(change(content), KEY.public)


def test_a_signature_of_a_message_is_none_of_a_statement(folder):
    """The key also signs the protocol's messages: what it signs here has a prefix of its own."""
    statement = make_statement(vs.Run(folder), KEYS)
    plain = KEY.sign(statement.text.encode()).hex()
    with pytest.raises(ProtocolError, match="not what was signed"):
        verify_statement(statement.signed_text.replace(statement.signature, plain), KEY.public)


def test_the_command_writes_and_checks_it(folder, tmp_path):
    make_keys(tmp_path / "keys", ["localhost"], ["east", "north", "west"])
    (tmp_path / "keys/server/identity.key").write_text(bytes(range(32)).hex())
    known = {name: key.raw.hex() for name, key in KEYS.learners.items()}
    (tmp_path / "keys/server/learners.json").write_text(json.dumps(known))
    (tmp_path / "keys/learners/east/server.pub").write_text(KEY.public.raw.hex())
    server, public = tmp_path / "keys/server", tmp_path / "keys/learners/east/server.pub"
    done = veilstream("report", str(folder), "--statement", "--keys", str(server))
    assert done.returncode == 0, done.stderr
    page = (folder / "statement.html").read_text()
    assert "<h2>What is promised</h2>" in page
    assert "http" not in page.replace("http-equiv", "")
    good = (folder / "statement.txt").read_bytes()
    for wrong in (public.parent, tmp_path / "keys"):
        refused = veilstream("report", str(folder), "--statement", "--keys", str(wrong))
        assert refused.returncode == 2
        assert "the server's folder of keys" in refused.stderr
    assert (folder / "statement.txt").read_bytes() == good
    checked = veilstream("report", str(folder / "statement.txt"), "--verify", str(public), "--json")
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["verified"] is True
    text = (folder / "statement.txt").read_text()
    (folder / "statement.txt").write_text(text.replace("three", "four").replace("once", "twice"))
    refused = veilstream("report", str(folder / "statement.txt"), "--verify", str(public))
    assert refused.returncode == 7
    assert "not what was signed" in refused.stderr


def test_statement_and_documentation_state_one_rule_about_content():
    from veilstream.reports.promise import CONTENT_DECIDES_NOTHING, promise_of

    page = Path(__file__).parents[2] / "docs/privacy.md"
    assert CONTENT_DECIDES_NOTHING in " ".join(page.read_text(encoding="utf-8").split())
    _, guarantee = vs.calibrate(vs.Budget(1.0, 1e-5), vs.mechanisms.toeplitz(4), clip_norm=1.0)
    assert CONTENT_DECIDES_NOTHING in " ".join(promise_of(guarantee, simulated=False)["uncovered"])


def rewritten(folder: Path, change) -> None:
    """Edit the head of a checkpoint, and hash it again: its hash is no secret."""
    path = folder / "checkpoint.bin"
    data = path.read_bytes()[:-32]
    (length,) = struct.unpack_from("<Q", data, 8)
    head = json.loads(data[16 : 16 + length])
    change(head)
    told = json.dumps(head).encode()
    whole = data[:8] + struct.pack("<Q", len(told)) + told + data[16 + length :]
    path.write_bytes(whole + hashlib.sha256(whole).digest())


def forged_promise(folder: Path) -> Terms:
    """Plan, guarantee, summary and audit say (0.1, 1e-9), all in agreement."""
    plan = vs.Plan.parse(FEDERATION, {"privacy.epsilon": 0.1, "privacy.delta": 1e-9})
    terms = Terms.of(plan, 4)
    (folder / "plan.toml").write_text(plan.to_toml())
    (folder / "guarantee.json").write_text(json.dumps(terms.guarantee.as_dict()))
    changed(folder / "summary.json", guarantee=terms.guarantee.as_dict())
    audit = {"plan_sha256": plan_digest(plan), "claimed": {"mu": 0.1, "epsilon": 0.1, "delta": 1e-9}}
    (folder / "audit.json").write_text(json.dumps(json.loads(AUDIT) | audit))
    return terms


def test_plan_guarantee_summary_and_audit_edited_together_are_not_signed(folder):
    forged_promise(folder)
    with pytest.raises(InputError, match=r"the plan that east signed when it enrolled .*privacy.epsilon: 1\.0"):
        make_statement(vs.Run(folder), KEYS)


def test_nor_with_the_checkpoint_edited_too(folder):
    terms = forged_promise(folder)
    rewritten(folder, lambda head: head.update(terms=terms.settings["digest"]))
    with pytest.raises(InputError, match="the plan that east signed"):
        make_statement(vs.Run(folder), KEYS)


@pytest.mark.parametrize("key", [PrivateKey(bytes([9] * 32)), SERVER_KEY])
def test_nor_with_enrolments_that_another_key_signed(folder, key):
    """Whoever has the folder, and even the server's key, has not the learners' keys."""
    terms = forged_promise(folder)
    rewritten(folder, lambda head: head.update(terms=terms.settings["digest"]))
    lines = [enrolment(name, key, terms) for name in ("east", "north", "west")]
    (folder / "enrolments.csv").write_text("learner,epoch,request,reply\n" + "".join(lines))
    with pytest.raises(InputError, match=r"the enrolment of east in epoch 0, signed with its key .*of another key"):
        make_statement(vs.Run(folder), KEYS)


def test_nor_with_messages_on_another_grid(folder):
    """Were all enrolments forged, the stored messages would still be of the run that was."""
    terms = forged_promise(folder)
    rewritten(folder, lambda head: head.update(terms=terms.settings["digest"]))
    lines = [enrolment(name, learner_key(i), terms) for i, name in enumerate(("east", "north", "west"))]
    (folder / "enrolments.csv").write_text("learner,epoch,request,reply\n" + "".join(lines))
    with pytest.raises(InputError, match=r"a last message of east under the terms of plan.toml .grid"):
        make_statement(vs.Run(folder), KEYS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda head: head.update(terms="0" * 64), "the terms that plan.toml gives"),
        (lambda head: head.update(run="clinics-9"), "enrolments in run clinics-9"),
        (lambda head: head["seats"][2].update(state="new", accepted=None), "west as enrolled in epoch 0"),
        (lambda head: head["seats"].pop(), "west as enrolled in epoch 0"),
        (lambda head: head["seats"][0].update(epoch=1), "the enrolment of east in epoch 1.*missing"),
        (lambda head: head["seats"][0].update(accepted=[5, "0" * 64]), "the message of 'east'"),
    ],
)
def test_a_checkpoint_that_was_edited_is_not_signed(folder, change, said):
    rewritten(folder, change)
    with pytest.raises(InputError, match=said):
        make_statement(vs.Run(folder), KEYS)


def test_an_enrolment_that_was_dropped_or_is_of_another_run_is_not_signed(folder):
    path, terms = folder / "enrolments.csv", Terms.of(vs.Run(folder).plan, 4)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    with pytest.raises(InputError, match=r"the enrolment of west in epoch 0, signed with its key .it is missing"):
        make_statement(vs.Run(folder), KEYS)
    path.write_text("".join(lines[:-1]) + enrolment("west", learner_key(2), terms, run="clinics-0"))
    with pytest.raises(InputError, match="west signed epoch 0 of another"):
        make_statement(vs.Run(folder), KEYS)
    path.unlink()
    with pytest.raises(InputError, match="the learners' signed enrolments"):
        make_statement(vs.Run(folder), KEYS)


def test_a_folder_of_an_earlier_version_is_not_signed(folder):
    rewritten(folder, lambda head: head.pop("terms"))
    with pytest.raises(InputError, match="an earlier version wrote it"):
        make_statement(vs.Run(folder), KEYS)


HOSTILE = ["\x1b[1A\x1b[2K", "\x9b1A", "\u202e1.0", "\r", "\x08", "\u2028"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_that_would_show_as_another_is_neither_signed_nor_shown(folder, tmp_path, text):
    statement = make_statement(vs.Run(folder), KEYS)
    lie = statement.text.replace("three", "").replace("PRIVACY", f"PRIVACY{text}", 1)
    signature = KEY.sign(b"veilstream privacy statement 1\n" + lie.encode()).hex()
    with pytest.raises(ProtocolError, match=r"character U\+[0-9A-F]{4} in line 1"):
        verify_statement(replace(statement, text=lie, signature=signature).signed_text, KEY.public)


@pytest.mark.parametrize("text", ["\x9b1A", "\u202e"])
def test_a_hostile_plan_name_is_not_signed(tmp_path, monkeypatch, text):
    monkeypatch.setattr("tests.support.run_folders.FEDERATION", FEDERATION.replace('"clinics"', f'"clin{text}ics"'))
    with pytest.raises(InputError, match=f"not the character U.{ord(text[0]):04X} in line 2"):
        make_statement(vs.Run(federation_folder(tmp_path / "run")), KEYS)


@pytest.mark.parametrize("key", ["began", "veilstream", "commit"])
def test_versions_say_nothing_else_in_a_statement(folder, key):
    changed(folder / "versions.json", **{key: "1. The promise is ε = 0.1"})
    with pytest.raises(InputError, match=f"{key} as the server wrote it"):
        make_statement(vs.Run(folder), KEYS)


def test_it_says_which_settings_outside_the_terms_were_changed_while_the_run_went_on(folder):
    with (folder / "operations.csv").open("w") as file:
        file.write("time,round,operation,about,why\n")
        file.write("2026-11-19T06:36:41Z,3,setting,federation.deadline_s,10.0 to 8.0\n")
        file.write("2026-11-19T06:40:00Z,4,void,east,by the operator\n")
    text = " ".join(make_statement(vs.Run(folder), KEYS, now=0.0).text.split())
    said = "no part of the terms: federation.deadline_s from 10.0 to 8.0, after round 3."
    assert text.count("Changed between two starts") == 1
    assert said in text
