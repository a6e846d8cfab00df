// All stages of planning, for all requests to one peer: check, find runs, count, then write each descriptor once.
#include "stages.h"

namespace kvplan::cpu {

namespace {

constexpr int64_t kMostDescriptors = int64_t{1} << 40;  // no machine holds more; below it no size here can wrap

}  // namespace

Status Planner::prepare_entries() {
  constexpr int64_t kNarrow = (int64_t{1} << 32) - 1;  // so that a run's count is below 2^32 too
  for (int64_t e = 0; e < job_.size.num_entries; ++e) {
    const Entry& entry = job_.entries[e];
    const Group& group = job_.groups[entry.group];
    const Space& space = job_.spaces[group.space];
    int64_t src, dst;
    if (!highest_index(group.src, space.src_limit, &src) || !highest_index(group.dst, space.dst_limit, &dst) ||
        !address_fits(entry.src_base, src, entry.src_stride, entry.nbytes) ||
        !address_fits(entry.dst_base, dst, entry.dst_stride, entry.nbytes))
      return {Code::kOverflow, 0, group.space, e, 0};
    narrow_ = narrow_ && src < kNarrow && dst < kNarrow && entry.src_stride < kNarrow && entry.dst_stride < kNarrow;
  }
  return {};
}

Status Planner::prepare_space(int64_t number) {
  const Space& space = job_.spaces[number];
  // No list may hold a page twice. Nor may two requests write one; but their lists may both hold pages that are not
  // written now, those of a shared prefix or of other chunks.
  std::vector<PageList> targets;
  std::vector<int64_t> firsts;
  for (int64_t request = 0; request < job_.requests; ++request) {
    const Window& window = job_.windows[request * job_.size.num_spaces + number];
    const PageList src = job_.pages.part(window.src_offset, window.src_pages);
    const PageList dst = job_.pages.part(window.dst_offset, window.dst_pages);
    Status status = check_window(space, window);
    if (status.code == Code::kOk) status = check_range(src, space.src_limit, Code::kSrcRange);
    if (status.code == Code::kOk) status = check_range(dst, space.dst_limit, Code::kDstRange);
    if (status.code == Code::kOk) status = check_distinct({dst}, space.dst_limit);
    if (status.code != Code::kOk) {
      status.request = request;
      return status;
    }
    const PageRange written = pages_written(space, window);
    targets.push_back(dst.part(written.first, written.count));
    firsts.push_back(written.first);
  }
  if (job_.requests == 1) return {};
  Status status = check_distinct(targets, space.dst_limit);
  if (status.code != Code::kOk) status.position += firsts[static_cast<size_t>(status.request)];
  return status;
}

Status Planner::prepare_group(int64_t request, int64_t number) {
  const Group& group = job_.groups[number];
  const Window& window = job_.windows[request * job_.size.num_spaces + group.space];
  Pairs pairs;
  const Status status = pairs_of(group, job_.spaces[group.space], window, &pairs);
  if (status.code != Code::kOk) return status;
  if (pairs.count > kMostDescriptors) return {Code::kOverflow};
  const PageList src = job_.pages.part(window.src_offset, window.src_pages);
  runs_.push_back(find_runs(group, pairs, src, job_.pages.part(window.dst_offset, window.dst_pages), narrow_));
  return status;
}

Status Planner::prepare() {
  const Status status = prepare_entries();
  if (status.code != Code::kOk) return status;
  for (int64_t space = 0; space < job_.size.num_spaces; ++space) {
    Status bad = prepare_space(space);
    bad.space = space;
    if (bad.code != Code::kOk) return bad;
  }
  runs_.reserve(static_cast<size_t>(job_.requests * job_.size.num_groups));
  for (int64_t request = 0; request < job_.requests; ++request) {
    for (int64_t group = 0; group < job_.size.num_groups; ++group) {
      Status bad = prepare_group(request, group);
      bad.request = request;
      bad.space = job_.groups[group].space;
      if (bad.code != Code::kOk) return bad;
    }
  }
  offsets_.push_back(0);
  starts_.push_back(0);
  for (int64_t segment = 0; segment < job_.size.num_segments; ++segment) {
    for (int64_t request = 0; request < job_.requests; ++request) {
      for (int64_t e = job_.bounds[segment]; e < job_.bounds[segment + 1]; ++e) {
        const Entry& entry = job_.entries[e];
        const Steps steps = steps_of(job_.groups[entry.group]);
        const int64_t count = runs_of(request, entry).with_columns(
            [&](const auto& runs) { return count_descriptors(entry, steps, runs); });
        int64_t total;
        if (!add(starts_.back(), count, &total) || total > kMostDescriptors) 
          return {Code::kOverflow, request, job_.groups[entry.group].space, e, 0};
        pieces_.push_back({request, e});
        starts_.push_back(total);
      }
      offsets_.push_back(starts_.back());
    }
  }
  return {};
}

const Runs& Planner::runs_of(int64_t request, const Entry& entry) const {
  return runs_[request * job_.size.num_groups + entry.group];
}

void Planner::write(Table out, int64_t first, int64_t last) const {
  for (int64_t i = first; i < last; ++i) {
    const Entry& entry = job_.entries[pieces_[i].entry];
    const Steps steps = steps_of(job_.groups[entry.group]);
    const Table here{out.src + starts_[i], out.dst + starts_[i], out.nbytes + starts_[i]};
    runs_of(pieces_[i].request, entry).with_columns([&](const auto& runs) { expand(entry, steps, runs, here); });
  }
}

}  // namespace kvplan::cpu
