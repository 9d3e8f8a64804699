// CRC-32 as zlib has it, over 64-bit words and bytes.
#pragma once
#include <array>
#include <cstdint>
#include <cstring>

class Crc32 {
 public:
  explicit Crc32(uint32_t found) : state(~found) {}
  uint32_t found() const { return ~state; }
  void add(uint64_t word) {
    word ^= state, state = 0;
    for (int i = 0; i < 8; i++) state ^= TABLE[7 - i][word >> 8 * i & 255];
  }
  void add(const char* bytes, long n) {
    for (; n >= 8; bytes += 8, n -= 8) {
      uint64_t word;
      std::memcpy(&word, bytes, 8);
      add(word);
    }
    for (; n > 0; bytes++, n--) state = state >> 8 ^ TABLE[0][(state ^ uint8_t(*bytes)) & 255];
  }

 private:
  uint32_t state;
  // [i][b]: of byte b with i bytes of zeros behind it.
  static constexpr std::array<std::array<uint32_t, 256>, 8> TABLE = [] {
    std::array<std::array<uint32_t, 256>, 8> table{};
    for (uint32_t b = 0; b < 256; b++) {
      uint32_t state = b;
      for (int bit = 0; bit < 8; bit++) state = state >> 1 ^ (state & 1 ? 0xEDB88320u : 0);
      table[0][b] = state;
    }
    for (int i = 1; i < 8; i++)
      for (int b = 0; b < 256; b++) table[i][b] = table[i - 1][b] >> 8 ^ table[0][table[i - 1][b] & 255];
    return table;
  }();
};
