"""What every route of a front worker shares, as one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from frontend.guards import AdminKeyRing, BodyReader, KeyRing
from frontend.metrics import FrontMetrics
from frontend.visits import Visits
from shared.config import Config

if TYPE_CHECKING:
    # Surfaces and probes use the client they are given; they have no business with the wire below it.
    from frontend.client import ModelClient


@dataclass(frozen=True, slots=True)
class Services:
    """Made once by `create_app`; opened and closed with the application's lifespan."""

    config: Config
    client: ModelClient
    metrics: FrontMetrics
    keys: KeyRing
    admin_keys: AdminKeyRing
    bodies: BodyReader
    visits: Visits | None = None
    """None where neither a line in the log nor spans are wanted."""
