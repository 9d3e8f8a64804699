// Sums and gathers over the ranks of one machine, through memory that all of them have mapped, and a board of tasks for each.
//
// A call moves its data in rounds of at most CHUNK bytes a rank; ranks make the same calls in the same order. In
// round s a rank writes its part into its slot s % 2, publishes s, waits until the others have, and reads their
// parts. That a rank has published s also says that it has read all of round s - 1: so whoever starts round s + 1
// waits until all have published s, and may then write over slot (s + 1) % 2. One word a rank is all that sums
// and gathers need. Memory full of zeros is a valid start.
//
// A wait spins for tens of microseconds, then yields its core to whoever wants it, as to a rank that shares it, and after
// two milliseconds sleeps, where it can on the peer's word: to wake a core from sleep costs the rank that does it 20 to 50 microseconds.
// It ends with a failure after the timeout, or when any rank has called `abort`. A collective that has failed once fails
// from then on: the ranks are out of step.
#pragma once
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <vector>

#include "order.h"
#include "simd.h"
#include "task_board.h"

class Collective {
 public:
  static constexpr size_t CHUNK = 128 << 10;  // own and others' parts of a round stay in the second-level cache
  enum Failure { NONE, TIMEOUT, ABORTED, OUT_OF_STEP };

  static size_t bytes(int ranks) { return sizeof(Header) + size_t(ranks) * (sizeof(Place) + sizeof(TaskBoard) + 2 * CHUNK); }

  Collective(char* memory, int rank, int ranks, double timeout_s)
      : rank(rank), ranks(ranks), header((Header*)memory), places((Place*)(header + 1)), boards((TaskBoard*)(places + ranks)),
        slots((char*)(boards + ranks)), timeout_s(timeout_s) {}
  const int rank, ranks;

  // x (n) becomes the sum over the ranks, added in their order in float and rounded once: the same bits on all ranks.
  template <class T> bool all_reduce(T* x, size_t n) {
    constexpr size_t STEP = CHUNK / sizeof(T);
    for (size_t from = 0; from < n; from += STEP) {
      const size_t count = std::min(STEP, n - from);
      if (!begin_round()) return false;
      memcpy(slot(rank), x + from, count * sizeof(T));
      publish(count * sizeof(T));
      for (int r = 0; r < ranks; r++)
        if (!arrived(r, count * sizeof(T))) return false;
      sum(x + from, count);
    }
    return true;
  }
  // The nodes of all ranks, mine (nodes of this rank, rows, columns), joined as `order` says, plus bias (columns) or null:
  // out (rows, columns), rounded once, the same bits on all ranks.
  template <class T>
  bool join(const float* mine, size_t rows, size_t columns, const NodeOrder& order, const float* bias, T* out) {
    const size_t n = rows * columns, most = size_t(*std::max_element(order.counts, order.counts + ranks));
    const size_t step = CHUNK / sizeof(float) / most;
    for (size_t from = 0; from < n; from += step) {
      const size_t count = std::min(step, n - from), own = size_t(order.counts[rank]);
      if (!begin_round()) return false;
      for (size_t i = 0; i < own; i++) memcpy(slot(rank) + i * count * sizeof(float), mine + i * n + from, count * sizeof(float));
      publish(own * count * sizeof(float));
      for (int r = 0; r < ranks; r++)
        if (!arrived(r, size_t(order.counts[r]) * count * sizeof(float))) return false;
      join_nodes(from, count, columns, order, bias, out, [&](int r, size_t i) { return (const float*)slot(r) + i * count; });
    }
    return true;
  }
  // Rows as they are handed out to the ranks.
  struct Share {
    size_t first, end;
  };
  Share share_of(int r, size_t rows) const { return {rows * size_t(r) / size_t(ranks), rows * size_t(r + 1) / size_t(ranks)}; }
  // As `join`, but only the rows of this rank's share are made, where `can_join_shares`.
  template <class T>
  bool join_share(const float* mine, size_t rows, size_t columns, const NodeOrder& order, const float* bias, T* out) {
    const size_t room = rows_at_once(columns, order), own = size_t(order.counts[rank]), n = rows * columns;
    const Share share = share_of(rank, rows);
    for (size_t from = 0, longest = (rows + size_t(ranks) - 1) / size_t(ranks); from < longest; from += room) {
      // In the slot of a rank its nodes of up to `room` rows for each of the others, one behind the other.
      const auto part = [&](int r) { return cut(share_of(r, rows), from, room); };
      const auto place = [&](int from_rank, int for_rank) {
        const size_t before = size_t(for_rank) - (for_rank > from_rank);
        return (float*)slot(from_rank) + before * room * columns * size_t(order.counts[from_rank]);
      };
      if (!begin_round()) return false;
      for (int r = 0; r < ranks; r++) {
        if (r == rank) continue;
        const Share rest = part(r);
        const size_t count = (rest.end - rest.first) * columns;
        for (size_t i = 0; i < own; i++) memcpy(place(rank, r) + i * count, mine + i * n + rest.first * columns, count * sizeof(float));
      }
      const auto left_by = [&](int r) {
        size_t count = 0;
        for (int other = 0; other < ranks; other++) count += other == r ? 0 : part(other).end - part(other).first;
        return count * columns * size_t(order.counts[r]) * sizeof(float);
      };
      publish(left_by(rank));
      for (int r = 0; r < ranks; r++)
        if (!arrived(r, left_by(r))) return false;
      const Share now = part(rank);
      const size_t begin = now.first * columns, count = (now.end - now.first) * columns;
      join_nodes(begin, count, columns, order, bias, out, [&](int r, size_t i) {
        return r == rank ? mine + i * n + begin : place(r, rank) + i * count;
      });
    }
    return true;
  }
  // Whether a row fits into a round of `join_share`.
  bool can_join_shares(size_t columns, const NodeOrder& order) const { return rows_at_once(columns, order) > 0; }
  // x (rows, row_bytes), of which each rank has its share, becomes whole.
  bool gather_shares(char* x, size_t rows, size_t row_bytes) {
    const size_t longest = (rows + size_t(ranks) - 1) / size_t(ranks) * row_bytes;
    for (size_t from = 0; from < longest; from += CHUNK) {
      const auto part = [&](int r) {
        const Share share = share_of(r, rows);
        return cut({share.first * row_bytes, share.end * row_bytes}, from, CHUNK);
      };
      if (!begin_round()) return false;
      const Share own = part(rank);
      memcpy(slot(rank), x + own.first, own.end - own.first);
      publish(own.end - own.first);
      for (int r = 0; r < ranks; r++) {
        const Share theirs = part(r);
        if (!arrived(r, theirs.end - theirs.first)) return false;
        if (r != rank) memcpy(x + theirs.first, slot(r), theirs.end - theirs.first);
      }
    }
    return true;
  }
  // Rows of all ranks side by side on rank 0: `mine` (rows, row_bytes[rank]) -> out (rows, sum of row_bytes).
  bool gather_rows(const char* mine, size_t rows, const long* row_bytes, char* out) {
    const size_t longest = rows * size_t(*std::max_element(row_bytes, row_bytes + ranks));
    if (rank == 0) scatter(mine, rows * size_t(row_bytes[0]), 0, 0, row_bytes, out);
    for (size_t from = 0; from < longest; from += CHUNK) {
      auto part = [&](int r) { return std::min(CHUNK, std::max(from, rows * size_t(row_bytes[r])) - from); };
      if (!begin_round()) return false;
      if (rank != 0) memcpy(slot(rank), mine + from, part(rank));
      publish(part(rank));
      for (int r = 1; r < ranks && rank == 0; r++) {
        if (!arrived(r, part(r))) return false;
        scatter(slot(r), part(r), from, r, row_bytes, out);
      }
    }
    return true;
  }
  // Until all ranks are here, and all that they have written before can be read. False as of a sum.
  bool meet() {
    if (!begin_round()) return false;
    publish(0);
    for (int r = 0; r < ranks; r++)
      if (!arrived(r, 0)) return false;
    return true;
  }
  // Of each rank.
  TaskBoard& board(int r) { return boards[r]; }
  // Whether rank r has opened its board as often as this one has.
  bool has_opened(int r) const { return boards[r].times_opened() == boards[rank].times_opened(); }
  // Until it has. False as of a sum.
  bool wait_opened(int r) {
    return wait_for([&] { return has_opened(r); }, nap, [&] { return r; });
  }
  // Until all tasks of the own board are done, whoever has taken them. False as of a sum.
  bool wait_done(uint32_t tasks) {
    TaskBoard& own = boards[rank];
    return wait_for([&] { return own.num_done() == tasks; }, nap, [&] { return own.taken_by(); });
  }
  // From any thread of any rank: all waits end, now and later.
  void abort() {
    header->aborted.store(1, std::memory_order_seq_cst);
    for (int r = 0; r < ranks; r++) futex(places[r], FUTEX_WAKE, INT_MAX, nullptr);
  }
  // What went wrong, in the lower byte, and with which rank, above; 0: nothing.
  long failure() const { return failed; }

 private:
  struct alignas(64) Header {
    std::atomic<uint32_t> aborted;
  };
  struct alignas(64) Place {
    std::atomic<uint32_t> published;  // last round of this rank; also the futex word
    std::atomic<uint32_t> sleepers;   // ranks that wait for it in the kernel
    uint32_t part_bytes[2];           // in the slots
  };
  static constexpr int SPINS = 2000;  // pauses of 15-50 ns
  static constexpr double YIELDING_S = 0.002;
  static constexpr long NAP_NS = 50'000'000;  // a wake-up can be missed only by `abort`
  static constexpr long SHORT_NAP_NS = 100'000;  // where nobody wakes

  Header* const header;
  Place* const places;
  TaskBoard* const boards;
  char* const slots;
  const double timeout_s;
  uint32_t round = 0;
  std::vector<float> joined;
  std::atomic<long> failed{0};  // written by the thread that waits, read by all

  char* slot(int r) const { return slots + (size_t(r) * 2 + round % 2) * CHUNK; }
  static void futex(Place& place, int op, uint32_t value, const timespec* timeout) {
    syscall(SYS_futex, &place.published, op, value, timeout, nullptr, 0);  // not PRIVATE: other processes wait
  }
  static double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
  }
  bool fail(Failure what, int with) {
    failed = what | long(with) << 8;
    return false;
  }
  bool is_aborted() { return header->aborted.load(std::memory_order_seq_cst) && !fail(ABORTED, rank); }
  bool begin_round() {
    if (failed || is_aborted()) return false;
    for (int r = 0; r < ranks; r++)
      if (r != rank && !wait(r, round)) return false;
    round++;
    return true;
  }
  void publish(size_t part) {
    Place& own = places[rank];
    own.part_bytes[round % 2] = uint32_t(part);
    own.published.store(round, std::memory_order_seq_cst);
    if (own.sleepers.load(std::memory_order_seq_cst)) futex(own, FUTEX_WAKE, INT_MAX, nullptr);
  }
  bool arrived(int r, size_t part) {
    if (r == rank) return true;
    return wait(r, round) && (places[r].part_bytes[round % 2] == part || fail(OUT_OF_STEP, r));
  }
  bool wait(int r, uint32_t wanted) {
    Place& peer = places[r];
    const auto is_there = [&] { return int32_t(peer.published.load(std::memory_order_seq_cst) - wanted) >= 0; };
    const auto sleep = [&] {
      const timespec most{0, NAP_NS};
      peer.sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = peer.published.load(std::memory_order_seq_cst);
      if (!is_there() && !is_aborted()) futex(peer, FUTEX_WAIT, seen, &most);
      peer.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    };
    return wait_for(is_there, sleep, [&] { return r; });
  }
  static void nap() {
    const timespec most{0, SHORT_NAP_NS};
    nanosleep(&most, nullptr);
  }
  // Until is_there(), which rank who() is to bring about; sleep() returns after a while.
  template <class There, class Sleep, class Who> bool wait_for(There is_there, Sleep sleep, Who who) {
    for (int i = 0; i < SPINS; i++) {
      if (is_there()) return !failed;
      __builtin_ia32_pause();
    }
    const double since = now();
    for (double at = since; !is_there() && !failed && !is_aborted(); at = now()) {
      if (at - since > timeout_s) fail(TIMEOUT, who());
      else if (at - since < YIELDING_S) sched_yield();
      else sleep();
    }
    return !failed;
  }
  template <class T> void sum(T* x, size_t n) const {
    constexpr size_t BLOCK = 256;
    float total[BLOCK];
    for (size_t from = 0; from < n; from += BLOCK) {
      const size_t count = std::min(BLOCK, n - from);
      load_row((const T*)slot(0) + from, total, count);
      for (int r = 1; r < ranks; r++) {
        const T* part = (const T*)slot(r) + from;
        for (size_t i = 0; i < count; i++) total[i] += widen(part[i]);
      }
      store_row(total, x + from, count);
    }
  }
  static Share cut(const Share& all, size_t from, size_t most) {
    const size_t first = std::min(all.first + from, all.end);
    return {first, std::min(first + most, all.end)};
  }
  // Of each other rank's share.
  size_t rows_at_once(size_t columns, const NodeOrder& order) const {
    const size_t most = size_t(*std::max_element(order.counts, order.counts + ranks));
    return CHUNK / (sizeof(float) * columns * most * size_t(ranks - 1));
  }
  // Elements [from, from + count) of out; node i of rank r has its own at nodes(r, i).
  template <class T, class Nodes>
  void join_nodes(size_t from, size_t count, size_t columns, const NodeOrder& order, const float* bias, T* out, Nodes nodes_of) {
    constexpr size_t BLOCK = 256;
    long nodes = 0;
    for (int r = 0; r < ranks; r++) nodes += order.counts[r];
    if (joined.size() < size_t(nodes) * BLOCK) joined.resize(size_t(nodes) * BLOCK);
    for (size_t at = 0; at < count; at += BLOCK) {
      const size_t width = std::min(BLOCK, count - at);
      float* top = joined.data();
      const long* joins = order.joins;
      for (int r = 0; r < ranks; r++)
        for (long i = 0; i < order.counts[r]; i++, joins++, top += BLOCK) {
          memcpy(top, nodes_of(r, size_t(i)) + at, width * sizeof(float));
          for (long j = 0; j < *joins; j++) {
            const float* right = top;
            top -= BLOCK;
            for (size_t k = 0; k < width; k++) top[k] += right[k];
          }
        }
      top -= BLOCK;
      for (size_t k = 0; bias && k < width; k++) top[k] += bias[(from + at + k) % columns];
      store_row(top, out + from + at, width);
    }
  }
  // Bytes [from, from + count) of rank r's rows, one after the other, to their places among all columns.
  void scatter(const char* part, size_t count, size_t from, int r, const long* row_bytes, char* out) const {
    size_t before = 0, all = 0;
    for (int i = 0; i < ranks; i++) (i < r ? before : all) += size_t(row_bytes[i]);
    all += before;
    const size_t width = size_t(row_bytes[r]);
    for (size_t piece; count; part += piece, from += piece, count -= piece) {
      const size_t column = from % width;
      piece = std::min(width - column, count);
      memcpy(out + from / width * all + before + column, part, piece);
    }
  }
};
