"""What the exit of `headwaiter` says, in the words of sysexits.h where it has some; each command's help has its own."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    """The service ended although nobody asked for it, or had to be ended at once; an order came to nothing; or nothing
    can be written."""
    USAGE = 2
    """The command line cannot be understood."""
    UNAVAILABLE = 69
    """No model server answers."""
    NOT_READY = 75
    """The model server answers, but a model is not ready."""
    REFUSED = 77
    """The model server does not do what it was told to, and has changed nothing."""
    CONFIGURATION = 78
    """The configuration, or the machine it is used on, does not allow it."""
    INTERRUPTED = 130
    """Ctrl-C ended the waiting, not what was waited for."""


_USAGE = {Exit.USAGE: "the command line cannot be understood"}
_UNWRITTEN = {Exit.FAILED: "what it has to say cannot be written"}

# What each command can end with.
BY_COMMAND: dict[str, dict[Exit, str]] = {
    "serve": {
        Exit.OK: "stopped as asked, everything has ended in order",
        Exit.FAILED: "the service ended by itself, or had to be ended at once",
        **_USAGE,
        Exit.CONFIGURATION: "the configuration, or this machine, does not allow it; nothing was started",
    },
    "plan": {
        Exit.OK: "there is a plan, and it fits",
        **_UNWRITTEN,
        **_USAGE,
        Exit.CONFIGURATION: "there is none, or it does not fit this machine",
    },
    "status": {
        Exit.OK: "every model that /readyz waits for is ready",
        **_UNWRITTEN,
        **_USAGE,
        Exit.UNAVAILABLE: "no model server answers",
        Exit.NOT_READY: "a model is not ready, or the service is stopping",
        Exit.CONFIGURATION: "the configuration is refused",
    },
    "top": {
        Exit.OK: "ended by q or Ctrl-C, or the one frame was printed",
        **_UNWRITTEN,
        **_USAGE,
        Exit.UNAVAILABLE: "no model server answers",
        Exit.CONFIGURATION: "the configuration is refused",
    },
    "check": {
        Exit.OK: "nothing has failed",
        **_UNWRITTEN,
        **_USAGE,
        Exit.CONFIGURATION: "something has: this configuration cannot be served here",
    },
    "config": {
        Exit.OK: "printed",
        **_UNWRITTEN,
        **_USAGE,
        Exit.CONFIGURATION: "the configuration is refused",
    },
}

_ORDERED = {
    Exit.OK: "done",
    Exit.FAILED: "it was begun and failed, or the model server has ended meanwhile",
    Exit.USAGE: "the command line cannot be understood, or no model has that name",
    Exit.UNAVAILABLE: "no model server answers",
    Exit.REFUSED: "the model server has refused it, and changed nothing",
    Exit.CONFIGURATION: "the configuration is refused",
    Exit.INTERRUPTED: "Ctrl-C: it goes on, and nobody waits for its end",
}
BY_COMMAND |= dict.fromkeys(("reload", "scale", "load", "unload", "drain", "resume"), _ORDERED)
BY_COMMAND["logs"] = {
    Exit.OK: "printed, or ended by Ctrl-C",
    **_UNWRITTEN,
    Exit.USAGE: "the command line cannot be understood, or nothing has that name",
    Exit.UNAVAILABLE: "no log is kept here; its one line says where to look",
    Exit.CONFIGURATION: "the configuration is refused",
}


def help_of(command: str) -> str:
    """The exit codes of one command, as the end of its help."""
    lines = [f"  {code.value:<3} {words}" for code, words in BY_COMMAND[command].items()]
    return "\b\nExit codes:\n" + "\n".join(lines)
