"""An operator's orders to a running service: reload, scale, load, unload, drain, resume.

Owns how an order is given, what is shown until it has ended, and what is said then. What it means, and whether it is
allowed, the model server decides. Whoever stops waiting, by Ctrl-C, stops nothing else.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass

from msgspec.structs import replace

from model_worker.commands.exits import Exit
from model_worker.commands.flags import Flags, load_config
from model_worker.commands.observer import Observer, Unreachable, fetch_snapshot
from model_worker.commands.progress import Progress
from shared.config import Config
from shared.errors import HeadwaiterError, ProtocolError
from shared.messages import Managed, Snapshot
from shared.suggestions import did_you_mean

# How often the processes are looked at.
LOOK_EVERY_S = 0.25
# A model server answers at once. One that is restarted answers within this, and says that it is another one.
SILENCE_S_MAX = 15.0
EXITS = {"done": Exit.OK, "refused": Exit.REFUSED, "failed": Exit.FAILED}


@dataclass(frozen=True, slots=True)
class Order:
    action: str
    model: str = ""
    """Empty: it is about the whole service."""
    replicas: int = 0

    def __str__(self) -> str:
        count = f" to {self.replicas}" if self.action == "scale" else ""
        return f"{self.action} of {self.model or 'the service'}{count}"


class Lost(HeadwaiterError):
    """The model server that was given the order is not there any more."""


def run_order(flags: Flags, order: Order, as_json: bool) -> Exit:
    """Gives the order and waits for its end.

    Raises:
        ConfigurationError: the configuration, which names the run directory, is refused.
    """
    config = load_config(flags)
    try:
        before = fetch_snapshot(config.run_directory)
        known = [model.name for model in before.models]
        if order.model and order.model not in known:
            text = f"no model is called {order.model!r}{did_you_mean(order.model, known)}; known: {', '.join(known)}"
            return _told(order, "unknown_model", text, Exit.USAGE, as_json)
        managed = _carry_out(config, order, before, as_json)
    except Unreachable as error:
        return _told(order, "unreachable", str(error), Exit.UNAVAILABLE, as_json)
    except Lost as error:
        return _told(order, "lost", str(error), Exit.FAILED, as_json)
    except KeyboardInterrupt:
        text = f"not waiting any more; the {order} goes on: headwaiter status shows how far it is"
        return _told(order, "goes_on", text, Exit.INTERRUPTED, as_json)
    return _told(order, managed.outcome, managed.text, EXITS.get(managed.outcome, Exit.FAILED), as_json)


def _told(order: Order, outcome: str, text: str, code: Exit, as_json: bool) -> Exit:
    """What is done goes to standard output, and everything else to standard error; a document holds both."""
    if as_json:
        document = {"action": order.action, "model": order.model, "outcome": outcome, "text": text}
        print(json.dumps(document, indent=2, ensure_ascii=False))
    elif code is Exit.OK:
        print(text)
    if code is not Exit.OK:
        print(f"headwaiter: {text}", file=sys.stderr)
    return code


def _carry_out(config: Config, order: Order, before: Snapshot, as_json: bool) -> Managed:
    if as_json:
        return _wait(config, order, before, None)
    with Progress(config) as progress:
        progress.begin(_about(before, order))
        return _wait(config, order, before, progress)


def _wait(config: Config, order: Order, before: Snapshot, progress: Progress | None) -> Managed:
    """
    Raises:
        Lost: there is no end to wait for.
    """
    with Observer(config.run_directory) as observer:
        token = observer.order(order.action, order.model, order.replicas)
        heard_s = now_s = time.monotonic()
        next_look_s = now_s
        while now_s - heard_s < SILENCE_S_MAX:
            if now_s >= next_look_s:
                observer.ask()
                next_look_s = now_s + LOOK_EVERY_S
            observer.socket.poll(int((next_look_s - now_s) * 1000) + 1)
            now_s = time.monotonic()
            try:
                for message in observer.news():
                    heard_s = now_s
                    if isinstance(message, Managed):
                        if message.token == token:
                            return message
                    elif message.epoch != before.epoch:
                        raise Lost(f"the model server was restarted before the {order} had ended")
                    elif progress is not None:
                        progress.update(_about(message, order))
            except ProtocolError as error:
                raise Lost(f"the model server was replaced by one of another version: {error}") from None
    raise Lost(f"the model server was not heard for {SILENCE_S_MAX:g} s; whether the {order} has ended is not known")


def _about(snapshot: Snapshot, order: Order) -> Snapshot:
    """With no other slots than those that the order is about."""
    if not order.model:
        return snapshot
    return replace(snapshot, slots=tuple(slot for slot in snapshot.slots if slot.model == order.model))
