// All stages of planning, for all requests of a job: check ids, find runs, count, then write each descriptor once.
#include <algorithm>

#include "past_cache.h"
#include "stages.h"

namespace kvplan::cpu {

Status Planner::check_ids() const {
  const auto size_of = [&](int64_t c) { return job_.checks[c + 1].first - job_.checks[c].first; };
  for (int64_t c = 0; c < job_.size.checks;) {
    const Check& check = job_.checks[c];
    const Code code = static_cast<Code>(check.code);
    std::vector<PageList> lists;  // one list, or all of one scope
    int64_t limit = 0;            // of shifted ids
    do {
      lists.push_back(pages_.part(job_.checks[c].offset, size_of(c)));
      lists.back().shift = job_.checks[c].shift;
      limit = std::max(limit, job_.checks[c].limit + job_.checks[c].shift);
      ++c;
    } while (code == Code::kDstTwice && c < job_.size.checks && job_.checks[c].code == check.code &&
             job_.checks[c].scope == check.scope);
    Status status;
    for (size_t i = 0; i < lists.size() && status.code == Code::kOk; ++i) {
      // Duplicates are looked up by id: whatever a job says, none may lie beyond the limit.
      status = check_range(lists[i], (&check)[i].limit, code == Code::kDstTwice ? Code::kDstRange : code);
      status.request = static_cast<int64_t>(i);
    }
    if (status.code == Code::kOk && code == Code::kDstTwice) status = check_distinct(lists, limit);
    if (status.code == Code::kOk) continue;
    const Check& failed = (&check)[status.request];
    return {status.code, failed.request, failed.space, failed.position + status.position, status.value};
  }
  return {};
}

Runs Planner::find_runs_of(int64_t number) const {
  const List& list = job_.lists[number];
  const Pairs pairs{(&list)[1].first - list.first, list.src_first, list.src_step, list.dst_first, list.dst_step};
  const Group& group = tables_.groups[number % tables_.size.num_groups];
  return find_runs(group, pairs, pages_.part(list.src_offset, pages_.size - list.src_offset),
                   pages_.part(list.dst_offset, pages_.size - list.dst_offset), narrow_);
}

Status Planner::prepare() {
  const Status status = check_ids();
  if (status.code != Code::kOk) return status;
  runs_.reserve(static_cast<size_t>(job_.size.lists));
  for (int64_t number = 0; number < job_.size.lists; ++number) runs_.push_back(find_runs_of(number));
  starts_.reserve(static_cast<size_t>(job_.size.pieces) + 1);
  starts_.assign(1, 0);
  offsets_.reserve(static_cast<size_t>(tables_.size.num_segments * job_.size.requests) + 1);
  offsets_.assign(1, 0);
  for (int64_t segment = 0; segment < tables_.size.num_segments; ++segment) {
    for (int64_t request = 0; request < job_.size.requests; ++request) {
      for (int64_t e = tables_.bounds[segment]; e < tables_.bounds[segment + 1]; ++e) {
        const Entry& entry = tables_.entries[e];
        const Steps steps = steps_of(tables_.groups[entry.group]);
        starts_.push_back(starts_.back() + runs_of(request, entry).with_columns([&](const auto& runs) {
          return count_descriptors(entry, steps, runs);
        }));
      }
      offsets_.push_back(starts_.back());
    }
  }
  return {};
}

const Runs& Planner::runs_of(int64_t request, const Entry& entry) const {
  return runs_[static_cast<size_t>(request * tables_.size.num_groups + entry.group)];
}

void Planner::write(Table out, int64_t first, int64_t last) const {
  if (first >= last) return;
  PieceName name = name_piece(tables_.bounds, tables_.size.num_segments, job_.size.requests, first);
  for (int64_t i = first; i < last; ++i) {
    const Entry& entry = tables_.entries[name.entry];
    const Steps steps = steps_of(tables_.groups[entry.group]);
    const int64_t at = starts_[static_cast<size_t>(i)];
    const Table here{out.src + at, out.dst + at, out.nbytes + at, out.cold};
    runs_of(name.request, entry).with_columns([&](const auto& runs) { expand(entry, steps, runs, here); });
    if (++name.entry < tables_.bounds[name.segment + 1]) continue;
    if (++name.request == job_.size.requests) name.request = 0, ++name.segment;
    name.entry = tables_.bounds[name.segment];
  }
  if (out.cold) written_past_cache();
}

}  // namespace kvplan::cpu
