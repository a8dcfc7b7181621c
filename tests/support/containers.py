"""A Containerfile without a container tool: its steps and its programs, in namespaces.

The base image is this machine's /usr and the interpreter that runs the tests, both read-only. In
place of the hash-locked install stand links to the installed packages that the lock names, and to
no others, after a look that their versions are the lock's. All other steps are run as written.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PACKAGES = Path(sysconfig.get_path("purelib"))
COPIED = ("hatchling", "editables")  # since a later step uninstalls them
CONTENT = {
    "etc/passwd": "root:x:0:0:root:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    "dev/null": "",
    "dev/urandom": "",
}


def instructions(path: Path) -> list[tuple[str, str]]:
    """(FROM, ...), (RUN, ...): a Containerfile's, with its lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


@dataclass
class Image:
    """What the steps up to some stage have made."""

    root: Path
    env: dict[str, str] = field(default_factory=dict)
    user: str = "0:0"
    workdir: str = "/"
    entrypoint: tuple[str, ...] = ()

    def start(
        self,
        *command: str,
        volumes: dict[str, Path] | None = None,
        secrets: dict[str, Path] | None = None,
        writable: bool = False,
        network: bool = True,
        log: Path | None = None,
        **options,
    ) -> subprocess.Popen:
        """A process with this image as its root, alone in its namespaces.

        Args:
            command: its program and arguments.
            volumes: folders of this machine by their place in the image, which it may write.
            secrets: the same, which it may not write.
            writable: whether its root is, too.
            network: whether it has this machine's.
            log: where what it prints goes.
            options: for `subprocess.Popen`.

        """
        uid, gid = self.user.split(":")
        limits = ["--clear-groups", "--reuid", uid, "--regid", gid]
        if uid != "0":
            limits += ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        root = shlex.quote(str(self.root))
        lines = ["set -e", "mount --make-rprivate /", f"mount --bind {root} {root}"]
        mounts = [(Path(place), place) for place in ("/usr", "/dev/null", "/dev/urandom")]
        mounts.append((PACKAGES, "/packages"))
        prefix = Path(sys.base_prefix)
        if not prefix.is_relative_to("/usr"):
            mounts.append((prefix, str(prefix)))
        for source, place in mounts + [(s, p) for p, s in (secrets or {}).items()]:
            lines += self._bind(source, place, "ro" if place[:5] != "/dev/" else "rw")
        for place, source in (volumes or {}).items():
            lines += self._bind(source, place, "rw")
        lines += [
            f"mount -t proc -o nosuid,nodev,noexec proc {root}/proc",
            f"mount -t tmpfs -o mode=1777,nosuid,nodev,noexec tmpfs {root}/tmp",
        ]
        if not writable:
            lines.append(f"mount -o remount,bind,ro {root}")
        inside = f'cd {shlex.quote(self.workdir)} && exec "$@"'
        lines.append(
            shlex.join(
                [
                    "exec",
                    "chroot",
                    str(self.root),
                    "/usr/bin/setpriv",
                    *limits,
                    "/usr/bin/env",
                    "-i",
                    *(f"{k}={v}" for k, v in self.env.items()),
                    "/bin/sh",
                    "-c",
                    inside,
                    "sh",
                    *command,
                ]
            )
        )
        spaces = ["--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts"]
        spaces += [] if network else ["--net"]
        start = ["unshare", *spaces, "sh", "-c", "\n".join(lines)]
        if log is None:
            return subprocess.Popen(start, **options)
        with log.open("w") as file:
            return subprocess.Popen(start, stdout=file, stderr=subprocess.STDOUT, **options)

    def run(self, *command: str, **options) -> subprocess.CompletedProcess:
        """The same, to its end."""
        kinds = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self.start(*command, **kinds, **options)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def _bind(self, source: Path, place: str, mode: str) -> list[str]:
        target = self.root / place.lstrip("/")
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.touch()
        source_, target_ = shlex.quote(str(source)), shlex.quote(str(target))
        return [f"mount --bind {source_} {target_}", *([f"mount -o remount,bind,ro {target_}"] if mode == "ro" else [])]


def build(containerfile: Path, target: str, folder: Path, done: dict[str, Image]) -> Image:
    """Run the steps of a stage and of those it is made from. `done` keeps stages between calls."""
    stages: dict[str, tuple[str, list[tuple[str, str]]]] = {}
    arguments: dict[str, str] = {}
    for kind, rest in instructions(containerfile):
        if kind == "FROM":
            base, _, name = rest.partition(" AS ")
            steps: list[tuple[str, str]] = []
            stages[name] = (base, steps)
        elif not stages:
            key, _, value = rest.partition("=")
            arguments[key] = value
        else:
            steps.append((kind, rest))
    return _Build(stages, arguments, folder, done).stage(target)


@dataclass
class _Build:
    stages: dict[str, tuple[str, list[tuple[str, str]]]]
    arguments: dict[str, str]
    folder: Path
    done: dict[str, Image]

    def stage(self, name: str) -> Image:
        if name in self.done:
            return self.done[name]
        base, steps = self.stages[name]
        image = Image(self.folder / name)
        if base in self.stages:
            below = self.stage(base)
            subprocess.run(["cp", "-a", below.root, image.root], check=True)
            image.env = dict(below.env)
        else:
            _base(image)
        known: dict[str, str] = {}
        for kind, rest in steps:
            self._step(image, kind, rest, known)
        self.done[name] = image
        return image

    def _step(self, image: Image, kind: str, rest: str, known: dict[str, str]) -> None:
        if kind == "ARG":
            key, _, value = rest.partition("=")
            if given := value or self.arguments.get(key):  # as a builder: one without a value is not set
                known[key] = given
        elif kind == "ENV":
            image.env |= dict(each.split("=", 1) for each in shlex.split(rest))
        elif kind == "USER":
            image.user = rest
        elif kind == "WORKDIR":
            image.workdir = rest
        elif kind == "ENTRYPOINT":
            image.entrypoint = tuple(json.loads(rest))
        elif kind == "COPY":
            self._copy(image, re.sub(r"\$\{(\w+)\}", lambda m: known[m[1]], rest).split())
        elif kind == "RUN":
            for command in rest.split(" && "):
                if "--require-hashes" in command:
                    _link_packages(image, command)
                else:
                    _run(image, command, known)
        elif kind not in ("CMD", "EXPOSE", "HEALTHCHECK"):
            raise AssertionError(f"a step that this does not know: {kind} {rest}")

    def _copy(self, image: Image, words: list[str]) -> None:
        above = ROOT
        if words[0].startswith("--from="):
            above = self.stage(words.pop(0).removeprefix("--from=")).root
        *sources, target = words
        place = image.root / target.lstrip("/")
        for source in sources:
            path = above / source.lstrip("/")
            to = place / path.name if target.endswith("/") else place
            to.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-a", path, to], check=True)
            subprocess.run(["chown", "-Rh", "0:0", to], check=True)


def _base(image: Image) -> None:
    for name in ("dev", "etc", "opt", "proc", "run", "tmp", "usr", "var/lib"):
        (image.root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):  # as on this machine
        if (host := Path("/", name)).is_symlink():
            (image.root / name).symlink_to(host.readlink())
    for name, content in CONTENT.items():
        (image.root / name).write_text(content)
    shutil.copy("/etc/ld.so.cache", image.root / "etc")
    image.env["PATH"] = f"{sys.base_prefix}/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _run(image: Image, command: str, known: dict[str, str]) -> None:
    before = dict(image.env)
    image.env |= known
    done = image.run("/bin/sh", "-c", command, writable=True, network=False)
    image.env = before
    assert done.returncode == 0, (command, done.stdout, done.stderr)


def _link_packages(image: Image, command: str) -> None:
    """Have the packages of a lock, and no others, where ``VENV/bin/pip`` would put them."""
    words = command.split()
    home = image.root / words[0].lstrip("/").removesuffix("bin/pip")
    lock = (image.root / words[-1].lstrip("/")).read_text()
    (site,) = home.glob("lib/python3*/site-packages")
    for line in re.findall(r"^\S+==.*?(?= \\$)", lock, re.MULTILINE):
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate():
            continue
        found = importlib.metadata.distribution(wanted.name)
        assert wanted.specifier.contains(found.version), (line, found.version)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if wanted.name in COPIED:
                subprocess.run(["cp", "-a", PACKAGES / top, site], check=True)
            elif not (site / top).exists() and not (site / top).is_symlink():
                (site / top).symlink_to(f"/packages/{top}")
