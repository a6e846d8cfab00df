// What each kernel is given, by value: plain pointers and sizes. Shared by device code and the host code that launches it.
#pragma once
#include "../job.h"

namespace kvplan::cuda {

constexpr int kThreads = 256;         // a block, of every kernel
constexpr int kItems = 4;             // consecutive items a thread, in scans and expansion
constexpr int kTile = kThreads * kItems;
constexpr int kMostMoved = 64;        // tensors that lie elsewhere than a table says, in one copy
constexpr int kShare = 32;            // entries that one block of expansion does, at most
constexpr int64_t kCopyTile = 2048;   // bytes of a descriptor that count as one when copies are shared out among warps

// Words of a single-pass scan, zeroed before: which tile is next, then what is known of each tile.
struct Scan {
  uint64_t* ticket;
  uint64_t* tiles;
};

struct PageArgs {
  const void* slots;
  bool wide;                // slots are int64, else int32
  int64_t stride;           // slots from one row of the table to the next
  int64_t num_rows, row_length;
  const int64_t* requests;  // [B] or nullptr: rows in turn
  const int64_t* lengths;   // [B] or nullptr: whole rows
  int64_t num_requests;     // B
  int64_t page_size;
  int64_t* pages;           // [B, columns]
  int64_t columns;
  uint64_t* bad;            // [B], all bits set before: position of the first bad slot, kNoRow, or -1
};

// Runs as columns; run i covers pairs [start[i], start[i + 1]) of all lists. indptr cuts them by list.
struct RunColumns {
  int64_t* src;
  int64_t* dst;
  int64_t* start;   // [runs + 1]; nullptr: lengths are wanted, in `count`, zeroed before
  int64_t* count;
  int64_t* indptr;  // [lists + 1]
};

struct PlanArgs {
  const int64_t* tables;
  const int64_t* job;
  JobSize size;             // what the host believes the job says
  int64_t tables_words, segments;
  const void* pages;
  bool wide;
  uint64_t* status;         // zeroed: places - place of the first bad id; ~0: not the job that the host believes
  uint64_t* hash;           // [hash_mask + 1], zeroed: places - the first place of an id, by id
  uint64_t hash_mask;
  Scan scan;                // of pairs
  RunColumns runs;
};

struct FindArgs {
  const int64_t* src;
  const int64_t* dst;
  int64_t pairs;
  const int64_t* indptr;    // [lists + 1] or nullptr: one list
  int64_t lists;
  Scan scan;
  RunColumns runs;
};

struct StartArgs {          // lengths of runs -> their starts; checks them
  const int64_t* src;
  const int64_t* dst;
  const int64_t* count;
  int64_t runs;             // there is room for; the last of indptr says how many there are
  const int64_t* indptr;    // [groups + 1]
  const Steps* steps;       // [groups]
  int64_t groups;
  Scan scan;
  int64_t* start;           // [runs + 1]
  uint64_t* highest;        // [groups, 2], zeroed: the highest index on either side
  uint64_t* status;         // zeroed: not 0 where something is malformed
};

struct ExpandArgs {
  const Entry* entries;     // set by the kernel itself where `tables` are given
  const int64_t* bounds;
  const Steps* steps;       // of each group, where there are no tables
  const int64_t* tables;
  const int64_t* job;       // to tell what a status means
  const void* pages;
  bool wide;
  int64_t num_entries, groups, segments, requests;
  RunColumns runs;
  Scan scan;                // of pieces
  int64_t* starts;          // [requests * entries + 1]
  const uint64_t* highest;  // where there are no tables
  uint64_t* status;
  uint64_t* table;          // [3, room]
  int64_t room;
  int64_t* info;            // see ops.plan_; without tables: one word, the number of descriptors or -1
  int64_t shares, share;    // entries are done in so many shares, of so many each
};

struct CopyArgs {
  const uint64_t* table;    // [3, room]
  int64_t room;
  const int64_t* count;     // descriptors, on the device; nullptr: room
  Scan scan;
  int64_t* tile_starts;     // [room + 1]: tiles of kCopyTile bytes before each descriptor
  int num_read, num_written;
  Moved moved[kMostMoved];  // read, then written
  int64_t warps;            // that copy
  int64_t* share;           // [2]: tiles for each warp, and how many of them take one more
};

}  // namespace kvplan::cuda
