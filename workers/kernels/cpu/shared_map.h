// Memory of a file without a name (memfd) where processes share it, placed so that huge pages fit. They are asked for by
// MADV_COLLAPSE, which gives them also where the system grants none by itself (shmem_enabled), and fills holes with zeros.
#pragma once
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

class SharedMap {
 public:
  static constexpr size_t HUGE_PAGE = size_t(2) << 20;
  // Address of all `bytes` of the file, or -errno.
  static long map(int fd, size_t bytes) {
    const size_t whole = span(bytes);
    char* place = (char*)mmap(nullptr, whole + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return -errno;
    const size_t before = -uintptr_t(place) % HUGE_PAGE, after = HUGE_PAGE - before;
    char* begin = place + before;
    if (before) munmap(place, before);
    munmap(begin + whole, after);
    if (mmap(begin, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
      const int error = errno;
      munmap(begin, whole);
      return -error;
    }
    return long(begin);
  }
  // 0, or the errno of what stays in small pages. A huge page of the file needs one small page that is there.
  static int collapse(char* begin, size_t bytes) { return madvise(begin, bytes, COLLAPSE) ? errno : 0; }
  static void unmap(char* begin, size_t bytes) { munmap(begin, span(bytes)); }

 private:
  static constexpr int COLLAPSE = 25;  // MADV_COLLAPSE, Linux 6.1, which older headers lack
  static size_t span(size_t bytes) { return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE; }
};
