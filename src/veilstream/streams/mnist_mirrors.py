"""A public mirror of MNIST: a web address under which the four gzipped files lie."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from urllib.parse import urlsplit

from veilstream.streams.mnist import IdxFile, UnusableFile, gunzip
from veilstream.streams.mnist_sources import FetchStep, Report, SourceFailed

__all__ = ["MIRRORS", "Mirror"]

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://azureopendatastorage.blob.core.windows.net/mnist/",
)

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Mirror:
    """Files at ``url`` + name + ``.gz``."""

    url: str
    timeout_s: float = 5.0
    """For connecting, and for each pause in what arrives."""
    whole_s: float = 300.0
    """For one file."""

    @property
    def name(self) -> str:
        """The host."""
        return urlsplit(self.url).netloc

    def fetch(self, file: IdxFile, report: Report) -> bytes:
        """Download and decompress, with bounds on time and size."""
        try:
            return gunzip(self._download(file, report), file.size)
        except UnusableFile as error:
            raise SourceFailed(f"{file.name}.gz {error}", "again") from error
        except urllib.error.HTTPError as error:
            error.close()
            transient = error.code == 429 or error.code >= 500
            why = f"{file.name}.gz: HTTP {error.code} {error.reason}"
            raise SourceFailed(why, "again" if transient else "next file") from error
        except urllib.error.URLError as error:  # no connection: the next file would wait as long
            raise SourceFailed(f"not reachable ({error.reason})", "next source") from error
        except (OSError, http.client.HTTPException) as error:
            raise SourceFailed(f"{file.name}.gz broke off ({error!r})", "again") from error

    def _download(self, file: IdxFile, report: Report) -> bytes:
        deadline = time.monotonic() + self.whole_s
        url = f"{self.url}{file.name}.gz"
        with urllib.request.urlopen(url, timeout=self.timeout_s) as answer:
            length = answer.headers.get("Content-Length", "")
            total = int(length) if length.isascii() and length.isdigit() else None
            raw = bytearray()
            while chunk := answer.read(_CHUNK):
                raw += chunk
                report(FetchStep("working", self.name, file.name, len(raw), total))
                if len(raw) > file.most:
                    raise UnusableFile(f"goes on past {file.most:,} bytes")
                if time.monotonic() > deadline:
                    raise SourceFailed(f"took longer than {self.whole_s:g} s", "next source")
        return bytes(raw)
