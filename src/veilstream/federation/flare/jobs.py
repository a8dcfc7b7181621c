"""A process that submits FLARE's jobs: one for each site that is there and has none.

    python -m veilstream.federation.flare.jobs KIT LEARNERS FOLDER

By FLARE's public API: a `CollabRecipe` and a session of the administrator whose kit it is given. A
job a site, since FLARE's jobs do not heal: one that loses a worker ends, and a site that comes back
is not let in again. So a site that dies costs its own job and nobody else's, and no site is in one
job with another. It ends at the first error and is started again; it can be killed at any time.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from veilstream.federation.flare.provisioning import ADMIN

_PREFIX = "veilstream-"
_LOOK_S = 0.7
_STALE_S = {"RUNNING": 5.0}  # FLARE waits a minute and more for a worker that is dead
_START_S = 60.0
_SYNC_S = 120  # for a site's worker to start: twenty on two cores take long


class Jobs:
    """What one session with FLARE's server looks after."""

    def __init__(self, session: Any, folder: Path) -> None:
        self._session, self._folder = session, folder
        self._idle_since: dict[str, float] = {}

    def look(self, learners: Iterable[str]) -> None:
        """Submit what is missing; end what has no worker any more."""
        found = {client.name for client in self._session.get_system_info().client_info}
        here = sorted(found & set(learners))
        if not here:
            return
        # A site that has died is listed for a while; one that answers says what it runs.
        rows = self._session.get_client_job_status(here) or []
        idle = {row["client_name"] for row in rows if row.get("status") == "no_jobs"}
        live = {
            job["job_name"]: job
            for job in self._session.list_jobs(name_prefix=_PREFIX)
            if not str(job.get("status")).startswith("FINISHED")
        }
        now, before = time.monotonic(), self._idle_since
        self._idle_since = {}
        for site in sorted(idle & set(here)):
            job = live.get(_PREFIX + site)
            if job is None:
                self._session.submit_job(str(export(site, self._folder)))
                _say(f"a job for {site}")
                continue
            since = self._idle_since[job["job_id"]] = before.get(job["job_id"], now)
            if now - since > _STALE_S.get(str(job["status"]), _START_S):
                _say(f"the job of {site} has no worker; it is aborted")
                self._session.abort_job(job["job_id"])


def export(site: str, folder: Path) -> Path:
    """The job of one site, as FLARE's recipe writes it: with the relay's source, for both sides."""
    from nvflare.collab import CollabRecipe

    relay, name = relay_module(), _PREFIX + site
    recipe = CollabRecipe(name, relay.ServerRelay(), relay.SiteRelay(), sync_task_timeout=_SYNC_S)
    recipe.set_per_site_config({site: {}})
    shutil.rmtree(folder / name, ignore_errors=True)
    recipe.export(str(folder))
    return folder / name


def relay_module() -> ModuleType:
    """The relay under the name that it has in a job, where veilstream need not be installed."""
    name = "veilstream_relay"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        had_torch = "torch" in sys.modules
        spec.loader.exec_module(module)
        if not had_torch:  # the relay's own affair, in FLARE's processes
            sys.modules.pop("torch", None)
    return sys.modules[name]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Until killed or the first error, which is the last line."""
    kit, learners, folder = (Path(argument) for argument in arguments)
    try:
        from nvflare.fuel.flare_api.flare_api import new_secure_session

        session = new_secure_session(ADMIN, str(kit), timeout=5.0)
        try:
            jobs = Jobs(session, folder)
            while True:
                jobs.look(json.loads(learners.read_text()))
                time.sleep(_LOOK_S)
        finally:
            session.close()
    except Exception as error:  # FLARE raises its own kinds
        _say(f"{type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
