"""FLARE's kits, made by `veilstream keys` from the same list of learners.

    KEYS/ca/flare/             FLARE's own CA and every key that it signed: keep offline
    KEYS/server/flare/         the administrator, who submits jobs: for `veilstream server`
    KEYS/flare/server/         for the account that runs FLARE's server
    KEYS/flare/sites/NAME/     for the account that runs the learner's site, *not* the learner's own

A kit is FLARE's workspace too: its `startup/start.sh` starts it where it lies. Made again when
learners are added: certificates that exist are kept, unless they end soon or the server has a new
name. FLARE's certificates last 360 days, so make the kits again once a year.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

from veilstream.errors import InputError, MissingExtra, VeilstreamError
from veilstream.files import write_file

PROJECT = "veilstream"
SERVER = "veilstream-server"
"""The server's identity, whatever its host is called."""
ADMIN = "admin@veilstream.local"
_LOCAL = ["localhost", "127.0.0.1"]
_RENEW_DAYS = 90
_RESERVED = {"server", "client", "all", "root_cert", "root_pri_key", PROJECT, SERVER}
_STORE = "{$HOME}/veilstream-flare"  # FLARE fills in the variable
_GONE_AFTER_S = 20
_ANSWER_S = 4.0
_MOST_JOBS = 1000  # one a site
# A stream's sender keeps a thread that waits for stragglers: 300 s by default, or thousands of
# threads at our pace.
_STREAMING = {"streaming_retry_timeout": 4, "streaming_retry_wait": 1}


def require_flare() -> None:
    """An error that says what to install."""
    if importlib.util.find_spec("nvflare") is None:
        raise MissingExtra("nvflare", "flare", "The FLARE engine")


def provision(keys: Path, host: str, port: int) -> None:
    """Kits for all whom KEYS/server/learners.json names; may be done again at any time."""
    require_flare()
    names = sorted(json.loads((keys / "server/learners.json").read_text()))
    for name in names:
        if name.lower() in _RESERVED:
            raise InputError("learner", name, "a name that FLARE does not use itself", "rename it")
    if ":" in host:
        raise InputError("host", host, "a name or an IPv4 address", "FLARE has no IPv6")
    home = keys / "ca" / "flare"
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.chmod(0o700)
    _forget_stale(home, hosts := _hosts(home, host))
    kits = _build(home, names, host, hosts, port)
    try:
        _set_up_server(kits / SERVER)
        _hand_over(kits / SERVER, keys / "flare/server")
        _hand_over(kits / ADMIN, keys / "server/flare")
        for name in names:
            _hand_over(kits / name, keys / "flare/sites" / name)
    finally:
        shutil.rmtree(kits)  # copies of keys; FLARE's state holds all that is needed


def _hosts(home: Path, host: str) -> list[str]:
    """Every name the server has had: one that is added must not take away another."""
    path = home / "hosts.json"
    before = json.loads(path.read_text()) if path.exists() else _LOCAL
    return before if host in before else [*before, host]


def _forget_stale(home: Path, hosts: list[str]) -> None:
    """Have FLARE make anew what ends soon, and the server's certificate if it has a new name."""
    from cryptography import x509

    state = home / PROJECT / "state" / "cert.json"
    if state.exists():
        content = json.loads(state.read_text())
        soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=_RENEW_DAYS)
        kept = {}
        for subject, value in content.items():
            if isinstance(value, dict):
                pem = value["cert"].encode()
                if x509.load_pem_x509_certificate(pem).not_valid_after_utc < soon:
                    continue
            kept[subject] = value
        known = home / "hosts.json"
        if not known.exists() or json.loads(known.read_text()) != hosts:
            kept.pop(SERVER, None)
        write_file(state, json.dumps(kept))
    write_file(home / "hosts.json", json.dumps(hosts))


def _build(home: Path, names: list[str], host: str, hosts: list[str], port: int) -> Path:
    """Call FLARE's provisioner; the folder of the new kits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nvflare.lighter.constants import CtxKey
        from nvflare.lighter.entity import Project
        from nvflare.lighter.impl.cert import CertBuilder
        from nvflare.lighter.impl.static_file import StaticFileBuilder
        from nvflare.lighter.impl.workspace import WorkspaceBuilder
        from nvflare.lighter.provisioner import Provisioner

        project = Project(name=PROJECT, description="")
        ports = {"fed_learn_port": port, "admin_port": port}
        project.set_server(SERVER, PROJECT, ports | {"default_host": host, "host_names": hosts})
        for name in names:
            project.add_client(name, PROJECT, {})
        project.add_admin(ADMIN, PROJECT, {"role": "project_admin"})
        # No SignatureBuilder: addresses in a kit are set where it is used, and mutual TLS is what
        # kits are trusted by.
        builders = [
            WorkspaceBuilder(template_file=["master_template.yml"]),
            StaticFileBuilder(config_folder="config", scheme="grpc"),
            CertBuilder(root_valid_days=3650),
        ]
        logger = logging.getLogger("veilstream.flare")
        logger.setLevel(logging.WARNING)
        ctx: Any = Provisioner(str(home), builders).provision(project, logger=logger)
    for path in [home / PROJECT, *(home / PROJECT).rglob("*")]:  # FLARE writes its CA's key 0644
        path.chmod(0o700 if path.is_dir() else 0o600)
    if ctx.get(CtxKey.BUILD_ERROR):
        raise VeilstreamError(f"FLARE could not make its kits in {home} (see above)")
    return Path(ctx.get(CtxKey.CURRENT_PROD_DIR))


def _set_up_server(kit: Path) -> None:
    """Settings for many small jobs.

    What FLARE's server would do otherwise: keep the jobs of all servers in one folder of /tmp, run
    four at a time, look for new ones every ten seconds, and count a dead site as present for ten
    minutes.
    """
    rules = json.loads((kit / "local/resources.json.default").read_text())
    rules["servers"][0] |= {"heart_beat_timeout": _GONE_AFTER_S, "admin_timeout": _ANSWER_S}
    rules["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = _STORE + "/snapshots"
    for part in rules["components"]:
        if part["id"] == "job_manager":
            part["args"]["uri_root"] = _STORE + "/jobs"
        elif part["id"] == "job_scheduler":
            part["args"] = {"max_jobs": _MOST_JOBS, "min_schedule_interval": 0.5, "max_schedule_interval": 2.0}
    (kit / "local/resources.json").write_text(json.dumps(rules, indent=1))


def _hand_over(kit: Path, to: Path) -> None:
    """To where it is fetched from, for its owner only."""
    new = to.with_name(f".{to.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(kit, new)
    (new / "local/comm_config.json").write_text(json.dumps(_STREAMING, indent=1))
    for path in [new, *new.rglob("*")]:
        path.chmod(0o700 if path.is_dir() or path.suffix == ".sh" else 0o600)
    shutil.rmtree(to, ignore_errors=True)
    new.rename(to)
