// What one planning call is to do, worked out on the host before any page id is read: lengths and positions are known
// there, so they are checked there, once, for every back end. What is left for a device is arithmetic on page ids.
#pragma once
#include "pairs.h"
#include "tables.h"

namespace kvplan {

// A job lies in one int64 tensor: these sizes, then List [lists + 1], Check [checks + 1].
struct JobSize {
  int64_t requests;
  int64_t lists;    // requests * groups
  int64_t pieces;   // requests * entries: a piece is what one entry moves for one request
  int64_t checks;
  int64_t pairs;    // index pairs of all lists
  int64_t places;   // page ids to look at, over all checks
  int64_t hashed;   // of these, those of checks for distinct ids
  int64_t pages;    // page ids given in all
  int64_t most;     // descriptors there can be: as many as there are if nothing is grouped
};

// The index pairs of one group in one request: number request * groups + group.
struct List {
  int64_t first;         // pairs of all lists before this one
  int64_t src_offset;    // its source page list begins here among all page ids
  int64_t dst_offset;
  int64_t src_first, src_step;  // see Pairs
  int64_t dst_first, dst_step;
};

// One check of one list of page ids. Checks stand in the order in which their failures are told.
struct Check {
  int64_t first;     // places of all checks before this one
  int64_t offset;    // of its first id among all page ids
  int64_t code;      // kSrcRange, kDstRange: ids are 0 to limit - 1. kDstTwice: ids of one scope, shifted, are distinct
  int64_t limit;
  int64_t scope;
  int64_t request, space;  // what a failure names
  int64_t position;  // of its first id in the request's list
  int64_t shift;     // added to its ids where those of one scope are compared
};

struct Job {
  JobSize size;
  const List* lists;
  const Check* checks;
};

// Words of a job's tensor.
KVPLAN_HD int64_t job_words(const JobSize& size) {
  return words_of<JobSize>() + words_of<List>() * (size.lists + 1) + words_of<Check>() * (size.checks + 1);
}

KVPLAN_HD Job view_job(const int64_t* words) {
  Job job;
  job.size = *reinterpret_cast<const JobSize*>(words);
  job.lists = reinterpret_cast<const List*>(words + words_of<JobSize>());
  job.checks = reinterpret_cast<const Check*>(job.lists + job.size.lists + 1);
  return job;
}

// Number of the last of n rows whose `first` is not above `place`. Rows rise; row 0 begins at 0.
template <class Row>
KVPLAN_HD int64_t row_with(const Row* rows, int64_t n, int64_t place) {
  return last_not_above(0, n, place, [&](int64_t row) { return rows[row].first; });
}

// Which piece is number `piece` of the table: pieces are ordered by segment, request, entry.
struct PieceName {
  int64_t segment, request, entry;
};

KVPLAN_HD PieceName name_piece(const int64_t* bounds, int64_t segments, int64_t requests, int64_t piece) {
  const int64_t segment = last_not_above(0, segments, piece, [&](int64_t s) { return bounds[s] * requests; });
  const int64_t first = bounds[segment], entries = bounds[segment + 1] - first;
  const int64_t rest = piece - first * requests;
  const int64_t request = quotient(rest, entries);
  return {segment, request, first + rest - request * entries};
}

// Position of pair k of a list on one side: which place of its page list, and which row of the page.
struct RowPlace {
  int64_t page, row;
};

KVPLAN_HD RowPlace place_of(const Side& side, int64_t first, int64_t step, int64_t k) {
  const int64_t local = first + k * step;
  const int64_t page = quotient(local, side.rows);
  return {page, local - page * side.rows};
}

}  // namespace kvplan
