"""Hostile messages change nothing but what they may, and the study would notice if they did."""

from __future__ import annotations

import numpy as np
import pytest
from studies import fuzz

from veilstream.deployment import local_rounds
from veilstream.deployment.learner import Learner
from veilstream.deployment.release import Payload
from veilstream.learning.tasks import Sample
from veilstream.privacy.gradient_types import ClippedGradient
from veilstream.privacy.grid import OnGrid
from veilstream.records.admission import Answer


def check(messages: int, processes: int) -> None:
    tally = fuzz.study(messages, processes)
    assert not tally.violations, "\n".join(tally.examples)
    assert len(tally.forms) == 1
    sent = sum(count for kind, count in tally.messages.items() if not kind.startswith("("))
    assert sent == messages
    assert tally.messages["(releases)"] > messages / 1_000


def test_hostile_messages_change_nothing():
    check(20_000, processes=1)


@pytest.mark.slow
def test_hostile_messages_change_nothing_long():
    check(1_000_000, processes=2)


class LetsNotANumberIn:
    """An admission that forgets to look at the numbers."""

    def __init__(self, inner):
        self.inner = inner

    def admitted_together(self, samples):
        return [self.admitted(sample) for sample in samples]

    def admitted(self, sample):
        if isinstance(sample, Sample):
            features = np.asarray(sample.features)
            if features.dtype == np.float64 and features.shape == (fuzz.D,):
                return Sample(features.astype(np.float32), np.float32(1.0))
        return self.inner.admitted(sample)


class Careless(Learner):
    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        self._admission = LetsNotANumberIn(self._admission)


class Talkative(Learner):
    """Tells a client what became of its gradient."""

    def observe(self, client, sample):
        before = self.local.prefix.copy()
        answer = super().observe(client, sample)
        moved = np.abs(self.local.prefix - before).max() > 2**18
        return "clipped" if moved else answer


class Choosy(Learner):
    """Refuses a client only after its gradient is known."""

    def observe(self, client, sample):
        answer = super().observe(client, sample)
        return Answer.REFUSED if self.local.prefix[0] % 2 else answer


class LetsErrorsOut(Learner):
    """A loss that raises, raises."""

    def __init__(self, *given, **more):
        super().__init__(*given, **more)
        quiet = self.steps.gradient

        def raw(model, sample):
            self.task.host_gradient(model.reveal(), sample)
            return quiet(model, sample)

        self.steps.gradient = raw


class AsksClientsFirst(Learner):
    """Looks at clients before it looks at the server's message."""

    def learn_round(self, r, x, clients, acknowledged=None):
        return super().learn_round(r, x, iter(list(clients)), acknowledged)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (Careless, "a client got Answer.TAKEN for Answer.REFUSED"),
        (Talkative, "a client got clipped for Answer.TAKEN"),
        (Choosy, "a client got Answer.REFUSED for Answer.TAKEN"),
        (LetsErrorsOut, "an error holds a client's data"),
        (AsksClientsFirst, "a server was refused after a client was read"),
    ],
)
def test_the_study_finds_a_broken_learner(broken, found):
    assert fuzz.run_batch(0, 1_500, broken).violations[found] > 0


def test_the_study_finds_gradients_that_are_not_clipped(monkeypatch):
    def unclipped(raw, grid, gamma=None, clients_per_step=1, weights=None):
        (one,) = raw.reveal().astype(np.float64)
        units = np.nan_to_num(one, posinf=0.0, neginf=0.0) / grid.step
        return ClippedGradient(OnGrid(np.clip(units, -(2.0**60), 2.0**60).astype(np.int64)))

    monkeypatch.setattr(local_rounds, "clip_onto_grid", unclipped)
    assert fuzz.run_batch(0, 1_500).violations["a gradient exceeds the clip norm"] > 0


def test_the_study_finds_messages_whose_length_depends_on_the_data(monkeypatch):
    original = local_rounds.encode

    def shorter(epoch, round_, steps, grid, prefix):
        whole = original(epoch, round_, steps, grid, prefix)
        return Payload(whole + bytes(8)) if prefix[0] % 2 else whole

    def lenient(payload):
        return original_decode(payload[: fuzz.HEADER_BYTES + 8 * fuzz.D])

    original_decode = local_rounds.decode
    monkeypatch.setattr(local_rounds, "encode", shorter)
    monkeypatch.setattr(local_rounds, "decode", lenient)
    assert len(fuzz.run_batch(0, 1_500).forms) > 1
