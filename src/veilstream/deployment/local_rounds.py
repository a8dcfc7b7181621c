"""A learner's side of Algorithm 1, and nothing else: models and clipped gradients in, messages out.

Computing (`noisy`, `message`) and counting (`apply`, `seal`) are separate calls, so that a caller can
write the result down in between. No clocks, files, sockets or randomness: a step's secret is given,
used once, and not kept.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.release import Payload, Release, decode, encode
from veilstream.deployment.terms import Terms
from veilstream.errors import InputError, PrivacyError
from veilstream.learning.algorithm import moved, step_size
from veilstream.mechanisms.keystream import Row
from veilstream.mechanisms.program import NoiseProgram
from veilstream.privacy.gradient_types import (
    ClippedGradient,
    Hidden,
    MetricValues,
    Noised,
    RawGradient,
    add_noise,
    clip_onto_grid,
    extend_on_grid,
)
from veilstream.privacy.grid import Grid
from veilstream.privacy.grid_noise import Draw, GridNoise

Float32s = NDArray[np.float32]
_OPEN = struct.Struct("<Q")


class NoisySum:
    """The running sum of clipped gradients and correlated noise, in units of the grid."""

    def __init__(self, program: NoiseProgram, *, std: float, grid: Grid, dim: int, draw: Draw | None = None) -> None:
        self.grid, self.dim = grid, dim
        self.noise = GridNoise(program, std=std, grid=grid, dim=dim, draw=draw)
        """Secret."""
        self._prefix = Noised(np.zeros(dim, np.int64))
        self._rows: dict[tuple[int, bytes], Row] = {}

    @property
    def prefix(self) -> Noised:
        """All noisy steps so far; what a message says. Read-only."""
        shown = self._prefix.view()
        shown.flags.writeable = False
        return Noised(shown)

    def clip(self, raw: RawGradient) -> ClippedGradient:
        """Onto the grid; what is not finite becomes zero."""
        return clip_onto_grid(raw, self.grid)

    def row(self, step: int, secret: bytes) -> Row:
        """Keystream of a step's own secret; audits and studies that need known draws replace it."""
        return Row(secret, step)

    def prepare(self, secrets: Sequence[bytes]) -> None:
        """Draw the noise of the next steps together, which costs less; it changes no bit of it."""
        first = self.noise.position
        rows = [self.row(step, secret) for step, secret in enumerate(secrets, first)]
        self._rows = dict(zip(enumerate(secrets, first), rows, strict=True))
        self.noise.prepare(rows)

    def noisy(self, gradient: ClippedGradient, secret: bytes) -> Noised:
        """The next noisy step. Its noise is used up; the sum has not moved."""
        step = self.noise.position
        row = self._rows.pop((step, secret), None) or self.row(step, secret)
        return add_noise(gradient, self.noise.step(row))

    def add(self, noisy: Noised) -> None:
        """Count a noisy step."""
        self._prefix = Noised(self._prefix + noisy)

    def replay(self, secret: bytes) -> None:
        """Go over a step's noise once more, for a step whose noisy result is known."""
        self.noise.step(self.row(self.noise.position, secret))

    def payload(self, epoch: int, round_: int, steps: int) -> Payload:
        """The bytes that may leave."""
        return encode(epoch, round_, steps, self.grid.step, self._prefix)


class LocalRounds(NoisySum):
    """One epoch: rounds of τ steps from pinned models."""

    def __init__(self, terms: Terms, epoch: int, draw: Draw | None = None) -> None:
        super().__init__(
            terms.mechanism.program, std=terms.noise_std, grid=terms.grid, dim=terms.release_dim, draw=draw
        )
        self.terms, self.epoch = terms, epoch
        self.round = self.taken = 0
        """The round that is open or comes next, and its steps that count."""
        self.pinned: str | None = None
        """Hash of the open round's model; None where no round is open."""
        self._ended = False
        self.sealed: Release | None = None
        """The last finished round's message."""
        self.sealed_model: str | None = None
        """Hash of the model that round was begun with."""
        self.model: Hidden[Float32s] = Hidden(np.zeros(terms.dim, np.float32))
        """z, the local model."""
        self.begun = self.model
        """x^r, the model that the open round began with."""

    @property
    def step(self) -> int:
        """The next step, over all rounds."""
        return self.round * self.terms.local_steps + self.taken

    @property
    def steps_wanted(self) -> int:
        """How many steps the open round can still take."""
        return 0 if self.pinned is None else self.terms.local_steps - self.taken

    @property
    def horizon_reached(self) -> bool:
        """Whether every round of this epoch has been sealed."""
        return self.round == self.terms.rounds

    @property
    def over(self) -> bool:
        """Whether no further round may be begun: at the horizon, or ended before it."""
        return self._ended or self.horizon_reached

    def wants(self, r: int, digest: str) -> bool:
        """Whether round r is to be pinned to this model; False where it has been, or is sealed."""
        if r == self.round - 1 and self.sealed_model == digest and self.pinned is None:
            return False
        if self._ended and not self.horizon_reached:
            raise PrivacyError(
                f"round {r} of an epoch that has ended after {self.round} of {self.terms.rounds} "
                "rounds: nothing was released (new_epoch() starts a fresh mechanism with new "
                "clients)"
            )
        if self.horizon_reached and r >= self.terms.rounds:
            raise PrivacyError(
                f"round {r} is past the horizon of {self.terms.rounds} rounds: nothing was "
                "released (new_epoch() starts a fresh mechanism with new clients)"
            )
        if r != self.round:
            begun = self.pinned is not None
            raise InputError(
                "round",
                r,
                f"round {self.round}, which {'is open' if begun else 'comes next'}",
                "finish_round first" if begun else _next_round(r < self.round),
            )
        if self.pinned is not None and self.pinned != digest:
            raise PrivacyError(
                f"round {r} was begun with another model: nothing was released (a learner answers one model a round)"
            )
        return self.pinned is None

    def pin(self, model: Float32s, digest: str) -> None:
        """Begin the round at this model."""
        self.pinned, self.model = digest, Hidden(model)
        self.begun = self.model

    def clip(self, raw: RawGradient, weights: Float32s | None = None) -> ClippedGradient:
        """What a step's clients contribute, normalised first where the terms say so; not finite becomes zero.

        ``weights`` are those of the clients' labels, where the terms have any.
        """
        return clip_onto_grid(raw, self.grid, self.terms.gamma, self.terms.clients_per_step, weights)

    def nothing(self) -> ClippedGradient:
        """What a step without a client contributes: zeros."""
        return self.whole(self.clip(RawGradient(np.zeros(self.terms.dim, np.float32))), None)

    def whole(self, gradient: ClippedGradient, values: MetricValues | None) -> ClippedGradient:
        """The clients' gradient (``values`` None: nobody's) with their telemetry behind it, if the terms have any."""
        told = self.terms.telemetry
        if told is None:
            return gradient
        return extend_on_grid(gradient, values, told, self.grid, self.terms.clients_per_step)

    def apply(self, noisy: Noised) -> None:
        """Move the local model by a noisy step's gradient, and the prefix by all of it."""
        method = self.terms.method
        size = np.float32(step_size(method.local_step_size, method.step_decay, self.round))
        value = self.grid.value(noisy[: self.terms.dim])
        radius = self.terms.projection_radius
        self.model = Hidden(moved(self.model.reveal(), value, size, radius))
        self.add(noisy)
        self.taken += 1

    def message(self) -> Release:
        """What the round sends, once all its steps count."""
        if self.pinned is None or self.taken != self.terms.local_steps:
            raise InputError(
                "round",
                f"{self.taken} steps of round {self.round}",
                f"a round that was begun and has {self.terms.local_steps}",
                "apply the others",
            )
        payload = self.payload(self.epoch, self.round, self.step)
        return Release(self.epoch, self.round, payload, hashlib.sha256(payload).hexdigest())

    def seal(self, release: Release) -> None:
        """End the round with the message that was made of it."""
        self.sealed, self.sealed_model = release, self.pinned
        self.pinned, self.round, self.taken = None, self.round + 1, 0

    def miss(self, noisy: Noised) -> None:
        """Count a round that this learner was not part of: its noise alone, where all learners share one clock."""
        self.add(noisy)
        self.round += 1

    def missed_message(self) -> Release:
        """What stands for the rounds so far, after some that were missed."""
        payload = self.payload(self.epoch, self.round - 1, self.step)
        return Release(self.epoch, self.round - 1, payload, hashlib.sha256(payload).hexdigest())

    def clear(self) -> None:
        """Begin the sum anew: what it had come to is part of a sum over learners that was opened."""
        self._prefix = Noised(np.zeros(self.dim, np.int64))

    def end(self) -> None:
        """Begin no further round; one that is open is dropped."""
        self._ended, self.pinned, self.taken = True, None, 0

    def resume(self, payload: bytes, sealed_model: str | None) -> None:
        """Stand where a round had just been sealed with this message; the noise is not restored."""
        message = decode(payload)
        self._prefix, self.round, self.taken = message.prefix, message.round + 1, 0
        self.sealed = Release(message.epoch, message.round, Payload(payload), message.hash)
        self.sealed_model, self.pinned = sealed_model, None

    def pack_open(self) -> bytes:
        """All that the open round's steps have come to: how many, their sum, the local model."""
        model = self.model.reveal().astype("<f4")
        return _OPEN.pack(self.step) + self._prefix.astype("<i8").tobytes() + model.tobytes()

    def restore_open(self, content: bytes) -> None:
        """Stand where `pack_open` was called, if that was in the round that is open now."""
        (step,) = _OPEN.unpack_from(content)
        taken = step - self.round * self.terms.local_steps
        if not 0 < taken <= self.terms.local_steps:  # of an earlier round
            return
        units = np.frombuffer(content, "<i8", count=self.dim, offset=_OPEN.size)
        numbers = np.frombuffer(content, "<f4", offset=_OPEN.size + units.nbytes)
        self._prefix = Noised(units.astype(np.int64))
        self.model, self.taken = Hidden(numbers.astype(np.float32)), taken


def _next_round(server_is_behind: bool) -> str:
    if server_is_behind:
        return "the server's folder is older than this learner: restore its newest copy, or start it with --reset NAME"
    return "rounds come in order, once"


def pack_step(noisy: Noised) -> bytes:
    """A noisy step as it is stored: four bytes a number where they are enough, as nearly always."""
    small = noisy.astype("<i4")
    return small.tobytes() if (small == noisy).all() else b"\0" + noisy.astype("<i8").tobytes()


def unpack_step(content: bytes) -> Noised:
    """As it was packed."""
    if len(content) % 4:
        return Noised(np.frombuffer(content, "<i8", offset=1).astype(np.int64))
    return Noised(np.frombuffer(content, "<i4").astype(np.int64))
