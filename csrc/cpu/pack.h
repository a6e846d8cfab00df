// Packing: descriptors by way of staging. Plain structs in and out; no torch.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

#include "stages.h"

namespace kvplan::cpu {

// What is to be packed. Borrowed; another thread may write the table meanwhile, the rest not.
struct PackInput {
  const uint64_t *src, *dst, *nbytes;
  int64_t n;
  const int64_t* cuts;  // [segments + 1], rising from 0 to n
  int64_t segments;
  bool read;            // the remote side is the source
  int64_t piece;        // bytes, above 0
  const uint64_t* edges;  // ascending
  int64_t num_edges;
};

// A table that is written from its beginning; how many descriptors there will be is not known before.
class Rows {
 public:
  // Room for `first`, and if that does not do, for `most`.
  Rows(int64_t first, int64_t most) : next_(first), most_(most) {}
  virtual ~Rows() = default;
  bool add(const uint64_t* src, const uint64_t* dst, const uint64_t* nbytes, int64_t n);  // false: there is no room
  int64_t size() const { return size_; }
  bool cold() const { return table_.cold; }

 protected:
  // Memory for a table of n descriptors. That of the one before must stay until the next call of anything.
  virtual Table allocate(int64_t n) = 0;
  Table table_{};

 private:
  int64_t next_, most_;
  int64_t room_ = 0, size_ = 0;
};

// The copy, the merged descriptor and the byte with which each piece begins; then where the last one ends.
using Pieces = std::array<std::vector<int64_t>, 3>;

constexpr int64_t kAllWell = -1;
constexpr int64_t kNoRoom = -2;

// kAllWell; or the number of the first descriptor that passes 64 bits, alone or with those before it; or kNoRoom: n are
// room enough on either side unless descriptors are larger than a piece.
// `starts`: [segments + 1], the piece with which each segment begins.
int64_t pack(const PackInput& in, Rows* copies, Rows* merged, Pieces* pieces, std::vector<int64_t>* starts);

// The same, but nothing is made: only the bytes of all are summed.
int64_t survey(const PackInput& in, int64_t* total);

}  // namespace kvplan::cpu
