"""Who a client is: one form for all spellings of the same text.

A tag is bytes, taken as they are, or text by the rule for clients' names in every source
(`veilstream.records.client_names`): brought into one form before it is hashed, and refused where
it has control characters. Nothing else is equated: capitals, full-width letters, ligatures and
invisible characters inside a text make other tags, and so do bytes and text of the same letters.

Stores from before version 0.4 hold hashes of text as it came. A person is therefore looked for
under the normal form *and* under the forms in which the same text may have been stored: as given,
and as given in NFC and NFD, with and without the outer white space. An old entry with *other* outer
white space than what is given now cannot be recognised: its hash does not say what it was made of.
"""

from __future__ import annotations

import hashlib
import hmac
import unicodedata

from veilstream.errors import InputError
from veilstream.records.client_names import LONGEST_NAME, client_name

LONGEST_TAG = LONGEST_NAME


def tag_forms(client: object) -> tuple[bytes, ...]:
    """Names under which this client may be known; the first is the one to store.

    Empty if this is no tag (`checked_tag` says why). Bytes have one form: themselves.
    """
    if type(client) is bytes:
        return (client,) if 0 < len(client) <= LONGEST_TAG else ()
    if type(client) is not str or (normal := client_name(client)) is None:
        return ()
    if normal == client and client.isascii():
        return (client.encode(),)
    forms = [normal, client]
    for text in (normal, client):
        forms += [unicodedata.normalize(form, text) for form in ("NFC", "NFD")]
    return tuple(dict.fromkeys(form.encode(errors="surrogatepass") for form in forms))


def checked_tag(client: object) -> bytes:
    """The name to store; an `InputError` that does not show the tag if there is none."""
    forms = tag_forms(client)
    if forms:
        return forms[0]
    raise InputError(
        "tag",
        "<not shown>",
        f"bytes, or text without control characters, of 1 to {LONGEST_TAG}; not white space alone",
        "give each person a tag that is the same whenever they come",
    )


def keyed_tag(key: bytes, form: bytes) -> bytes:
    """A form of a tag as a ledger keeps it: of no use to whoever has only the file's rows."""
    return hmac.new(key, form, hashlib.sha256).digest()
