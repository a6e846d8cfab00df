// The torch ops on CPU tensors: tensors -> plain structs, and registration. Schemas and fakes are in kvplan/ops/schemas.py.
#include <array>
#include <cstring>
#include <tuple>

#include "cpu/stages.h"
#include "cpu/workers.h"
#include "new_table.h"
#include "tensors.h"

namespace kvplan {
namespace {

// Another thread may write a tensor while an op reads it. So what an op checks it copies first: what was checked is then
// what is used.
class Pages {
 public:
  Pages(const Tensor& tensor, const char* what) : Pages(tensor, check_ids(tensor, what), tensor.numel()) {}
  const cpu::PageList& list() const { return list_; }

 private:
  Pages(const Tensor& tensor, bool wide, int64_t size)
      : words_(static_cast<size_t>(wide ? size : size / 2 + size % 2)), list_{words_.words(), size, wide} {
    if (size == 0) return;
    const void* const given = tensor.data_ptr();
    if (wide && cpu::narrow_ids(static_cast<const int64_t*>(given), size, reinterpret_cast<int32_t*>(words_.words())))
      list_.wide = false;
    else
      std::memcpy(words_.words(), given, static_cast<size_t>(size) * (wide ? 8 : 4));
  }

  cpu::Scratch words_;
  cpu::PageList list_;
};

template <class T>
std::vector<T> copied_rows(const Tensor& tensor, const char* what) {
  int64_t count;
  const T* at = rows<const T>(tensor, what, &count);
  return std::vector<T>(at, at + count);
}

// The tables of a pairing, checked.
class CheckedTables {
 public:
  explicit CheckedTables(const Tensor& tensor) : words_(copied_rows<int64_t>(tensor, "tables")) {
    const char* fault = fault_in_sizes(words_.data(), static_cast<int64_t>(words_.size()));
    STD_TORCH_CHECK(fault == nullptr, fault);
    tables_ = view_tables(words_.data());
    int64_t row = 0;
    fault = fault_in_rows(tables_, &row);
    STD_TORCH_CHECK(fault == nullptr, fault, " ", row);
  }
  const Tables& operator*() const { return tables_; }
  const Tables* operator->() const { return &tables_; }

 private:
  std::vector<int64_t> words_;
  Tables tables_;
};

// Windows [requests, spaces]; checks that they lie within the page ids.
int64_t check_windows(const Tables& tables, const std::vector<int64_t>& words, int64_t num_pages) {
  const int64_t per_request = tables.size.num_spaces * words_of<Window>();
  const int64_t requests = per_request == 0 ? 0 : static_cast<int64_t>(words.size()) / per_request;
  STD_TORCH_CHECK(words.size() == static_cast<size_t>(requests * per_request),
                  "windows must hold seven numbers a request and space");
  const auto inside = [&](int64_t offset, int64_t size) {
    return offset >= 0 && size >= 0 && offset <= num_pages && size <= num_pages - offset;
  };
  const auto* windows = reinterpret_cast<const Window*>(words.data());
  for (int64_t i = 0; i < requests * tables.size.num_spaces; ++i) {
    const Window& window = windows[i];
    STD_TORCH_CHECK(inside(window.src_offset, window.src_pages) && inside(window.dst_offset, window.dst_pages),
                    "window ", i, " leaves the list of pages");
    STD_TORCH_CHECK(window.src_start >= 0 && window.dst_start >= -1 && window.num_tokens >= -1, "window ", i,
                    " has a negative position");
  }
  return requests;
}

constexpr int64_t kFacts = 5;  // words of a Status in an info

int64_t* put_status(int64_t* out, const Status& status) {
  const std::array<int64_t, kFacts> facts = {static_cast<int64_t>(status.code), status.request, status.space,
                                             status.position, status.value};
  return std::copy(facts.begin(), facts.end(), out);
}

Status prepare_job(const Tables& tables, const std::vector<int64_t>& windows, int64_t num_pages,
                   std::vector<int64_t>* words, bool* narrow) {
  const int64_t requests = check_windows(tables, windows, num_pages);
  return cpu::prepare(tables, reinterpret_cast<const Window*>(windows.data()), requests, num_pages, words, narrow);
}

std::tuple<Tensor, Tensor> prepare(const Tensor& tables, const std::vector<int64_t>& windows, int64_t num_pages) {
  std::vector<int64_t> words;
  Tensor status = new_words({kFacts});
  STD_TORCH_CHECK(num_pages >= 0, "num_pages must not be negative");
  bool narrow;
  const Status found = prepare_job(*CheckedTables(tables), windows, num_pages, &words, &narrow);
  put_status(static_cast<int64_t*>(status.data_ptr()), found);
  Tensor job = new_words({found.code == Code::kOk ? static_cast<int64_t>(words.size()) : 0});
  if (found.code == Code::kOk) std::copy(words.begin(), words.end(), static_cast<int64_t*>(job.data_ptr()));
  return {job, status};
}

constexpr int64_t kDescriptorsPerPiece = 1 << 16;  // 1.5 MiB, so that few pieces are under way at the end

void write(const cpu::Planner& planner, const cpu::Table& out, int64_t n) {
  const int64_t threads = 3 * static_cast<size_t>(n) * sizeof(int64_t) > cpu::Blocks::kCache ? cpu::num_threads() : 1;
  const int64_t pieces = planner.pieces();
  if (threads == 1) return planner.write(out, 0, pieces);
  const int64_t parts = std::min(pieces, ceil_div(n, kDescriptorsPerPiece));
  cpu::for_each_piece(parts, threads, [&](int64_t part) {
    planner.write(out, pieces * part / parts, pieces * (part + 1) / parts);
  });
}

// The table of a plan. `info(count)` gives the room for that many words of an info.
template <class Info>
Tensor planned(const Tensor& tables_tensor, const Tensor& pages, const std::vector<int64_t>& windows, const Info& info) {
  const CheckedTables tables(tables_tensor);
  const Pages ids(pages, "pages");
  std::vector<int64_t> words;
  bool narrow = false, cold;
  Status status = prepare_job(*tables, windows, ids.list().size, &words, &narrow);
  const Job job = status.code == Code::kOk ? view_job(words.data()) : Job{};
  cpu::Planner planner(*tables, job, ids.list(), narrow);
  if (status.code == Code::kOk) status = planner.prepare();
  const bool ok = status.code == Code::kOk;
  const auto& offsets = planner.offsets();
  int64_t* at = put_status(info(kFacts + (ok ? static_cast<int64_t>(offsets.size()) : 0)), status);
  if (ok) std::copy(offsets.begin(), offsets.end(), at);
  const int64_t n = ok ? offsets.back() : 0;
  Tensor table = new_table(n, &cold);
  auto* out = static_cast<uint64_t*>(table.data_ptr());
  if (ok) write(planner, {out, out + n, out + 2 * n, cold}, n);
  return table;
}

std::tuple<Tensor, Tensor> plan(const Tensor& tables, const Tensor& pages, const std::vector<int64_t>& windows) {
  Tensor info = new_words({0});
  Tensor table = planned(tables, pages, windows, [&](int64_t count) {
    info = new_words({count});
    return static_cast<int64_t*>(info.data_ptr());
  });
  return {table, info};
}

Tensor plan_into(const Tensor& tables, const Tensor& pages, const std::vector<int64_t>& windows, const Tensor& info) {
  int64_t room;
  auto* words = rows<int64_t>(info, "info", &room);
  return planned(tables, pages, windows, [&](int64_t count) {
    STD_TORCH_CHECK(count <= room, "info has ", room, " words, and ", count, " are needed");
    return words;
  });
}

// Whether the words of a job are one of these tables and so many page ids, of these sizes.
bool belongs(const Tables& tables, const std::vector<int64_t>& job, const std::vector<int64_t>& sizes, int64_t num_pages) {
  const auto words = static_cast<int64_t>(job.size());
  if (words < words_of<JobSize>() || !std::equal(sizes.begin(), sizes.end(), job.begin())) return false;
  const JobSize& size = *reinterpret_cast<const JobSize*>(job.data());
  for (const int64_t count : {size.requests, size.lists, size.checks})
    if (count < 0 || count > words) return false;
  return size.lists == size.requests * tables.size.num_groups && size.pieces == size.requests * tables.size.num_entries &&
         size.pages == num_pages && words == job_words(size) && cpu::job_fits(tables, view_job(job.data()));
}

void plan_(const Tensor& tables_tensor, const Tensor& job_tensor, const Tensor& pages,
           const std::vector<int64_t>& sizes, const Tensor& table, const Tensor& info) {
  const CheckedTables tables(tables_tensor);
  const Pages ids(pages, "pages");
  const int64_t num_pages = ids.list().size;
  check_table(table, "table");
  int64_t words;
  auto* out = rows<int64_t>(info, "info", &words);
  STD_TORCH_CHECK(static_cast<int64_t>(sizes.size()) == words_of<JobSize>(), "sizes must be the first ",
                  words_of<JobSize>(), " words of the job");
  STD_TORCH_CHECK(reinterpret_cast<const JobSize*>(sizes.data())->pages == num_pages,
                  "sizes, job and pages do not belong together");
  const auto job_words = copied_rows<int64_t>(job_tensor, "job");
  Job job{};
  Status status{Code::kJob};
  if (belongs(*tables, job_words, sizes, num_pages)) {
    job = view_job(job_words.data());
    status = {};
  }
  STD_TORCH_CHECK(words == kFacts + tables->size.num_segments * job.size.requests + 1 || status.code == Code::kJob,
                  "info must have ", kFacts, " + segments * requests + 1 words");
  STD_TORCH_CHECK(words >= kFacts, "info must have ", kFacts, " words or more");
  bool narrow = false;
  if (status.code == Code::kOk) status = cpu::check_entries(*tables, &narrow);
  cpu::Planner planner(*tables, job, ids.list(), narrow);
  if (status.code == Code::kOk) status = planner.prepare();
  const int64_t n = status.code == Code::kOk ? planner.offsets().back() : 0, room = table.size(1);
  if (n > room) status = {Code::kRoom, 0, 0, room, n};
  int64_t* rest = put_status(out, status);
  std::fill(rest, out + words, 0);
  if (status.code != Code::kOk) return;
  std::copy(planner.offsets().begin(), planner.offsets().end(), rest);
  auto* at = static_cast<uint64_t*>(table.data_ptr());
  write(planner, {at, at + room, at + 2 * room}, n);
}

// A word that another thread may write: checked and used as it was then.
int64_t read_once(const int64_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

std::tuple<Tensor, Tensor> page_indices(const Tensor& slots, int64_t page_size, const std::optional<Tensor>& requests,
                                        const std::optional<Tensor>& lengths) {
  const Slots view = slots_of(slots, page_size, requests, lengths);
  const int64_t columns = ceil_div(view.row_length, page_size);
  Tensor pages = slots.dim() == 1 ? new_words({columns}) : new_words({view.num_requests, columns});
  Tensor bad = new_words({view.num_requests});
  auto* out = static_cast<int64_t*>(pages.data_ptr());
  auto* found = static_cast<int64_t*>(bad.data_ptr());
  std::fill(out, out + view.num_requests * columns, -1);
  const cpu::PageList all{view.data, view.num_rows * view.row_length, view.wide};
  for (int64_t b = 0; b < view.num_requests; ++b, out += columns) {
    const int64_t row = view.requests ? read_once(view.requests + b) : b;
    const int64_t length = view.lengths ? read_once(view.lengths + b) : view.row_length;
    const bool inside = row >= 0 && row < view.num_rows && length >= 0 && length <= view.row_length;
    found[b] = inside ? cpu::page_indices(all.part(row * view.stride, length), page_size, out) : kNoRow;
  }
  return {pages, bad};
}

// The checks that `plan` makes of one list of page ids, alone: [code, position, value].
Tensor check_pages(const Tensor& pages, int64_t limit, bool distinct) {
  STD_TORCH_CHECK(limit >= 0, "limit must not be negative");
  const Pages ids(pages, "pages");
  Status status = cpu::check_range(ids.list(), limit, distinct ? Code::kDstRange : Code::kSrcRange);
  if (status.code == Code::kOk && distinct) status = cpu::check_distinct({ids.list()}, limit);
  Tensor found = new_words({3});
  const std::array<int64_t, 3> words = {static_cast<int64_t>(status.code), status.position, status.value};
  std::copy(words.begin(), words.end(), static_cast<int64_t*>(found.data_ptr()));
  return found;
}

std::tuple<Tensor, Tensor> find_runs(const Tensor& src, const Tensor& dst, const std::optional<Tensor>& indptr) {
  int64_t n, m;
  const auto* from = rows<const int64_t>(src, "src", &n);
  const auto* to = rows<const int64_t>(dst, "dst", &m);
  STD_TORCH_CHECK(n == m, "src and dst must be of one length");
  const auto cuts = indptr ? copied_rows<int64_t>(*indptr, "indptr") : std::vector<int64_t>{0, n};
  STD_TORCH_CHECK(!cuts.empty() && cuts[0] == 0 && cuts.back() == n && std::is_sorted(cuts.begin(), cuts.end()),
                  "indptr must rise from 0 to the length of src");
  const auto num_cuts = static_cast<int64_t>(cuts.size());
  Tensor runs = new_words({3, n});
  Tensor run_indptr = new_words({num_cuts});
  auto* out = static_cast<int64_t*>(runs.data_ptr());
  auto* found = static_cast<int64_t*>(run_indptr.data_ptr());
  found[0] = 0;
  for (size_t i = 0; i + 1 < cuts.size(); ++i) {
    int64_t* at = out + found[i];
    found[i + 1] = found[i] + cpu::find_runs(from + cuts[i], to + cuts[i], cuts[i + 1] - cuts[i], at, at + n, at + 2 * n);
  }
  // The tail is defined, so that equal inputs give equal outputs to the bit.
  for (int64_t* row = out; n > 0 && row < out + 3 * n; row += n) std::fill(row + found[num_cuts - 1], row + n, 0);
  return {runs, run_indptr};
}

// Runs of each group (indptr [groups + 1] cuts them), expanded over the entries. Refuses what would leave 64 bits.
std::tuple<Tensor, Tensor> expand(const Tensor& entries, const Tensor& runs, const Tensor& indptr, const Tensor& steps,
                                  int64_t capacity) {
  const auto entry = copied_rows<Entry>(entries, "entries");
  const auto cuts = copied_rows<int64_t>(indptr, "indptr");
  const auto step = copied_rows<Steps>(steps, "steps");
  const auto given_runs = copied_rows<int64_t>(runs, "runs");
  const auto* run = given_runs.data();
  const auto num_entries = static_cast<int64_t>(entry.size()), num_groups = static_cast<int64_t>(step.size());
  const auto size = static_cast<int64_t>(given_runs.size()) / 3;
  STD_TORCH_CHECK(runs.dim() == 2 && runs.size(0) == 3 && cuts.size() == step.size() + 1 && cuts[0] == 0 && capacity >= 0 &&
                      std::is_sorted(cuts.begin(), cuts.end()) && cuts.back() <= size,
                  "runs must be [3, R], indptr must rise from 0 to at most R and have a row more than steps");
  std::vector<cpu::RunColumns<int64_t>> groups;
  std::vector<std::array<int64_t, 2>> last;  // highest index on each side
  for (int64_t g = 0; g < num_groups; ++g) {
    STD_TORCH_CHECK(step[g].src > 0 && step[g].dst > 0, "steps must be positive");
    cpu::RunColumns<int64_t> part{run + cuts[g], run + size + cuts[g], run + 2 * size + cuts[g], cuts[g + 1] - cuts[g], 0};
    std::array<int64_t, 2> highest{0, 0};
    for (int64_t i = 0; i < part.size; ++i) {
      int64_t src, dst;
      STD_TORCH_CHECK(part.count[i] > 0 && part.count[i] <= kMostDescriptors && add(part.pairs, part.count[i], &part.pairs) &&
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

void copy_(const Tensor& table, const std::optional<Tensor>& count, const std::vector<Tensor>& read,
           const std::vector<Tensor>& written, const std::vector<int64_t>& homes) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Long && table.dim() == 2 && table.size(0) == 3 &&
                      (table.size(1) <= 1 || table.stride(1) == 1),
                  "table must be int64 [3, N], the words of a row side by side");
  const auto* from = static_cast<const uint64_t*>(table.data_ptr());
  const auto *to = from + table.stride(0), *sizes = to + table.stride(0);
  const int64_t room = table.size(1);
  int64_t words = 1;
  const int64_t* given = count ? rows<const int64_t>(*count, "count", &words) : &room;
  const int64_t n = words == 1 ? read_once(given) : -1;
  STD_TORCH_CHECK(n >= 0 && n <= room, "count must be one number, from 0 to the table's ", room);
  const std::vector<Moved> sources = moved_sources(read, written, homes);
  const std::vector<Moved> targets = moved_from(written, homes.data() + read.size());
  if (sources.empty() && targets.empty()) return cpu::copy(from, to, sizes, n);
  std::vector<uint64_t> src(from, from + n), dst(to, to + n), nbytes(sizes, sizes + n);
  for (size_t i = 0; i < src.size(); ++i) {
    STD_TORCH_CHECK(relocate(sources.data(), static_cast<int64_t>(sources.size()), nbytes[i], &src[i]) &&
                        relocate(targets.data(), static_cast<int64_t>(targets.size()), nbytes[i], &dst[i]),
                    "descriptor ", i, " begins in a tensor that has been moved, and ends outside of it");
  }
  cpu::copy(src.data(), dst.data(), nbytes.data(), n);
}

void set_num_threads(int64_t threads) {
  STD_TORCH_CHECK(threads > 0, "threads must be positive");
  cpu::set_num_threads(threads);
}

cpu::Ranges ranges_of(const Tensor& tensor, const char* what) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long && tensor.dim() == 2 && tensor.size(0) == 2 &&
                      (tensor.size(1) <= 1 || tensor.stride(1) == 1),
                  what, " must be int64 [2, N], the words of a row side by side");
  const auto* base = static_cast<const uint64_t*>(tensor.data_ptr());
  return {base, base + tensor.stride(0), tensor.size(1)};
}

Tensor first_collision(const Tensor& ranges, const Tensor& others) {
  const cpu::Ranges sorted = ranges_of(others, "others");
  uint64_t last = 0;
  for (int64_t i = 0; i < sorted.size; last = sorted.base[i] + (sorted.nbytes[i] - 1), ++i)
    STD_TORCH_CHECK(sorted.nbytes[i] > 0 && sorted.nbytes[i] - 1 <= ~sorted.base[i] && (i == 0 || sorted.base[i] > last),
                    "others must ascend, be apart and not be empty; ", i, " does not");
  Tensor found = new_words({1});
  *static_cast<int64_t*>(found.data_ptr()) = cpu::first_collision(ranges_of(ranges, "ranges"), sorted);
  return found;
}

}  // namespace
}  // namespace kvplan

STABLE_TORCH_LIBRARY_IMPL(kvplan, CPU, m) {
  m.impl("prepare", TORCH_BOX(&kvplan::prepare));
  m.impl("plan", TORCH_BOX(&kvplan::plan));
  m.impl("plan_into", TORCH_BOX(&kvplan::plan_into));
  m.impl("plan_", TORCH_BOX(&kvplan::plan_));
  m.impl("page_indices", TORCH_BOX(&kvplan::page_indices));
  m.impl("check_pages", TORCH_BOX(&kvplan::check_pages));
  m.impl("find_runs", TORCH_BOX(&kvplan::find_runs));
  m.impl("expand", TORCH_BOX(&kvplan::expand));
  m.impl("first_collision", TORCH_BOX(&kvplan::first_collision));
  m.impl("copy_", TORCH_BOX(&kvplan::copy_));
}

// It takes no tensor, so no device tells who is meant.
STABLE_TORCH_LIBRARY_IMPL(kvplan, CompositeExplicitAutograd, m) {
  m.impl("set_num_threads", TORCH_BOX(&kvplan::set_num_threads));
}
