"""A process of its own that talks to FLARE's server as its administrator: submits, watches, aborts.

    python -m veilstream.federation.transports.flare.job_manager KIT JOB LEARNERS SOCKET

Apart from ours, since FLARE's session prints, logs, starts threads and may block for as long as it
likes. Our process tells it over a Unix socket whom the relay socket can reach, and gets back lines
to show. It can be killed at any time: the next one finds the job that runs, or submits another.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from veilstream.federation.protocol import frames
from veilstream.federation.transports.flare.job import JOB, write_job
from veilstream.federation.transports.flare.names import ADMIN
from veilstream.federation.transports.flare.policy import (
    Job,
    Seen,
    abort_why,
    doubles,
    sites_to_start,
)

__all__ = ["STUCK", "JobManager", "main"]

STUCK = 3
"""Exit code: FLARE's server does not do what it is told; start it anew."""
_LOOK_S = 0.7
_END_S = 30.0
_CONNECT_S = 60.0


class JobManager:
    """One session with FLARE's server."""

    def __init__(self, session: Any, folder: Path, seen: Seen, log: Callable[[str], None]) -> None:
        self._session, self._folder, self._seen, self._log = session, folder, seen, log
        self._tokens: dict[str, str] = {}
        self._job = self._running()

    def look(self) -> None:
        """Do what is due."""
        seen, now = self._seen, time.monotonic()
        self._meet(now)
        if self._job is None:
            self._start(now)
            return
        status = str(self._session.get_job_status(self._job.id))
        if status.startswith("FINISHED"):
            self._log(f"FLARE's job ended ({status.partition(':')[2].lower()})")
            self._job = None
            return
        why = abort_why(seen, self._job, now, self._idle)
        if why is not None:
            self._log(f"FLARE's job is started anew: {why}")
            self._end(self._job.id)
            self._job = None

    def _meet(self, now: float) -> None:
        """Who is registered; a token is given anew at each registration."""
        tokens = _tokens(self._session.do_command("check_status server"))
        for site, token in tokens.items():
            if self._tokens.get(site, token) != token:
                self._seen.doubted.setdefault(site, now)
        for site in self._seen.reached - frozenset(tokens):
            self._seen.doubted.setdefault(site, now)
        self._tokens = self._tokens | tokens
        self._seen.registered = frozenset(tokens)
        for site in sorted(doubles(self._seen, now)):
            self._log(
                f"{site} answers, but its place is disputed: another learner seems to use its keys "
                "(each needs its own; if it moved, stop the first)"
            )

    def _start(self, now: float) -> None:
        # Of those listed, one may have died lately, and one may have a worker that is yet to end.
        here = self._seen.registered & self._seen.known
        sites = sites_to_start(self._seen, self._idle(here) if here else here, now)
        if not sites:
            return
        job = self._session.submit_job(str(write_job(self._folder, sites)))
        self._job = Job(job, sites, now)
        self._seen.some = None
        self._log(f"FLARE's job begins with {', '.join(sorted(sites))}")

    def _idle(self, sites: frozenset[str]) -> frozenset[str]:
        """Which of them answer, and run no job."""
        rows = self._session.get_client_job_status(sorted(sites)) or []
        return frozenset(
            row["client_name"] for row in rows if row.get("status") == "no_jobs"
        ) & sites  # fmt: skip

    def _running(self) -> Job | None:
        """A job that an earlier job manager submitted; if there are several, the newest."""
        rows = [row for row in self._session.list_jobs() if row.get("job_name", JOB) == JOB]
        live = [row for row in rows if not str(row.get("status")).startswith("FINISHED")]
        live.sort(key=lambda row: str(row.get("submit_time", "")))
        for row in live[:-1]:
            self._end(row["job_id"])
        return Job(live[-1]["job_id"], frozenset(), time.monotonic()) if live else None

    def _end(self, job: str) -> None:
        self._session.abort_job(job)
        until = time.monotonic() + _END_S
        while not str(self._session.get_job_status(job)).startswith("FINISHED"):
            if time.monotonic() > until:
                raise TimeoutError(f"FLARE's job {job} does not end")
            time.sleep(0.2)


def _tokens(answer: dict[str, Any]) -> dict[str, str]:
    """Of the table of clients in FLARE's answer: name and token."""
    if "data" not in answer:
        raise ConnectionError(f"no answer from FLARE's server: {answer.get('details')}")
    for part in answer["data"]:
        head, *rows = part.get("rows") or [[]]
        columns = [str(name).lower() for name in head]
        if "token" in columns:
            name, token = columns.index("client"), columns.index("token")
            return {row[name]: row[token] for row in rows}
    return {}


class _StatusSocket:
    """The socket by which our server process and the job manager know of each other."""

    def __init__(self, path: Path, known: frozenset[str]) -> None:
        self.seen = Seen(known)
        self._listener = frames.listen(path)
        threading.Thread(target=self._serve, daemon=True).start()

    def log(self, line: str) -> None:
        """To be shown, once."""
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        self.seen.notes.append(line)

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(OSError, ValueError):
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        connection.settimeout(2.0)
        said = frames.receive(connection)
        if said is None:
            return
        news, seen, now = json.loads(said), self.seen, time.monotonic()
        seen.reached = frozenset(news["reached"])
        if not news["connected"] and seen.connected is not None:
            seen.connected, seen.lost = None, now
        elif news["connected"] and seen.connected is None:
            seen.connected = now
        count = len(seen.notes)
        frames.send(connection, json.dumps(seen.notes[:count]).encode())
        del seen.notes[:count]


def main(arguments: list[str]) -> int:
    """Until killed, or FLARE's server is stuck."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    kit, job, learners, path = (Path(argument) for argument in arguments)
    status = _StatusSocket(path, frozenset(json.loads(learners.read_text())))
    alone_since = time.monotonic()
    while True:
        session = None
        try:
            session = new_secure_session(ADMIN, str(kit), timeout=5.0)
            manager = JobManager(session, job, status.seen, status.log)
            while True:
                manager.look()
                alone_since = time.monotonic()
                time.sleep(_LOOK_S)
        except TimeoutError as error:
            status.log(f"{error}: FLARE's server is started anew")
            time.sleep(1.5)
            return STUCK
        except Exception as error:
            sys.stdout.write(f"{type(error).__name__}: {error}\n")
            if time.monotonic() - alone_since > _CONNECT_S:
                return STUCK
            time.sleep(0.5)
        finally:
            if session is not None:
                with contextlib.suppress(Exception):
                    session.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
