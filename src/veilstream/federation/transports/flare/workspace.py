"""FLARE's workspaces: copies of kits, with our own rules in place of its defaults.

What a default kit would do otherwise: keep jobs of all servers together in /tmp, build any of a
hundred classes that a job names, take code along with a job, stream logs to the server, and count a
dead site as present for ten minutes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from veilstream.errors import InputError

__all__ = ["admin_workspace", "environment", "server_workspace", "site_workspace"]

ALLOWED_CLASSES = [
    "nvflare.collab.runtime.controller.CollabController",
    "nvflare.collab.runtime.executor.CollabExecutor",
    "veilstream.federation.transports.flare.relay_server.ServerRelay",
    "veilstream.federation.transports.flare.relay_site.SiteRelay",
]
# A right that is not named is denied. No "byoc": a job that brings code is refused.
_RIGHTS = {"submit_job": "any", "manage_job": "any", "view": "any"}
_AUTHORIZATION = {"format_version": "1.0", "permissions": {"project_admin": _RIGHTS}}
_GONE_AFTER_S = 20
_ANSWER_S = 4.0


def server_workspace(kit: Path, to: Path, address: tuple[str, int]) -> None:
    """For FLARE's server. An address that is not loopback means every interface."""
    _copy(kit, to)
    host, port = address
    startup = _read(to / "startup/fed_server.json")
    startup["servers"][0]["service"]["target"] = f"{_host(host)}:{port}"
    startup["servers"][0] |= {"admin_server": _host(host), "admin_port": port}
    _write(to / "startup/fed_server.json", startup)
    rules = _read(to / "local/resources.json.default")
    rules["class_allow_list"] = ALLOWED_CLASSES
    rules["servers"][0] |= {"heart_beat_timeout": _GONE_AFTER_S, "admin_timeout": _ANSWER_S}
    store = rules["snapshot_persistor"]["args"]["storage"]["args"]
    store["root_dir"] = str(to.resolve() / "snapshots")
    for part in rules["components"]:
        if part["id"] == "job_manager":
            part["args"]["uri_root"] = str(to.resolve() / "jobs")
        elif part["id"] == "job_scheduler":
            part["args"] = {
                "max_jobs": 1, "min_schedule_interval": 0.5, "max_schedule_interval": 2.0,
            }  # fmt: skip
    rules["components"] = [c for c in rules["components"] if c["id"] != "log_receiver"]
    _write(to / "local/resources.json", rules)
    _common(to)


def site_workspace(kit: Path, to: Path, server: tuple[str, int]) -> str:
    """For a learner's site; its name."""
    _copy(kit, to)
    startup = _read(to / "startup/fed_client.json")
    startup["servers"][0]["service"]["target"] = f"{_host(server[0])}:{server[1]}"
    _write(to / "startup/fed_client.json", startup)
    rules = _read(to / "local/resources.json.default")
    rules |= {"class_allow_list": ALLOWED_CLASSES, "allow_log_streaming": False}
    rules["components"] = [c for c in rules["components"] if c["id"] != "site_log_streamer"]
    _write(to / "local/resources.json", rules)
    _common(to)
    return str(startup["client"]["fqsn"])


def admin_workspace(kit: Path, to: Path, port: int) -> None:
    """For the job manager, who sits on the server's machine."""
    _copy(kit, to)
    startup = _read(to / "startup/fed_admin.json")
    startup["admin"] |= {"host": "127.0.0.1", "port": port}
    _write(to / "startup/fed_admin.json", startup)


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """For FLARE's processes; what they start inherits it."""
    return {
        "PYTHONUNBUFFERED": "1",
        # A stream's sender keeps a thread that waits for stragglers: 300 s by default, which is
        # thousands of threads at our pace.
        "NVFLARE_STREAMING_RETRY_TIMEOUT": "4",
        "NVFLARE_STREAMING_RETRY_WAIT": "1",
        "MALLOC_ARENA_MAX": "2",
        **extra,
    }


def _copy(kit: Path, to: Path) -> None:
    if not (kit / "startup").is_dir():
        raise InputError(
            "keys", str(kit), "FLARE's kit", "`veilstream keys make --engine flare` makes it"
        )
    shutil.rmtree(to, ignore_errors=True)
    to.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.copytree(kit.resolve(), to, copy_function=_copy_or_link)
    to.chmod(0o700)
    (to / "transfer").mkdir()


def _copy_or_link(source: str, to: str) -> None:
    """A private key stays in one place: a run's folder may be given away."""
    if source.endswith(".key"):
        Path(to).symlink_to(source)
    else:
        shutil.copy(source, to)


def _common(to: Path) -> None:
    _write(to / "local/authorization.json", _AUTHORIZATION)
    logs = _read(to / "local/log_config.json.default")
    handlers = logs["handlers"]
    handlers["consoleHandler"]["level"] = "WARNING"  # our child's log, which nobody rotates
    handlers["logFileHandler"] |= {"maxBytes": 5_000_000, "backupCount": 2}
    logs["handlers"] = {k: handlers[k] for k in ("consoleHandler", "logFileHandler")}
    logs["loggers"]["root"]["handlers"] = list(logs["handlers"])
    logs["loggers"]["nvflare.collab"] = {"level": "WARNING"}  # else four lines a call
    _write(to / "local/log_config.json", logs)


def _host(host: str) -> str:
    if ":" in host:
        raise InputError("address", host, "a name or an IPv4 address", "FLARE has no IPv6")
    return "127.0.0.1" if host == "localhost" else host


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
