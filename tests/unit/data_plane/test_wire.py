from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data_plane.fakes import info, request
from workers.data_plane.wire import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Abort,
    Accepted,
    Challenge,
    Chunks,
    CloseLease,
    Events,
    Goodbye,
    Hello,
    KVPool,
    LeaseOffer,
    LeaseRefused,
    Message,
    OpenLease,
    Ping,
    Pong,
    Redirect,
    Refused,
    RenewLeases,
    Resync,
    Snapshot,
    Stats,
    Submit,
    Welcome,
    WireError,
    encode,
    frame_reader,
    hello_mac,
    welcome_mac,
)
from workers.hashing import BlockHash
from workers.types import (
    BeamParams,
    BlockEvent,
    BlockEventKind,
    EarlyStopping,
    FinishReason,
    GenerateRequest,
    Grammar,
    GrammarKind,
    GroupId,
    GroupStats,
    KVSource,
    RequestId,
    SamplingParams,
    TokenChunk,
    TokenLogprob,
)

FULL_REQUEST = GenerateRequest(
    grammar=Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type":"object"}'),
    request_id=RequestId("r1"),
    prompt_token_ids=(0, 1, 151_935),
    sampling=SamplingParams(
        max_tokens=5,
        temperature=0.0,
        logit_bias=((7, -100.0), (8, 0.5)),
        seed=-(2**63),
        stop_token_ids=(2, 3),
        num_logprobs=0,
    ),
    num_choices=2,
    beam=BeamParams(width=4, length_penalty=-0.5, early_stopping=EarlyStopping.NEVER),
    cache_salt="tenant é",
    priority=-3,
    kv_source=KVSource(group_id=GroupId("g1"), host="10.0.0.7", port=40_123, transfer_id="0f" * 16),
    transfer_id="a7" * 16,
)
FULL_CHUNK = TokenChunk(
    request_id=RequestId("r1"),
    choice=1,
    token_ids=(9,),
    logprobs=(TokenLogprob(token_id=9, logprob=-0.1, top=((9, -0.1), (4, -9999.0))),),
    prompt_logprobs=(None, TokenLogprob(token_id=1, logprob=-1.5)),
    num_cached_tokens=16,
    finish_reason=FinishReason.STOP,
    stop_token_id=9,
    score=-0.25,
)
ONE_OF_EACH: list[Message] = [
    Challenge(nonce=b"n" * 32),
    Hello(client_id="router", nonce=b"m" * 32, mac=b"x" * 32, subscribes=True),
    Welcome(info=info(), mac=b"y" * 32),
    Snapshot(number=7, block_hashes=(BlockHash(b"h" * 16),), is_last=True),
    Events(events=(BlockEvent(number=8, kind=BlockEventKind.REMOVED),)),
    Stats(stats=GroupStats(num_running=3, step_seconds=0.02)),
    Chunks(chunks=(FULL_CHUNK,)),
    Submit(client_id="router", request=FULL_REQUEST),
    Accepted(request_id=RequestId("r1")),
    Refused(request_id=RequestId("r1"), code="aborted", message="too late"),
    Abort(request_id=RequestId("r1")),
    Ping(),
    Pong(),
    Goodbye(reason="rank 1 died"),
    Resync(),
    Redirect(request_id=RequestId("r1"), source=FULL_REQUEST.kv_source),
    OpenLease(number=3, hashes=(BlockHash(b"h" * 16),), transfer_id="0f" * 16),
    RenewLeases(numbers=(3, 4)),
    CloseLease(number=3),
    KVPool(layout={"model_hash": "m", "block_size": 16}, endpoints=(("127.0.0.1", 40_000),)),
    LeaseOffer(number=3, first=7, blocks=(5, 9), generations=(1, 2**50), is_complete=False),
    LeaseRefused(number=3, reason="too many"),
]


def test_every_kind_of_message_arrives_as_it_was_sent() -> None:
    data = b"".join(encode(message) for message in ONE_OF_EACH)
    assert list(frame_reader(MAX_FRAME_BYTES).feed(data)) == ONE_OF_EACH


def test_frame_layout() -> None:
    # Golden: routers and groups of two builds talk to each other during a rolling update.
    assert encode(Abort(request_id=RequestId("r1"))) == b"\x10\x00\x00\x00\x0a\x81\xaarequest_id\xa2r1"
    assert encode(Ping()) == b"\x02\x00\x00\x00\x0b\x80"


def test_redirect_layout() -> None:
    nowhere = b"\x18\x00\x00\x00\x0f\x82\xaarequest_id\xa2r1\xa6source\xc0"
    assert encode(Redirect(request_id=RequestId("r1"), source=None)) == nowhere
    (read,) = frame_reader(100).feed(nowhere)
    assert read == Redirect(request_id=RequestId("r1"), source=None)
    for broken in (b"\x81\xaarequest_id\xa2r1", b"\x82\xaarequest_id\xa2r1\xa6source\x01"):
        with pytest.raises(WireError, match="malformed Redirect"):
            PROTOCOL.decode(15, broken)


def test_a_request_of_a_router_that_knows_no_transfers_is_understood() -> None:
    body = msgspec.to_builtins(Submit(client_id="router", request=request("r1", range(3))))
    del body["request"]["kv_source"], body["request"]["transfer_id"]
    assert PROTOCOL.decode(7, msgspec.msgpack.encode(body)) == Submit(
        client_id="router", request=request("r1", range(3))
    )


@given(
    source=st.fixed_dictionaries(
        {},
        optional={
            "group_id": st.text(max_size=3) | st.integers(),
            "host": st.text(max_size=3) | st.none(),
            "port": st.integers(-(2**70), 2**70) | st.floats(),
            "transfer_id": st.text(max_size=3) | st.binary(max_size=3) | st.none(),
        },
    )
)
@settings(max_examples=200, deadline=None)
def test_a_source_of_odd_values_is_read_as_it_is_or_a_wire_error(source: dict[str, object]) -> None:
    body = msgspec.to_builtins(Submit(client_id="router", request=request("r1", range(3))))
    body["request"]["kv_source"] = source
    try:
        data = msgspec.msgpack.encode(body)
    except OverflowError:  # more than 64 bits cannot be sent at all
        return
    with suppress(WireError):
        message = PROTOCOL.decode(7, data)
        assert isinstance(message, Submit)
        assert isinstance(message.request.kv_source, KVSource)


@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=200))
@settings(max_examples=50, deadline=None)
def test_any_cut_of_the_stream_gives_the_same_messages(cuts: list[int]) -> None:
    data = b"".join(encode(message) for message in ONE_OF_EACH)
    reader, seen, start = frame_reader(MAX_FRAME_BYTES), [], 0
    for size in [*cuts, len(data)]:
        seen += list(reader.feed(data[start : start + size]))
        start += size
    assert seen == ONE_OF_EACH


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x00\x00\x00\x00", "frame of 0 bytes"),
        (b"GET / HTTP/1.1\r\n\r\n", "frame of 542393671 bytes"),
        (b"\x01\x00\x00\x00\xff", "unknown kind 255"),
        (b"\x02\x00\x00\x00\x0a\xc1", "malformed Abort"),
        (b"\x02\x00\x00\x00\x0a\x80", "malformed Abort"),  # a field is missing
        (b"\x02\x00\x00\x00\x06\x93", "malformed Chunks"),  # cut in the middle
        (b"\x10\x00\x00\x00\x0a\x81\xaarequest_id\xa2\xff\xff", "malformed Abort"),  # not UTF-8
    ],
)
def test_garbage_is_a_wire_error(data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message):
        list(frame_reader(MAX_FRAME_BYTES).feed(data))


@given(data=st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_end_in_a_message_or_a_wire_error(data: bytes) -> None:
    reader = frame_reader(1000)
    try:
        for message in reader.feed(data):
            assert isinstance(message, Message)
    except WireError:
        pass


@given(kind=st.integers(0, 25), body=st.binary(max_size=60))
@settings(max_examples=500, deadline=None)
def test_random_bodies_end_in_a_message_or_a_wire_error(kind: int, body: bytes) -> None:
    frame = (len(body) + 1).to_bytes(4, "little") + bytes([kind]) + body
    with suppress(WireError):
        assert len(list(frame_reader(1000).feed(frame))) == 1


def test_deep_nesting_is_a_wire_error() -> None:
    body = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"  # an unknown field that must be skipped
    frame = (len(body) + 1).to_bytes(4, "little") + b"\x0a" + body
    with pytest.raises(WireError):
        list(frame_reader(MAX_FRAME_BYTES).feed(frame))


def test_oversized_frames_are_neither_sent_nor_awaited() -> None:
    with pytest.raises(WireError, match="the limit is 100"):
        encode(Submit(client_id="r", request=request("r", range(200))), max_frame_bytes=100)
    reader = frame_reader(100)
    with pytest.raises(WireError, match="frame of 101 bytes"):
        list(reader.feed((101).to_bytes(4, "little")))  # before any of its body has come


def test_what_msgpack_cannot_hold_is_a_wire_error() -> None:
    salted = GenerateRequest(
        request_id=RequestId("r"),
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=1),
        cache_salt="\ud800",
    )
    with pytest.raises(WireError, match="cannot be written"):
        encode(Submit(client_id="c", request=salted))


def test_macs_depend_on_every_part_and_on_the_side() -> None:
    parts = (b"secret", b"server", b"client", "name")
    macs = {
        hello_mac(*parts),
        welcome_mac(*parts),
        hello_mac(b"other", b"server", b"client", "name"),
        hello_mac(b"secret", b"serverc", b"lient", "name"),
        hello_mac(b"secret", b"server", b"client", "nama"),
    }
    assert len(macs) == 5
    assert hello_mac(*parts) == hello_mac(*parts)
    with pytest.raises(ValueError, match="secret is empty"):
        hello_mac(b"", b"server", b"client", "name")
