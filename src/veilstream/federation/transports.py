"""The server's side of transports, by name. Packages add others (`veilstream.transports`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from veilstream.federation.addresses import Address
from veilstream.federation.protocol.transport import ServerSide
from veilstream.registry import Registry


@dataclass(frozen=True, kw_only=True)
class TransportSetting:
    """What a server's transport is made from."""

    keys: Path
    address: Address
    dim: int
    """Parameters of the model: they bound the size of a message."""
    answer_within_s: float
    insecure: bool


def _direct(setting: TransportSetting) -> ServerSide:
    from veilstream.federation.direct import DirectServer

    return DirectServer(
        setting.keys,
        setting.address,
        dim=setting.dim,
        answer_within_s=setting.answer_within_s,
        insecure=setting.insecure,
    )


TRANSPORTS: Registry[Callable[[TransportSetting], ServerSide]] = Registry(
    "veilstream.transports", "transport", {"direct": _direct}, callable
)
