"""The job that is submitted to FLARE: two relays and no code of its own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["JOB", "write_job"]

JOB = "veilstream"
_SYNC_S = 120  # for sites to say that their worker has started: twenty on two cores take long
_CONTROLLER = "nvflare.collab.runtime.controller.CollabController"
_EXECUTOR = "nvflare.collab.runtime.executor.CollabExecutor"
_SERVER = "veilstream.federation.transports.flare.relay_server.ServerRelay"
_SITE = "veilstream.federation.transports.flare.relay_site.SiteRelay"


def write_job(folder: Path, sites: Iterable[str]) -> Path:
    """A job for these sites and no others: one that is not there would hold up all."""
    shutil.rmtree(folder, ignore_errors=True)
    meta = {
        "name": JOB, "resource_spec": {}, "min_clients": 1, "mandatory_clients": [],
        "deploy_map": {"app": ["server", *sorted(sites)]},
    }  # fmt: skip
    controller = {"server_obj_id": "relay", "collab_obj_ids": [], "sync_task_timeout": _SYNC_S}
    server = {
        "format_version": 2,
        "server": {"task_request_interval": 0.3},
        "workflows": [{"id": "controller", "path": _CONTROLLER, "args": controller}],
        "components": [{"id": "relay", "path": _SERVER, "args": {}}],
    }
    executor = {"path": _EXECUTOR, "args": {"client_obj_id": "relay", "collab_obj_ids": []}}
    client = {
        "format_version": 2,
        "executors": [{"tasks": ["*"], "executor": executor}],
        "components": [{"id": "relay", "path": _SITE, "args": {}}],
    }
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    _write(folder / "meta.json", meta)
    _write(config / "config_fed_server.json", server)
    _write(config / "config_fed_client.json", client)
    return folder


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
