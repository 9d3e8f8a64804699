// In which order a product adds up its inputs. Mirrored by workers/kernels/order.py, which says why.
#pragma once
#include <algorithm>
#include <cstddef>

// Inputs that are added one after the other; then their sum is the last of a list, whose last two are joined into one as
// often as `joins` says. What the list holds after all leaves are the nodes.
struct Leaf {
  long inputs, joins;
};
struct SumOrder {
  const Leaf* leaves;
  long count;
  long inputs() const {
    long n = 0;
    for (long l = 0; l < count; l++) n += leaves[l].inputs;
    return n;
  }
  long nodes() const {
    long n = count;
    for (long l = 0; l < count; l++) n -= leaves[l].joins;
    return n;
  }
  long levels() const {  // the longest list
    long longest = 0, n = 0;
    for (long l = 0; l < count; n -= leaves[l++].joins) longest = std::max(longest, ++n);
    return longest;
  }
};
// How the nodes of all ranks, in their order, are joined in the same way. counts: nodes of each rank.
struct NodeOrder {
  const long *counts, *joins;
};
