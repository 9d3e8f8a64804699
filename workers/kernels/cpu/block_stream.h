// Blocks of a pool on their way through a stream socket, one piece of each, without a copy of our own. Bytes are summed
// right after the system has copied them: they are in the cache then, so that a checksum reads no memory.
#pragma once
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>

#include "crc32.h"

// As in workers/kernels/block_stream.py.
struct BlockStream {
  static constexpr long PAGE = 4096, MAX_PARTS = 64;

  char* first;  // the piece of block 0
  long stride;  // from block to block
  const int64_t* blocks;
  long count;
  long num_bytes;       // of a piece
  uint32_t* checksums;  // (count), as `checksum` in workers/transfer/pool_bytes.py of what has passed; or null
  long done;            // bytes that have passed

  long whole() const { return count * num_bytes; }
  bool is_done() const { return done == whole(); }
  long block() const { return done / num_bytes; }

  // Adds the bytes that come next: pieces, or `most` bytes of each, until they are `enough`.
  void next(iovec* parts, msghdr& message, long enough, long most) const {
    long bytes = 0, skip = done % num_bytes;
    for (long i = block(); i < count && bytes < enough && long(message.msg_iovlen) < MAX_PARTS; i++, skip = 0) {
      const long part = std::min(most, num_bytes - skip);
      parts[message.msg_iovlen++] = {piece(i) + skip, size_t(part)};
      bytes += part;
    }
  }
  void advance(long bytes) {
    const long from = done, to = done += bytes;
    if (!checksums || !bytes) return;
    for (long i = from / num_bytes; i <= (to - 1) / num_bytes; i++) {
      const long begin = std::max(from - i * num_bytes, 0L), end = std::min(to - i * num_bytes, num_bytes);
      Crc32 crc(checksums[i]);
      for (long page = begin / PAGE; page < end / PAGE; page++) crc.add(sum((const uint64_t*)(piece(i) + page * PAGE)));
      if (end == num_bytes) crc.add(piece(i) + end / PAGE * PAGE, end % PAGE);
      checksums[i] = crc.found();
    }
  }

 private:
  char* piece(long i) const { return first + blocks[i] * stride; }
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
