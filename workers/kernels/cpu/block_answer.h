// An answer of the KV transfer, as workers/transfer/messages.py has it: the frame DATA, blocks, the frame TRAILER.
#pragma once
#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstring>

#include "block_stream.h"

// Of the owner. As in workers/kernels/block_stream.py.
struct BlockAnswer {
  // A call of the system sends whole pieces: one that ends elsewhere ends with a short segment, which costs as much as a
  // long one and more.
  static constexpr long SEND_BYTES = 256 << 10, SEND_PIECE_BYTES = 2 << 20;

  BlockStream* stream;
  const char* head;  // the frame DATA
  long head_bytes;
  const int64_t* generations;  // of the pool, live; or null: not compared
  const int64_t* wanted;       // (count), of the blocks
  long number;                 // of the request
  char* trailer;               // room for the frame: 48 bytes and 5 for each checksum
  long trailer_bytes;
  long done;  // bytes of both frames that have passed

  // Sends up to `limit` bytes, or what the system takes; -errno when that is nothing.
  long send(int socket, long limit) {
    long passed = 0;
    while (!is_done() && passed < limit) {
      iovec parts[1 + BlockStream::MAX_PARTS];
      msghdr message{};
      message.msg_iov = parts;
      const long frame = std::max(head_bytes - done, 0L);
      if (frame) parts[message.msg_iovlen++] = {(char*)head + done, size_t(frame)};
      if (!stream->is_done()) stream->next(parts, message, SEND_BYTES, SEND_PIECE_BYTES);
      else if (!frame) add_trailer(parts, message);
      const long sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return passed ? passed : -errno;
      if (stream->is_done()) done += sent;
      else done += std::min(sent, frame), stream->advance(std::max(sent - frame, 0L));
      passed += sent;
    }
    return passed;
  }

 private:
  bool is_done() const { return trailer_bytes && done == head_bytes + trailer_bytes; }
  void add_trailer(iovec* parts, msghdr& message) {
    if (!trailer_bytes) trailer_bytes = make_trailer();
    const long skip = done - head_bytes;
    parts[message.msg_iovlen++] = {trailer + skip, size_t(trailer_bytes - skip)};
  }
  // Asked when all bytes have left the pool and are summed.
  bool is_current() const {
    std::atomic_thread_fence(std::memory_order_acquire);
    if (generations)
      for (long i = 0; i < stream->count; i++)
        if (__atomic_load_n(&generations[stream->blocks[i]], __ATOMIC_RELAXED) != wanted[i]) return false;
    return true;
  }
  // In msgpack: {"number": uint32, "is_current": bool, "checksums": [uint32, ...]}.
  long make_trailer() const {
    char* at = trailer + 4;
    const auto text = [&](const char* bytes, long n) { std::memcpy(at, bytes, size_t(n)), at += n; };
    const auto big = [&](uint64_t value, int n) {
      while (n--) *at++ = char(value >> 8 * n);
    };
    text("\x05" "\x83\xa6number\xce", 10), big(uint64_t(number), 4);
    text("\xaais_current", 11), *at++ = is_current() ? '\xc3' : '\xc2';
    const long sums = stream->checksums ? stream->count : 0;
    text("\xa9" "checksums\xdc", 11), big(uint64_t(sums), 2);
    for (long i = 0; i < sums; i++) *at++ = '\xce', big(stream->checksums[i], 4);
    const uint32_t length = uint32_t(at - trailer - 4);
    for (int i = 0; i < 4; i++) trailer[i] = char(length >> 8 * i);
    return at - trailer;
  }
};

// Of the reader, for one answer: each frame and each piece may take `timeout_s`. It waits awake until that was in vain
// once: to wake a reader that sleeps takes the owner's time, and each of its segments of 64 KiB may find it asleep.
class BlockReceiver {
 public:
  static constexpr long RECEIVE_BYTES = 128 << 10;  // what stays in the first-level caches until it is summed
  static constexpr std::chrono::microseconds AWAKE{100};

  BlockReceiver(int socket, double timeout_s) : socket(socket), timeout(timeout_s) {
    int cpu = -1;
    socklen_t size = sizeof(cpu);
    // Not where the bytes come from this very core: the owner waits for it.
    is_awake = getsockopt(socket, SOL_SOCKET, SO_INCOMING_CPU, &cpu, &size) == 0 && cpu != sched_getcpu();
  }

  // Fills the pieces; 0, or -errno, with 0 bytes left to read ENOTCONN.
  long blocks(BlockStream& stream) {
    for (begin(); !stream.is_done();) {
      iovec parts[BlockStream::MAX_PARTS];
      msghdr message{};
      message.msg_iov = parts;
      stream.next(parts, message, RECEIVE_BYTES, RECEIVE_BYTES);
      const long block = stream.block(), got = receive(message);
      if (got < 0) return got;
      stream.advance(got);
      if (stream.block() != block) begin();
      else if (is_late()) return -ETIMEDOUT;
    }
    return 0;
  }
  // A frame of up to `room` bytes; how many it has, or as above. -EMSGSIZE of a longer one: its length alone is there then.
  long frame_into(char* frame, long room) {
    const long head = fill(frame, 5);
    if (head < 0) return head;
    uint32_t length = 0;
    for (int i = 0; i < 4; i++) length |= uint32_t(uint8_t(frame[i])) << 8 * i;
    if (length < 1 || long(length) > room - 4) return -EMSGSIZE;
    const long body = fill(frame + 5, long(length) - 1);
    return body < 0 ? body : 4 + long(length);
  }

 private:
  using Clock = std::chrono::steady_clock;
  const int socket;
  const std::chrono::duration<double> timeout;
  bool is_awake;
  Clock::time_point begun;

  void begin() { begun = Clock::now(); }
  bool is_late() const { return Clock::now() - begun > timeout; }
  long fill(char* target, long n) {
    for (begin(); n;) {
      iovec part{target, size_t(n)};
      msghdr message{};
      message.msg_iov = &part, message.msg_iovlen = 1;
      const long got = receive(message);
      if (got < 0) return got;
      target += got, n -= got;
      if (n && is_late()) return -ETIMEDOUT;
    }
    return 0;
  }
  // Bytes, 0 after a signal: time goes on, and the socket's own timeout begins anew; or -errno.
  long receive(msghdr& message) {
    long got = recvmsg(socket, &message, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN && is_awake) {
      const auto until = Clock::now() + AWAKE;
      do {
        for (int i = 0; i < 16; i++) __builtin_ia32_pause();
        got = recvmsg(socket, &message, MSG_DONTWAIT);
      } while (got < 0 && errno == EAGAIN && (is_awake = Clock::now() < until));
    }
    if (got < 0 && errno == EAGAIN) got = recvmsg(socket, &message, 0);
    if (got == 0) return -ENOTCONN;
    if (got < 0) return errno == EINTR ? 0 : -errno;
    return got;
  }
};

// Takes the frame `head`, fills the pieces and takes the frame behind them; or only what comes instead of `head`. How many
// bytes the frame has that is in `frame` then, or as above.
inline long receive_answer(BlockStream& stream, int socket, double timeout_s, const char* head, long head_bytes, char* frame, long room) {
  BlockReceiver receiver(socket, timeout_s);
  const long found = receiver.frame_into(frame, room);
  if (found != head_bytes || std::memcmp(frame, head, size_t(head_bytes))) return found;
  const long failure = receiver.blocks(stream);
  return failure ? failure : receiver.frame_into(frame, room);
}
