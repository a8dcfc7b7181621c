"""A million hostile messages: to a learner from clients and servers, and to `decode`.

    python -m studies.fuzz --messages 1000000

Messages are made from known forms of harm, so for each of them it is known what must happen:

* a client is answered `TAKEN` or `REFUSED` and nothing else. Bad tags are refused and leave the
  learner as it was; clients who took part are answered and not used; a new client uses up one step,
  with a gradient within the clip norm, and exactly zero where its record cannot be used (`REFUSED`) or
  the task's gradient raises, is not finite, or has another shape or type;
* `observe` raises `InputError` where no round is open or the round is full, and nothing else ever;
* a bad message from the server raises `InputError` or `PrivacyError`, changes nothing, and no
  client has been looked at by then;
* all releases of all learners have one length, and headers that the data cannot change;
* `decode` refuses bytes, or reads what `encode` makes of them again;
* no error, warning or log holds a client's numbers or tag (all of them carry some to look for).

Whatever else happens is counted as a violation.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import multiprocessing
import random
import shutil
import struct
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from studies.fuzz_messages import (
    BAD_ACKNOWLEDGEMENTS,
    BAD_MODELS,
    BAD_ROUNDS,
    BAD_TAGS,
    BATCH,
    BEHAVIOURS,
    NEEDLES,
    ODD_MODELS,
    RESTART_EVERY,
    ROUNDS,
    STEP_BEHAVIOURS,
    TAG,
    TAU,
    D,
    HostileText,
    Temperamental,
    _x,
    bad_record,
    fresh_tag,
    good_record,
    mutated,
)
from veilstream.deployment.learner import Learner
from veilstream.deployment.release import HEADER_BYTES, Release, decode, encode
from veilstream.errors import InputError, PrivacyError
from veilstream.plans.plan import Plan
from veilstream.privacy.gradient_types import Noised
from veilstream.progress import progress
from veilstream.records.admission import Answer

# --- looking on ----------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was sent and what went wrong."""

    messages: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    forms: set[tuple[int, bytes]] = field(default_factory=set)
    """Length and the constant part of the header of every release."""

    def violated(self, what: str, example: object = "") -> None:
        """Count one; the first few are shown."""
        self.violations[what] += 1
        if self.violations[what] <= 3:
            self.examples.append(f"{what}: {_safe(example)}"[:300])

    def add(self, other: Tally) -> None:
        """Put two together."""
        self.messages += other.messages
        self.violations += other.violations
        self.examples += other.examples
        self.forms |= other.forms


def _safe(value: object) -> str:
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}>"


def leaks(error: BaseException) -> bool:
    """Whether an error, or what it came from, holds a client's number or tag."""
    chain: BaseException | None = error
    while chain is not None:
        text = " ".join((_safe(chain), _safe(chain.args), str(chain)))
        if any(needle in text for needle in NEEDLES):
            return True
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    return False


@contextlib.contextmanager
def listening(tally: Tally) -> Iterator[None]:
    """Search all that is logged, warned of or printed meanwhile."""
    logged, printed = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(1)
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
        ):
            warnings.simplefilter("always")
            yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    tally.messages["(warnings seen)"] += len(caught)
    for text in (logged.getvalue(), printed.getvalue(), *(str(w.message) for w in caught)):
        if any(needle in text for needle in NEEDLES):
            tally.violated("a log, warning or print holds a client's data", text)


def stand(learner: Learner) -> tuple[Any, ...]:
    """All that a refused message must leave as it is."""
    local = learner.local
    return (
        local.epoch,
        local.round,
        local.taken,
        local.pinned,
        local.sealed_model,
        local.prefix.tobytes(),
        local.model.reveal().tobytes(),
        local.noise.snapshot(),
        learner.ledger.chain.length,
        learner.epochs.broken,
    )


def fuzz_plan() -> Plan:
    return Plan(
        learning={"rounds": ROUNDS, "local_steps": TAU, "clip_norm": 0.7, "task": "custom"},
        privacy={"epsilon": 2.0, "delta": 1e-5},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 0.1}],
    )


class Fuzzer:
    """One store, its learner, and a stream of messages."""

    def __init__(self, folder: Path, seed: int, make: Callable[..., Learner]) -> None:
        self.rng = random.Random(seed)
        self.tally = Tally()
        self._folder, self._make = folder, make
        self._numbers = itertools.count()
        self._used: list[str | bytes] = []
        self._x = _x(self.rng)
        self._release: Release | None = None
        self.learner = self._open()

    def _open(self) -> Learner:
        return self._make(fuzz_plan(), self._folder / "s.db", Temperamental(), create=True)

    def restart(self) -> None:
        """The same learner from its store."""
        taken, round_ = self.learner.local.taken, self.learner.round
        self.learner.close()
        self.learner = self._open()
        if (self.learner.local.taken, self.learner.round) != (taken, round_):
            self.tally.violated("a restart lost steps")

    def message(self) -> None:
        """Send one."""
        kinds = (
            (self._bad_client, 50),
            (self._bad_tag, 8),
            (self._good_client, 7),
            (self._spent, 4),
            (self._bad_server, 16),
            (self._odd_server, 1),
            (self._acknowledge, 2),
            (self._decode, 9),
            (self._proceed, 30),
        )
        (send,) = self.rng.choices([k for k, _ in kinds], [weight for _, weight in kinds])
        self.tally.messages[send.__name__.strip("_").replace("_", " ")] += 1
        send()
        if self.learner.epochs.broken or self.learner.ledger._failed:
            self.tally.violated("a message broke the learner", send.__name__)
            self.restart()

    # --- clients ---

    def _bad_client(self) -> None:
        self._new_client(bad_record(self.rng), Answer.REFUSED, len(STEP_BEHAVIOURS))

    def _bad_tag(self) -> None:
        record = good_record(self.rng, 0) if self.rng.random() < 0.5 else bad_record(self.rng)
        if self.rng.random() < 0.05:
            self._observe(HostileText(TAG), bad_record(self.rng), Answer.REFUSED, shut=True)
            return
        self._observe(self.rng.choice(BAD_TAGS)(self.rng), record, Answer.REFUSED, shut=True)

    def _spent(self) -> None:
        if self._used:
            tag = self.rng.choice(self._used)
            # What cannot be used is refused first, so an answer to it does not tell who took part.
            if self.rng.random() < 0.5:
                self._observe(tag, good_record(self.rng, 0), Answer.TAKEN, shut=True)
            else:
                self._observe(tag, bad_record(self.rng), Answer.REFUSED, shut=True)

    def _observe(self, tag: Any, record: Any, expected: Answer, *, shut: bool = False) -> None:
        """A client who must leave no trace; ``shut``: who is answered also if no step is free."""
        before = stand(self.learner)
        free = shut or self.learner.clients_wanted > 0
        try:
            answer = self.learner.observe(tag, record)
        except Exception as error:
            self._client_error(error, allowed=not free)
        else:
            if not free:
                self.tally.violated("a client was answered where no step was free", answer)
            elif answer is not expected:
                self.tally.violated(f"a client got {answer} for {expected}", record)
        if stand(self.learner) != before:
            self.tally.violated("a client who was not taken changed the learner", record)

    def _client_error(self, error: Exception, *, allowed: bool) -> None:
        if leaks(error):
            self.tally.violated("an error holds a client's data", error)
        if not (allowed and type(error) is InputError):
            self.tally.violated(f"observe raised {type(error).__name__}", error)

    def _good_client(self) -> None:
        behaviour = self.rng.randrange(len(BEHAVIOURS))
        self._new_client(good_record(self.rng, behaviour), Answer.TAKEN, behaviour)

    def _new_client(self, record: Any, expected: Answer, behaviour: int) -> None:
        """Whatever the record says, its client takes exactly one step."""
        learner, tag = self.learner, fresh_tag(self.rng, next(self._numbers))
        if not learner.clients_wanted:
            self._observe(tag, record, expected)
            return
        taken, prefix = learner.local.taken, learner.local.prefix.copy()
        noise = learner.local.noise.cells
        try:
            answer = learner.observe(tag, record)
        except Exception as error:
            self._client_error(error, allowed=False)
            return
        if answer is not expected:
            self.tally.violated(f"a client got {answer} for {expected}", record)
        if learner.local.taken != taken + 1:
            self.tally.violated("a new client was not taken once", (answer, behaviour))
            return
        self._used.append(tag)
        made = learner.local.noise.cells - noise
        self._check_gradient(learner.local.prefix - prefix - made, behaviour)

    def _check_gradient(self, units: np.ndarray, behaviour: int) -> None:
        """What entered the prefix besides noise: within the clip norm, or nothing."""
        grid = self.learner.grid
        bound = (Fraction(grid.clip_norm) / Fraction(grid.step)) ** 2
        if sum(int(u) ** 2 for u in units) > bound:
            self.tally.violated("a gradient exceeds the clip norm", behaviour)
        if bool(units.any()) != (behaviour < len(STEP_BEHAVIOURS)):
            self.tally.violated("a zero gradient that is not zero, or the reverse", behaviour)

    # --- servers ---

    def _bad_server(self) -> None:
        rng, learner = self.rng, self.learner
        r: Any = learner.round
        x: Any = self._x if learner.pinned else _x(rng)
        acknowledged: Any = None
        wrong = rng.randrange(4)
        if wrong == 0:
            r = rng.choice(BAD_ROUNDS)(rng, r)
        elif wrong == 1:
            x = rng.choice(BAD_MODELS)(rng)
        elif wrong == 2:
            acknowledged = rng.choice(BAD_ACKNOWLEDGEMENTS)(rng)
        elif learner.pinned:
            x = _x(rng)  # a second model for a pinned round
        else:
            r, x = r - 1, _x(rng)  # a second model for a sealed one
        self._refused(r, x, acknowledged)

    def _refused(self, r: Any, x: Any, acknowledged: Any) -> None:
        learner = self.learner
        before, read = stand(learner), []

        def clients() -> Iterator[tuple[str, Any]]:
            read.append(1)
            yield fresh_tag(self.rng, next(self._numbers)), good_record(self.rng, 0)

        try:
            if self.rng.random() < 0.5:
                learner.begin_round(r, x, acknowledged)
            else:
                learner.learn_round(r, x, clients(), acknowledged)
        except Exception as error:
            self._server_error(error)
        else:
            self.tally.violated("a bad message from the server was accepted", (r, x, acknowledged))
        if read:
            self.tally.violated("a server was refused after a client was read")
        if stand(learner) != before:
            self.tally.violated("a refused server changed the learner")

    def _server_error(self, error: Exception) -> None:
        if leaks(error):
            self.tally.violated("an error holds a client's data", type(error))
        if not isinstance(error, InputError | PrivacyError):
            self.tally.violated(f"a server's message raised {type(error).__name__}", error)

    def _odd_server(self) -> None:
        learner = self.learner
        if learner.pinned or learner.horizon_reached:
            return
        x = self.rng.choice(ODD_MODELS)(self.rng)
        try:
            learner.begin_round(learner.round, x)
        except Exception as error:
            self._server_error(error)
            return
        self._x = x
        held = learner.local.model.reveal()
        if type(held) is not np.ndarray or learner.ledger.blob("x") != held.tobytes():
            self.tally.violated("a learner uses another model than it stores", type(x))

    def _acknowledge(self) -> None:
        rng, learner = self.rng, self.learner
        before = stand(learner)
        given = rng.choice(BAD_ACKNOWLEDGEMENTS)(rng)
        if not (isinstance(given, tuple) and len(given) == 2):
            given = rng.choice(BAD_ROUNDS)(rng, learner.round), given
        try:
            learner.acknowledge(*given)
        except Exception as error:
            self._server_error(error)
        else:
            self.tally.violated("a bad acknowledgement was accepted", given)
        if stand(learner) != before:
            self.tally.violated("a refused acknowledgement changed the learner")

    def _decode(self) -> None:
        units = Noised(np.arange(D) * self.rng.randrange(2**40))
        whole = self._release.payload if self._release else encode(0, 1, 2, 2.0**-20, units)
        payload = mutated(self.rng, whole)
        try:
            message = decode(payload)
        except InputError:
            return
        except Exception as error:
            self.tally.violated("decode raised", error)
            return
        again = encode(message.epoch, message.round, message.steps, message.grid, message.prefix)
        if again != payload:
            self.tally.violated("decode accepted what encode does not make", payload)

    # --- going on ---

    def _proceed(self) -> None:
        """A server and a stream that behave: what comes next in the protocol."""
        learner = self.learner
        try:
            if learner.horizon_reached:
                learner.new_epoch()
                self._release = None
            elif not learner.pinned:
                self._begin()
            elif not learner.clients_wanted or self.rng.random() < 0.3:
                self._finish()
            else:
                learner.begin_round(learner.round, self._x)  # asked again
        except Exception as error:
            self.tally.violated("a good server was refused", error)

    def _begin(self) -> None:
        learner, self._x = self.learner, _x(self.rng)
        r = self.rng.choice((int, np.int64, np.uint8))(learner.round)
        last = self._release
        known = last is not None and last.epoch == learner.epoch and last.round == learner.round - 1
        acknowledged = (last.round, last.hash) if last and known else None
        learner.begin_round(r, self._x, acknowledged)

    def _finish(self) -> None:
        learner = self.learner
        expected = (learner.epoch, learner.round, (learner.round + 1) * TAU)
        release = self._release = learner.finish_round()
        if learner.finish_round().payload != release.payload:
            self.tally.violated("a release changed when it was asked for again")
        self.tally.messages["(releases)"] += 1
        payload = release.payload
        self.tally.forms.add((len(payload), payload[:8] + payload[24:HEADER_BYTES]))
        epoch, round_, steps = struct.unpack_from("<IIQ", payload, 8)
        if (epoch, round_, steps) != expected or (release.epoch, release.round) != expected[:2]:
            self.tally.violated("a release has another place than its round", release)


def run_batch(seed: int, messages: int, make: Callable[..., Learner] = Learner) -> Tally:
    """Messages to one store, on a disk of memory where there is one: its fsync costs little."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    try:
        fuzzer = Fuzzer(folder, seed, make)
        try:
            with listening(fuzzer.tally):
                for number in range(1, messages + 1):
                    fuzzer.message()
                    if number % RESTART_EVERY == 0:
                        fuzzer.restart()
        finally:
            fuzzer.learner.close()
        return fuzzer.tally
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _batch(work: tuple[int, int]) -> Tally:
    return run_batch(*work)


def study(messages: int, processes: int = 1, first_seed: int = 0) -> Tally:
    """All batches, put together; releases of all of them have one form."""
    sizes = [min(BATCH, messages - first) for first in range(0, messages, BATCH)]
    work = list(zip(itertools.count(first_seed), sizes, strict=False))
    total = Tally()
    with progress("sending hostile messages", messages) as tick, contextlib.ExitStack() as stack:
        results: Iterator[Tally] = map(_batch, work)
        if processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(processes))
            results = pool.imap(_batch, work)
        for (_, size), tally in zip(work, results, strict=True):
            total.add(tally)
            tick(size)
    if len(total.forms) > 1:
        total.violated("releases have more than one form", total.forms)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Hostile messages to a deployed learner.")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    tally = study(options.messages, options.processes, options.seed)
    violations = sum(tally.violations.values())
    if options.json:
        print(
            json.dumps(
                {
                    "messages": options.messages,
                    "violations": violations,
                    "kinds": tally.messages,
                    "found": tally.violations,
                }
            )
        )
        return
    for kind, count in sorted(tally.messages.items()):
        print(f"{kind:20} {count:>10,}")
    for kind, count in tally.violations.most_common():
        print(f"VIOLATION {kind}: {count:,}")
    for example in tally.examples[:30]:
        print(f"  {example}")
    print(
        f"{options.messages:,} messages: {violations} violations; releases had "
        f"{len(tally.forms)} form; {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
