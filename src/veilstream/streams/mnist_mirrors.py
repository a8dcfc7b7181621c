"""Public mirrors of MNIST: web addresses under which the four gzipped files lie."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from veilstream.streams.fetching import FetchStep, Report, SourceFailed, UnusableFile
from veilstream.streams.mnist import IdxFile, gunzip

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://azureopendatastorage.blob.core.windows.net/mnist/",
)

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Mirror:
    """Files at ``url`` + name + ``.gz``, downloaded by pooch."""

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
            import pooch
            import requests
        except ImportError:
            why = "pooch is not installed: pip install 'veilstream[mnist]'"
            raise SourceFailed(why, "next source") from None
        received = _Received(self, file, report)
        try:
            download = pooch.HTTPDownloader(
                progressbar=received,
                chunk_size=_CHUNK,
                timeout=self.timeout_s,
                headers={"Accept-Encoding": "identity"},
                hooks={"response": received.answered},
            )
            download(f"{self.url}{file.name}.gz", received, None)
            return gunzip(bytes(received.content), file.size)
        except UnusableFile as error:
            raise SourceFailed(f"{file.name}.gz {error}", "again") from error
        except requests.HTTPError as error:
            answer = error.response
            status = 0 if answer is None else answer.status_code
            why = f"{file.name}.gz: HTTP {status} {'' if answer is None else answer.reason}"
            transient = status == 429 or status >= 500
            raise SourceFailed(why, "again" if transient else "next file") from error
        except requests.ConnectionError as error:
            # No connection: the next file would wait as long.
            raise SourceFailed(f"not reachable ({error})", "next source") from error
        except OSError as error:  # all that requests raises is one
            raise SourceFailed(f"{file.name}.gz broke off ({error!r})", "again") from error
        finally:
            received.hang_up()


class _Received:
    """The file that pooch writes to and the progress bar that it moves, with bounds on both."""

    def __init__(self, mirror: Mirror, file: IdxFile, report: Report) -> None:
        self._mirror, self._file, self._report = mirror, file, report
        self._deadline = time.monotonic() + mirror.whole_s
        self._responses: list[Any] = []
        self.content = bytearray()
        self.total = 0
        """Bytes in all, set by pooch; 0 where the mirror does not say."""

    def answered(self, response: Any, **_: object) -> None:
        """Remember an answer, to close it: pooch does not when a download is given up."""
        self._responses.append(response)

    def hang_up(self) -> None:
        """Close all connections."""
        for response in self._responses:
            response.close()

    def write(self, chunk: bytes) -> None:
        self.content += chunk
        done, most = len(self.content), self._file.most
        step = FetchStep("working", self._mirror.name, self._file.name, done, self.total or None)
        self._report(step)
        if done > most:
            raise UnusableFile(f"goes on past {most:,} bytes")
        if time.monotonic() > self._deadline:
            raise SourceFailed(f"took longer than {self._mirror.whole_s:g} s", "next source")

    def flush(self) -> None:
        """Nothing is buffered."""

    def update(self, amount: int) -> None:
        """`write` has reported it."""

    def reset(self) -> None:
        """`write` has reported it."""

    def close(self) -> None:
        """`write` has reported it."""
