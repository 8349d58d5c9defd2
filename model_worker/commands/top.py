"""`headwaiter top`: the tables of `headwaiter status`, with what happens in them, again and again.

Owns one frame and the loop around it. On a terminal each frame is drawn in the place of the one before; in a pipe or a
file they follow each other. Asks the model server over its socket, so it works while no web worker runs, and goes on
asking one that has gone away.
"""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import time
import tty
from collections import defaultdict, deque
from collections.abc import Iterator

import zmq
from msgspec.structs import replace
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from model_worker.commands.exits import Exit
from model_worker.commands.flags import Flags, load_config
from model_worker.commands.observer import ANSWER_TIMEOUT_S, Observer, Unreachable, fetch_snapshot
from model_worker.commands.rates import Rates, rates
from model_worker.commands.screen import console, counted, show
from model_worker.commands.status import duration, headline, model_table, slot_table
from model_worker.weights import human_bytes
from shared.errors import ProtocolError
from shared.messages import Snapshot, Trouble

SPARKS = "▁▂▃▄▅▆▇█"
SPARKS_ASCII = "_.:-=+*#"
SPARKS_SHOWN = 20
TROUBLES_SHOWN = 5
# Rows that are kept for the slots, however small the terminal is.
SLOTS_SHOWN_MIN = 3
QUIT_KEYS = b"qQ\x03\x04"


def run_top(flags: Flags, every_s: float, once: bool) -> Exit:
    """Draws until it is interrupted; with `once`, one frame.

    Raises:
        ConfigurationError: the configuration, which names the run directory, is refused.
    """
    config = load_config(flags)
    out = console()
    frames = Frames(out)
    try:
        # So that a service which does not run is a refusal, and not an empty screen.
        first = fetch_snapshot(config.run_directory)
        if once:
            show(out, frames.frame(first))
            return Exit.OK
        with Observer(config.run_directory) as observer, _screen(out) as screen, _keys() as keys:
            screen.draw(frames.frame(first))
            _watch(observer, screen, frames, keys, every_s)
    except Unreachable as error:
        print(f"headwaiter: {error}", file=sys.stderr)
        return Exit.UNAVAILABLE
    except KeyboardInterrupt:
        pass
    return Exit.OK


def _watch(observer: Observer, screen: _Screen, frames: Frames, keys: int | None, every_s: float) -> None:
    """Returns when a key says so.

    Raises:
        Unreachable: what answers is not a model server of this version.
    """
    poller = zmq.Poller()
    poller.register(observer.socket, zmq.POLLIN)
    if keys is not None:
        poller.register(keys, zmq.POLLIN)
    heard_s = time.monotonic()
    next_s = heard_s + every_s
    while True:
        ready = dict(poller.poll(max(0, int((next_s - time.monotonic()) * 1000) + 1)))
        if keys is not None and keys in ready:
            pressed = os.read(keys, 64)
            if not pressed or any(key in QUIT_KEYS for key in pressed):
                return
        now_s = time.monotonic()
        try:
            for snapshot in observer.snapshots():
                heard_s = now_s
                screen.draw(frames.frame(snapshot))
        except ProtocolError as error:
            raise Unreachable(f"the model server speaks another version of the protocol: {error}") from None
        if now_s >= next_s:
            observer.ask()
            next_s = now_s + every_s
            if now_s - heard_s > ANSWER_TIMEOUT_S + every_s:
                screen.draw(frames.silence(now_s - heard_s))


class Frames:
    """What is drawn, from one snapshot after the other."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._before: Snapshot | None = None
        self._sparks: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=SPARKS_SHOWN))
        self._last: RenderableType = Text("nothing was heard yet")

    def frame(self, snapshot: Snapshot) -> RenderableType:
        """Rates are those since the snapshot before; of the first one, and after a restart, those of its whole life."""
        before = self._before
        if before is not None and (before.epoch != snapshot.epoch or before.uptime_s >= snapshot.uptime_s):
            before = None
        self._before = snapshot
        found = rates(snapshot, before)
        for model, of_model in found.items():
            self._sparks[model].append(of_model.answered_per_s)
        parts: list[RenderableType] = [Text(headline(snapshot)), Text(""), model_table(snapshot), Text("")]
        parts += [_since(snapshot, before), self._rate_table(found), Text("")]
        if snapshot.devices:
            parts += [device_table(snapshot), Text("")]
        troubles = snapshot.troubles[-TROUBLES_SHOWN:]
        taken = 13 + 2 * len(snapshot.models) + len(snapshot.devices) + len(troubles)
        parts += [*slots_that_fit(snapshot, self._room(taken)), Text("")]
        parts += [trouble_table(troubles)] if troubles else []
        self._last = Group(*parts)
        return self._last

    def silence(self, silent_s: float) -> RenderableType:
        """The last frame, below the news that it is an old one."""
        return Group(
            Text(f"the model server was not heard for {duration(silent_s)}; asking on", "bold red"), self._last
        )

    def _room(self, taken: int) -> int:
        return max(SLOTS_SHOWN_MIN, self._out.height - taken) if self._out.is_terminal else sys.maxsize

    def _rate_table(self, found: dict[str, Rates]) -> Table:
        sparks = SPARKS_ASCII if self._out.options.ascii_only else SPARKS
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("MODEL", no_wrap=True)
        for heading in ("ANSWERED/s", "OTHERWISE/s", "WAIT p50", "p95", "MODEL p50", "p95", "BATCH", "TOKENS/s"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        for model, of_model in found.items():
            table.add_row(
                model,
                f"{of_model.answered_per_s:.1f}",
                Text(f"{of_model.otherwise_per_s:.1f}", "red" if of_model.otherwise_per_s > 0 else ""),
                *(_seconds(value) for value in (*of_model.wait_s, *of_model.forward_s)),
                "–" if of_model.batch_size is None else f"{of_model.batch_size:.1f}",
                "–" if of_model.tokens_per_s is None else f"{of_model.tokens_per_s:.0f}",
                Text(sparkline(self._sparks[model], sparks), "cyan"),
            )
        return table


def _since(snapshot: Snapshot, before: Snapshot | None) -> Text:
    if before is None:
        return Text(f"since the start, {duration(snapshot.uptime_s)} ago:", "dim")
    return Text(f"in the last {snapshot.uptime_s - before.uptime_s:.1f} s:", "dim")


def sparkline(values: deque[float], marks: str = SPARKS) -> str:
    """
    >>> sparkline(deque([0.0, 1.0, 2.0]), "_-#")
    '_-#'
    """
    most = max(values, default=0.0)
    return "".join(marks[round(value / most * (len(marks) - 1)) if most else 0] for value in values)


def slots_that_fit(snapshot: Snapshot, rows: int) -> list[RenderableType]:
    """The table of the slots; those that are ready give way to the others where not all of them have room."""
    if len(snapshot.slots) <= rows:
        return [slot_table(snapshot)]
    urgent = sorted(snapshot.slots, key=lambda slot: slot.state == "ready")[: rows - 1]
    shown = tuple(slot for slot in snapshot.slots if slot in urgent)
    left = len(snapshot.slots) - len(shown)
    return [slot_table(replace(snapshot, slots=shown)), Text(f"and {counted(left, 'more slot', 'more slots')}", "dim")]


def device_table(snapshot: Snapshot) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("DEVICE", no_wrap=True)
    for heading in ("SLOTS", "MEMORY", "OF", ""):
        table.add_column(heading, justify="right", no_wrap=True)
    for device in snapshot.devices:
        slots = [slot for slot in snapshot.slots if slot.device == device.device]
        used_bytes = sum(slot.memory_bytes for slot in slots)
        table.add_row(
            device.device,
            str(len(slots)),
            human_bytes(used_bytes),
            human_bytes(device.memory_bytes) if device.memory_bytes else "not known",
            f"{used_bytes / device.memory_bytes:.0%}" if device.memory_bytes else "",
        )
    return table


def trouble_table(troubles: tuple[Trouble, ...]) -> Table:
    """The newest first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("TROUBLE", "SLOT"):
        table.add_column(heading, no_wrap=True)
    for heading in ("TIMES", "AGO"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("CAUSE", overflow="ellipsis", no_wrap=True)
    for trouble in reversed(troubles):
        ago = duration(trouble.seconds_ago)
        table.add_row(Text(trouble.event, "red"), trouble.slot, str(trouble.count), ago, Text(trouble.text))
    return table


def _seconds(value: float | None) -> str:
    """
    >>> _seconds(0.0042), _seconds(1.5), _seconds(None)
    ('4.2 ms', '1.5 s', '–')
    """
    if value is None:
        return "–"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


class _Screen:
    """Where frames go: each in the place of the last one, or behind it."""

    def __init__(self, out: Console, live: Live | None) -> None:
        self._out = out
        self._live = live

    def draw(self, frame: RenderableType) -> None:
        if self._live is not None:
            self._live.update(frame, refresh=True)
            return
        show(self._out, frame)
        self._out.file.write("\n")
        self._out.file.flush()


@contextlib.contextmanager
def _screen(out: Console) -> Iterator[_Screen]:
    if not out.is_terminal:
        yield _Screen(out, None)
        return
    with Live(console=out, screen=True, auto_refresh=False) as live:
        yield _Screen(out, live)


@contextlib.contextmanager
def _keys() -> Iterator[int | None]:
    """The descriptor that single keys are read from, unechoed; None where there is no keyboard."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield descriptor
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
