"""What a server that sees only sums keeps beside its checkpoint.

    keys.bin      the run's list of keys, with the certificates of those who gave them
    openings.bin  a certificate for every round: who was part of its sum, signed by those who agreed on it
    masks.bin     the set that was named last, with the sum under its masks, and what all sealed for it

A server that is killed asks for the same set again: the learners' answers are the same bytes. It needs nobody of the
set for it who had sealed before others were asked to agree.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from veilstream.errors import InputError, ProtocolError
from veilstream.federation.masking.requests import KeysRequest
from veilstream.federation.masking.statements import OpenCertificate
from veilstream.files import sync_directory, write_file

KEYS, OPENINGS, MASKS = MASKING_FILES = ("keys.bin", "openings.bin", "masks.bin")
_LENGTH = struct.Struct("<I")


class MaskingFiles:
    """One run's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keys(self) -> KeysRequest | None:
        """The list of keys; None before there is one."""
        content = self._read(KEYS)
        return None if content is None else KeysRequest.unpack(content)

    def keep_keys(self, keys: KeysRequest) -> None:
        """Durable when it returns."""
        self._write(KEYS, keys.pack())

    def masks(self) -> bytes | None:
        """As `keep_masks` kept them."""
        return self._read(MASKS)

    def keep_masks(self, content: bytes) -> None:
        """Durable when it returns."""
        self._write(MASKS, content)

    def openings(self) -> dict[int, OpenCertificate]:
        """Certificates by round; what a kill cut short is not one.

        Raises:
            InputError: behind some round stands no certificate, one of an earlier round, or one of the same round
                that says another set.

        """
        return self._read_openings()[0]

    def drop_torn_opening(self) -> None:
        """Remove what a kill cut short, before anything is written behind it."""
        _, whole, size = self._read_openings()
        if whole < size:
            with (self._folder / OPENINGS).open("r+b") as file:
                file.truncate(whole)

    def _read_openings(self) -> tuple[dict[int, OpenCertificate], int, int]:
        """Certificates, where the last whole one ends, and how long the file is."""
        content, at = self._read(OPENINGS) or b"", 0
        found: dict[int, OpenCertificate] = {}
        while at + _LENGTH.size <= len(content):
            end = at + _LENGTH.size + _LENGTH.unpack_from(content, at)[0]
            if end > len(content):
                break
            try:
                certificate = OpenCertificate.unpack(content[at + _LENGTH.size : end])
            except ProtocolError as error:
                behind = f"behind round {max(found)}" if found else "at its beginning"
                raise InputError(
                    "run folder",
                    str(self._folder / OPENINGS),
                    f"a certificate of every round; {behind} stands something else",
                    "put the whole folder back from one copy",
                ) from error
            self._check_follows(found, certificate)
            found[certificate.opened.at.round] = certificate
            at = end
        return found, at, len(content)

    def _check_follows(self, found: dict[int, OpenCertificate], certificate: OpenCertificate) -> None:
        """A server killed before its next checkpoint opens the same set again, and nothing else stands twice."""
        round_, last = certificate.opened.at.round, max(found, default=-1)
        if round_ > last or (round_ == last and certificate.opened == found[last].opened):
            return
        rule = (
            f"one set of round {round_}; it has certificates of two, which no learners that follow the rules sign"
            if round_ in found and certificate.opened != found[round_].opened
            else f"certificates in the order of their rounds; round {round_} stands behind round {last}"
        )
        raise InputError("run folder", str(self._folder / OPENINGS), rule, "put the whole folder back from one copy")

    def keep_opening(self, certificate: OpenCertificate) -> None:
        """Durable when it returns."""
        content = certificate.pack()
        with (self._folder / OPENINGS).open("ab") as file:
            file.write(_LENGTH.pack(len(content)) + content)
            file.flush()
            os.fsync(file.fileno())

    def _read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError("run folder", str(self._folder / name), "a file that can be read", str(error)) from error

    def _write(self, name: str, content: bytes) -> None:
        write_file(self._folder / name, content)
        sync_directory(self._folder)
