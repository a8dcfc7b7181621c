"""The layout: what importing each room loads, and the two walks of CONTRIBUTING."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOISE = {"veilstream.mechanisms." + name for name in ("keystream", "normals", "stream")}
CLIENTS = {"veilstream.streams", "veilstream.deployment.ledger", "veilstream.deployment.learner"}


def loaded_by(statement: str) -> set[str]:
    """Modules that a fresh interpreter holds after this statement."""
    code = f"import sys\n{statement}\nprint(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(out.stdout.split())


def below(loaded: set[str], rooms: set[str]) -> set[str]:
    return {m for m in loaded for room in rooms if m == room or m.startswith(room + ".")}


def test_importing_the_package_loads_nothing():
    loaded = loaded_by("import veilstream")
    assert {m for m in loaded if m.startswith("veilstream")} == {"veilstream"}
    assert "numpy" not in loaded


def test_the_package_names_what_it_has_before_it_is_loaded():
    code = "import veilstream as vs; assert set(vs.__all__) <= set(dir(vs))"
    assert "numpy" not in loaded_by(code)


@pytest.mark.parametrize("module", ["coordinator", "model_api", "process", "checkpoint"])
def test_a_server_loads_neither_noise_nor_clients(module):
    loaded = loaded_by(f"import veilstream.federation.server.{module}")
    assert below(loaded, NOISE | CLIENTS) == set()
    assert "cryptography.hazmat.primitives.ciphers" not in loaded


def test_a_servers_live_page_loads_neither_noise_nor_clients():
    loaded = loaded_by("import veilstream.reports.live_federation, veilstream.reports.federation_report")
    assert below(loaded, NOISE | CLIENTS | {"veilstream.research", "veilstream.simulation"}) == set()


def test_a_server_that_works_out_its_terms_loads_no_noise():
    plan = "[learning]\\nrounds=4\\n[data]\\ndim=3\\n[privacy]\\nepsilon=1.0\\ndelta=1e-3\\n"
    plan += "[[methods]]\\nname='a'\\nmechanism='buffered'\\nstep_size=0.1\\n"
    loaded = loaded_by(
        "from veilstream.deployment.terms import Terms\n"
        f'from veilstream.plans.plan import Plan\nTerms.of(Plan.parse("{plan}"), 3)'
    )
    assert below(loaded, NOISE | CLIENTS) == set()


@pytest.mark.parametrize("command", ["server", "learner", "plan", "run"])
def test_help_of_a_command_loads_no_room_that_works(command):
    code = f"import sys; sys.argv = ['veilstream', '{command}', '--help']; from veilstream.cli import main"
    loaded = loaded_by(code + "\ntry: main()\nexcept SystemExit as done: assert not done.code")
    rooms = {m.split(".")[1] for m in loaded if m.startswith("veilstream.") and m.count(".") > 1}
    assert rooms <= {"cli", "deployment", "federation"}  # `deployment.process_secrecy` and `federation.logs`
    assert not loaded & {"numpy", "scipy", "jax", "veilstream.mechanisms", "veilstream.deployment.terms"}


def test_noise_is_there_when_it_is_asked_for():
    loaded = loaded_by("import veilstream as vs; list(vs.mechanisms.tree(4).noise(std=1.0, dim=2, seed=1))")
    assert loaded >= NOISE


def test_the_direct_transport_at_a_learner_loads_nothing_else_of_ours():
    pytest.importorskip("grpc")
    loaded = loaded_by("import veilstream.federation.direct.client")
    ours = {m.removeprefix("veilstream") for m in loaded if m.startswith("veilstream")}
    folder = ".federation"
    assert ours == {
        "",
        ".federation",
        f"{folder}.direct",
        f"{folder}.direct.certificates",
        f"{folder}.direct.client",
        f"{folder}.direct.wire",
        f"{folder}.protocol",
        f"{folder}.protocol.sizes",
        f"{folder}.repeated_lines",
    }
    assert "numpy" not in loaded


PUBLIC = ("flwr", "flwr.app", "flwr.clientapp", "flwr.serverapp")


def test_the_flower_app_uses_flowers_public_modules_only():
    used = set()
    for path in (ROOT / "examples/flower").rglob("*.py"):
        used |= set(re.findall(r"^\s*(?:from|import) (flwr[\w.]*)", path.read_text(), re.M))
    assert used >= {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
    assert used <= set(PUBLIC)


ORDER = ("mechanisms", "privacy", "records", "learning", "streams", "plans", "runs", "research")
ALLOWED = {room: set(ORDER[:i]) for i, room in enumerate(ORDER)}
ALLOWED["deployment"] = set(ORDER) - {"research"}
ALLOWED["simulation"] = set(ORDER)


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_loads_only_rooms_below_it(room):
    folder = ROOT / "src/veilstream" / room
    light = ("torch", "jax_noise", "__main__", "cnn", "image_features", "models")
    modules = [
        "veilstream." + ".".join(path.relative_to(folder.parent).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if path.name != "__init__.py" and not any(word in str(path) for word in light)
    ]
    assert modules
    loaded = loaded_by("\n".join(f"import {module}" for module in modules))
    rooms = {m.split(".")[1] for m in loaded if m.startswith("veilstream.") and m.count(".") > 1}
    assert rooms - {room} <= ALLOWED[room]


def walks() -> dict[str, list[str]]:
    """The numbered lists of CONTRIBUTING, as paths."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found = {}
    for name in ("in simulation", "in a federation"):
        listing = text.split(f"One client {name}:")[1].split("\n\n")[1]
        found[name] = [re.search(r"`([\w/]+\.py)`", line)[1] for line in listing.splitlines()]
    return found


@pytest.mark.parametrize("name", ["in simulation", "in a federation"])
def test_the_files_of_a_walk_exist_and_are_loaded_alone(name):
    walk = walks()[name]
    modules = ["veilstream." + path.removesuffix(".py").replace("/", ".") for path in walk]
    assert len(set(walk)) == len(walk) <= 20
    assert loaded_by("\n".join(f"import {m}" for m in modules)) >= set(modules)


TRACED = """
import sys
seen = []
def profile(frame, event, argument):
    code = frame.f_code
    path = code.co_filename.partition("/src/veilstream/")[2]
    if event != "call" or not path or path in seen or not code.co_flags & 1:  # a class body is no call
        return
    while frame is not None:  # nor is what a module does while it is imported
        if frame.f_code.co_name == "<module>" and "/src/veilstream/" in frame.f_code.co_filename:
            return
        frame = frame.f_back
    seen.append(path)
import veilstream as vs
plan = vs.Plan.parse(PLAN)
sys.setprofile(profile)
vs.run(plan, out=OUT)
sys.setprofile(None)
print(*seen)
"""


def test_the_walk_in_simulation_is_the_real_order_of_first_calls(tmp_path):
    plan = "[learning]\nrounds=4\nlearners=2\n[data]\ndim=3\n[privacy]\nepsilon=2.0\ndelta=1e-3\n"
    plan += "[[methods]]\nname='a'\nmechanism='buffered'\nstep_size=0.1\n"
    code = f"PLAN = {plan!r}\nOUT = {str(tmp_path / 'run')!r}\n{TRACED}"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    order = out.stdout.split()
    walk = walks()["in simulation"]
    assert [path for path in order if path in walk] == walk
