from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.transfer.layouts import layout
from workers.transfer.messages import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    MAX_READ_BLOCKS,
    Challenge,
    Check,
    Data,
    Generations,
    Hello,
    MemoryFacts,
    Message,
    MessageError,
    Pair,
    PeerFacts,
    Read,
    Refused,
    Trailer,
    Welcome,
    encode,
    frame_reader,
    hello_mac,
    transfer_key,
    welcome_mac,
)

NONCE = bytes(range(32))
FACTS = PeerFacts(
    rank=0,
    layout=layout(),
    num_blocks=8,
    device="cpu",
    has_generations=True,
    transports=("memory", "sockets"),
    memory=MemoryFacts(
        machine="m",
        pid=1,
        pool_address=1 << 46,
        generations_address=1 << 45,
        proof_address=1 << 44,
        proof=NONCE,
    ),
)
FULL = tuple(range(MAX_READ_BLOCKS))
MESSAGES: list[Message] = [
    Challenge(nonce=NONCE),
    Hello(nonce=NONCE, mac=NONCE),
    Welcome(mac=NONCE, facts=FACTS),
    Read(
        number=1,
        blocks=tuple((1 << 31) - 1 - block for block in FULL),
        generations=tuple((1 << 62) - 1 - block for block in FULL),
        offset=5,
        num_bytes=6,
        has_checksums=True,
    ),
    Data(number=(1 << 32) - 1),
    Trailer(number=2, is_current=False, checksums=FULL),
    Refused(number=3, reason="stale", message="x" * 500),
    Check(number=4, blocks=FULL),
    Generations(number=5, generations=FULL),
    Pair(host="10.0.0.1", port=65535, timeout_s=5.0),
]


def test_every_message_comes_back_from_any_cut_of_the_stream() -> None:
    stream = b"".join(encode(message) for message in MESSAGES)
    for step in (1, 3, 1000, len(stream)):
        reader = frame_reader()
        reader.max_frame_bytes = MAX_FRAME_BYTES
        found = [
            message
            for start in range(0, len(stream), step)
            for message in reader.feed(stream[start : start + step])
        ]
        assert found == MESSAGES
        assert not reader.is_inside_frame


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_no_frame_is_larger_than_allowed(message: Message) -> None:
    limit = MAX_GREETING_BYTES if isinstance(message, Challenge | Hello | Welcome) else MAX_FRAME_BYTES
    assert len(encode(message)) < limit


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_an_error_or_waits_for_more(data: bytes) -> None:
    reader = frame_reader()
    try:
        list(reader.feed(data))
    except MessageError:
        return
    assert reader.is_inside_frame or data == b""


@settings(deadline=None)
@given(st.sampled_from(MESSAGES), st.integers(0, 10**6), st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_another_valid_message(
    message: Message, place: int, value: int
) -> None:
    frame = bytearray(encode(message))
    frame[5 + place % (len(frame) - 5)] = value
    reader = frame_reader()
    reader.max_frame_bytes = MAX_FRAME_BYTES
    try:
        [found] = reader.feed(bytes(frame))
    except MessageError:
        return
    assert type(found) is type(message)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (b"\xff\xff\xff\x7f\x03", "a frame of 2147483647 bytes; allowed are 1 to 4096"),
        (b"\0\0\0\0\x03", "a frame of 0 bytes"),
        (b"\x01\0\0\0\x63", "a frame of unknown kind 99"),
        (b"\x02\0\0\0\x03\xc0", "a malformed Read frame"),
    ],
)
def test_bad_frames_are_named(frame: bytes, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        list(frame_reader().feed(frame))


@pytest.mark.parametrize(
    "changed",
    [
        {"blocks": ()},
        {"blocks": (-1,)},
        {"blocks": (1 << 31,)},
        {"blocks": tuple(range(MAX_READ_BLOCKS + 1))},
        {"num_bytes": 0},
        {"num_bytes": 1 << 40},
        {"offset": -1},
        {"number": 1 << 32},
    ],
)
def test_requests_out_of_bounds_are_malformed(changed: dict[str, object]) -> None:
    good = {
        "number": 1,
        "blocks": (0,),
        "generations": (0,),
        "offset": 0,
        "num_bytes": 1,
        "has_checksums": False,
    }
    frame = encode(Read(**{**good, **changed}))  # type: ignore[arg-type]
    reader = frame_reader()
    reader.max_frame_bytes = MAX_FRAME_BYTES
    with pytest.raises(MessageError, match="malformed Read"):
        list(reader.feed(frame))


def test_a_layout_that_no_model_has_is_malformed() -> None:
    good = encode(Welcome(mac=NONCE, facts=FACTS))
    bad = good.replace(b"\xacnum_kv_heads\x03", b"\xacnum_kv_heads\x00")
    assert bad != good
    with pytest.raises(MessageError, match="num_kv_heads 0 is not between 1 and 4096"):
        list(frame_reader().feed(bad))


def test_macs_are_fixed() -> None:
    key = transfer_key(b"secret")
    other = bytes(reversed(NONCE))
    assert hello_mac(key, NONCE, other).hex() == HELLO_MAC
    assert welcome_mac(key, NONCE, other, FACTS) != welcome_mac(key, other, NONCE, FACTS)
    assert hello_mac(transfer_key(b"secreT"), NONCE, other).hex() != HELLO_MAC
    with pytest.raises(ValueError, match="secret is empty"):
        transfer_key(b"")


HELLO_MAC = "3eea2ede65d06d780d3d52d153a5eecf9b4c4871bfdd0a3a80ff0f0b4cebdaa8"
