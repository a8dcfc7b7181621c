"""The methods that a plan can compare: the rows of the paper's comparison table (tab), and ours.

A method says what it protects: only one whose noise is calibrated to a budget and to a clip norm
that is enforced protects anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from veilstream.errors import UnknownName


@dataclass(frozen=True, kw_only=True)
class Method:
    """How one method runs a round."""

    kind: str
    source: str
    adds_noise: bool  # Whether it adds noise that is calibrated to a budget
    clips: bool = True  # Whether gradients are clipped to the norm that the noise is calibrated to
    default_mechanism: str | None = None
    fixed_mechanism: bool = False  # Whether the method stands or falls with that mechanism
    local_updates: bool = True  # τ steps on τ clients, or one step on all τ of them
    one_machine: bool = False  # Whether it is for a single learner that releases after every client (n = 1, τ = 1)
    unit_steps: bool = False  # Whether gradients are scaled to length one
    normalises: bool = False  # Whether every client's gradient g becomes g / (|g| + gamma), and the clip norm is one
    chooses_steps: bool = False  # Whether step sizes follow from public facts of the plan (`plans.auto`)

    def steps_and_clients(self, local_steps: int, clients_per_step: int) -> tuple[int, int]:
        """Steps in a round and clients in a step."""
        if self.local_updates:
            return local_steps, clients_per_step
        return 1, local_steps * clients_per_step

    @property
    def private(self) -> bool:
        """Whether it keeps a promise: noise, calibrated to a norm that is enforced."""
        return self.adds_noise and self.clips

    @property
    def protects(self) -> str:
        """What a client gets."""
        if self.private:
            return "every client, by local differential privacy"
        return "nothing" if not self.adds_noise else "nothing: not private, gradients not clipped"


METHODS: dict[str, Method] = {
    method.kind: method
    for method in (
        Method(
            kind="ours",
            source="Zhang, Zhu, Fay and Johansson, Algorithm 1",
            adds_noise=True,
            default_mechanism="optimal",
        ),
        Method(
            kind="auto",
            source="Algorithm 1 with normalised gradients and a step from public facts",
            adds_noise=True,
            default_mechanism="buffered",
            normalises=True,
            chooses_steps=True,
        ),
        Method(
            kind="independent",
            source="the paper's baseline: Algorithm 1 with independent noise",
            adds_noise=True,
            default_mechanism="independent",
            fixed_mechanism=True,
        ),
        Method(
            kind="liu",
            source="Liu et al. 2023: one mini-batch update a round, independent noise",
            adds_noise=True,
            default_mechanism="independent",
            fixed_mechanism=True,
            local_updates=False,
        ),
        Method(
            kind="dp-ftrl",
            source="Denisov et al. 2022 (optimal) and Kairouz et al. 2021 (tree): one machine",
            adds_noise=True,
            default_mechanism="optimal",
            one_machine=True,
        ),
        Method(
            kind="undeclared",
            source="Algorithm 1 as one might read the paper: B_g assumed and never enforced",
            adds_noise=True,
            clips=False,
            default_mechanism="optimal",
        ),
        Method(
            kind="noise-free",
            source="Mitra et al. 2021: online federated learning with local updates, no privacy",
            adds_noise=False,
        ),
        Method(
            kind="gao",
            source="Gao et al. 2018: online normalised gradient descent on one machine, no privacy",
            adds_noise=False,
            one_machine=True,
            unit_steps=True,
        ),
    )
}


def method_of(kind: str) -> Method:
    """The method of this kind; an unknown one is refused with the nearest name."""
    if kind not in METHODS:
        raise UnknownName("methods.kind", kind, METHODS)
    return METHODS[kind]
