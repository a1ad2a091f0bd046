"""Keep-alives of a stream hang on one timer, which wakes the stream's reader."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from services.gateway.reminder import Reminder
from services.gateway.token_stream import Chunk, TokenStream
from services.protocol.generate import GenerateRequest, SamplingParams, TokenDelta


@dataclass
class Timer:
    at: float
    call: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class Clock:
    """A loop whose time the test sets."""

    now: float = 100.0
    timers: list[Timer] = field(default_factory=list)
    set: int = 0
    """Timers so far."""

    def time(self) -> float:
        return self.now

    def call_at(self, at: float, call: Callable[[], None]) -> Timer:
        self.set += 1
        self.timers.append(Timer(at, call))
        return self.timers[-1]

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        return self.call_at(self.now + seconds, call)

    def until(self, now: float) -> None:
        while ready := [timer for timer in self.timers if timer.at <= now and not timer.cancelled]:
            first = min(ready, key=lambda timer: timer.at)
            self.timers.remove(first)
            self.now = first.at
            first.call()
        self.now = now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "get_running_loop", lambda: clock)
    return clock


def test_silence_is_noticed_again_and_again(clock: Clock) -> None:
    woken: list[float] = []
    reminder = Reminder(5, lambda: (woken.append(clock.now), reminder.said())[0])
    clock.until(117)
    assert woken == [105, 110, 115]
    assert not reminder.due
    reminder.close()
    clock.until(200)
    assert woken == [105, 110, 115]


def test_what_is_said_puts_it_off_without_a_new_timer(clock: Clock) -> None:
    woken: list[float] = []
    reminder = Reminder(5, lambda: woken.append(clock.now))
    for _ in range(1000):
        clock.until(clock.now + 0.01)
        reminder.said()
    assert not woken
    assert clock.set <= 4  # in 10 s
    clock.until(clock.now + 4.9)
    assert not woken
    clock.until(clock.now + 0.2)
    assert woken == [pytest.approx(115)]
    assert reminder.due


def _stream() -> TokenStream:
    request = GenerateRequest(request_id="r", gateway_id="g", prompt=b"", sampling=SamplingParams(max_tokens=9))
    return TokenStream(request, None, lambda _: None)


def test_a_reader_that_is_woken_loses_nothing() -> None:
    async def run() -> None:
        stream = _stream()
        reading = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        stream.wake()
        assert await reading == Chunk([])
        stream.accept(TokenDelta("r", 0, (1, 2)), 0.0)
        stream.wake()
        assert await stream.next() == Chunk([1, 2])
        stream.accept(TokenDelta("r", 2, (3,)), 0.0)
        assert await stream.next() == Chunk([3])
        stream.wake()  # while nobody reads
        assert await stream.next() == Chunk([])

    asyncio.run(run())
