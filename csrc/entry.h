// The plain structs that every stage, on every device, agrees on. Kernels know nothing else.
#pragma once
#include <cstdint>

namespace kvplan {

// What moves, once per peer. Row of Pairing.entries, int64 [E, 6].
struct Entry {
  uint64_t src_base;    // bytes; address of source index 0
  int64_t src_stride;   // bytes from one source index to the next
  uint64_t dst_base;    // bytes
  int64_t dst_stride;   // bytes
  int64_t nbytes;       // bytes moved at one pair of indices
  int64_t group;        // row of the group table: whose index pairs this entry follows
};

// The tables of a pairing lie behind one another in one int64 tensor: this header, then Entry [num_entries],
// Group [num_groups], Space [num_spaces], bounds [num_segments + 1]: the entry at which each segment begins.
struct Header {
  int64_t num_entries, num_groups, num_spaces, num_segments;
};

// Who numbers the pages of one destination space. Row of Pairing.spaces, int64 [K, 8].
struct Space {
  int64_t src_limit;    // source page ids are 0 to src_limit - 1
  int64_t src_tokens;   // tokens one source page covers
  int64_t src_align;    // what src_start must be a multiple of: src_tokens where rows are interleaved, else 1
  int64_t dst_limit;
  int64_t dst_tokens;
  int64_t dst_align;
  int64_t domain;       // the first space whose memory this one shares, through others too; itself where there is none
  int64_t shift;        // pages: ids of one domain with equal sums of id and shift are one physical page
};

// One side of a group: how a row position becomes an index.
// Position q, counted from the first token of the page list, is held iff q % size == rank. It is then local row
// l = (q - rank) / size, in list entry l / rows, and its index is pages[l / rows] * page_step + l % rows * row_step.
// A page that moves whole is one row: rows = page_step = row_step = 1.
struct Side {
  int64_t size;         // interleave size, 1 without DCP
  int64_t rank;
  int64_t rows;         // rows one page stores
  int64_t page_step;    // index steps from one page to the next
  int64_t row_step;     // index steps from one row to the next
};

// Entries that share one list of (source index, destination index). Row of Pairing.groups, int64 [G, 12].
struct Group {
  int64_t space;        // row of the space table
  int64_t compression;  // tokens one row stands for
  Side src;
  Side dst;
};

// Index steps from one row to the next on each side of a group.
struct Steps {
  int64_t src, dst;
};

// What one request gives for one space, int64 [7]. Offsets and lengths count page ids in the list of all requests.
struct Window {
  int64_t src_offset, src_pages;  // this space's source list
  int64_t dst_offset, dst_pages;  // this space's destination list
  int64_t src_start;    // tokens; position of the first token of the source list
  int64_t dst_start;    // tokens; -1: the destination list starts with the source list and covers the same tokens. Where
                        // it is greater than src_start, what is sent begins at it
  int64_t num_tokens;   // tokens from src_start that are valid; -1: all that the source list covers
};

// A longest stretch in which both indices go up by their step.
struct Run {
  int64_t src;          // first source index
  int64_t dst;          // first destination index
  int64_t count;        // index pairs
};

// Memory that lies elsewhere than the addresses of a table say: a compiler may hand an op a copy of a tensor.
struct Moved {
  uint64_t home;    // first address by which the table knows it
  uint64_t nbytes;
  uint64_t now;     // where it is
};

// Why a request is refused. The words for each are in kvplan/planning/refusal.py.
enum class Code : int64_t {
  kOk = 0,
  kSrcRange = 1,        // value: the page id; position: where in the source list
  kDstRange = 2,
  kDstTwice = 3,        // value: the page id; position: the second place of it
  kSrcLength = 4,       // value: pages needed; position: pages given
  kDstLength = 5,       // value: pages needed exactly; position: pages given
  kDstCover = 6,        // value: pages needed at least; position: pages given
  kAlignment = 8,       // value: what src_start - dst_start must be a multiple of; position: group
  kSrcVirtual = 9,      // value: what src_start must be a multiple of; position: it
  kDstVirtual = 10,     // value: what dst_start must be a multiple of; position: it
  kOverflow = 11,       // position: group or entry; value: 0
  kRoom = 12,           // value: descriptors there are; position: descriptors there is room for
  kJob = 13,            // tables, job, pages and outputs of a planning op were not made for one call
};

// In place of the position of a bad slot: the request names no row of the table, or more tokens than a row has.
constexpr int64_t kNoRow = -2;

struct Status {
  Code code = Code::kOk;
  int64_t request = 0;
  int64_t space = 0;
  int64_t position = 0;
  int64_t value = 0;
};

}  // namespace kvplan
