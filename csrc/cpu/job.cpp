// Windows -> job: everything about a call that is known before a page id is read.
#include <algorithm>
#include <array>

#include "stages.h"

namespace kvplan::cpu {

Status check_entries(const Tables& tables, bool* narrow) {
  constexpr int64_t kNarrow = (int64_t{1} << 32) - 1;  // so that a run's count is below 2^32 too
  *narrow = true;
  std::vector<std::array<int64_t, 2>> highest(static_cast<size_t>(tables.size.num_groups), {-1, -1});
  for (int64_t g = 0; g < tables.size.num_groups; ++g) {
    const Group& group = tables.groups[g];
    const Space& space = tables.spaces[group.space];
    auto& [src, dst] = highest[static_cast<size_t>(g)];
    if (!highest_index(group.src, space.src_limit, &src) || !highest_index(group.dst, space.dst_limit, &dst)) src = -1;
    *narrow = *narrow && src < kNarrow && dst < kNarrow;
  }
  for (int64_t e = 0; e < tables.size.num_entries; ++e) {
    const Entry& entry = tables.entries[e];
    const auto [src, dst] = highest[static_cast<size_t>(entry.group)];
    if (src < 0 || !address_fits(entry.src_base, src, entry.src_stride, entry.nbytes) ||
        !address_fits(entry.dst_base, dst, entry.dst_stride, entry.nbytes))
      return {Code::kOverflow, 0, tables.groups[entry.group].space, e, 0};
    *narrow = *narrow && entry.src_stride < kNarrow && entry.dst_stride < kNarrow;
  }
  return {};
}

namespace {

class Builder {
 public:
  Builder(const Tables& tables, const Window* windows, int64_t requests)
      : tables_(tables), windows_(windows), requests_(requests) {
    lists_.reserve(static_cast<size_t>(requests * tables.size.num_groups + 1));
    checks_.reserve(static_cast<size_t>(4 * requests * tables.size.num_spaces + 1));
  }

  Status build(int64_t num_pages, std::vector<int64_t>* words) {
    for (int64_t space = 0; space < tables_.size.num_spaces; ++space) {
      for (int64_t request = 0; request < requests_; ++request) {
        Status status = check_window(tables_.spaces[space], window(request, space));
        status.request = request;
        status.space = space;
        if (status.code != Code::kOk) return status;
      }
      add_checks(space);
      if (wraps_) return {Code::kOverflow, 0, space, 0, 0};
    }
    add_checks_across();
    if (wraps_) return {Code::kOverflow, 0, 0, 0, 0};
    std::vector<int64_t> pairs_per_group(static_cast<size_t>(tables_.size.num_groups), 0);
    for (int64_t request = 0; request < requests_; ++request) {
      for (int64_t group = 0; group < tables_.size.num_groups; ++group) {
        Status status = add_list(request, group, &pairs_per_group[static_cast<size_t>(group)]);
        status.request = request;
        status.space = tables_.groups[group].space;
        if (status.code != Code::kOk) return status;
      }
    }
    int64_t most = 0;
    for (int64_t e = 0; e < tables_.size.num_entries; ++e) {
      const int64_t group = tables_.entries[e].group;
      if (!add(most, pairs_per_group[static_cast<size_t>(group)], &most) || most > kMostDescriptors)
        return {Code::kOverflow, 0, tables_.groups[group].space, e, 0};
    }
    const JobSize size{requests_, static_cast<int64_t>(lists_.size()), requests_ * tables_.size.num_entries,
                       static_cast<int64_t>(checks_.size()), pairs_, places_, hashed_, num_pages, most};
    lists_.push_back({pairs_, 0, 0, 0, 0, 0, 0});
    checks_.push_back({places_, 0, 0, 0, 0, 0, 0, 0, 0});
    words->reserve(words_of<JobSize>() + lists_.size() * words_of<List>() + checks_.size() * words_of<Check>());
    append(words, &size, 1);
    append(words, lists_.data(), lists_.size());
    append(words, checks_.data(), checks_.size());
    return {};
  }

 private:
  const Window& window(int64_t request, int64_t space) const {
    return windows_[request * tables_.size.num_spaces + space];
  }

  void add_check(Code code, int64_t offset, int64_t count, int64_t scope, int64_t request, int64_t space,
                 int64_t position) {
    const Space& limits = tables_.spaces[space];
    const int64_t limit = code == Code::kSrcRange ? limits.src_limit : limits.dst_limit;
    checks_.push_back({places_, offset, static_cast<int64_t>(code), limit, scope, request, space, position, limits.shift});
    wraps_ = wraps_ || !kvplan::add(places_, count, &places_);
    if (code == Code::kDstTwice) hashed_ += count;  // of places, so no more
  }

  // No list may hold a page twice. Nor may two requests write one; but their lists may both hold pages that are not
  // written now, those of a shared prefix or of other chunks.
  void add_checks(int64_t space) {
    for (int64_t request = 0; request < requests_; ++request) {
      const Window& given = window(request, space);
      add_check(Code::kSrcRange, given.src_offset, given.src_pages, 0, request, space, 0);
      add_check(Code::kDstRange, given.dst_offset, given.dst_pages, 0, request, space, 0);
      add_check(Code::kDstTwice, given.dst_offset, given.dst_pages, scopes_++, request, space, 0);
    }
    if (requests_ == 1) return;
    for (int64_t request = 0; request < requests_; ++request) add_written(request, space);
    ++scopes_;
  }

  void add_written(int64_t request, int64_t space) {
    const Window& given = window(request, space);
    const PageRange written = pages_written(tables_.spaces[space], given);
    add_check(Code::kDstTwice, given.dst_offset + written.first, written.count, scopes_, request, space, written.first);
  }

  // Nor may a page be written through two spaces that share memory.
  void add_checks_across() {
    std::vector<std::array<int64_t, 2>> members;  // (domain, space)
    bool shared = false;
    for (int64_t space = 0; space < tables_.size.num_spaces && !shared; ++space) shared = tables_.spaces[space].domain != space;
    if (!shared) return;
    for (int64_t space = 0; space < tables_.size.num_spaces; ++space) members.push_back({tables_.spaces[space].domain, space});
    std::sort(members.begin(), members.end());
    for (size_t first = 0, stop; first < members.size(); first = stop) {
      for (stop = first + 1; stop < members.size() && members[stop][0] == members[first][0];) ++stop;
      if (stop == first + 1) continue;
      for (int64_t request = 0; request < requests_; ++request)
        for (size_t k = first; k < stop; ++k) add_written(request, members[k][1]);
      ++scopes_;
    }
  }

  Status add_list(int64_t request, int64_t number, int64_t* pairs_of_group) {
    const Group& group = tables_.groups[number];
    const Window& given = window(request, group.space);
    Pairs pairs;
    const Status status = pairs_of(group, tables_.spaces[group.space], given, &pairs);
    if (status.code != Code::kOk) return status;
    lists_.push_back({pairs_, given.src_offset, given.dst_offset, pairs.src_first, pairs.src_step, pairs.dst_first,
                      pairs.dst_step});
    if (!kvplan::add(pairs_, pairs.count, &pairs_) || pairs_ > kMostDescriptors) return {Code::kOverflow};
    *pairs_of_group += pairs.count;
    return {};
  }

  template <class T>
  static void append(std::vector<int64_t>* words, const T* rows, size_t count) {
    const auto* at = reinterpret_cast<const int64_t*>(rows);
    words->insert(words->end(), at, at + count * words_of<T>());
  }

  const Tables& tables_;
  const Window* windows_;
  int64_t requests_;
  std::vector<List> lists_;
  std::vector<Check> checks_;
  int64_t pairs_ = 0, places_ = 0, hashed_ = 0, scopes_ = 0;
  bool wraps_ = false;  // places pass int64
};

}  // namespace

Status prepare(const Tables& tables, const Window* windows, int64_t requests, int64_t num_pages,
               std::vector<int64_t>* job, bool* narrow) {
  const Status status = check_entries(tables, narrow);
  if (status.code != Code::kOk) return status;
  return Builder(tables, windows, requests).build(num_pages, job);
}

namespace {

// Whether the last of `count` rows that lie `step` apart is on one of `pages` pages.
bool side_lies_within(const Side& side, int64_t first, int64_t step, int64_t count, int64_t pages) {
  int64_t last;
  return first >= 0 && step > 0 && mul(count - 1, step, &last) && add(first, last, &last) && last / side.rows < pages;
}

bool lies_within(int64_t offset, int64_t count, int64_t pages) {
  return offset >= 0 && count >= 0 && offset <= pages && count <= pages - offset;
}

}  // namespace

bool job_fits(const Tables& tables, const Job& job) {
  const JobSize& size = job.size;
  if (job.lists[0].first != 0 || job.lists[size.lists].first != size.pairs || size.pairs > kMostDescriptors) return false;
  for (int64_t number = 0; number < size.lists; ++number) {
    const List& list = job.lists[number];
    const Group& group = tables.groups[number % tables.size.num_groups];
    const int64_t next = (&list)[1].first;
    if (next < list.first || next > size.pairs || !lies_within(list.src_offset, 0, size.pages) ||
        !lies_within(list.dst_offset, 0, size.pages))
      return false;
    if (next > list.first &&
        (!side_lies_within(group.src, list.src_first, list.src_step, next - list.first, size.pages - list.src_offset) ||
         !side_lies_within(group.dst, list.dst_first, list.dst_step, next - list.first, size.pages - list.dst_offset)))
      return false;
  }
  if (job.checks[0].first != 0 || job.checks[size.checks].first != size.places) return false;
  for (int64_t c = 0; c < size.checks; ++c) {
    const Check& check = job.checks[c];
    const int64_t next = (&check)[1].first;
    int64_t end;
    if (next < check.first || next > size.places || !lies_within(check.offset, next - check.first, size.pages) ||
        check.code < static_cast<int64_t>(Code::kSrcRange) || check.code > static_cast<int64_t>(Code::kDstTwice) ||
        check.limit <= 0 || !kvplan::add(check.limit, check.shift, &end) || check.space < 0 || check.space >= tables.size.num_spaces || check.request < 0 ||
        check.request >= size.requests)
      return false;
  }
  return true;
}

}  // namespace kvplan::cpu
