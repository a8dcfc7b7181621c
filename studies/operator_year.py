"""A year of an operator's work in a few minutes: what the handbook has an answer for, with the real commands.

    python -m studies.operator_year                 prints what was done, and what was found

Server and learners are the commands that people run. One after the other: certificates are renewed while everything
runs; a learner's disk is full (a small file system of its own, or where nobody may mount one, a limit on the size of
files); a learner is away; the server is stopped for a backup and waits differently afterwards; a learner's store is
lost and its witness is not; another learner's keys are made; the server comes back from the old backup; and a run
with one learner more goes on from its last model. Every command is one that docs/handbook.md names. In the end:

* every ledger verifies, and no round of any learner has two payloads, whatever the server listed and forgot;
* no round was held up longer than the handbook says;
* every warning and error in every log is about something that was done just then, every number that a line gives
  about it is right, and every line that the handbook names was written.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import json
import os
import re
import resource
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from veilstream.federation.addresses import free_port
from veilstream.federation.keys.new_keys import make_keys, renew_learner, renew_server
from veilstream.federation.keys.shown_keys import certificates_in
from veilstream.federation.processes import Child

HANDBOOK = Path(__file__).parents[1] / "docs/handbook.md"
NAMES = ("north", "south", "west")
_COMMAND = [sys.executable, "-P", "-m", "veilstream"]
_SHORT_S = 60.0  # how long the first certificates last
_SLACK_S = 10.0  # after an episode, for lines about its end
_DISK_MIB = 24

_PLAN = """
name = "year"
[learning]
rounds = {rounds}
learners = {learners}
{start}
[data]
dim = 20
[privacy]
epsilon = 4.0
delta = 1e-5
[federation]
quorum = 0.5
deadline_s = {deadline_s}
grace_s = 2
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.05
"""


@dataclass
class Episode:
    """Something that was done to the federation, and when."""

    name: str
    began: float
    about: tuple[str, ...]
    ended: float = 0.0


@dataclass
class Report:
    """What was done, and what was found."""

    episodes: list[Episode] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    violations: Counter[str] = field(default_factory=Counter)
    lines: Counter[str] = field(default_factory=Counter)
    """Log lines by level."""
    unexplained: list[str] = field(default_factory=list)
    """Warnings and errors about nothing that was done, and lines whose numbers are wrong."""


class Year:
    """The processes of one federation, and the commands of its operator."""

    def __init__(self, root: Path, rounds: int, reply_s: float) -> None:
        self.root, self.rounds, self.reply_s = root, rounds, reply_s
        self.report = Report()
        self.handbook = " ".join(HANDBOOK.read_text().split())
        self.port, self.api = free_port(), free_port()
        self.learner_apis = {name: free_port() for name in (*NAMES, "east")}
        self.children: dict[str, Child] = {}
        self.down: dict[str, list[list[float]]] = defaultdict(list)
        """When each process was not there: pairs of times."""
        self.run, self.plan = root / "run", root / "plan.toml"
        self.write_plan(deadline_s=10)

    def write_plan(self, *, deadline_s: float, learners: int = 3, start: str = "", path: Path | None = None) -> None:
        text = _PLAN.format(rounds=self.rounds, learners=learners, deadline_s=deadline_s, start=start)
        (path or self.plan).write_text(text)

    def by_the_book(self, *fragments: str) -> None:
        """The handbook must name these words."""
        for fragment in fragments:
            if fragment not in self.handbook:
                self.report.violations[f"not in the handbook: {fragment}"] += 1

    @contextmanager
    def episode(self, name: str, *about: str) -> Iterator[Episode]:
        now = Episode(name, time.time(), about)
        self.report.episodes.append(now)
        yield now
        now.ended = time.time()

    def start(self, name: str, *more: str) -> None:
        common = ["--plan", str(self.plan), "--log-format", "json"]
        if name == "server":
            words = ["server", *common, "--keys", str(self.root / "keys/server"), "--out", str(self.run)]
            words += ["--listen", f"127.0.0.1:{self.port}", "--model-api", f"127.0.0.1:{self.api}"]
        else:
            index = (*NAMES, "east").index(name)
            words = ["learner", *common, "--keys", str(self.root / "keys/learners" / name)]
            words += ["--server", f"127.0.0.1:{self.port}", "--data", f"plan:{index}", "--store", str(self.store(name))]
            words += ["--learner-api", f"127.0.0.1:{self.learner_apis[name]}", "--reply-after", str(self.reply_s)]
        self.children[name] = Child([*_COMMAND, *words, *more], self.root / f"{name}.log")
        self.children[name].start()
        if self.down[name]:
            self.down[name][-1][1] = time.time()

    def stop(self, name: str, how: int = signal.SIGTERM) -> None:
        child = self.children[name]
        self.down[name].append([time.time(), float("inf")])
        if how == signal.SIGKILL and child.pid is not None:
            os.kill(child.pid, how)
        child.end(10.0)

    def store(self, name: str) -> Path:
        return self.root / "disk/north.db" if name == "north" else self.root / f"{name}.db"

    def witness(self, name: str) -> list[str]:
        return ["--witness", str(self.root / "other/north.witness")] if name == "north" else []

    def command(self, *words: str, expect: int = 0) -> str:
        done = subprocess.run([*_COMMAND, *words], capture_output=True, text=True)
        if done.returncode != expect:
            self.report.violations[f"exit {done.returncode} of {' '.join(words[:2])}: {done.stderr[-300:]}"] += 1
        return done.stdout + done.stderr

    def done(self) -> int:
        with contextlib.suppress(OSError):
            return (self.run / "rounds.csv").read_bytes().count(b"\n") - 1
        return 0

    def wait(self, condition: Any, what: str, within_s: float = 60.0) -> None:
        until = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > until:
                raise TimeoutError(f"{what} within {within_s:g} s: {self.last_lines()}")
            time.sleep(0.1)

    def further(self, rounds: int) -> None:
        """Wait for so many rounds more."""
        until = self.done() + rounds
        self.wait(lambda: self.done() >= until, f"round {until}")

    def last_lines(self) -> str:
        return "\n".join(f"--- {name}\n{child.last_lines(4)}" for name, child in self.children.items())

    def ask(self, name: str, path: str) -> tuple[int, bytes]:
        """The learner's API, with its token; or the model API."""
        if name == "server":
            request = urllib.request.Request(f"https://127.0.0.1:{self.api}{path}")
            context = ssl.create_default_context(cafile=str(self.root / "keys/server/ca.pem"))
        else:
            token = self.store(name).with_suffix(".token").read_text().strip()
            request = urllib.request.Request(
                f"http://127.0.0.1:{self.learner_apis[name]}{path}", headers={"Authorization": f"Bearer {token}"}
            )
            context = None
        try:
            with urllib.request.urlopen(request, timeout=10, context=context) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.report.violations[what] += 1

    def seconds_of_rounds(self, first: int) -> list[float]:
        with (self.run / "rounds.csv").open() as file:
            return [float(row["seconds"]) for row in csv.DictReader(file)][first:]


# --- what happens ---------------------------------------------------------------------------------


def renew_certificates(year: Year, ends: float) -> None:
    with year.episode("certificates", "server", *NAMES):
        year.by_the_book("veilstream keys renew keys --all", "veilstream keys show keys")
        before, serial = year.done(), _serial(year.api)
        year.command("keys", "renew", str(year.root / "keys"), "--all")
        year.check(_serial(year.api) != serial, "the model API shows the old certificate")
        year.check(_serial(year.port) == _serial(year.api), "the server shows learners another certificate")
        days = json.loads(year.ask("server", "/status")[1])["certificate_days"]
        shown = json.loads(year.command("keys", "show", str(year.root / "keys"), "--json"))["certificates"]
        last = {each["days_left"] for each in shown if each["whose"] != "CA"}
        year.check({days} == last, "days of certificates differ")
        year.further(8)
        with (year.run / "rounds.csv").open() as file:
            missed = [row["missing"] for row in csv.DictReader(file)][before:]
        year.check(not any(missed), "a round was lost while certificates were renewed")
        year.report.facts["days left after renewing"] = days
    while time.time() < ends:  # from here on nobody could connect with the old ones
        time.sleep(0.5)


def fill_disk(year: Year, mounted: bool) -> None:
    with year.episode("disk full", "north"):
        year.by_the_book("could not be written", "`/healthz` 503", "its disk can be written again")
        year.check(year.ask("north", "/healthz")[0] == 200, "/healthz of a healthy learner")
        free = _fill(year, mounted)
        year.wait(lambda: year.ask("north", "/healthz")[0] == 503, "/healthz says that the disk is full")
        year.down["north"].append([time.time(), float("inf")])
        state = json.loads(year.ask("north", "/status")[1])["state"]
        year.check(state == "blocked", f"/status says {state!r} while the disk is full")
        year.wait(lambda: b"veilstream_learner_connected 0.0" in year.ask("north", "/metrics")[1], "it has left")
        year.further(5)  # the others go on
        free()
        emptied = time.time()
        year.wait(lambda: b"veilstream_learner_connected 1.0" in year.ask("north", "/metrics")[1], "it is back")
        year.down["north"][-1][1] = time.time()
        year.check(year.ask("north", "/healthz")[0] == 200, "/healthz once there is room")
        year.report.facts["seconds from room on the disk to being back"] = round(time.time() - emptied, 1)
        year.further(5)


def go_away(year: Year, measure_s: float) -> None:
    with year.episode("away", "south"):
        year.by_the_book('"learner north is away"', "`federation.grace_s`")
        together = _rate(year, measure_s)
        first = year.done()
        year.stop("south", signal.SIGKILL)
        year.further(2)
        held_up = max(year.seconds_of_rounds(first))
        without = _rate(year, measure_s)
        year.start("south", *year.witness("south"))
        year.wait(lambda: _learner_has(year, "south", "connected"), "south is back")
        year.further(5)
        year.check(held_up < 2 + 2 * year.reply_s + 3, f"a round was held up for {held_up:.1f} s by one that is away")
        year.report.facts["rounds a second with everyone"] = round(together, 2)
        year.report.facts["rounds a second with one away"] = round(without, 2)
        year.report.facts["longest round when it left, s"] = round(held_up, 2)


def stop_for_backup(year: Year) -> None:
    """A backup of the server's folder is made while it is stopped; it waits differently afterwards."""
    with year.episode("backup", "server", *NAMES):
        year.by_the_book("server: the run's folder", "`operations.csv`")
        year.stop("server")
        shutil.copytree(year.run, year.root / "backup")
        year.write_plan(deadline_s=8)
        year.start("server")
        year.further(5)
        with (year.run / "operations.csv").open() as file:
            told = [(row["operation"], row["about"], row["why"]) for row in csv.DictReader(file)]
        year.check(told == [("setting", "federation.deadline_s", "10.0 to 8.0")], f"operations.csv says {told}")


def lose_store(year: Year) -> None:
    with year.episode("store lost", "north"):
        year.by_the_book("veilstream ledger epoch NAME.db --lost", "--witness")
        year.stop("north", signal.SIGKILL)
        for path in (year.root / "disk").glob("north.db*"):
            path.unlink()
        told = year.command("ledger", "epoch", str(year.store("north")), "--lost", expect=2)
        year.check("--witness PATH" in told, "the command does not ask for the witness")
        year.command("ledger", "epoch", str(year.store("north")), "--lost", *year.witness("north"))
        year.start("north")
        year.wait(lambda: _learner_has(year, "north", "connected"), "north is back")
        year.further(5)


def add_keys(year: Year) -> None:
    with year.episode("keys added", "server"):
        year.by_the_book("veilstream keys add keys east")
        year.command("keys", "add", str(year.root / "keys"), "east")


def restore_server(year: Year) -> None:
    with year.episode("old backup", "server", *NAMES):
        year.by_the_book("is older than learner", "--reset NAME")
        year.stop("server", signal.SIGKILL)
        year.run.rename(year.root / "lost-run")
        shutil.copytree(year.root / "backup", year.run)
        year.start("server")
        log = year.root / "server.log"
        at = len(log.read_text())
        year.wait(
            lambda: all(f"is older than learner '{name}'" in log.read_text()[at:] for name in ("south", "west")),
            "the server says that its folder is old",
        )
        year.stop("server")
        year.start("server", *(word for name in NAMES for word in ("--reset", name)))
        year.further(10)


def add_learner(year: Year) -> None:
    with year.episode("learner added", "server", *NAMES, "east"):
        year.by_the_book("veilstream ledger epoch NAME.db", "--abandon", "learners = 4", "veilstream model fetch")
        address, ca = f"https://127.0.0.1:{year.api}", str(year.root / "keys/server/ca.pem")
        year.command("model", "fetch", address, "--ca", ca, "--out", str(year.root / "last.npz"))
        for name in ("server", *NAMES):
            year.stop(name)
        for name in NAMES:
            year.command("ledger", "epoch", str(year.store(name)), "--abandon")
        year.run, year.plan = year.root / "run-of-four", year.root / "plan-of-four.toml"
        year.rounds = 12
        year.write_plan(deadline_s=8, learners=4, start=f'start = "{year.root / "last.npz"}"', path=year.plan)
        year.start("server")
        for name in NAMES:
            year.start(name)
        year.start("east", "--new-store")
        year.wait(lambda: year.done() >= 12, "the run of four", 120.0)
        with (year.run / "rounds.csv").open() as file:
            year.check(any(not row["missing"] for row in csv.DictReader(file)), "no round had all four learners")


def _rate(year: Year, seconds: float) -> float:
    before, began = year.done(), time.monotonic()
    time.sleep(seconds)
    return (year.done() - before) / (time.monotonic() - began)


def _learner_has(year: Year, name: str, what: str) -> bool:
    with contextlib.suppress(OSError):
        return f"veilstream_learner_{what} 1.0".encode() in year.ask(name, "/metrics")[1]
    return False


def _serial(port: int) -> int:
    from cryptography import x509

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    import socket

    with socket.create_connection(("127.0.0.1", port), 5.0) as raw, context.wrap_socket(raw) as connection:
        der = connection.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


@contextmanager
def _small_disk(folder: Path) -> Iterator[bool]:
    """A file system of its own where this account may mount one; yields whether it could."""
    folder.mkdir()
    mounted = False
    if shutil.which("mount") and hasattr(os, "geteuid") and os.geteuid() == 0:
        words = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_MIB}m,mode=0700", "tmpfs", str(folder)]
        mounted = subprocess.run(words, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def _fill(year: Year, mounted: bool) -> Any:
    """Leave no room for the learner's store; returns what makes room again."""
    if mounted:
        filler = year.root / "disk/something-else"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        return filler.unlink
    pid = year.children["north"].pid
    assert pid is not None
    log = year.root / "north.log"
    wal = year.store("north").with_name("north.db-wal")
    limit = log.stat().st_size + (64 << 10)
    year.wait(lambda: wal.stat().st_size > limit, "a log of the store that is longer than the limit")
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


# --- what the logs say ----------------------------------------------------------------------------

_PEER = r"(?P<who>north|south|west|east)"
_EXPLAINED: tuple[tuple[str, str | None], ...] = (
    # What a line says, and the episode that it must be about; None: the time when the one that it names was not there.
    (rf"^{_PEER}: (it has ended the connection|the connection was lost|not connected|it connected anew)$", None),
    (rf"^learner {_PEER} is away \(its connection ended\)", None),
    (rf"^round \d+ was closed without learner {_PEER}", None),
    (r"certificate ends on .*, in 0 days", "start"),
    (r"^federation.deadline_s is 8.0 from here on \(it was 10.0\)$", "backup|old backup"),
    (rf"^learner {_PEER} refuses: a request for epoch 0 at a learner whose epoch is 1", "store lost"),
    (rf"^(node )?{_PEER}: this server's folder .* is older than learner", "old backup"),
    (r"^the published model was not kept: .* expected a model of this plan", "learner added"),
    (rf"^learner {_PEER} is taken as it is at its next enrolment$", "old backup"),
    (r"^waiting: .*(older than|cannot take part|no rounds left)", "old backup"),
    (r"^learner north: the ledger .* could not be written .*; it leaves the server and tries again", "disk full"),
)
_SERVER_GONE = re.compile(r"connection to .* was lost|server has ended|no connection to|Connection refused|resets")
_LATE = re.compile(r"^round \d+ is answered .* s late, and how late may depend on clients")
_SAME_DEVICE = re.compile(r"is on the same device as the store")


def read_logs(year: Year) -> None:
    """Every warning has its reason, every number about an episode is right, every promised line is there."""
    report, found = year.report, defaultdict(list)
    for name in ("server", *NAMES, "east"):
        for text in (year.root / f"{name}.log").read_text().splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                if not text.startswith(("veilstream: interrupted; nothing half-written", "year")):
                    report.unexplained.append(f"{name}: {text}")
                continue
            when = datetime.datetime.fromisoformat(line["time"]).timestamp()
            report.lines[line["level"]] += 1
            found[name].append(line["message"])
            if name != "server" and line.get("learner") != name:
                report.unexplained.append(f"{name}: a line without its learner: {text}")
            true = _numbers_are_right(year, name, when, line)
            if not true or (line["level"] != "info" and not _explained(year, name, when, line["message"])):
                report.unexplained.append(f"{name} {line['time']} {line['level']}: {line['message']}")
    for who, words in (
        ("north", "could not be written"),
        ("north", "its disk can be written again"),
        ("server", "learner north is away"),
        ("server", "learner south is away"),
        ("server", "learner south is back after"),
        ("server", "was renewed: new connections"),
        ("server", "is older than learner 'south'"),
        ("server", "east: keys are known, but this run was begun without"),
    ):
        year.check(any(words in text for text in found[who]), f"{who} never said {words!r}")


def _explained(year: Year, name: str, when: float, message: str) -> bool:
    if _LATE.search(message):
        return True  # a busy machine; the line says so itself
    if _SAME_DEVICE.search(message):
        return year.store(name).parent.stat().st_dev == year.root.stat().st_dev
    if name != "server" and _SERVER_GONE.search(message):
        return when < year.report.episodes[0].began or _was_down(year, "server", when)
    for pattern, episode in _EXPLAINED:
        if (match := re.search(pattern, message)) is None:
            continue
        if episode == "start":
            return when < year.report.episodes[0].ended
        if episode is not None:
            those = [e for e in year.report.episodes if e.name in episode.split("|")]
            return any(e.began - 1 <= when <= e.ended + _SLACK_S for e in those)
        return _was_down(year, match["who"], when)
    return False


def _was_down(year: Year, name: str, when: float) -> bool:
    return any(began - _SLACK_S <= when <= ended + _SLACK_S for began, ended in year.down[name])


def _numbers_are_right(year: Year, name: str, when: float, line: dict[str, Any]) -> bool:
    text = line["message"]
    if match := re.match(rf"learner {_PEER} is back after (\d+) s", text):
        lengths = [ended - began for began, ended in year.down[match["who"]] if began <= when]
        return any(abs(float(match[2]) - length) <= _SLACK_S for length in lengths)
    if match := re.search(r"its disk can be written again, after (\d+) s", text):
        (episode,) = [e for e in year.report.episodes if e.name == "disk full"]
        return float(match[1]) <= episode.ended - episode.began + 1
    if match := re.match(r"(\d+) of (\d+) rounds closed", text):
        return line["round"] == int(match[1])
    if match := re.search(r", (\d+) rounds left", text):
        return line["round"] + int(match[1]) in (year.rounds, year.report.facts["rounds planned"])
    return True


def check_releases(year: Year) -> None:
    """One payload for each round of each epoch of each learner, in all that any server listed."""
    seen: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for folder in ("run", "lost-run", "run-of-four", "backup"):
        if not (year.root / folder).exists():
            continue
        with (year.root / folder / "releases.csv").open() as file:
            for row in csv.DictReader(file):
                where = "new" if folder == "run-of-four" else "old"
                seen[row["learner"] + where, row["epoch"], row["learner_round"]].add(row["hash"])
    twice = sum(len(hashes) > 1 for hashes in seen.values())
    year.check(not twice, f"{twice} rounds of learners have two payloads")
    year.report.facts["learners' rounds that servers listed"] = len(seen)
    for name in (*NAMES, "east"):
        more = year.witness(name)
        year.check("Verified" in year.command("ledger", "verify", str(year.store(name)), *more), f"{name} verifies")


def study(root: Path, rounds: int = 600, reply_s: float = 0.2, measure_s: float = 8.0) -> Report:
    """The whole year, in ``root``."""
    year = Year(root, rounds, reply_s)
    year.report.facts["rounds planned"] = rounds
    make_keys(root / "keys", ["127.0.0.1"], list(NAMES))
    short_days: Any = _SHORT_S / 86400  # of the first certificates, so that the renewed ones are needed
    renew_server(root / "keys", [], short_days)
    for name in NAMES:
        renew_learner(root / "keys", name, short_days)
    ends = max(
        datetime.datetime.fromisoformat(each.ends).timestamp()
        for each in certificates_in(root / "keys")
        if each.whose != "CA"
    )
    (root / "other").mkdir()
    with _small_disk(root / "disk") as mounted:
        year.report.facts["disk full by"] = "a small file system" if mounted else "a limit on the size of files"
        try:
            year.start("server")
            for name in NAMES:
                year.start(name, "--new-store", *year.witness(name))
            year.wait(lambda: year.done() >= 10, "the first ten rounds")
            renew_certificates(year, ends)
            fill_disk(year, mounted)
            go_away(year, measure_s)
            stop_for_backup(year)
            lose_store(year)
            add_keys(year)
            restore_server(year)
            add_learner(year)
        finally:
            for name in list(year.children):
                year.stop(name)
        check_releases(year)
        read_logs(year)
    return year.report


def main() -> int:
    """Run it and print what was found; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--reply-after", type=float, default=0.2)
    parser.add_argument("--keep", type=Path, help="a new folder for keys, runs, stores and logs")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) if asked.keep is None else asked.keep
        root.mkdir(exist_ok=True)
        began = time.monotonic()
        report = study(root, asked.rounds, asked.reply_after)
    for episode in report.episodes:
        print(f"{episode.name:<16} {episode.ended - episode.began:6.1f} s  {', '.join(episode.about)}")
    for name, fact in report.facts.items():
        print(f"{name}: {fact}")
    print(f"log lines: {dict(report.lines)}; without a reason or with a wrong number: {len(report.unexplained)}")
    for line in report.unexplained:
        print(f"  {line}")
    for what, count in report.violations.items():
        print(f"VIOLATION {what} ({count})")
    print(f"{time.monotonic() - began:.0f} s")
    return bool(report.violations or report.unexplained)


if __name__ == "__main__":
    sys.exit(main())
