"""The package as it is installed: wheel and sdist, in an environment that knows no checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import veilstream as vs

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]
# Nothing of the checkout, whatever the tests themselves were started with.
CLEAN = {name: held for name, held in os.environ.items() if name != "PYTHONPATH"}


def ask(*command: object, cwd: Path, **more: str) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=CLEAN | more)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    ask(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out, cwd=ROOT)
    return out / f"veilstream-{vs.__version__}.tar.gz"


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory) -> Path:
    """Built from the sdist alone, without npm or a compiler."""
    out = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(out, filter="data")
    source = out / f"veilstream-{vs.__version__}"
    ask(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=source, PATH=str(out))
    return out / f"veilstream-{vs.__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel; its dependencies are those of this one, read in place.

    A .pth file inside a folder that a .pth file names is not followed, so an editable install of
    the checkout does not come along.
    """
    place = tmp_path_factory.mktemp("environment")
    ask(sys.executable, "-m", "venv", "--without-pip", place, cwd=place)
    python = place / "bin" / "python"
    ask(
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
        wheel,
        cwd=place,
    )
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(ask(python, "-c", code, cwd=place).strip())
    here = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    (packages / "dependencies.pth").write_text("\n".join(here) + "\n")
    return place


def test_the_sdist_holds_what_its_tests_need(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in (
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "tests/conftest.py",
        "experiments/demo.toml",
        "requirements/test.lock",
        "studies/kills.py",
        "src/veilstream/py.typed",
    ):
        assert wanted in names, wanted


def test_the_wheel_holds_the_package_and_its_plans_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"veilstream", f"veilstream-{vs.__version__}.dist-info"}
    shipped = {Path(name).name for name in names if name.startswith("veilstream/_experiments/")}
    assert shipped == {path.name for path in (ROOT / "experiments").glob("*.toml")} | {"comparisons-log.csv"}
    source = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py")}
    examples = "veilstream/_examples/"
    assert source == {name for name in names if name.endswith(".py") and not name.startswith(examples)}
    carried = {name.removeprefix(examples) for name in names if name.startswith(examples)}
    assert all((ROOT / "examples" / name).is_file() for name in carried)


def test_the_demo_runs_where_only_the_wheel_was_installed(environment, tmp_path):
    code = "import veilstream; print(veilstream.__file__)"
    found = ask(environment / "bin" / "python", "-c", code, cwd=tmp_path).strip()
    assert Path(found).is_relative_to(environment)
    command = environment / "bin" / "veilstream"
    assert ask(command, "--version", cwd=tmp_path).strip() == f"veilstream {vs.__version__}"
    small = ("--set", "run.seeds=1", "--out", tmp_path / "demo", "--json")
    told = json.loads(ask(command, "demo", *small, cwd=tmp_path))
    assert told["complete"]
    assert vs.Run(tmp_path / "demo").summary["complete"]


def test_the_wheel_carries_the_page_and_its_library_with_the_licence(wheel):
    """From the sdist, which has it where npm could fetch it; the page's own parts are always there."""
    names = set(zipfile.ZipFile(wheel).namelist())
    page = "veilstream/reports/page/"
    assert {page + own for own in ("template.html", "page.css", "page.js", "charts.js")} <= names
    if not (ROOT / "src/veilstream/reports/page/vendor/uplot.js").exists():
        pytest.skip("the chart library is not here: npm could not fetch it")
    carried = {name.removeprefix(page) for name in names if name.startswith(page + "vendor/")}
    assert carried == {"vendor/uplot.js", "vendor/uplot.css", "vendor/uplot-LICENSE"}
