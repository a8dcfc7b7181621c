"""The Helm chart: what it renders is closed, keeps its keys to their owner, and gives commands what they know."""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import veilstream as vs
from tests.support.command_line import parse
from veilstream.errors import InputError
from veilstream.federation.keys.identity import check_private

yaml = pytest.importorskip("yaml")
from tests.support.helm import rendered  # noqa: E402

CHART = Path(__file__).parents[2] / "deploy/helm/veilstream"
PLAN = '[learning]\nrounds = 3 # a plan\'s own text, with a "quote"\n'
VALUES: dict[str, Any] = {
    "plan": PLAN,
    "learners": [
        {
            "name": name,
            "keys": f"{name}-keys",
            "server": "fl.example.org:8400",
            "data": {"claim": f"{name}-records", "file": "records.csv"},
            "newStore": new,
            "store": {"size": "10Gi", "storageClass": "fast"},
            "witness": {"size": "1Gi", "storageClass": "other"},
        }
        for name, new in (("north", True), ("south", False))
    ],
}
MANIFESTS = rendered(CHART, VALUES, "federation")
SETS = {each["metadata"]["name"]: each["spec"] for each in MANIFESTS if each["kind"] == "StatefulSet"}
LEARNERS = ("federation-north", "federation-south")


def pod(name: str) -> dict[str, Any]:
    return SETS[name]["template"]["spec"]


def test_there_is_what_was_asked_for_and_nothing_else():
    names = sorted((each["kind"], each["metadata"]["name"]) for each in MANIFESTS)
    assert names == [
        ("ConfigMap", "federation-plan"),
        ("NetworkPolicy", "federation-north"),
        ("NetworkPolicy", "federation-south"),
        ("Service", "federation-server"),
        *(("StatefulSet", f"federation-{name}") for name in ("north", "server", "south")),
    ]
    without = rendered(CHART, {**VALUES, "server": {"enabled": False}}, "federation")
    assert not [each for each in without if each["metadata"]["name"] == "federation-server"]


def test_the_plan_arrives_as_it_was_written():
    (plan,) = [each["data"]["plan.toml"] for each in MANIFESTS if each["kind"] == "ConfigMap"]
    assert plan == PLAN
    tomllib.loads(plan)


@pytest.mark.parametrize("name", SETS)
def test_nothing_runs_as_root_or_writes_outside_its_volumes(name):
    spec = pod(name)
    assert SETS[name]["replicas"] == 1
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 10001
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    for container in spec["containers"] + spec["initContainers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("name", SETS)
def test_keys_are_files_that_their_owner_alone_reads(name):
    """Kubernetes adds the group's bit to a secret's files, and `veilstream` refuses such keys: they are copied."""
    spec = pod(name)
    (secret,) = [volume["secret"] for volume in spec["volumes"] if "secret" in volume]
    assert secret["defaultMode"] == 0o400
    (copying,) = spec["initContainers"]
    assert copying["command"] == ["sh", "-c", "install -m 0400 /secret/* /keys/"]
    (kept,) = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "keys"]
    assert kept["medium"] == "Memory"
    (container,) = spec["containers"]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert "secret" not in mounts
    assert mounts["keys"]["readOnly"] is True
    assert "env" not in container


def test_copied_keys_are_taken_and_those_that_a_group_may_read_are_not(tmp_path):
    """The init container's own command, on a folder as Kubernetes mounts it."""
    secret, keys = tmp_path / "secret", tmp_path / "keys"
    secret.mkdir(), keys.mkdir()
    for name in ("identity.key", "tls.key", "tls.pem"):
        (secret / name).write_text(name)
        (secret / name).chmod(0o440)
    with pytest.raises(InputError, match="only its owner can read"):
        check_private(secret / "identity.key")
    (copy,) = pod("federation-north")["initContainers"][0]["command"][2:]
    subprocess.run(["sh", "-c", copy.replace(" /", f" {tmp_path}/")], check=True)
    assert {path.name: path.stat().st_mode & 0o777 for path in keys.iterdir()} == dict.fromkeys(
        ("identity.key", "tls.key", "tls.pem"), 0o400
    )
    check_private(keys / "identity.key")


@pytest.mark.parametrize("name", SETS)
def test_commands_have_the_options_that_they_are_given_and_files_on_mounted_volumes(name):
    (container,) = pod(name)["containers"]
    words = container["args"]
    parse(["server" if name.endswith("server") else "learner", *words])
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    for word in words:
        assert not word.startswith("/") or any(word.startswith(place) for place in mounted), word
    assert ("--new-store" in words) is (name == "federation-north")


@pytest.mark.parametrize("name", LEARNERS)
def test_store_and_witness_have_a_volume_each_and_records_are_read_only(name):
    claims = {each["metadata"]["name"]: each["spec"] for each in SETS[name]["volumeClaimTemplates"]}
    assert {claim: spec["storageClassName"] for claim, spec in claims.items()} == {"store": "fast", "witness": "other"}
    (container,) = pod(name)["containers"]
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert mounts["store"]["mountPath"] == "/var/lib/veilstream"
    assert mounts["witness"]["mountPath"] == "/var/lib/veilstream-witness"
    assert mounts["data"]["readOnly"] is True


def test_probes_ask_healthz():
    (server,) = pod("federation-server")["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert server[probe]["httpGet"] == {"path": "/healthz", "port": "models", "scheme": "HTTPS"}
    assert {"name": "models", "containerPort": 8480} in server["ports"]
    for name in LEARNERS:
        (learner,) = pod(name)["containers"]
        assert learner["args"][learner["args"].index("--learner-api") + 1] == "127.0.0.1:8490"
        for probe in ("startupProbe", "readinessProbe"):
            *_, code = learner[probe]["exec"]["command"]
            assert "http://127.0.0.1:8490/healthz" in code
            compile(code, "probe", "exec")
        assert "ports" not in learner


def test_nobody_calls_a_learner_and_it_calls_its_server_alone():
    for policy in (each["spec"] for each in MANIFESTS if each["kind"] == "NetworkPolicy"):
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert "ingress" not in policy
        assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [8400, 53, 53]


def test_the_chart_is_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == vs.__version__
    assert {values["images"][role].partition(":")[2] for role in ("server", "learner")} == {vs.__version__}


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not here")
def test_helm_itself_renders_the_same(tmp_path):
    given = tmp_path / "values.yaml"
    given.write_text(yaml.safe_dump(VALUES))
    command = ["helm", "template", "federation", str(CHART), "-f", str(given)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    theirs = [document for document in yaml.safe_load_all(text) if document]

    def ordered(manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(manifests, key=lambda each: (each["kind"], each["metadata"]["name"]))

    assert ordered(theirs) == ordered(MANIFESTS)
    subprocess.run(["helm", "lint", str(CHART), "-f", str(given)], check=True, capture_output=True)
