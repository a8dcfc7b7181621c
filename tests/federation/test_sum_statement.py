"""A statement of a run in which only sums were opened: every certificate in the server's folder is verified."""

from __future__ import annotations

import dataclasses
import secrets

import pytest

from tests.federation.test_masked_rounds import run, sum_plan
from tests.support.federation import World
from veilstream.errors import InputError
from veilstream.federation.keys.identity import LearnerKeys, ServerKeys
from veilstream.federation.masking.statements import OpenCertificate, Signatures
from veilstream.federation.server.masking_files import MaskingFiles
from veilstream.reports.statement import make_statement
from veilstream.runs.folder import Run

ROUNDS = 4


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    root = tmp_path_factory.mktemp("sums")
    with World(root, sum_plan(ROUNDS)).start_all() as world:
        run(world)
    return root


def stated(root) -> str:
    keys = ServerKeys.load(root / "keys/server")
    return " ".join(make_statement(Run(root / "run"), keys).text.split())


def rewritten(root, change) -> None:
    """Every certificate as ``change`` gives it; None leaves one out."""
    files = MaskingFiles(root / "run")
    openings = files.openings()
    (root / "run/openings.bin").unlink()
    for r, certificate in openings.items():
        if (kept := change(r, certificate)) is not None:
            files.keep_opening(kept)


@pytest.fixture
def restored(done):
    """The folder, and afterwards as it was."""
    before = {name: (done / "run" / name).read_bytes() for name in ("openings.bin", "keys.bin", "releases.csv")}
    yield done
    for name, content in before.items():
        (done / "run" / name).write_bytes(content)


def test_it_says_how_many_certificates_are_verified(done):
    text = stated(done)
    assert f"{ROUNDS} of {ROUNDS} certificates are verified" in text
    assert "signed by at least 2 learners who opened it" in text
    assert "a: part of 4 sums." in text


def signed_by(certificate: OpenCertificate, by: dict[int, bytes]) -> OpenCertificate:
    return dataclasses.replace(certificate, signatures=Signatures(by))


def forged(certificate: OpenCertificate) -> OpenCertificate:
    return signed_by(certificate, {place: secrets.token_bytes(64) for place in certificate.signatures.by})


def of_fewer(certificate: OpenCertificate) -> OpenCertificate:
    """Whose signatures hold, and are too few."""
    return signed_by(certificate, dict(list(certificate.signatures.by.items())[:1]))


def of_another_set(certificate: OpenCertificate) -> OpenCertificate:
    what = certificate.opened
    return dataclasses.replace(certificate, opened=dataclasses.replace(what, members=what.members - {2}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (forged, "round 2 that holds: it has signatures that were not made by those whom they name"),
        (of_fewer, "round 2 that holds: 1 learners signed it, where it takes 2"),
        (of_another_set, "round 2 that holds: it has signatures that were not made"),
        (lambda certificate: None, "round 2 has none"),
    ],
    ids=["forged", "of too few", "of another set", "missing"],
)
def test_one_that_does_not_hold_is_an_error_that_names_the_round(restored, change, said):
    rewritten(restored, lambda r, certificate: change(certificate) if r == 2 else certificate)
    with pytest.raises(InputError, match=rf"openings\.bin.*{said}"):
        stated(restored)


def test_a_certificate_of_an_earlier_round_does_not_stand_for_a_later_one(restored):
    kept = MaskingFiles(restored / "run").openings()

    def again(r, certificate):
        at = dataclasses.replace(kept[1].opened.at, round=r)
        return (
            dataclasses.replace(kept[1], opened=dataclasses.replace(kept[1].opened, at=at)) if r == 2 else certificate
        )

    rewritten(restored, again)
    with pytest.raises(InputError, match="round 2"):
        stated(restored)


def moved(certificate: OpenCertificate, r: int) -> OpenCertificate:
    at = dataclasses.replace(certificate.opened.at, round=r)
    return dataclasses.replace(certificate, opened=dataclasses.replace(certificate.opened, at=at))


def signed_anew(root, certificate: OpenCertificate) -> OpenCertificate:
    """By all who are in the list, as if every one of them colluded."""
    content = certificate.opened.open_content()
    keys = [LearnerKeys.load(root / "keys/learners" / name).identity for name in "abc"]
    return signed_by(certificate, {place: key.sign(content) for place, key in enumerate(keys)})


def written(root, certificates) -> None:
    (root / "run/openings.bin").unlink()
    for certificate in certificates:
        MaskingFiles(root / "run").keep_opening(certificate)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("place", [2, 3, 4])
def test_two_sets_of_a_round_are_never_verified_whoever_signed_them(restored, signed, place):
    kept = list(MaskingFiles(restored / "run").openings().values())
    other = of_another_set(kept[2])
    other = signed_anew(restored, other) if signed else other
    written(restored, [*kept[:place], other, *kept[place:]])
    with pytest.raises(InputError, match="one set of round 2; it has certificates of two"):
        stated(restored)


def test_certificates_of_later_rounds_and_in_another_order_are_refused(restored):
    kept = list(MaskingFiles(restored / "run").openings().values())
    written(restored, [*kept, moved(kept[3], 9)])
    with pytest.raises(InputError, match=r"up to 4, which .* one of round 9"):
        stated(restored)
    for wrong in (kept[::-1], kept + kept):
        written(restored, wrong)
        with pytest.raises(InputError, match=r"in the order of their rounds; round . stands behind round 3"):
            stated(restored)


def test_what_a_kill_leaves_is_verified(restored):
    """The last round's certificate twice, signed by others; and one of the round that was under way."""
    kept = list(MaskingFiles(restored / "run").openings().values())
    written(restored, [*kept, signed_anew(restored, kept[3]), moved(kept[3], 4)])
    assert f"{ROUNDS} of {ROUNDS} certificates are verified" in stated(restored)


def test_bytes_that_are_no_certificate_are_named_by_the_round_before(restored):
    path = restored / "run/openings.bin"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2 + 40] + bytes(8) + content[len(content) // 2 + 48 :])
    with pytest.raises(InputError, match="round"):
        stated(restored)


def test_a_set_that_the_list_of_releases_has_otherwise_is_not_signed(restored):
    path = restored / "run/releases.csv"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith("1,b,")) + "\n")
    with pytest.raises(InputError, match=r"round 1 .*releases\.csv"):
        stated(restored)


def test_reading_a_torn_list_changes_nothing(restored):
    """A server may be writing to it."""
    path = restored / "run/openings.bin"
    torn = path.read_bytes() + b"\x40\x00\x00\x00abc"
    path.write_bytes(torn)
    assert f"{ROUNDS} of {ROUNDS} certificates are verified" in stated(restored)
    assert path.read_bytes() == torn
    MaskingFiles(restored / "run").drop_torn_opening()
    assert path.read_bytes() == torn[:-7]
