"""What a process says that is not so: all that the wire's decoder lets through."""

from __future__ import annotations

import random

from msgspec.structs import replace

from model_worker.broker.events import ChunkArrived, Event, ItemFinished, ReplicaPhaseChanged
from shared.errors import Code
from shared.messages import Phase, RequestId


def lie_about(told: ItemFinished, rng: random.Random, other: RequestId) -> tuple[list[Event], list[Event]]:
    """What is said before the true report, and after it; `other` is somebody else's request."""
    slot, incarnation, request_id, attempt = told.slot, told.incarnation, told.id, told.attempt
    before: list[tuple[Event, ...]] = [
        (replace(told, attempt=attempt + rng.choice((-1, 1))),),
        (replace(told, id=other),),
        (replace(told, id=RequestId(rng.randbytes(16))),),
        (replace(told, cost=rng.choice((0, 2**62)), forward_ms=rng.choice((-1e9, 1e12)), batch_size=2**62),),
        (replace(told, code=rng.choice(list(Code))),),
        (ChunkArrived(slot, incarnation, other, attempt), ChunkArrived(slot, incarnation, request_id, attempt + 1)),
        (ChunkArrived(slot, incarnation, request_id, attempt),),  # perhaps of a request that is not streamed
    ]
    after: list[tuple[Event, ...]] = [
        (told,),
        (told, told),
        (ChunkArrived(slot, incarnation, request_id, attempt),),
        (replace(told, code=Code.REPLICA_FAULT),),
        (),
    ]
    return list(rng.choice(before)), list(rng.choice(after))


def lie_about_phase(ready: ReplicaPhaseChanged, rng: random.Random) -> ReplicaPhaseChanged:
    """Said by a process that is ready, and goes on as if it had not been said."""
    return rng.choice(
        (
            ready,
            replace(ready, mixes_parameters=not ready.mixes_parameters, pads=not ready.pads, concurrency=7),
            replace(ready, max_batch_size=1),
            replace(ready, phase=Phase.LOADING, progress=0.1),
            replace(ready, phase=Phase.DRAINING),
            replace(ready, phase=Phase.FAILED, detail="out of sorts"),
        )
    )
