"""The script `plain.py` with nine more lines, and private: a small network on images in the format of MNIST."""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from densenet import densenet
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import veilstream as vs


def read(folder: Path, part: str) -> TensorDataset:
    """Images in [-1, 1] and their labels."""
    pixels = np.frombuffer(gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    images = torch.from_numpy(pixels.reshape(len(labels), 1, 28, 28).astype(np.float32) / 127.5 - 1.0)
    return TensorDataset(images, torch.from_numpy(labels.astype(np.int64)))


def accuracy(model: torch.nn.Module, loader: DataLoader, device: str) -> float:
    """Share of images whose label is the likeliest."""
    model.eval()
    with torch.no_grad():
        right = [(model(images.to(device)).argmax(1) == labels.to(device)).float() for images, labels in loader]
    return float(torch.cat(right).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train-*.gz and t10k-*.gz")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=600)
    parser.add_argument("--rate", type=float, default=0.5)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--store", type=Path, default=Path("store.db"))
    parser.add_argument("--out", type=Path, default=Path("model.pt"))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = densenet(blocks=(2, 2), growth=8, start=16, channels=1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.rate, momentum=0.9)
    train = DataLoader(read(args.data, "train"), batch_size=args.batch_size, shuffle=True)
    test = DataLoader(read(args.data, "t10k"), batch_size=1000)
    budget, loss = vs.Budget(args.epsilon, 1e-5), functional.cross_entropy
    options = {"loss": loss, "clip_norm": 1.0, "passes": args.epochs, "store": args.store}
    train = private = vs.torch.make_private(model, optimizer, train, budget, **options)
    private.resume()
    args.epochs = private.passes_left
    for epoch in range(args.epochs):
        model.train()
        for images, labels in train:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: accuracy {accuracy(model, test, device):.4f}", flush=True)
    print(private.guarantee)
    torch.save(model.state_dict(), args.out)


if __name__ == "__main__":
    main()
