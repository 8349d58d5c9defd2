"""`headwaiter serve`: the whole service in the foreground, from the checks before it to the last process after it.

Owns supervisord, its child, and with it both programs; passes their output on, shows how the models come up, and turns
Ctrl-C into an orderly stop. Refuses to start anything that the checks already know cannot work.

Theory of operation: one loop on the main thread waits for a signal, the end of supervisord, news from the model server,
or the next look; a second thread copies the programs' output, and stops supervisord when that tells of a program that
refuses to run. The loop never waits for an answer for longer than `supervision.CONTROL_TIMEOUT_S` or `HTTP_TIMEOUT_S`,
so a stop is never far away.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from enum import Enum, auto
from types import FrameType
from typing import IO

import zmq

from model_worker.commands import checks
from model_worker.commands.addresses import connectable_host
from model_worker.commands.exits import Exit
from model_worker.commands.flags import Flags, load_config
from model_worker.commands.kept_log import KeptLog
from model_worker.commands.observer import Observer
from model_worker.commands.progress import Progress
from model_worker.commands.screen import outlive_readers
from model_worker.commands.supervision import SUPERVISOR_FILES, Program, Supervisor, early_refusal
from model_worker.preflight import preflight
from shared.config import ENV_PREFIX, Config
from shared.errors import ConfigurationError, ProtocolError
from shared.messages import ModelState
from shared.sockets import RunDirectory

# How often serve looks: often while people watch it come up, seldom afterwards.
LOOK_STARTING_S = 0.25
LOOK_SERVING_S = 0.5
HTTP_TIMEOUT_S = 1.0
# What the programs may need for their own end after the time that the configuration gives to requests and models.
END_S_MAX = 20.0
# What supervisord may need to see the end of killed programs.
CUT_OFF_S = 3.0
# Between two tries to lock the run directory of a model server that is ending.
LOCK_PAUSE_S = 0.05
# A longer line, such as a progress bar that never ends its own, is passed on in pieces.
LINE_BYTES_MAX = 65536
# A program that refuses to run says why in one line that starts like this.
ADDRESSED_TO_PEOPLE = b"headwaiter: "
FINAL_STATES = ("ready", "idle", "failed")


def run_serve(flags: Flags) -> Exit:
    """Runs until stopped.

    Raises:
        ConfigurationError: nothing was started; one line with the remedy.
    """
    config = _with_definite_port(load_config(flags))
    preflight(config)
    checks.check_packages(config)
    checks.check_routers(config)
    checks.check_port(config)
    checks.check_run_directory(config)
    checks.check_open_files()
    outlive_readers()
    return Service(config).run()


def _with_definite_port(config: Config) -> Config:
    """Port 0 asks for any free one; it is chosen here, because both programs and the user have to know it."""
    if config.http.port != 0:
        return config
    os.environ[f"{ENV_PREFIX}HTTP__PORT"] = str(checks.probe_port(config))
    return Config.load()


class Stage(Enum):
    STARTING = auto()
    SERVING = auto()
    STOPPING = auto()


class Service:
    """One run of `serve`. Main thread only."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._progress = Progress(config)
        # For the relay thread alone.
        self._log = KeptLog(config.run_directory, config.logging.kept_bytes_max)
        self._supervisor = Supervisor(config.run_directory)
        self._observer = Observer(config.run_directory)
        self._signals: list[int] = []
        self._stage = Stage.STARTING
        # What the command will say with its exit, and why it was not asked for; set by whatever ends it.
        self._exit = Exit.FAILED
        self._cause = ""
        self._program_gave_up = False
        # The last line that a program addressed to people; written by the relay thread, read after its end.
        self._last_words = ""
        # Programs that refused to run as soon as they were started; appended by the relay thread.
        self._refusals: list[Program] = []
        self._models: tuple[ModelState, ...] = ()
        self._next_look_s = 0.0
        # When an orderly stop has taken so long that something must be stuck.
        self._cut_off_s = math.inf

    def run(self) -> Exit:
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._observer.close)
            wake = cleanup.enter_context(_signals_into(self._signals))
            cleanup.enter_context(self._progress)
            relay = threading.Thread(target=self._copy_output, args=[self._supervisor.start()], name="relay")
            relay.start()
            cleanup.callback(relay.join)
            cleanup.callback(self._supervisor.close)
            supervisor_pidfd = os.pidfd_open(self._supervisor.pid)
            cleanup.callback(os.close, supervisor_pidfd)
            poller = zmq.Poller()
            for readable in (wake.fileno(), supervisor_pidfd, self._observer.socket):
                poller.register(readable, zmq.POLLIN)
            while (ended := self._supervisor.exit_code()) is None:
                poller.poll(max(0, int((self._next_look_s - time.monotonic()) * 1000) + 1))
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
                self._turn()
            self._tidy()
        self._heed_refusals()
        return self._conclude(ended)

    def _turn(self) -> None:
        self._heed_refusals()
        while self._signals:
            self._handle_signal(self._signals.pop(0))
        if os.getpid() == 1:
            self._supervisor.bury_others()
        self._read_news()
        if time.monotonic() < self._next_look_s:
            return
        if self._stage is not Stage.STOPPING:
            self._look()
        elif time.monotonic() >= self._cut_off_s:
            self._end_at_once("something is stuck")
        self._next_look_s = time.monotonic() + (LOOK_STARTING_S if self._stage is Stage.STARTING else LOOK_SERVING_S)

    def _look(self) -> None:
        for program in self._supervisor.programs():
            if program.given_up:
                self._stop_without(program)
                return
        if self._stage is not Stage.STARTING:
            return
        self._observer.ask()
        if self._models and all(model.state in FINAL_STATES for model in self._models) and self._front_answers():
            self._stage = Stage.SERVING
            self._progress.serving(self._models)

    def _heed_refusals(self) -> None:
        if self._refusals and self._stage is not Stage.STOPPING:
            self._stop_without(self._refusals[0])

    def _stop_without(self, program: Program) -> None:
        self._program_gave_up = True
        ended = "ended after each start" if program.state == "FATAL" else f"exit code {program.exit_status}"
        self._stop(Exit.FAILED, f"{program.name} cannot run ({ended}): its own lines above say why")

    # --- what happens --------------------------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stage is Stage.STOPPING:
            self._end_at_once(f"{name} again")
            return
        self._progress.say(
            f"{name}: stopping, for up to {self._grace_s:g} s while requests finish; once more ends it at once"
        )
        self._stop(Exit.OK)

    @property
    def _grace_s(self) -> float:
        """How long requests may take to finish, the web workers' and then the model server's."""
        return self._config.http.grace_s + self._config.server.grace_s

    def _stop(self, code: Exit, cause: str = "") -> None:
        self._stage = Stage.STOPPING
        self._exit = code
        self._cause = cause
        self._cut_off_s = time.monotonic() + self._grace_s + self._config.server.stop_timeout_s + END_S_MAX
        self._supervisor.stop()

    def _end_at_once(self, why: str) -> None:
        self._progress.say(f"{why}: ending everything at once; requests in progress are cut off")
        self._exit, self._cause = Exit.FAILED, self._cause or "ended before all requests were finished"
        self._cut_off_s = time.monotonic() + CUT_OFF_S
        self._supervisor.stop_at_once()

    def _read_news(self) -> None:
        try:
            for snapshot in self._observer.snapshots():
                if self._stage is not Stage.STARTING:
                    continue
                self._models = snapshot.models
                self._progress.update(snapshot)
                if all(model.state == "failed" for model in snapshot.models):
                    reasons = "; ".join(f"{model.name}: {model.reason}" for model in snapshot.models)
                    self._stop(Exit.FAILED, f"no model can be loaded: {reasons}")
        except ProtocolError as error:
            self._stop(Exit.FAILED, f"the model server speaks another version of the protocol: {error}")

    def _front_answers(self) -> bool:
        """Whether the first request would be answered by a model; by those there are, if a required one has failed."""
        complete = all(model.answers for model in self._models if model.required)
        connection = http.client.HTTPConnection(
            connectable_host(self._config), self._config.http.port, timeout=HTTP_TIMEOUT_S
        )
        try:
            connection.request("GET", "/readyz" if complete else "/livez")
            return connection.getresponse().status == http.client.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _copy_output(self, output: IO[bytes]) -> None:
        """The relay thread: passes on every line, but keeps the last one that a program addressed to people."""
        with output, contextlib.closing(self._log):
            while line := output.readline(LINE_BYTES_MAX):
                self._log.write(line)
                if line.startswith(ADDRESSED_TO_PEOPLE):
                    self._last_words = line.removeprefix(ADDRESSED_TO_PEOPLE).decode(errors="replace").strip()
                    continue
                self._progress.copy(line)
                if (program := early_refusal(line)) is not None:
                    self._refusals.append(program)
                    # At once, and not when the loop gets to it: in a second supervisord would start it again.
                    self._supervisor.stop()

    def _tidy(self) -> None:
        """Removes what killed programs left.

        A model server that has outlived supervisord is told to stop by that, finishes what it has, and holds the lock
        until then. It is waited for, so that the next start is not refused; another signal ends the waiting.
        """
        directory = RunDirectory(self._config.run_directory)
        until_s = time.monotonic() + self._config.server.grace_s + self._config.server.stop_timeout_s + END_S_MAX
        while not self._signals and time.monotonic() < until_s:
            try:
                directory.lock()
            except ConfigurationError:
                time.sleep(LOCK_PAUSE_S)
                continue
            for name in SUPERVISOR_FILES:
                (directory.path / name).unlink(missing_ok=True)
            directory.release()
            return

    def _conclude(self, ended: int) -> Exit:
        """Says the cause last, where it is seen."""
        # Told to stop while it still starts, supervisord dies of the signal; no program runs yet.
        if self._stage is not Stage.STOPPING or ended not in (0, -signal.SIGTERM):
            how = f"by signal {signal.Signals(-ended).name}" if ended < 0 else f"with exit code {ended}"
            self._exit, self._cause = Exit.FAILED, self._cause or f"supervisord ended {how}, and both programs with it"
        # A program that gave up has said why better than serve could.
        told = self._cause if not (self._program_gave_up and self._last_words) else ""
        for line in dict.fromkeys([self._last_words, told]):
            if line:
                self._progress.complain(line)
        if self._exit is Exit.OK:
            self._progress.say("stopped")
        return self._exit


@contextlib.contextmanager
def _signals_into(signals: list[int]) -> Iterator[socket.socket]:
    """Notes each signal that asks for a stop and makes the yielded socket readable; the handlers do nothing else."""
    wake_read, wake_write = socket.socketpair()
    wake_read.setblocking(False)
    wake_write.setblocking(False)

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    previous_fd = signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # Under nohup it stays ignored.
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield wake_read
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_fd)
        wake_read.close()
        wake_write.close()
