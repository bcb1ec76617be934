"""What goes wrong on the way does not cost the episode, and nothing trains that should not."""

import asyncio
import contextlib
import threading

import pytest

from metagym.errors import ContextOverflowError
from metagym.testing import FaultyBackend

from .conftest import harnesses
from .end_to_end_test import SCRIPTS, scripted

FIVE = ("mini-swe-agent", "claude-code", "codex", "qwen-code", "opencode")


def trained_once(session):
    trained = [t for trace in session.traces for t in set(trace.turn[trace.trainable].tolist())]
    assert len(trained) == len(set(trained))
    return len(trained)


@harnesses(FIVE, in_ci=("mini-swe-agent",))
@pytest.mark.timeout(600)
def test_an_error_of_the_engine(harness, play):
    """A 503 with Retry-After at the second call: the program asks again."""
    played = play(harness, scripted(harness), wrap=lambda b: FaultyBackend(b, "error", at=1))
    session = played.opened.session
    assert "return a + b" in played.calc, played.outcome
    assert session.metrics["errors"] == 1
    assert trained_once(session) == len(SCRIPTS[harness.name])
    assert len([t for t in session.traces if t.kind == "main"]) == 1


@harnesses(FIVE, in_ci=("mini-swe-agent",))
@pytest.mark.timeout(600)
def test_a_conversation_that_does_not_fit(harness, play):
    """A 400 that says so: the program shortens its history or ends; what was said before stays as it was."""
    overflow = ContextOverflowError("400001 tokens leave no room in a context of 400000")
    played = play(harness, scripted(harness), wrap=lambda b: FaultyBackend(b, "error", at=2, error=overflow))
    assert played.outcome.stopped == "", played.outcome
    assert trained_once(played.opened.session) >= 1
    assert played.left.strip() == ""


@harnesses(FIVE, in_ci=("mini-swe-agent",))
@pytest.mark.timeout(600)
def test_a_call_that_hangs(harness, play):
    """Its time is over: it is stopped, and nothing of it is left."""
    played = play(harness, scripted(harness), wrap=lambda b: FaultyBackend(b, "hang", at=1), timeout_s=20)
    assert (played.outcome.stopped, played.outcome.exit_code) == ("time", None)
    assert played.left.strip() == ""
    assert trained_once(played.opened.session) <= 1


@harnesses(FIVE, in_ci=("mini-swe-agent",))
@pytest.mark.timeout(600)
def test_a_hang_that_the_session_ends(harness, play):
    """The session's own limit for a reply: an error that the program can ask again after."""
    played = play(harness, scripted(harness), wrap=lambda b: FaultyBackend(b, "hang", at=1), timeout_s=120,
                  session={"timeout_s": 2.0})  # fmt: skip
    assert "return a + b" in played.calc, played.outcome
    assert trained_once(played.opened.session) == len(SCRIPTS[harness.name])


@harnesses(FIVE, in_ci=("mini-swe-agent",))
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["disconnect", "500"])
def test_an_answer_that_is_lost_on_the_way(harness, play, between, how):
    """The first answer of the main conversation is cut off, or a 500 comes in its place: the program asks
    again, and one of the two answers trains."""
    between.how = how
    played = play(harness, scripted(harness), between=between)
    session = played.opened.session
    told = (played.outcome, session.metrics)
    assert between.faults == 1
    assert "return a + b" in played.calc, told
    assert trained_once(session) == len(SCRIPTS[harness.name]), told


@harnesses(FIVE, in_ci=("mini-swe-agent",))
@pytest.mark.timeout(600)
def test_a_budget_of_turns(harness, play):
    """The second turn is refused for good: the program ends, or is ended."""
    played = play(harness, scripted(harness), session={"max_turns": 2})
    assert played.opened.session.ended is not None
    assert played.outcome.stopped in ("", "budget")
    assert played.left.strip() == ""
    assert trained_once(played.opened.session) <= 2


WHY = b'{"error": {"message": "broken", "type": "server_error"}}'
REFUSED = b"HTTP/1.1 500 Internal Server Error\r\ncontent-type: application/json\r\nconnection: close\r\n"
REFUSED += b"content-length: %d\r\n\r\n%s" % (len(WHY), WHY)


class Between:
    """Forwards one unix socket to another. The first answer of the main conversation does not get through."""

    def __init__(self):
        self.how, self.faults = "disconnect", 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, listen: str, to: str) -> None:
        ready = threading.Event()

        async def connected(reader, writer):
            there, back = await asyncio.open_unix_connection(to)
            asked = bytearray()

            async def up():
                while data := await reader.read(1 << 16):
                    asked.extend(data)
                    back.write(data)
                    await back.drain()
                back.write_eof()

            async def answer():
                """What comes next; of the main conversation's first answers as much as comes at once."""
                data = await there.read(1 << 16)
                while data and not self.faults and b"tools" in asked and b"I look" not in data:
                    try:
                        more = await asyncio.wait_for(there.read(1 << 16), 0.5)
                    except TimeoutError:
                        break
                    if not more:
                        break
                    data += more
                return data

            async def down():
                while data := await answer():
                    if not self.faults and b"I look" in data and b"tools" in asked:
                        self.faults += 1
                        writer.write(data[:40] if self.how == "disconnect" else REFUSED)
                        await writer.drain()
                        if self.how == "disconnect":
                            writer.transport.abort()
                        writer.close()
                        return
                    writer.write(data)
                    await writer.drain()

            with contextlib.suppress(ConnectionError, OSError):
                await asyncio.gather(up(), down())
            writer.close()
            back.close()

        async def main():
            async with await asyncio.start_unix_server(connected, listen):
                ready.set()
                await asyncio.Event().wait()

        def run():
            self._loop = asyncio.new_event_loop()
            self._task = self._loop.create_task(main())
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._task)
            for task in asyncio.all_tasks(self._loop):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    self._loop.run_until_complete(task)
            self._loop.close()

        self._thread = threading.Thread(target=run)
        self._thread.start()
        ready.wait()

    def close(self):
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(10)


@pytest.fixture
def between():
    made = Between()
    yield made
    made.close()
