// The torch ops: schemas, registration, tensors -> plain structs. Built on torch's stable ABI, so that one binary serves
// torch 2.11 and newer. Python (kvplan/ops.py) checks what a user passes; the checks here keep memory safe.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "cpu/blocks.h"
#include "cpu/stages.h"

namespace kvplan {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

static_assert(sizeof(Entry) == 6 * sizeof(int64_t) && sizeof(Space) == 6 * sizeof(int64_t));
static_assert(sizeof(Group) == 12 * sizeof(int64_t) && sizeof(Window) == 7 * sizeof(int64_t));

Tensor new_words(std::initializer_list<int64_t> sizes) {
  const std::vector<int64_t> shape(sizes);
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * std::max<int64_t>(shape[i], 1);
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides.data(),
                                                  aoti_torch_dtype_int64(), aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// An uninitialised table of n descriptors.
Tensor new_table(int64_t n) {
  const size_t nbytes = 3 * static_cast<size_t>(n) * sizeof(int64_t);
  if (nbytes < cpu::Blocks::kLarge) return new_words({3, n});
  const auto block = cpu::Blocks::instance().take(nbytes);
  return torch::stable::from_blob(block.data, {3, n}, {n, 1}, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Long, [block](void*) { cpu::Blocks::instance().give(block); });
}

// Data of a contiguous int64 CPU tensor with rows of `columns` words.
template <class T>
const T* rows(const Tensor& tensor, const char* what, int64_t* count) {
  constexpr int64_t columns = sizeof(T) / sizeof(int64_t);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous() && tensor.is_cpu(), what,
                  " must be a contiguous int64 CPU tensor");
  STD_TORCH_CHECK(tensor.numel() % columns == 0, what, " must have rows of ", columns, " words");
  *count = tensor.numel() / columns;
  return static_cast<const T*>(tensor.data_ptr());
}

cpu::PageList page_list(const Tensor& tensor, const char* what) {
  const bool wide = tensor.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK((wide || tensor.scalar_type() == ScalarType::Int) && tensor.dim() == 1 && tensor.is_contiguous() &&
                      tensor.is_cpu(),
                  what, " must be a contiguous 1-D int32 or int64 CPU tensor");
  return {tensor.data_ptr(), tensor.numel(), wide};
}

constexpr int64_t kMostRanks = 1 << 16;  // of an interleave; pairs_of searches through them
constexpr int64_t kDescriptorsPerThread = 1 << 16;  // about 20 us: below that waking a thread costs more

// The tables inside one tensor; checks that they lie within it and within each other's bounds.
void read_tables(const Tensor& tables, cpu::Job* job) {
  int64_t words;
  const auto* at = rows<int64_t>(tables, "tables", &words);
  constexpr int64_t kHeader = sizeof(Header) / sizeof(int64_t);
  STD_TORCH_CHECK(words >= kHeader, "tables have no header");
  job->size = *reinterpret_cast<const Header*>(at);
  const Header& size = job->size;
  for (const int64_t count : {size.num_entries, size.num_groups, size.num_spaces, size.num_segments})
    STD_TORCH_CHECK(count >= 0 && count <= words, "tables have a bad header");
  STD_TORCH_CHECK(words == kHeader + 6 * size.num_entries + 12 * size.num_groups + 6 * size.num_spaces +
                               size.num_segments + 1,
                  "tables do not have the length their header says");
  job->entries = reinterpret_cast<const Entry*>(at + kHeader);
  job->groups = reinterpret_cast<const Group*>(job->entries + size.num_entries);
  job->spaces = reinterpret_cast<const Space*>(job->groups + size.num_groups);
  job->bounds = reinterpret_cast<const int64_t*>(job->spaces + size.num_spaces);
  STD_TORCH_CHECK(job->bounds[0] == 0 && job->bounds[size.num_segments] == size.num_entries &&
                      std::is_sorted(job->bounds, job->bounds + size.num_segments + 1),
                  "bounds must rise from 0 to the number of entries");
}

void check_tables(const cpu::Job& job) {
  for (int64_t s = 0; s < job.size.num_spaces; ++s) {
    const Space& space = job.spaces[s];
    STD_TORCH_CHECK(space.src_limit > 0 && space.dst_limit > 0 && space.src_tokens > 0 && space.dst_tokens > 0 &&
                        space.src_align > 0 && space.dst_align > 0,
                    "space ", s, " is empty");
  }
  for (int64_t g = 0; g < job.size.num_groups; ++g) {
    const Group& group = job.groups[g];
    STD_TORCH_CHECK(group.space >= 0 && group.space < job.size.num_spaces, "group ", g, " names no space");
    STD_TORCH_CHECK(group.compression > 0, "group ", g, " has no compression");
    // The row arithmetic of a group must agree with the tokens by which its lists are checked.
    const auto check = [&](const Side& side, int64_t tokens, int64_t align) {
      int64_t covered;
      STD_TORCH_CHECK(side.size > 0 && side.size < kMostRanks && side.rank >= 0 && side.rank < side.size && side.rows > 0 &&
                          side.page_step > 0 && side.row_step > 0 && mul(side.rows, side.size, &covered) &&
                          mul(covered, group.compression, &covered) && covered == tokens &&
                          (side.size == 1 || align % tokens == 0),
                      "group ", g, " has a side that does not fit its space");
    };
    check(group.src, job.spaces[group.space].src_tokens, job.spaces[group.space].src_align);
    check(group.dst, job.spaces[group.space].dst_tokens, job.spaces[group.space].dst_align);
  }
  for (int64_t e = 0; e < job.size.num_entries; ++e) {
    const Entry& entry = job.entries[e];
    STD_TORCH_CHECK(entry.group >= 0 && entry.group < job.size.num_groups, "entry ", e, " names no group");
    STD_TORCH_CHECK(entry.nbytes > 0 && entry.src_stride > 0 && entry.dst_stride > 0, "entry ", e, " has no size");
  }
}

void check_windows(const cpu::Job& job, size_t words) {
  const int64_t count = job.requests * job.size.num_spaces;
  STD_TORCH_CHECK(words == static_cast<size_t>(count) * (sizeof(Window) / sizeof(int64_t)),
                  "windows must hold seven numbers a request and space");
  const auto inside = [&](int64_t offset, int64_t size) {
    return offset >= 0 && size >= 0 && offset <= job.pages.size && size <= job.pages.size - offset;
  };
  for (int64_t i = 0; i < count; ++i) {
    const Window& window = job.windows[i];
    STD_TORCH_CHECK(inside(window.src_offset, window.src_pages) && inside(window.dst_offset, window.dst_pages),
                    "window ", i, " leaves the list of pages");
    STD_TORCH_CHECK(window.src_start >= 0 && window.dst_start >= -1 && window.num_tokens >= -1, "window ", i,
                    " has a negative position");
  }
}

std::tuple<Tensor, Tensor> plan(const Tensor& tables, const Tensor& pages, const std::vector<int64_t>& windows) {
  cpu::Job job{};
  read_tables(tables, &job);
  check_tables(job);
  job.pages = page_list(pages, "pages");
  job.windows = reinterpret_cast<const Window*>(windows.data());
  const int64_t per_request = job.size.num_spaces * static_cast<int64_t>(sizeof(Window) / sizeof(int64_t));
  job.requests = per_request == 0 ? 0 : static_cast<int64_t>(windows.size()) / per_request;
  check_windows(job, windows.size());

  cpu::Planner planner(job);
  const Status status = planner.prepare();
  const bool ok = status.code == Code::kOk;
  const std::array<int64_t, 5> facts = {static_cast<int64_t>(status.code), status.request, status.space,
                                        status.position, status.value};
  const auto& offsets = planner.offsets();
  Tensor info = new_words({static_cast<int64_t>(facts.size() + (ok ? offsets.size() : 0))});
  auto* words = static_cast<int64_t*>(info.data_ptr());
  words = std::copy(facts.begin(), facts.end(), words);
  if (ok) std::copy(offsets.begin(), offsets.end(), words);
  const int64_t n = ok ? offsets.back() : 0;
  Tensor table = new_table(n);
  auto* out = static_cast<uint64_t*>(table.data_ptr());
  // Threads are torch's own, as many as its user lets it have.
  const int64_t grain = n == 0 ? 1 : ceil_div(planner.pieces() * kDescriptorsPerThread, n);
  torch::stable::parallel_for(0, planner.pieces(), grain, [&](int64_t first, int64_t last) {
    planner.write({out, out + n, out + 2 * n}, first, last);
  });
  return {table, info};
}

std::tuple<Tensor, Tensor> page_indices(const Tensor& slots, int64_t page_size) {
  STD_TORCH_CHECK(page_size > 0, "page_size must be positive");
  const auto list = page_list(slots, "slots");
  Tensor pages = new_words({ceil_div(list.size, page_size)});
  Tensor bad = new_words({1});
  *static_cast<int64_t*>(bad.data_ptr()) =
      cpu::page_indices(list, page_size, static_cast<int64_t*>(pages.data_ptr()));
  return {pages, bad};
}

// The checks that `plan` makes of one list of page ids, alone: [code, position, value].
Tensor check_pages(const Tensor& pages, int64_t limit, bool distinct) {
  STD_TORCH_CHECK(limit >= 0, "limit must not be negative");
  const auto list = page_list(pages, "pages");
  Status status = cpu::check_range(list, limit, distinct ? Code::kDstRange : Code::kSrcRange);
  if (status.code == Code::kOk && distinct) status = cpu::check_distinct({list}, limit);
  Tensor found = new_words({3});
  const std::array<int64_t, 3> words = {static_cast<int64_t>(status.code), status.position, status.value};
  std::copy(words.begin(), words.end(), static_cast<int64_t*>(found.data_ptr()));
  return found;
}

std::tuple<Tensor, Tensor> find_runs(const Tensor& src, const Tensor& dst) {
  int64_t n, m;
  const auto* from = rows<int64_t>(src, "src", &n);
  const auto* to = rows<int64_t>(dst, "dst", &m);
  STD_TORCH_CHECK(n == m, "src and dst must be of one length");
  Tensor runs = new_words({3, n});
  Tensor count = new_words({1});
  auto* out = static_cast<int64_t*>(runs.data_ptr());
  const int64_t found = cpu::find_runs(from, to, n, out, out + n, out + 2 * n);
  // The tail is defined, so that equal inputs give equal outputs to the bit.
  for (int64_t* row = out; row < out + 3 * n; row += n) std::fill(row + found, row + n, 0);
  *static_cast<int64_t*>(count.data_ptr()) = found;
  return {runs, count};
}

// Runs of each group (indptr [groups + 1] cuts them), expanded over the entries. Refuses what would leave 64 bits.
std::tuple<Tensor, Tensor> expand(const Tensor& entries, const Tensor& runs, const Tensor& indptr, const Tensor& steps,
                                  int64_t capacity) {
  int64_t num_entries, words, num_cuts, num_groups;
  const auto* entry = rows<Entry>(entries, "entries", &num_entries);
  const auto* run = rows<int64_t>(runs, "runs", &words);
  const auto* cuts = rows<int64_t>(indptr, "indptr", &num_cuts);
  const auto* step = rows<Steps>(steps, "steps", &num_groups);
  STD_TORCH_CHECK(runs.dim() == 2 && runs.size(0) == 3 && num_cuts == num_groups + 1 && cuts[0] == 0 && capacity >= 0 &&
                      std::is_sorted(cuts, cuts + num_cuts) && cuts[num_groups] <= words / 3,
                  "runs must be [3, R], indptr must rise from 0 to at most R and have a row more than steps");
  const int64_t size = words / 3;
  std::vector<cpu::RunColumns<int64_t>> groups;
  std::vector<std::array<int64_t, 2>> last;  // highest index on each side
  for (int64_t g = 0; g < num_groups; ++g) {
    STD_TORCH_CHECK(step[g].src > 0 && step[g].dst > 0, "steps must be positive");
    cpu::RunColumns<int64_t> part{run + cuts[g], run + size + cuts[g], run + 2 * size + cuts[g], cuts[g + 1] - cuts[g], 0};
    std::array<int64_t, 2> highest{0, 0};
    for (int64_t i = 0; i < part.size; ++i) {
      int64_t src, dst;
      STD_TORCH_CHECK(part.count[i] > 0 && add(part.pairs, part.count[i], &part.pairs) &&
                          mul(part.count[i] - 1, step[g].src, &src) && add(part.src[i], src, &src) &&
                          mul(part.count[i] - 1, step[g].dst, &dst) && add(part.dst[i], dst, &dst),
                      "run ", cuts[g] + i, " is empty, negative or too long");
      highest = {std::max(highest[0], src), std::max(highest[1], dst)};
    }
    groups.push_back(part);
    last.push_back(highest);
  }
  int64_t total = 0;
  for (int64_t e = 0; e < num_entries; ++e) {
    const int64_t g = entry[e].group;
    STD_TORCH_CHECK(g >= 0 && g < num_groups && entry[e].nbytes > 0 && entry[e].src_stride > 0 &&
                        entry[e].dst_stride > 0,
                    "entry ", e, " names no group or has no size");
    STD_TORCH_CHECK(address_fits(entry[e].src_base, last[g][0], entry[e].src_stride, entry[e].nbytes) &&
                        address_fits(entry[e].dst_base, last[g][1], entry[e].dst_stride, entry[e].nbytes) &&
                        add(total, cpu::count_descriptors(entry[e], step[g], groups[g]), &total),
                    "entry ", e, " passes 64 bits");
  }
  Tensor table = new_words({3, capacity});
  Tensor count = new_words({1});
  *static_cast<int64_t*>(count.data_ptr()) = total;
  auto* out = static_cast<uint64_t*>(table.data_ptr());
  int64_t at = 0;
  for (int64_t e = 0; e < num_entries && total <= capacity; ++e) {
    const int64_t g = entry[e].group;
    cpu::expand(entry[e], step[g], groups[g], {out + at, out + capacity + at, out + 2 * capacity + at});
    at += cpu::count_descriptors(entry[e], step[g], groups[g]);
  }
  for (uint64_t* row = out; capacity > 0 && row < out + 3 * capacity; row += capacity)
    std::fill(row + at, row + capacity, 0);
  return {table, count};
}

void copy_(const Tensor& table, const std::vector<Tensor>& /* written: for the schema alone */) {
  int64_t words;
  const auto* out = reinterpret_cast<const uint64_t*>(rows<int64_t>(table, "table", &words));
  STD_TORCH_CHECK(table.dim() == 2 && table.size(0) == 3, "table must be [3, N]");
  const int64_t n = words / 3;
  cpu::copy(out, out + n, out + 2 * n, n);
}

}  // namespace
}  // namespace kvplan

STABLE_TORCH_LIBRARY(kvplan, m) {
  m.def("plan(Tensor tables, Tensor pages, int[] windows) -> (Tensor table, Tensor info)");
  m.def("page_indices(Tensor slots, int page_size) -> (Tensor pages, Tensor bad)");
  m.def("check_pages(Tensor pages, int limit, bool distinct) -> Tensor");
  m.def("find_runs(Tensor src, Tensor dst) -> (Tensor runs, Tensor count)");
  m.def("expand(Tensor entries, Tensor runs, Tensor indptr, Tensor steps, int capacity)"
        " -> (Tensor table, Tensor count)");
  m.def("copy_(Tensor table, Tensor(a!)[] written) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(kvplan, CPU, m) {
  m.impl("plan", TORCH_BOX(&kvplan::plan));
  m.impl("page_indices", TORCH_BOX(&kvplan::page_indices));
  m.impl("check_pages", TORCH_BOX(&kvplan::check_pages));
  m.impl("find_runs", TORCH_BOX(&kvplan::find_runs));
  m.impl("expand", TORCH_BOX(&kvplan::expand));
  m.impl("copy_", TORCH_BOX(&kvplan::copy_));
}
