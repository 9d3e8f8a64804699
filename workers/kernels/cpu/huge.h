// Vectors in huge pages, for the rows of a step: where their pages of 4 KiB happen to lie would decide how well the
// second-level cache holds them, and each costs a walk through the page tables.
#pragma once
#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <vector>

template <class T> struct HugePages {
  using value_type = T;
  HugePages() = default;
  template <class U> HugePages(const HugePages<U>&) {}
  T* allocate(size_t n) {
    const size_t align = n * sizeof(T) < WORTH_BYTES ? 64 : PAGE_BYTES, bytes = (n * sizeof(T) + align - 1) / align * align;
    void* found = std::aligned_alloc(align, bytes);
    if (!found) throw std::bad_alloc();
    if (align == PAGE_BYTES) madvise(found, bytes, MADV_HUGEPAGE);  // where the system has none, all works as before
    return (T*)found;
  }
  void deallocate(T* p, size_t) { std::free(p); }
  bool operator==(const HugePages&) const { return true; }
  bool operator!=(const HugePages&) const { return false; }

 private:
  static constexpr size_t PAGE_BYTES = 2 << 20, WORTH_BYTES = 256 << 10;
};
template <class T> using HugeVector = std::vector<T, HugePages<T>>;
