"""Circuit breakers: what stands around calls to a dependency, and counts how they end."""

import asyncio
import functools
import inspect
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar, cast
from uuid import uuid4

from windlass.context import current_job
from windlass.failures.classifier import Classifier
from windlass.model.breaker import BreakerState, CallOutcome, SharedBreaker
from windlass.model.errors import BreakerOpen, ConfigurationError, Fail, RetryAfter, Snooze
from windlass.model.failure import ErrorClass
from windlass.model.limits import shown
from windlass.policy.breaker import Asking, BreakerSettings, Circuit, Permit, Refusal
from windlass.policy.sharing import Share
from windlass.service import is_set_within
from windlass.telemetry import emit

P = ParamSpec("P")
R = TypeVar("R")


class BreakerReport(NamedTuple):
    """What a breaker of this process shows of itself."""

    name: str
    state: BreakerState
    opened: int  # how often it did, once its threshold was reached
    refused: int  # calls that were not let through


class ProtectedCall:
    """One call that was let through, until the breaker was told how it ended."""

    __slots__ = ("_breaker", "_permit", "began", "limit")

    def __init__(self, breaker: "Breaker", permit: Permit, began: float) -> None:
        self._breaker = breaker
        self._permit: Permit | None = permit
        self.began = began
        self.limit: asyncio.Timeout | None = None

    @property
    def breaker(self) -> "Breaker":
        """What protects it."""
        return self._breaker

    def end(self, outcome: CallOutcome) -> None:
        """Say how it ended; only the first time counts."""
        permit, self._permit = self._permit, None
        if permit is not None:
            took_too_long = self._breaker.took_too_long(self.began)
            self._breaker.take_in(permit, CallOutcome.FAILED if took_too_long else outcome)


class _Asked:
    """A call that asks to be let through, and may wait for an answer."""

    __slots__ = ("admitted", "is_waiting", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.admitted: ProtectedCall | Refusal = _NOT_ASKED
        self.is_waiting = False

    @property
    def is_refused_for_now(self) -> bool:
        return isinstance(self.admitted, Refusal) and self.admitted.is_near


_NOT_ASKED = Refusal(0.0, 0.0)

# The blocks that are entered here, innermost last. Each asyncio task and each thread has its own.
_entered: ContextVar[tuple[ProtectedCall, ...]] = ContextVar("windlass_breakers", default=())


class Breaker:
    """Stands around calls as a decorator, as `with` or `async with`, or on a task.

    It may be used from any thread and event loop of the process. Its lock is never held over a call.
    """

    def __init__(
        self,
        settings: BreakerSettings,
        *,
        classifier: Classifier,
        fallback: Callable[..., Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.fallback = fallback
        self._classifier = classifier
        self._clock = clock
        self._lock = threading.Lock()  # around the state, and nothing else
        self._circuit = Circuit(settings)
        self._opened = 0
        self._refused = 0
        self._waiting: deque[_Asked] = deque()  # the first one is answered first
        self._share = Share()
        self._wake: Callable[[], None] | None = None  # who keeps it in step with the store
        self.holder = uuid4()  # of trials, if it is shared: this breaker of this process

    # For people

    @property
    def name(self) -> str:
        """What it is called."""
        return self.settings.name

    @property
    def state(self) -> BreakerState:
        """Whether it lets calls through."""
        return self.report().state

    @property
    def half_open_in(self) -> float:
        """Seconds until it lets trials through; 0 if it is not open."""
        with self._lock:
            return self._circuit.half_open_in(self._clock())

    def report(self) -> BreakerReport:
        """What it shows of itself."""
        self._count_overdue()
        with self._lock:
            state = self._circuit.state(self._clock())
            return BreakerReport(self.name, state, self._opened, self._refused)

    def reset(self, clock: Callable[[], float] | None = None) -> None:
        """Close it and forget how calls ended; with a clock, go by that from here on."""
        with self._lock:
            self._clock = clock or self._clock
            self._circuit.close()
            self._share.forget()
            self._answer_waiting()

    def __repr__(self) -> str:
        return f"<Breaker {self.name!r} {self.state}>"

    # Call by call

    async def begin(self) -> ProtectedCall:
        """Let a call through, or raise `BreakerOpen`; wait a moment if others are about to answer."""
        loop = asyncio.get_running_loop()
        answered = asyncio.Event()
        thread = threading.get_ident()

        def wake() -> None:
            if threading.get_ident() == thread:
                answered.set()
            else:
                with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                    loop.call_soon_threadsafe(answered.set)

        with self._asked(wake) as asked:
            if asked.is_waiting:
                await is_set_within(answered, self.settings.patience)
        return self._let_through(asked)

    def begin_here(self) -> ProtectedCall:
        """`begin` for synchronous code; in an event loop, which that would block, it does not wait."""
        answered = threading.Event()
        asking = Asking.ONCE if _is_in_event_loop() else Asking.FIRST
        with self._asked(answered.set, asking) as asked:
            if asked.is_waiting:
                answered.wait(self.settings.patience)
        return self._let_through(asked)

    @contextmanager
    def _asked(self, wake: Callable[[], None], asking: Asking = Asking.FIRST) -> Iterator["_Asked"]:
        """Ask for a call; while the block lasts, it may wait for an answer."""
        asked = _Asked(wake)
        self._count_overdue()
        with self._lock:
            asked.admitted = self._admit(asking)
            if asking is Asking.FIRST and asked.is_refused_for_now:
                asked.is_waiting = True
                self._waiting.append(asked)
        try:
            yield asked
        except BaseException:
            with self._lock:
                self._stop_waiting(asked)
            if isinstance(asked.admitted, ProtectedCall):
                asked.admitted.end(CallOutcome.NO_VERDICT)
            raise
        self._count_overdue()  # which may answer it
        with self._lock:
            if self._stop_waiting(asked):
                asked.admitted = self._admit(Asking.AGAIN)

    def _admit(self, asking: Asking) -> ProtectedCall | Refusal:
        now = self._clock()
        admitted = self._circuit.admit(now, asking, self._share.trials(now))
        if self._circuit.state(now) is BreakerState.HALF_OPEN and self._share.ask(now):
            self._wake_up()
        return ProtectedCall(self, admitted, now) if isinstance(admitted, Permit) else admitted

    def _stop_waiting(self, asked: "_Asked") -> bool:
        """Forget one that waits; say whether it did, and was not answered."""
        was_waiting, asked.is_waiting = asked.is_waiting, False
        if was_waiting:
            self._waiting.remove(asked)
        return was_waiting

    def _answer_waiting(self) -> None:
        """Let those through that wait, as far as there is room, or refuse them. Under the lock."""
        while self._waiting:
            admitted = self._admit(Asking.FIRST)
            if isinstance(admitted, Refusal) and admitted.is_near:
                return
            asked = self._waiting.popleft()
            asked.admitted, asked.is_waiting = admitted, False
            asked.wake()

    def _let_through(self, asked: "_Asked") -> ProtectedCall:
        admitted = asked.admitted
        if isinstance(admitted, ProtectedCall):
            return admitted
        with self._lock:
            self._refused += 1
        raise BreakerOpen(self.name, admitted.pause(random.random()))  # noqa: S311 - jitter

    def take_in(self, permit: Permit, outcome: CallOutcome) -> None:
        """Take in how a call ended."""
        self._change(lambda now: self._circuit.end(permit, outcome, now))

    def took_too_long(self, began: float) -> bool:
        """Whether a call that began then is over its time."""
        limit = self.settings.timeout
        return limit is not None and self._clock() - began > limit

    def _count_overdue(self) -> None:
        """Count calls as failed that go on although their time is over."""
        if self.settings.timeout is not None:
            self._change(self._circuit.count_overdue)

    def _change(self, change: Callable[[float], BreakerState | None]) -> None:
        """Take in something that may change the state, and tell of it."""
        with self._lock:
            now = self._clock()
            before = self._circuit.state(now)
            after = change(now)
            if after is not None and self.settings.shared:
                self._share.tell(after)
                self._wake_up()
            self._answer_waiting()
            if after is BreakerState.OPEN and before is BreakerState.CLOSED:
                self._opened += 1
        if after is not None:
            self._emit(before, after)

    def _emit(self, before: BreakerState, after: BreakerState, **more: str) -> None:
        if after is BreakerState.CLOSED:
            emit("breaker.closed", breaker=self.name, **more)
            return
        pause = f"{self.half_open_in:.3g} s"
        # Once for an outage: a trial that fails says nothing new.
        event = "breaker.opened" if before is BreakerState.CLOSED else "breaker.stays_open"
        emit(event, breaker=self.name, half_open_in=pause, **more)

    # In step with the store, if it is shared. All of it may be called from another thread than calls are made in

    def govern(self, wake: Callable[[], None] | None) -> None:
        """Let the store decide who tries; `wake` is called when it has to hear of something.

        None: it cannot be asked, and this process goes by itself.
        """
        with self._lock:
            self._wake = wake
            if self._share.govern(is_governed=wake is not None):
                self._answer_waiting()

    @property
    def is_governed(self) -> bool:
        """Whether the store decides who tries."""
        with self._lock:
            return self._share.is_governed

    def follow(self, known: SharedBreaker) -> bool:
        """Be as the store says that it is, if that is new here; return whether it is."""
        with self._lock:
            now = self._clock()
            before = self._circuit.state(now)
            if not self._is_behind(known, now):
                self._share.epoch = known.epoch
                return False
            self._share.follow(known.epoch)
            after = before
            if known.open_for is not None:
                self._circuit.open(now + known.open_for)
                after = BreakerState.OPEN
            elif before is not BreakerState.CLOSED:
                after = self._circuit.close()
            if after is BreakerState.OPEN and before is BreakerState.CLOSED:
                self._opened += 1
            self._answer_waiting()
        if after is not before:
            self._emit(before, after, told_by="the store")
        return True

    def _is_behind(self, known: SharedBreaker, now: float) -> bool:
        """Whether the store knows something that is new here."""
        share = self._share
        if share.epoch is None:
            return known.open_for is not None  # what was found out here is newer than a closed one
        if share.epoch != known.epoch:
            return True
        # By the clock of the store, which may be late, it is too soon for trials.
        is_early = bool(known.open_for) and self._circuit.state(now) is BreakerState.HALF_OPEN
        return is_early and share.news is None and not self._circuit.is_trying(now)

    @property
    def news(self) -> SharedBreaker | None:
        """What the store is to be told: how it is here, found out in that epoch."""
        with self._lock:
            share = self._share
            if share.epoch is None or share.news is None:
                return None
            is_open = share.news is BreakerState.OPEN
            open_for = self._circuit.half_open_in(self._clock()) if is_open else None
            return SharedBreaker(self.name, share.epoch, open_for)

    def was_told(self, news: SharedBreaker, *, is_written: bool) -> None:
        """Forget news that the store has heard of; what was found out since is still to be told."""
        with self._lock:
            state = BreakerState.CLOSED if news.open_for is None else BreakerState.OPEN
            self._share.was_told(news.epoch, state, is_written=is_written)

    @property
    def wants_trials(self) -> bool:
        """Whether there is a call to try with, or a trial under way."""
        with self._lock:
            return self._share.is_asked or self._circuit.is_trying(self._clock())

    def grant(self, epoch: int, *, is_ours: bool, theirs_for: float) -> None:
        """Take in whether the trials are ours; if not, that need not be asked again for so many seconds."""
        with self._lock:
            until = self._clock() + theirs_for
            self._share.grant(epoch, is_ours=is_ours, theirs_until=until)
            self._answer_waiting()

    def give_up_trials(self) -> bool:
        """Leave the trials to others if they are ours and none is under way; return whether that was so."""
        with self._lock:
            is_unused = self._share.has_grant and not self._circuit.is_trying(self._clock())
            if is_unused:
                self._share.give_up()
            return is_unused

    def _wake_up(self) -> None:
        if self._wake is not None:
            self._wake()

    # As a block

    def __enter__(self) -> Self:
        _entered.set((*_entered.get(), self.begin_here()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        call = self._left()
        if call is not None:
            self._judge(call, error)

    async def __aenter__(self) -> Self:
        call = await self.begin()
        if self.settings.timeout is not None:
            call.limit = asyncio.timeout(self.settings.timeout)
            await call.limit.__aenter__()
        _entered.set((*_entered.get(), call))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        call = self._left()
        if call is None:
            return
        if call.limit is None:
            self._judge(call, error)
            return
        try:
            await call.limit.__aexit__(kind, error, trace)
        except TimeoutError as expired:
            call.end(CallOutcome.FAILED)
            raise TimeoutError(
                f"breaker '{self.name}': took longer than {self.settings.timeout:g} s"
            ) from expired
        self._judge(call, error)

    def _left(self) -> ProtectedCall | None:
        """The innermost block of this breaker that was entered here.

        None if it was entered in another task or thread: its place is free again after a while.
        """
        entered = _entered.get()
        for place in range(len(entered) - 1, -1, -1):
            if entered[place].breaker is self:
                _entered.set(entered[:place] + entered[place + 1 :])
                return entered[place]
        return None

    def _judge(self, call: ProtectedCall, error: BaseException | None) -> None:
        """Decide by how a call ended what that says of the dependency."""
        _, job = current_job.get() or (None, None)
        if job is not None and job.overran(call.began):
            call.end(CallOutcome.FAILED)
        elif error is None:
            call.end(CallOutcome.SUCCEEDED)
        elif isinstance(error, Snooze | BreakerOpen) or not isinstance(error, Exception):
            call.end(CallOutcome.NO_VERDICT)
        else:
            call.end(self.outcome_of(self._class_of(error)))

    def outcome_of(self, error_class: ErrorClass) -> CallOutcome:
        """What an error of this class says of the dependency."""
        counts = error_class in self.settings.counts
        return CallOutcome.FAILED if counts else CallOutcome.NO_VERDICT

    def _class_of(self, error: Exception) -> ErrorClass:
        match error:
            case Fail():
                return ErrorClass.PERMANENT_INPUT
            case RetryAfter():
                return ErrorClass.RATE_LIMITED
            case _:
                facts = self._classifier.facts_of(error, datetime.now(UTC))
                return self._classifier.classify(facts).error_class

    # As a decorator

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Protect a function: a call that is not let through raises, or is answered by the fallback."""
        if not inspect.isroutine(function):
            raise ConfigurationError(
                f"breaker '{self.name}' protects a function, not {shown(function)}; of a task, write "
                f"@app.task(breaker={self.name!r}), or put @app.task above it"
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigurationError(
                f"breaker '{self.name}' cannot protect {shown(function)}, a generator function, whose "
                f"call returns before it has begun; use `with breaker:` inside it"
            )
        if inspect.iscoroutinefunction(function):
            return cast("Callable[P, R]", self._around_coroutine(function))
        if self.fallback is not None and inspect.iscoroutinefunction(self.fallback):
            raise ConfigurationError(
                f"breaker '{self.name}': its fallback is a coroutine function, and cannot stand in for "
                f"the plain function {shown(function)}; give a plain one"
            )
        return self._around(function)

    def _around(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def protected(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                call = self.begin_here()
            except BreakerOpen:
                if self.fallback is None:
                    raise
                answer: R = self.fallback(*args, **kwargs)
                return answer
            try:
                value = function(*args, **kwargs)
            except BaseException as error:
                self._judge(call, error)
                raise
            self._judge(call, None)
            return value

        return protected

    def _around_coroutine(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def protected(*args: Any, **kwargs: Any) -> Any:
            try:
                await self.__aenter__()
            except BreakerOpen:
                if self.fallback is None:
                    raise
                answer = self.fallback(*args, **kwargs)
                return await answer if inspect.isawaitable(answer) else answer
            try:
                value = await function(*args, **kwargs)
            except BaseException as error:
                await self.__aexit__(type(error), error, error.__traceback__)
                raise
            await self.__aexit__(None, None, None)
            return value

        return protected


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
