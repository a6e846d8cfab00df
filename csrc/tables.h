// The tables of a pairing, found in the one tensor that holds them, and checked.
#pragma once
#include "arith.h"
#include "entry.h"

namespace kvplan {

constexpr int64_t kMostRanks = 1 << 16;  // of an interleave; pairs_of searches through them
constexpr int64_t kMostDescriptors = int64_t{1} << 40;  // no machine holds more; below it no size here can wrap

template <class T>
KVPLAN_HD constexpr int64_t words_of() {
  static_assert(sizeof(T) % sizeof(int64_t) == 0);
  return sizeof(T) / sizeof(int64_t);
}

// Borrowed views; see Header in entry.h for their order.
struct Tables {
  Header size;
  const Entry* entries;
  const Group* groups;
  const Space* spaces;
  const int64_t* bounds;
};

// Words of the tensor of tables of these sizes.
KVPLAN_HD int64_t table_words(const Header& size) {
  return words_of<Header>() + words_of<Entry>() * size.num_entries + words_of<Group>() * size.num_groups +
         words_of<Space>() * size.num_spaces + size.num_segments + 1;
}

KVPLAN_HD Tables view_tables(const int64_t* words) {
  Tables tables;
  tables.size = *reinterpret_cast<const Header*>(words);
  tables.entries = reinterpret_cast<const Entry*>(words + words_of<Header>());
  tables.groups = reinterpret_cast<const Group*>(tables.entries + tables.size.num_entries);
  tables.spaces = reinterpret_cast<const Space*>(tables.groups + tables.size.num_groups);
  tables.bounds = reinterpret_cast<const int64_t*>(tables.spaces + tables.size.num_spaces);
  return tables;
}

// What is wrong with tables of so many words, or nullptr; *row is then the row of the table at fault.
inline const char* fault_in_sizes(const int64_t* words, int64_t count) {
  if (count < words_of<Header>()) return "tables have no header";
  const Header& size = *reinterpret_cast<const Header*>(words);
  for (const int64_t rows : {size.num_entries, size.num_groups, size.num_spaces, size.num_segments})
    if (rows < 0 || rows > count) return "tables have a bad header";
  return count == table_words(size) ? nullptr : "tables do not have the length their header says";
}

// The row arithmetic of a group must agree with the tokens by which its lists are checked.
inline bool side_fits(const Side& side, int64_t compression, int64_t tokens, int64_t align) {
  int64_t covered;
  return side.size > 0 && side.size < kMostRanks && side.rank >= 0 && side.rank < side.size && side.rows > 0 &&
         side.page_step > 0 && side.row_step > 0 && mul(side.rows, side.size, &covered) &&
         mul(covered, compression, &covered) && covered == tokens && (side.size == 1 || align % tokens == 0);
}

inline const char* fault_in_rows(const Tables& tables, int64_t* row) {
  const Header& size = tables.size;
  if (tables.bounds[0] != 0 || tables.bounds[size.num_segments] != size.num_entries) return "bounds leave out entries";
  for (*row = 0; *row < size.num_segments; ++*row)
    if (tables.bounds[*row] >= tables.bounds[*row + 1]) return "segment without entries";
  for (*row = 0; *row < size.num_spaces; ++*row) {
    const Space& space = tables.spaces[*row];
    if (space.src_limit <= 0 || space.dst_limit <= 0 || space.src_tokens <= 0 || space.dst_tokens <= 0 ||
        space.src_align <= 0 || space.dst_align <= 0)
      return "empty space";
    int64_t end;
    if (space.domain < 0 || space.domain > *row || tables.spaces[space.domain].domain != space.domain ||
        !add(space.dst_limit, space.shift, &end))
      return "no such domain in space";
  }
  for (*row = 0; *row < size.num_groups; ++*row) {
    const Group& group = tables.groups[*row];
    if (group.space < 0 || group.space >= size.num_spaces) return "no such space in group";
    const Space& space = tables.spaces[group.space];
    if (group.compression <= 0 || !side_fits(group.src, group.compression, space.src_tokens, space.src_align) ||
        !side_fits(group.dst, group.compression, space.dst_tokens, space.dst_align))
      return "a side does not fit its space in group";
  }
  for (*row = 0; *row < size.num_entries; ++*row) {
    const Entry& entry = tables.entries[*row];
    if (entry.group < 0 || entry.group >= size.num_groups) return "no such group in entry";
    if (entry.nbytes <= 0 || entry.src_stride <= 0 || entry.dst_stride <= 0) return "no size in entry";
  }
  return nullptr;
}

// Highest index on one side of a group, whichever pages are asked for; false where it passes int64.
KVPLAN_HD bool highest_index(const Side& side, int64_t limit, int64_t* index) {
  int64_t page, row;
  return mul(limit - 1, side.page_step, &page) && mul(side.rows - 1, side.row_step, &row) && add(page, row, index);
}

}  // namespace kvplan
