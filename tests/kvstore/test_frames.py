import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.protocol import codec, kv
from services.protocol.frames import FrameError, FrameReader, frame

CALLS = [kv.Stat(call=1), kv.Lookup(call=2, keys=(b"a" * 32,) * 50), kv.Drop(call=3), kv.Release(call=4, lease=7)]


@given(st.lists(st.integers(1, 400), min_size=1))
def test_frames_survive_any_cut(sizes: list[int]) -> None:
    stream = b"".join(map(frame, CALLS))
    reader, got, position = FrameReader(), [], 0
    for size in [*sizes, len(stream)]:
        got += [codec.kv_call.decode(payload) for payload in reader.feed(stream[position : position + size])]
        position += size
    assert got == CALLS


def test_an_oversized_header_is_refused_before_its_payload_arrives_and_behind_good_frames() -> None:
    reader = FrameReader()
    payloads = reader.feed(frame(CALLS[0]) + (kv.MAX_FRAME + 1).to_bytes(4, "little"))
    assert codec.kv_call.decode(next(payloads)) == CALLS[0]
    with pytest.raises(FrameError, match="over the limit"):
        next(payloads)


def test_the_largest_frame_passes() -> None:
    reader = FrameReader()
    payload = bytes(kv.MAX_FRAME)
    (got,) = reader.feed(len(payload).to_bytes(4, "little") + payload)
    assert got == payload


def test_an_oversized_message_is_not_framed() -> None:
    with pytest.raises(FrameError, match="over the limit"):
        frame(kv.Lookup(call=1, keys=(bytes(kv.MAX_FRAME),)))
