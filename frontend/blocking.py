"""`BlockingModelClient`: asks models for answers, from any thread of an ordinary, synchronous program.

Owns one thread with an event loop, on which a `ModelClient` lives, and the way of calls and answers between it and the
threads that wait. Refuses to know what a request is.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Self, TypeVar, Unpack

from frontend.client import INSPECT_TIMEOUT_S, ModelClient
from frontend.outgoing import RequestOptions
from shared.config import Config
from shared.errors import UsageError
from shared.messages import Managed, ModelState, Snapshot

T = TypeVar("T")
_END = object()


class BlockingModelClient:
    """A connection to the model server of this host, for programs without an event loop.

        with BlockingModelClient() as client:
            vector = client.predict("minilm", "a sentence")

    Takes what `ModelClient` takes, and its methods have the same names, arguments and errors; they return when the
    answer is there. May be used by many threads at once. Belongs to the process that opened it. Is closed at the
    interpreter's exit, if not before.
    """

    def __init__(self, source: Config | str | os.PathLike[str] | None = None) -> None:
        self._source = source
        self._running: _LoopThread | None = None
        self._opening = threading.Lock()
        self._finalizer: weakref.finalize[[], BlockingModelClient] | None = None

    # --- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def open(self) -> None:
        """Connects. Returns at once, whether a model server is there or not.

        Raises:
            UsageError: it is open already.
            ConfigurationError: the configuration, or the run directory, cannot be used.
        """
        if self._running is not None:
            self._running.check_process()
        # Not waited for: a child of a fork may have inherited it held.
        if not self._opening.acquire(blocking=False):
            raise _open_already()
        try:
            if self._running is not None:
                raise _open_already()
            running = _LoopThread(ModelClient(self._source))
            running.start()
            self._running = running
            # Also when this object is forgotten, and at the interpreter's exit, while Python's threads can still end.
            self._finalizer = weakref.finalize(self, running.stop)
        finally:
            self._opening.release()

    def close(self) -> None:
        """Ends every open request with `server_unavailable`, here and at the model server. May be called twice."""
        self._running = None
        if self._finalizer is not None:
            self._finalizer()

    def stop_holding(self) -> None:
        """As `ModelClient.stop_holding`."""
        self._ask(ModelClient.stop_holding)

    def _opened(self) -> _LoopThread:
        running = self._running
        if running is None:
            raise _not_open()
        return running

    # --- requests ------------------------------------------------------------------------------------------------

    def predict(
        self,
        model: str,
        inputs: object,
        parameters: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> object:
        """One answer of `model`. An exception in the waiting thread, such as KeyboardInterrupt, gives the request up.

        Raises:
            RequestError: the request ended without an answer; its `code` says how.
        """
        running = self._opened()
        return running.wait(running.client.predict, model, inputs, parameters, **options)

    def submit(
        self,
        model: str,
        inputs: object,
        parameters: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Future[object]:
        """Puts a request on its way and returns at once: the future's `result()` is what `predict` would have returned
        or raised, and its `cancel()` gives the request up."""
        running = self._opened()
        return running.call(running.client.predict, model, inputs, parameters, **options)

    def stream(
        self,
        model: str,
        inputs: object,
        parameters: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[object]:
        """The pieces of one answer, as they are made. Leaving the iteration gives the request up.

        Raises:
            RequestError: the stream broke off, or never began; the pieces so far are not a whole answer.
        """
        running = self._opened()
        pieces = running.client.stream(model, inputs, parameters, **options)
        try:
            while (piece := running.wait(anext, pieces, _END)) is not _END:
                yield piece
        finally:
            # Not waited for: a generator that was forgotten is closed wherever its memory is collected, which may be
            # on the loop's own thread.
            running.call_if_open(pieces.aclose)

    # --- what the model server is like ---------------------------------------------------------------------------

    def models(self) -> tuple[ModelState, ...]:
        """As `ModelClient.models`."""
        return self._ask(ModelClient.models)

    def model_names(self) -> tuple[str, ...]:
        """As `ModelClient.model_names`."""
        return self._ask(ModelClient.model_names)

    def ready(self, model: str) -> bool:
        """As `ModelClient.ready`."""
        return self._ask(lambda client: client.ready(model))

    def wait_for_server(self, timeout_s: float) -> bool:
        """As `ModelClient.wait_for_server`."""
        running = self._opened()
        return running.wait(running.client.wait_for_server, timeout_s)

    def server_heard(self) -> bool:
        """As `ModelClient.server_heard`."""
        return self._ask(ModelClient.server_heard)

    def server_draining(self) -> bool:
        """As `ModelClient.server_draining`."""
        return self._ask(ModelClient.server_draining)

    def pending_count(self) -> int:
        """As `ModelClient.pending_count`."""
        return self._ask(ModelClient.pending_count)

    def malformed_count(self) -> int:
        """As `ModelClient.malformed_count`."""
        return self._ask(ModelClient.malformed_count)

    def inspect(self, timeout_s: float = INSPECT_TIMEOUT_S) -> Snapshot:
        """As `ModelClient.inspect`."""
        running = self._opened()
        return running.wait(running.client.inspect, timeout_s)

    def manage(self, action: str, model: str = "", replicas: int = 0) -> Managed | None:
        """As `ModelClient.manage`, and waits for the end; None if the client was closed before that."""
        running = self._opened()

        async def carry_out() -> Managed | None:
            return await running.client.manage(action, model, replicas)

        return running.wait(carry_out)

    def _ask(self, question: Callable[[ModelClient], T]) -> T:
        running = self._opened()

        async def answer() -> T:
            return question(running.client)

        return running.wait(answer)


class _LoopThread:
    """A thread that runs an event loop with an open `ModelClient` on it, until it is told to stop."""

    def __init__(self, client: ModelClient) -> None:
        self.client = client
        self._pid = os.getpid()
        # A daemon, so that the interpreter's exit does not wait for it before it tells it to stop.
        self._thread = threading.Thread(target=self._run, name="headwaiter client", daemon=True)
        self._opened: Future[None] = Future()
        # What is called before the stop is carried out, and nothing is called after it: held while a call is handed
        # over, and while the stop is. Reentrant, because a stream may be collected, and closed, at any moment.
        self._lock = threading.RLock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        # Whoever opens it may be interrupted before the loop is there.
        self._is_stopped = False

    def start(self) -> None:
        self._thread.start()
        try:
            self._opened.result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Closes the client and waits for the thread's end. Does nothing in a child that inherited this by fork."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._is_stopped = True
            loop, self._loop = self._loop, None
            if loop is not None and self._stopping is not None:
                loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def check_process(self) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                f"this BlockingModelClient was opened by process {self._pid} and inherited by fork, which leaves its "
                "thread behind: make one in this process"
            )

    def call(self, function: Callable[..., Awaitable[T]], /, *arguments: object, **options: object) -> Future[T]:
        """Has the loop await what the function returns."""
        self.check_process()
        with self._lock:
            if self._loop is None:
                raise _not_open()

            async def work() -> T:
                return await function(*arguments, **options)

            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def wait(self, function: Callable[..., Awaitable[T]], /, *arguments: object, **options: object) -> T:
        """The same, and waits for it."""
        if threading.current_thread() is self._thread:
            raise UsageError("a BlockingModelClient cannot be used on its own thread: it would wait for itself")
        called = self.call(function, *arguments, **options)
        try:
            return called.result()
        except BaseException:
            # Also of this thread's own, such as KeyboardInterrupt. Does nothing to a call that has ended.
            called.cancel()
            raise

    def call_if_open(self, function: Callable[[], Awaitable[object]]) -> None:
        """For what a closed client has done already, and a child of a fork must not do."""
        if self._pid == os.getpid():
            with self._lock:
                if self._loop is not None:
                    self.call(function)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._stopping = asyncio.Event()
        try:
            self.client.open()
        except BaseException as error:
            self._opened.set_exception(error)
            return
        with self._lock:
            if self._is_stopped:
                self._stopping.set()
            else:
                self._loop = asyncio.get_running_loop()
        self._opened.set_result(None)
        await self._stopping.wait()
        self.client.close()
        # Those who wait get their errors, in the turns that follow.
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*waiting, return_exceptions=True)


def _not_open() -> UsageError:
    return UsageError("this BlockingModelClient is not open: use `with BlockingModelClient(...) as client:`")


def _open_already() -> UsageError:
    return UsageError("this BlockingModelClient is open already: one serves any number of threads")
