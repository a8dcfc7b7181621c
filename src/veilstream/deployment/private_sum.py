"""Private running sums in memory, without a learner: the one other way to release safely."""

from __future__ import annotations

import os
import threading
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from veilstream.deployment.local_rounds import NoisySum
from veilstream.deployment.process_secrecy import without_values
from veilstream.deployment.release import Payload
from veilstream.errors import HorizonExhausted, InputError, PrivacyError
from veilstream.mechanisms.factorization import Factorization
from veilstream.mechanisms.keystream import fresh_secret
from veilstream.mechanisms.participation import Participation
from veilstream.privacy.gradient_types import RawGradient
from veilstream.privacy.guarantee import Accounting, Budget, Neighbours
from veilstream.privacy.noise_law import calibrate_release
from veilstream.privacy.seeds import check_generator_once, checked_seed


class PrivateSum:
    """Running sums of clipped vectors under correlated noise on a grid.

    **Guarantees**: `guarantee` for every vector that is added (one client's record each;
    replace-one neighbours unless said otherwise; the whole horizon together; an adversary who sees
    every payload and chooses each next vector's circumstances after seeing those before;
    lem-priv-analy with the law of `veilstream.privacy.grid_noise`). Noise is drawn from the
    operating system; there is no seed. It presumes that only payloads leave, and that a client's
    vector is added as often as ``participation`` says. Threads may share it: their vectors are
    added one after the other.

    Args:
        mechanism: any factorization; its horizon is how many vectors may be added.
        budget: the promise for the whole horizon.
        clip_norm: bound on every vector's norm.
        dim: numbers of a vector.
        neighbours: "replace-one" or "zero-out".
        participation: how often one client's vector may be added, and how far apart; None for once.
        accounting: "exact", or "zcdp" as in the paper.

    Raises:
        InputError: for a value that the rules exclude, or a run that float64 cannot keep.

    """

    def __init__(
        self,
        mechanism: Factorization,
        budget: Budget,
        *,
        clip_norm: float,
        dim: int,
        neighbours: Neighbours | str = Neighbours.REPLACE_ONE,
        participation: Participation | tuple[int, int] | None = None,
        accounting: Accounting | str = Accounting.EXACT,
    ) -> None:
        noise = calibrate_release(
            budget, mechanism, clip_norm, dim, neighbours=neighbours, participation=participation, accounting=accounting
        )
        self.guarantee, self.grid, self.noise_std = noise.guarantee, noise.grid, noise.std
        check_generator_once(fresh_secret)
        self._dim = dim
        self._sum = NoisySum(noise.mechanism.program, std=noise.std, grid=noise.grid, dim=dim)
        self._process = os.getpid()
        self._one_call = threading.Lock()

    @property
    def position(self) -> int:
        """How many vectors have been added."""
        return self._sum.noise.position

    @without_values
    def add(self, gradient: NDArray[Any]) -> Payload:
        """Clip a vector, add it to the sum with its step's noise, and return what may leave.

        Args:
            gradient: ``dim`` numbers, float32 or float64. One that is not finite counts as zero.

        Returns:
            A message as a learner sends it; `decode` reads it. Its ``round`` is the step.

        Raises:
            InputError: for another shape or type; nothing is used up.
            HorizonExhausted: after the mechanism's last step.
            PrivacyError: in a process that was forked from the one that began.

        """
        if os.getpid() != self._process:
            raise PrivacyError(
                "this sum belongs to another process, and two of them would use its noise twice: "
                "nothing was released (make one in each process)"
            )
        raw = np.array(gradient)  # a copy: the caller may change its own meanwhile
        if raw.shape != (self._dim,) or raw.dtype not in (np.float32, np.float64):
            raise InputError(
                "gradient",
                f"{raw.dtype} of shape {raw.shape}",
                f"float32 or float64 of shape ({self._dim},)",
                "flatten and cast it",
            )
        with self._one_call:
            step, horizon = self.position, self.guarantee.horizon
            if step == horizon:
                raise HorizonExhausted(horizon, step)
            secret = checked_seed(fresh_secret())
            self._sum.add(self._sum.noisy(self._sum.clip(RawGradient(raw)), secret))
            return self._sum.payload(0, step, step + 1)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PrivateSum cannot be copied: its noise would be used twice")
