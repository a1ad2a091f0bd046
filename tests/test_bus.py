"""The connection itself, over a real NATS server."""

import asyncio
import logging

import pytest
from nats.aio.msg import Msg

from services.bus import Bus, MessageTooLarge, NoListener, NoReply, NotConnected
from services.settings import SettingsError
from tests.nats import NatsServer, eventually, nats_server


@pytest.mark.parametrize("url", ["", "localhost:4222", "http://x", "nats://", "nats://h:99999", "nats://h:x"])
def test_a_url_that_names_no_server_is_a_settings_error(url: str) -> None:
    with pytest.raises(SettingsError, match="SAMOVAR_NATS_URL"):
        Bus(url, "test")


def test_the_address_for_people_has_no_password() -> None:
    assert Bus("nats://me:secret@host:1234", "test").address == "host:1234"


async def test_requests_say_why_they_failed() -> None:
    with nats_server(max_payload=2048) as server:
        silent = asyncio.Event()

        async def never(msg: Msg) -> None:
            silent.set()

        bus = Bus(server.url, "test")
        with pytest.raises(NotConnected):
            await bus.request("x", b"", 1)
        assert not await bus.publish("x", b"")
        assert bus.counters.dropped_publishes == 1
        bus.subscribe("silent", never)
        await bus.start()
        await asyncio.wait_for(bus.wait_connected(), 10)
        with pytest.raises(NoListener):
            await bus.request("nobody", b"", 1)
        with pytest.raises(NoReply):
            await bus.request("silent", b"", 0.05)
        assert silent.is_set()
        await bus.close()


@pytest.mark.parametrize("headers", [None, {"traceparent": "0" * 55}])
async def test_the_largest_message_passes_and_one_byte_more_does_not(headers: dict[str, str] | None) -> None:
    with nats_server(max_payload=2048) as server:
        got: list[bytes] = []

        async def take(msg: Msg) -> None:
            got.append(msg.data)

        bus = Bus(server.url, "test")
        bus.subscribe("x", take)
        await bus.start()
        await asyncio.wait_for(bus.wait_connected(), 10)
        # "NATS/1.0\r\n", "traceparent: ...\r\n" and "\r\n" count too.
        size = 2048 - (10 + 13 + 55 + 2 + 2 if headers else 0)
        with pytest.raises(MessageTooLarge) as caught:
            await bus.publish("x", b"a" * (size + 1), headers)
        assert (caught.value.size, caught.value.limit) == (2049, 2048)
        assert await bus.publish("x", b"a" * size, headers)
        await eventually(lambda: got == [b"a" * size])
        assert bus.counters.reconnects == 0
        await bus.close()


async def test_a_connection_that_nats_py_gave_up_is_made_anew() -> None:
    with nats_server() as server:
        got: list[bytes] = []

        async def take(msg: Msg) -> None:
            got.append(msg.data)

        connects: list[None] = []
        bus = Bus(server.url, "test", lambda: connects.append(None))
        bus.subscribe("x", take)
        await bus.start()
        await asyncio.wait_for(bus.wait_connected(), 10)
        client = bus._client
        assert client is not None
        # The server answers too large a message with -ERR and closes; nats-py then stays closed.
        client._transport.write(b"PUB x 100000000\r\n")  # type: ignore[union-attr]
        await eventually(lambda: client.is_closed)
        await eventually(lambda: len(connects) == 2 and bus.connected)
        await bus.publish("x", b"again")
        await eventually(lambda: got == [b"again"])
        await bus.close()


async def test_a_handler_that_fails_is_logged_and_the_next_message_handled(caplog: pytest.LogCaptureFixture) -> None:
    with nats_server() as server:
        got: list[bytes] = []

        async def take(msg: Msg) -> None:
            if msg.data == b"bad":
                raise KeyError("ours")
            got.append(msg.data)

        bus = Bus(server.url, "test")
        bus.subscribe("x", take)
        await bus.start()
        await asyncio.wait_for(bus.wait_connected(), 10)
        await bus.publish("x", b"bad")
        await bus.publish("x", b"good")
        await eventually(lambda: got == [b"good"])
        assert bus.counters.errors == 1
        assert "a NATS handler failed" in caplog.text
        await bus.close()


async def test_an_outage_is_logged_once_and_ends_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    server = NatsServer().start()
    bus = Bus(server.url, "test")
    await bus.start()
    await asyncio.wait_for(bus.wait_connected(), 10)
    server.stop()
    await eventually(lambda: not bus.connected)
    await eventually(lambda: "still trying" in caplog.text)
    server.start()
    await asyncio.wait_for(bus.wait_connected(), 10)
    assert bus.connected
    assert bus.counters.reconnects == 1
    assert caplog.text.count("still trying") <= 2
    await bus.close()
    server.close()


async def test_close_while_nats_is_away_is_quick() -> None:
    server = NatsServer()
    for start_first in (False, True):
        bus = Bus(server.url, "test")
        if start_first:
            server.start()
            await bus.start()
            await asyncio.wait_for(bus.wait_connected(), 10)
            server.stop()
        else:
            await bus.start()
        await asyncio.sleep(0)
        await asyncio.wait_for(bus.close(), 4)
    server.close()
