"""A private step of a PyTorch loop beside a plain one, on every device that is here: seconds and memory.

    python benchmarks/training_loop.py                      DenseNet-121, 7 million parameters
    python benchmarks/training_loop.py --json FILE --batch 64 --steps 10 --size 32

The private step is the deployed one: `vs.torch.make_private` with its ledger on disk. Made images. Each figure is
the median of ``--steps`` steps after two; plain and private take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import veilstream as vs
from veilstream.deployment.ledger.store import Ledger
from veilstream.privacy.grid_noise import GridNoise

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/pytorch"))
from densenet import densenet

LATER = 2


class Watched:
    """A method that adds up the seconds spent in it."""

    def __init__(self, owner: type, name: str) -> None:
        self.seconds, real = 0.0, getattr(owner, name)

        def call(*given: Any, **more: Any) -> Any:
            begun = time.perf_counter()
            try:
                return real(*given, **more)
            finally:
                self.seconds += time.perf_counter() - begun

        setattr(owner, name, call)

    def taken(self) -> float:
        taken, self.seconds = self.seconds, 0.0
        return taken


class PeakMemory:
    """The largest resident memory of this process while it is open, in MB, beyond what it began with."""

    def __enter__(self) -> PeakMemory:
        self.begun, self.most, self._over = resident(), 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.most = max(self.most, resident() - self.begun)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def resident() -> float:
    """Resident memory of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def timed(device: str, step: Callable[[], None]) -> float:
    """Seconds of a step, until the device is done."""
    begun = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def measured(device: str, batch: int, steps: int, size: int, microbatch: int | None, buffers: int) -> dict[str, Any]:
    """Both kinds of step on one device."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8 * batch, 3, size, size), torch.randint(0, 10, (8 * batch,)))
    plain = densenet().to(device)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    model = densenet().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    passes = -(-(steps + LATER) // 8)
    mechanism = vs.mechanisms.buffered(8 * passes, buffers, participation=(passes, 8))
    noise, ledger = Watched(GridNoise, "step"), Watched(Ledger, "write")
    figures: dict[str, list[float]] = {"plain_s": [], "private_s": [], "noise_s": [], "ledger_s": []}
    memory = {"plain_mb": 0.0, "private_mb": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        private = vs.torch.make_private(
            model,
            optimizer,
            DataLoader(data, batch_size=batch),
            vs.Budget(2.0, 1e-5),
            loss=functional.cross_entropy,
            clip_norm=1.0,
            passes=passes,
            mechanism=mechanism,
            microbatch=microbatch,
            state_steps=None,
            store=Path(folder) / "loop.db",
        )

        def batches() -> Any:
            for _ in range(passes):
                yield from private

        with private:
            for count, (images, labels) in enumerate(batches()):
                images, labels = images.to(device), labels.to(device)

                def plain_step(images: torch.Tensor = images, labels: torch.Tensor = labels) -> None:
                    plain_optimizer.zero_grad()
                    functional.cross_entropy(plain(images), labels).backward()
                    plain_optimizer.step()

                for kind, step in (("plain", plain_step), ("private", optimizer.step)):
                    if device == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                    noise.taken(), ledger.taken()
                    with PeakMemory() as peak:
                        seconds = timed(device, step)  # type: ignore[arg-type]
                    used = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else peak.most
                    memory[f"{kind}_mb"] = max(memory[f"{kind}_mb"], used)
                    if count >= LATER:
                        figures[f"{kind}_s"].append(seconds)
                        if kind == "private":
                            figures["noise_s"].append(noise.taken())
                            figures["ledger_s"].append(ledger.taken())
                if count == steps + LATER - 1:
                    break
        dim = private.parameters
    found = {name: statistics.median(values) for name, values in figures.items()} | memory
    host = 8.0 * dim * (mechanism.with_block_length(1).program.state_size + 4) / 1e6
    about = {"device": device, "parameters": dim, "batch": batch, "size": size, "microbatch": microbatch}
    return about | found | {"noise_memory_mb": host, "ratio": found["private_s"] / found["plain_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--size", type=int, default=32, help="images of so many pixels a side")
    parser.add_argument("--microbatch", type=int)
    parser.add_argument("--buffers", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    devices = [given.device] if given.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows = []
    for device in devices:
        row = measured(device, given.batch, given.steps, given.size, given.microbatch, given.buffers)
        row["name"] = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        rows.append(row)
        print(
            f"{row['name']}: d = {row['parameters']:,}, batch {row['batch']}: plain {row['plain_s']:.3f} s, "
            f"private {row['private_s']:.3f} s ({row['ratio']:.1f}x), of which noise {row['noise_s']:.3f} s beside the "
            f"gradients and ledger {row['ledger_s']:.3f} s; memory {row['plain_mb']:,.0f} and "
            f"{row['private_mb']:,.0f} MB, noise state {row['noise_memory_mb']:,.0f} MB on the host"
        )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
