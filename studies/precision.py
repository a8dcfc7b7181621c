"""The attack on low-order bits: one coordinate's gradient is 0 in one world and B_g in the other.

    python -m studies.precision --releases 2000000

An adversary who knows all else sees one message and asks which world it came from. A message is
*telling* if only one of the worlds can send it. Two sorts are looked for:

* bits that are too fine (Mironov 2012). If fl(g + w) is below g/2 in size then w lies in
  [-3g/2, -g/2], so the sum is exact (Sterbenz), and both g and w are multiples of the float32
  spacing at g/2. A message that small which is no multiple of that comes from the other world.
* messages out of reach: not a multiple of the grid, or further from 0 or from B_g than noise can
  be. (|z| <= 23.1 for a normal of 384 bits, so a prefix of noise is at most 23.1·std·sum|b_t|. Each
  whole number within that range is the cell of some of them.)

Not every leak is an impossible message. The low-order bits of messages are therefore also compared
between the worlds: their spread is far wider than 2^8 units, so the lowest bit and the lowest
eight must have one distribution, whatever the gradient. These are two-sample chi-square tests, one
for each setting and one over all settings; all tests of a run taken together raise a false alarm in
`FALSE_ALARMS` of runs (seeds are fixed, so a run that passes always passes). Noise that is
a float32 number (`Float32Draws`), for one, has no impossible messages on the deployed grid and
fails here: it often lies half-way between two multiples, so even ones get more, and an odd gradient
turns even into odd. On a finer grid it has impossible ones, too. What neither test sees is how
probable single cells are: that is for a test of the cells themselves.

**Why this is the deployed code.** A step of `Learner` is `clip_onto_grid`, `GridNoise.step`,
`add_noise`, and at the end of a round `encode`. Here the same functions are called in the same
order. All of them but the clipping act coordinate by coordinate, with independent normals for each;
so the coordinates of one call are as many releases of dimension one, once the gradient has been
clipped as the vector of one number that it then is. `test_precision.py` holds this to what a
`Learner` sends, number by number.

Neighbours are replace-one as in deployment: noise is calibrated to 2·B_g, of which the attacked
pair (0, B_g) uses half.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2, chi2_contingency

import veilstream as vs
from veilstream.deployment.release import decode, encode
from veilstream.mechanisms import Factorization, NoiseKey
from veilstream.mechanisms.keystream import Row
from veilstream.privacy.gradient_types import Noised, RawGradient, add_noise, clip_onto_grid
from veilstream.privacy.grid import Grid
from veilstream.privacy.grid_noise import GridNoise
from veilstream.privacy.noise_law import ReleaseNoise, calibrate_release
from veilstream.progress import progress
from veilstream.simulation.noise_source import noise_seed

HORIZON = 4  # the attacked client comes at each of these steps in turn
DELTA = 1e-5
LARGEST_NORMAL = 23.1
BITS = (1, 8)
FALSE_ALARMS = 1e-6
CHUNK = 20_000

Floats = NDArray[np.float64]
Float32s = NDArray[np.float32]
Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Setting:
    """A mechanism, a clip norm and a budget."""

    mechanism: str
    clip_norm: float
    epsilon: float

    @cached_property
    def release(self) -> ReleaseNoise:
        """As a learner of dimension one has it."""
        mechanism = vs.mechanisms.MECHANISMS[self.mechanism](HORIZON)
        budget = vs.Budget(self.epsilon, DELTA)
        return calibrate_release(budget, mechanism, self.clip_norm, 1)

    @property
    def factorization(self) -> Factorization:
        """In blocks of one step."""
        return self.release.mechanism

    @property
    def noise_std(self) -> float:
        return self.release.std

    @property
    def grid(self) -> Grid:
        return self.release.grid


SETTINGS = tuple(
    Setting(mechanism, clip_norm, epsilon)
    for mechanism, clip_norm, epsilon in itertools.product(
        ("independent", "buffered"), (1.0, 0.7, 3.3, 0.001), (0.5, 8.0, 20.0)
    )
)


@dataclass(frozen=True)
class Sent:
    """What leaves in one world: as deployed, and as an implementation without a grid sends it."""

    message: Integers
    """The prefix up to the attacked step, read from the wire, in units of the grid."""
    step: Integers
    """Its difference to the message before."""
    naive: Float32s
    """fl(gradient + noise) of the attacked step, in float32."""


class Float32Draws(GridNoise):
    """Sabotage: draws are float32 numbers, of which a cell holds few, and ties go to even cells."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **(more | {"draw": self._singles}))

    def _singles(self, row: Row, out: Floats, scale: float) -> Iterator[slice]:
        for tile in self._normals.tiles(row, out, scale):
            out[tile] = out[tile].astype(np.float32)
            yield tile

    def _uncertainty(self, feed: float, largest: float) -> float:
        return -1.0


def sent(setting: Setting, grid: Grid, raw: float, at: int, noise: GridNoise, secret: bytes) -> Sent:
    """One release a coordinate of the noise, of a client at step ``at`` with gradient ``raw``."""
    gradient = RawGradient(np.array([raw], np.float32))
    nothing = RawGradient(np.zeros(1, np.float32))
    before = prefix = Noised(np.zeros_like(noise.cells))
    earlier = now = noise.cells + noise.fraction
    for t in range(at + 1):
        clipped = clip_onto_grid(gradient if t == at else nothing, grid)
        noisy = add_noise(clipped, noise.step(Row(secret, t)))
        before, prefix = prefix, Noised(prefix + noisy)
        earlier, now = now, noise.cells + noise.fraction
    received = decode(encode(0, at, at + 1, grid.step, prefix))
    clipped32 = vs.clip(gradient.reveal(), setting.clip_norm).astype(np.float32)
    increment = ((now - earlier) * grid.step).astype(np.float32)
    return Sent(received.prefix, received.prefix - before, clipped32 + increment)


def too_fine(values: Floats | Float32s, gradient: float) -> NDArray[np.bool_]:
    """Messages that float32 noise plus this gradient cannot give: small, with finer bits."""
    half = np.float32(gradient) / 2
    exact = np.asarray(values, np.float64)
    finer = np.fmod(exact, float(np.spacing(half))) != 0.0
    return np.asarray((np.abs(exact) < float(half)) & finer)


def out_of_reach(setting: Setting, grid: Grid, message: Integers, at: int) -> NDArray[np.bool_]:
    """Messages that one of the worlds cannot send."""
    row = np.abs(setting.factorization.decoder_matrix()[at]).sum()
    limit = LARGEST_NORMAL * setting.noise_std * row / grid.step
    clipped = clip_onto_grid(RawGradient(np.array([setting.clip_norm], np.float32)), grid)
    shift = int(clipped.reveal()[0])
    values = message * grid.step
    off = np.fmod(values, grid.step) != 0.0
    return np.asarray(off | (np.abs(message) > limit) | (np.abs(message - shift) > limit))


@dataclass
class Count:
    """What the adversary found in one setting."""

    setting: Setting
    releases: int = 0
    """In each world."""
    telling: int = 0
    naive_telling: int = 0
    """In the world with gradient 0, without the grid."""
    naive_mistaken: int = 0
    """The same event in the world with gradient B_g, where it is impossible."""
    low_bits: dict[str, list[Integers]] = field(default_factory=dict)
    """Histograms of the two worlds, by what is looked at."""

    def add(self, world: int, grid: Grid, at: int, seen: Sent) -> None:
        clip_norm = self.setting.clip_norm
        self.releases += len(seen.message) if world == 0 else 0
        self.telling += int(out_of_reach(self.setting, grid, seen.message, at).sum())
        self.telling += int(too_fine(seen.message * grid.step, clip_norm).sum())
        bound = float(vs.clip(np.array([clip_norm], np.float32), clip_norm)[0])
        naive = int(too_fine(seen.naive, bound).sum())
        if world == 0:
            self.naive_telling += naive
        else:
            self.naive_mistaken += naive
        for name, units in (("message", seen.message), ("step", seen.step)):
            for bits in BITS:
                low = np.bincount(units & ((1 << bits) - 1), minlength=1 << bits)
                worlds = self.low_bits.setdefault(
                    f"{name}, {bits} bit", [np.zeros(1 << bits, np.int64) for _ in range(2)]
                )
                worlds[world] += low

    def differences(self) -> dict[str, tuple[float, int]]:
        """Between the worlds' low-order bits: chi-square and its degrees of freedom."""
        found = {}
        for name, worlds in self.low_bits.items():
            result = chi2_contingency(np.stack(worlds), correction=False)
            found[name] = (float(result.statistic), int(result.dof))
        return found

    @property
    def least_p(self) -> float:
        return min(p_values([self]).values())


def p_values(counts: list[Count]) -> dict[str, float]:
    """Of the hypothesis that both worlds have the same low-order bits, over some settings."""
    each = [count.differences() for count in counts]
    return {name: float(chi2.sf(sum(d[name][0] for d in each), sum(d[name][1] for d in each))) for name in each[0]}


def _chunks(releases: int) -> Iterator[tuple[int, int]]:
    """Number and size of each call."""
    for number, first in enumerate(range(0, releases, CHUNK)):
        yield number, min(CHUNK, releases - first)


def attack(
    setting: Setting, releases: int, *, grid: Grid | None = None, noise: type[GridNoise] = GridNoise, seed: int = 0
) -> Count:
    """``releases`` in each world; ``grid`` and ``noise`` are the deployed ones unless broken."""
    grid = setting.grid if grid is None else grid
    count = Count(setting)
    for (number, size), world in itertools.product(_chunks(releases), (0, 1)):
        key = NoiseKey.from_seed(noise_seed(seed, f"{setting}/{number}/{world}"))
        own = noise(setting.factorization.program, std=setting.noise_std, grid=grid, dim=size)
        at = number % HORIZON
        seen = sent(setting, grid, world * setting.clip_norm, at, own, key.secret)
        count.add(world, grid, at, seen)
    return count


@dataclass(frozen=True)
class Figure:
    """What the command prints."""

    settings: int
    releases_per_world_and_setting: int
    releases: int
    telling_events: int
    naive_telling_events: int
    naive_mistaken: int
    low_bits_tests: int
    low_bits_least_p: float
    low_bits_alarms: int
    false_alarm_rate: float


def figure(counts: list[Count]) -> Figure:
    """All settings together; a test alarms below its share of the false-alarm rate."""
    groups = [[count] for count in counts] + [counts]
    p = [value for group in groups for value in p_values(group).values()]
    return Figure(
        settings=len(counts),
        releases_per_world_and_setting=counts[0].releases,
        releases=2 * sum(count.releases for count in counts),
        telling_events=sum(count.telling for count in counts),
        naive_telling_events=sum(count.naive_telling for count in counts),
        naive_mistaken=sum(count.naive_mistaken for count in counts),
        low_bits_tests=len(p),
        low_bits_least_p=min(p),
        low_bits_alarms=sum(value < FALSE_ALARMS / len(p) for value in p),
        false_alarm_rate=FALSE_ALARMS,
    )


def study(releases: int) -> list[Count]:
    """Every setting."""
    counts = []
    with progress("attacking low-order bits", len(SETTINGS)) as tick:
        for setting in SETTINGS:
            counts.append(attack(setting, releases))
            tick(1)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description="The attack on the low-order bits of releases.")
    parser.add_argument("--releases", type=int, default=2_000_000, help="per world and setting")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began = time.monotonic()
    counts = study(options.releases)
    result = figure(counts)
    if options.json:
        print(json.dumps(asdict(result)))
        return
    print(
        "mechanism    clip norm  epsilon  std/B_g  telling    low bits: least p  without the grid: telling of 0, of B_g"
    )
    for count in counts:
        s = count.setting
        share = count.naive_telling / count.releases
        print(
            f"{s.mechanism:12} {s.clip_norm:9g}  {s.epsilon:7g}  {s.noise_std / s.clip_norm:7.2f}  "
            f"{count.telling:7d}    {count.least_p:17.2g}  {count.naive_telling:>10d} "
            f"({share:.1%}), {count.naive_mistaken}"
        )
    print(
        f"{result.releases:,} releases ({result.releases_per_world_and_setting:,} in each world of "
        f"{result.settings} settings): {result.telling_events} telling events on the grid, "
        f"{result.naive_telling_events:,} without it\n"
        f"low-order bits: {result.low_bits_alarms} alarms in {result.low_bits_tests} tests, least "
        f"p = {result.low_bits_least_p:.2g} (false-alarm rate {FALSE_ALARMS:g} for all together)\n"
        f"{time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    main()
