"""Where a simulation's noise comes from: the mechanisms' own streams on the host, or JAX.

Increments have standard deviation one, for all seeds, learners and coordinates, one block of rounds
at a time. Methods that differ only in budget, accounting, clip norm or step size share these draws.

* `HostNoise` runs `NoiseStream` a block ahead in a thread of its own: the faster way on a CPU.
* `OwnPaceNoise` has one stream a learner, which advances only in the rounds that it takes part in; where only sums over
  learners are seen it advances with the others, and what it drew while away comes with its next round.
* `DeviceNoise` runs the same programs inside the compiled block, with draws of `jax.random`
  addressed by (seed, mechanism, step), so one plan has the same draws on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from veilstream.errors import PrivacyError
from veilstream.mechanisms import Factorization, NoiseStream
from veilstream.mechanisms.jax_noise import JaxNoise
from veilstream.mechanisms.keystream import noise_seed
from veilstream.plans.plan import Plan
from veilstream.simulation.attendance import Attendance

if TYPE_CHECKING:
    from jax import Array

Float32s = NDArray[np.float32]
NoisePlace = Literal["host", "device"]


def learner_noise_seed(seed: int, mechanism: str, learner: int) -> int:
    """Seed of one learner's draws, where every learner has a stream of its own."""
    return noise_seed(seed, f"{mechanism}/{learner}")


def noise_place_of(plan: Plan) -> NoisePlace:
    """On the host where learners miss rounds, else as the plan says, else where JAX computes."""
    import jax

    if plan.data.partial_attendance:
        return "host"
    if plan.run.noise in ("host", "device"):
        return plan.run.noise
    return "host" if jax.default_backend() == "cpu" and find_spec("cryptography") is not None else "device"


class HostNoise:
    """Streams of one or more mechanisms, one per seed, each over all learners' coordinates."""

    def __init__(
        self, mechanisms: Sequence[Factorization], seeds: Sequence[int], *, steps: int, dim: int, rounds: int
    ) -> None:
        # A stream holds a block of its own: no longer than the one that is asked for.
        fitting = [m.with_block_length(min(m.program.block_length, rounds * steps)) for m in mechanisms]
        self._steps = steps
        self._dim = dim
        self._open(fitting, seeds)
        self._round = 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="noise")
        self._ahead: tuple[int, int, Future[tuple[Float32s, ...]]] | None = None

    def _open(self, mechanisms: Sequence[Factorization], seeds: Sequence[int]) -> None:
        self._streams: list[list[NoiseStream]] = [
            [m.noise(std=1.0, dim=self._dim, seed=noise_seed(seed, m.name)) for seed in seeds] for m in mechanisms
        ]

    def take(self, first: int, count: int, following: int) -> tuple[Float32s, ...]:
        """Increments of rounds from ``first``, (count, steps, seeds, dim) a mechanism; begins ``following`` more."""
        if self._ahead is None:
            if first < self._round:
                raise _used(0, self._round, first, count)
            self._ahead = (first, count, self._begin(first, count))
        at, length, block = self._ahead
        if (at, length) != (first, count):
            raise _used(at, length, first, count)
        made = block.result()
        self._ahead = None
        if following:
            self._ahead = (first + count, following, self._begin(first + count, following))
        return made

    def _begin(self, first: int, count: int) -> Future[tuple[Float32s, ...]]:
        return self._thread.submit(self._make, first, count)

    def _make(self, first: int, count: int) -> tuple[Float32s, ...]:
        while self._round < first:  # resumed: run forward to where the checkpoint stood
            now = min(first - self._round, max(1, 64 // self._steps))
            self._pass_over(now)
            self._round += now
        made = self._next_rounds(count)
        self._round += count
        return made

    def _pass_over(self, count: int) -> None:
        for streams in self._streams:
            for stream in streams:
                stream.take(count * self._steps)

    def _next_rounds(self, count: int) -> tuple[Float32s, ...]:
        made = []
        for streams in self._streams:
            block: Float32s = np.empty((count, self._steps, len(streams), self._dim), np.float32)
            rows = block.reshape(count * self._steps, len(streams), self._dim)
            for i, stream in enumerate(streams):
                if len(streams) == 1:
                    stream.take(len(rows), out=rows[:, 0])
                    continue
                filled = 0
                while filled < len(rows):
                    now = min(len(rows) - filled, stream.program.block_length)
                    rows[filled : filled + now, i] = stream.take(now)
                    filled += now
            made.append(block)
        return tuple(made)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class OwnPaceNoise(HostNoise):
    """Streams of single learners: a learner's k-th round has the k-th increments; zero where it is absent.

    With ``one_clock`` round r has the r-th increments for all, and those of rounds without a learner are added to its
    next one, as learners do whose sums alone are seen.
    """

    def __init__(
        self,
        mechanisms: Sequence[Factorization],
        seeds: Sequence[int],
        attendance: Attendance,
        *,
        steps: int,
        dim: int,
        rounds: int,
        one_clock: bool = False,
    ) -> None:
        self._attendance = attendance
        self._seeds, self._one_clock = seeds, one_clock
        self._owed: dict[tuple[int, int, int], Float32s] = {}
        super().__init__(mechanisms, seeds, steps=steps, dim=dim, rounds=rounds)

    def _open(self, mechanisms: Sequence[Factorization], seeds: Sequence[int]) -> None:
        n = self._attendance.learners
        self._of_learners: list[list[list[NoiseStream]]] = [
            [
                [
                    m.noise(std=1.0, dim=self._dim // n, seed=learner_noise_seed(seed, m.name, learner))
                    for learner in range(n)
                ]
                for seed in seeds
            ]
            for m in mechanisms
        ]

    def _pass_over(self, count: int) -> None:
        self._next_rounds(count)

    def _next_rounds(self, count: int) -> tuple[Float32s, ...]:
        present = self._attendance.taking_part(self._seeds, self._round, count)
        n, steps = self._attendance.learners, self._steps
        made = []
        for place, of_seeds in enumerate(self._of_learners):
            block = np.zeros((count, steps, len(of_seeds), n, self._dim // n), np.float32)
            for s, streams in enumerate(of_seeds):
                for learner, stream in enumerate(streams):
                    attended = np.flatnonzero(present[:, s, learner])
                    if self._one_clock:
                        owed = (place, s, learner)
                        for r, drawn in enumerate(stream.take(count * steps).reshape(count, steps, stream.dim)):
                            due = drawn + self._owed.pop(owed, np.zeros_like(drawn))
                            if present[r, s, learner]:
                                block[r, :, s, learner] = due
                            else:
                                self._owed[owed] = due
                        continue
                    increments = stream.take(len(attended) * steps)
                    block[attended, :, s, learner] = increments.reshape(-1, steps, stream.dim)
            made.append(block.reshape(count, steps, len(of_seeds), self._dim))
        return tuple(made)


class DeviceNoise:
    """Programs inside JAX; `block` is pure, and runs in the compiled block of rounds."""

    def __init__(
        self, mechanisms: Sequence[Factorization], seeds: Sequence[int], *, steps: int, dim: int, rounds: int
    ) -> None:
        import jax

        self._programs = [JaxNoise(m.with_block_length(rounds * steps).program) for m in mechanisms]
        words = [_words(noise_seed(seed, m.name)) for m in mechanisms for seed in seeds]
        keys = np.array(words, np.uint32)  # typed, for methods without noise have none
        self.keys = jax.random.wrap_key_data(keys.reshape(-1, 2), impl="threefry2x32").reshape(
            len(mechanisms), len(seeds)
        )
        self._shape = (rounds, steps, len(seeds), dim)

    def initial_state(self) -> tuple[Array, ...]:
        """One state a mechanism, over all seeds."""
        _, _, seeds, dim = self._shape
        return tuple(program.initial_state(seeds * dim) for program in self._programs)

    def block(self, keys: Any, states: tuple[Array, ...], number: Any) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Next states, and increments (rounds, steps, seeds, dim) a mechanism, of a block."""
        import jax
        import jax.numpy as jnp

        rounds, steps, seeds, dim = self._shape
        after, made = [], []
        for index, (program, state) in enumerate(zip(self._programs, states, strict=True)):
            draw = jax.vmap(lambda key, p=program: p.draws(key, number, dim), out_axes=1)
            fresh = draw(keys[index]).reshape(-1, seeds * dim)
            state, increments = program.apply(state, fresh, number)
            missing = rounds * steps - len(increments)  # a horizon shorter than one block
            increments = jnp.pad(increments, ((0, missing), (0, 0)))
            after.append(state)
            made.append(increments.reshape(rounds, steps, seeds, dim))
        return tuple(after), tuple(made)

    def replay(self, blocks: int) -> tuple[Array, ...]:
        """States after ``blocks`` blocks: where a checkpoint stood."""
        import jax

        def pass_over(number: Any, states: tuple[Array, ...]) -> tuple[Array, ...]:
            return self.block(self.keys, states, number)[0]

        run = jax.jit(lambda count: jax.lax.fori_loop(0, count, pass_over, self.initial_state()))
        states: tuple[Array, ...] = run(blocks)
        return states


def _used(at: int, length: int, first: int, count: int) -> PrivacyError:
    return PrivacyError(
        f"noise of rounds {at} to {at + length - 1} was made, of rounds {first} to "
        f"{first + count - 1} asked: noise is never used twice (resume from a checkpoint)"
    )


def _words(seed: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(seed >> 32 & 0xFFFFFFFF), np.uint32(seed & 0xFFFFFFFF)
