// Blocks of a pool on their way through a stream socket, one piece of each, without a copy of our own. Bytes are summed
// right after the system has copied them: they are in the cache then, so that a checksum reads no memory.
#pragma once
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>

// As in workers/kernels/block_stream.py.
struct BlockStream {
  static constexpr long PAGE = 4096, MAX_PARTS = 64;
  // A call of the system sends whole pieces: one that ends elsewhere ends with a short segment, which costs as much as a
  // long one and more. It receives what stays in the first-level caches until it is summed.
  static constexpr long SEND_BYTES = 256 << 10, SEND_PIECE_BYTES = 2 << 20, RECEIVE_BYTES = 128 << 10;

  char* first;  // the piece of block 0
  long stride;  // from block to block
  const int64_t* blocks;
  long count;
  long num_bytes;  // of a piece
  uint64_t* sums;  // (count, num_bytes / PAGE): the 64-bit words of every whole page; or null
  long done;       // bytes that have passed

  // Sends up to `limit` bytes, or what the system takes; -errno when that is nothing.
  long send(int socket, long limit) {
    const long before = done;
    while (done < whole() && done - before < limit) {
      iovec parts[MAX_PARTS];
      msghdr message = next(parts, SEND_BYTES, SEND_PIECE_BYTES);
      const long sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return done > before ? done - before : -errno;
      advance(sent);
    }
    return done - before;
  }

  // Fills all pieces, each in `timeout_s`; 0, or -errno, with 0 bytes left to read ENOTCONN.
  long receive(int socket, double timeout_s) {
    using Clock = std::chrono::steady_clock;
    const std::chrono::duration<double> timeout(timeout_s);
    for (auto begun = Clock::now(); done < whole();) {
      iovec parts[MAX_PARTS];
      msghdr message = next(parts, RECEIVE_BYTES, RECEIVE_BYTES);
      const long block = done / num_bytes, got = recvmsg(socket, &message, 0);
      if (got == 0) return -ENOTCONN;
      if (got < 0 && errno != EINTR) return -errno;  // a signal: time goes on, and the socket's own timeout begins anew
      if (got > 0) advance(got);
      if (done / num_bytes != block) begun = Clock::now();
      else if (Clock::now() - begun > timeout) return -ETIMEDOUT;
    }
    return 0;
  }

 private:
  long whole() const { return count * num_bytes; }
  char* piece(long i) const { return first + blocks[i] * stride; }
  // The bytes that come next: pieces, or `most` bytes of each, until they are `enough`.
  msghdr next(iovec* parts, long enough, long most) const {
    msghdr message{};
    message.msg_iov = parts;
    long bytes = 0, skip = done % num_bytes;
    for (long i = done / num_bytes; i < count && bytes < enough && long(message.msg_iovlen) < MAX_PARTS; i++, skip = 0) {
      const long part = std::min(most, num_bytes - skip);
      parts[message.msg_iovlen++] = {piece(i) + skip, size_t(part)};
      bytes += part;
    }
    return message;
  }
  void advance(long bytes) {
    const long from = done, to = done += bytes;
    if (!sums || !bytes) return;
    for (long i = from / num_bytes; i <= (to - 1) / num_bytes; i++) {
      const long end = std::min(to - i * num_bytes, num_bytes) / PAGE;
      for (long page = std::max(from - i * num_bytes, 0L) / PAGE; page < end; page++)
        sums[i * (num_bytes / PAGE) + page] = sum((const uint64_t*)(piece(i) + page * PAGE));
    }
  }
  static uint64_t sum(const uint64_t* words) {
    typedef uint64_t Vector __attribute__((vector_size(64), aligned(1), may_alias));
    const Vector* at = (const Vector*)words;
    Vector total[4] = {at[0], at[1], at[2], at[3]};
    for (int i = 4; i < PAGE / 64; i += 4)
      for (int j = 0; j < 4; j++) total[j] += at[i + j];
    const Vector all = (total[0] + total[1]) + (total[2] + total[3]);
    uint64_t found = 0;
    for (int j = 0; j < 8; j++) found += all[j];
    return found;
  }
};
