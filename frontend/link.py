"""What a front believes about the model server: is it there, is it still the same one, what did it say last.

Owns when to say HELLO and PULSE and when to send requests again. Pure: it knows no socket, no event loop and no
clock; times are arguments, in seconds on the caller's monotonic clock.

Either side may be restarted at any moment and in any order. A front says HELLO until it is welcomed, and from then on
pulses. It sends requests only while welcomed. A new epoch in anything the server says, or silence, ends the welcome;
the next WELCOME tells the front what has become of the requests that it had sent.
"""

from __future__ import annotations

from enum import Enum, Flag, auto

from shared.errors import Code, RequestError
from shared.messages import ModelState, ServerPulse, Welcome

# The server pulses every second: two missed pulses and a little are silence.
SERVER_SILENCE_S = 2.0
HELLO_EVERY_S = 1.0
PULSE_EVERY_S = 1.0
# HELLO is said out of turn when the server shows up, but not for each of the messages it shows up with.
HELLO_APART_S = 0.1
# The server cancels the requests of a front that it has not heard for 3 s. A front that was stopped for this long
# since its last tick has to assume that it happened.
OWN_STALL_S = 2.0
# How long what the server said counts as news, for readiness.
FRESH_S = 3.0


class Say(Flag):
    """What the front has to say now."""

    NOTHING = 0
    HELLO = auto()
    PULSE = auto()


class Aftermath(Enum):
    """What a WELCOME means for the requests that were sent before it."""

    KEPT = auto()
    """The server has them."""
    DOUBTFUL = auto()
    """The same server, after a silence: sending again is safe, because it knows ids it already has."""
    LOST = auto()
    """A new server, or one that gave this front up: it has none of them."""


class ServerLink:
    """One front's view of its model server."""

    def __init__(self, now_s: float) -> None:
        self.epoch = ""
        self.server_version = ""
        self.models: tuple[ModelState, ...] = ()
        self.model_names: tuple[str, ...] = ()
        self.draining = False
        # The server has ended because no model can ever be loaded; none will come by itself.
        self.hopeless = False
        self.is_up = False
        self._heard_s: float | None = None
        self._aftermath = Aftermath.KEPT
        self._hello_s: float | None = None
        self._pulse_s = now_s
        self._tick_s = now_s

    @property
    def was_ever_up(self) -> bool:
        return bool(self.epoch)

    def is_fresh(self, now_s: float) -> bool:
        """Whether the server was heard recently enough for its word on the models to count."""
        return self._heard_s is not None and now_s - self._heard_s < FRESH_S

    def heard(self, now_s: float) -> None:
        """Any valid message is a sign of life."""
        self._heard_s = now_s

    def heard_welcome(self, welcome: Welcome, now_s: float) -> Aftermath:
        """Opens the link, and says what to do about requests that were sent before."""
        self.heard(now_s)
        aftermath = self._aftermath
        if welcome.epoch != self.epoch:
            aftermath = Aftermath.LOST if self.epoch else aftermath
            # WELCOME does not say; a new server that is draining will, with its first pulse.
            self.draining = False
        self.hopeless = False
        self.epoch = welcome.epoch
        self.server_version = welcome.version
        self._heard_models(welcome.models)
        self.is_up = True
        self._aftermath = Aftermath.KEPT
        return aftermath

    def heard_pulse(self, pulse: ServerPulse, now_s: float) -> Say:
        """Takes over what the server says about its models."""
        self.heard(now_s)
        self._heard_models(pulse.models)
        self.draining = pulse.draining
        self.hopeless = pulse.hopeless
        if self.is_up and pulse.epoch == self.epoch:
            return Say.NOTHING
        # Another server, or the same one after a silence. Only its WELCOME says which requests it has.
        self._break(Aftermath.DOUBTFUL)
        return self._hello(now_s, HELLO_APART_S)

    def not_connected(self) -> None:
        """A send found no connection. If it was a HELLO, it does not count."""
        self._break(Aftermath.DOUBTFUL)
        self._hello_s = None

    def connectable(self, now_s: float) -> Say:
        """The socket can take messages: a server may have just come up."""
        return Say.NOTHING if self.is_up else self._hello(now_s, HELLO_APART_S)

    def tick(self, now_s: float) -> Say:
        """Call it a few times a second, after everything that has arrived was handed over."""
        stalled = now_s - self._tick_s > OWN_STALL_S
        self._tick_s = now_s
        if stalled:
            self._break(Aftermath.LOST)
            return self._hello(now_s, HELLO_APART_S)
        if self.is_up and self._heard_s is not None and now_s - self._heard_s > SERVER_SILENCE_S:
            self._break(Aftermath.DOUBTFUL)
        if not self.is_up:
            return self._hello(now_s, HELLO_EVERY_S)
        if now_s - self._pulse_s < PULSE_EVERY_S:
            return Say.NOTHING
        self._pulse_s = now_s
        return Say.PULSE

    def _heard_models(self, models: tuple[ModelState, ...]) -> None:
        self.models = models
        self.model_names = tuple(model.name for model in models)

    def _break(self, aftermath: Aftermath) -> None:
        self.is_up = False
        if self._aftermath is not Aftermath.LOST:
            self._aftermath = aftermath

    def _hello(self, now_s: float, apart_s: float) -> Say:
        if self._hello_s is not None and now_s - self._hello_s < apart_s:
            return Say.NOTHING
        self._hello_s = now_s
        return Say.HELLO


def unavailable(text: str = "the model server is not there") -> RequestError:
    """What is told to whoever needs the model server while the link is down."""
    return RequestError(text, code=Code.SERVER_UNAVAILABLE, retry_after_s=1.0)
