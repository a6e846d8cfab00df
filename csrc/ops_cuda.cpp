// The torch ops on CUDA tensors. They launch kernels on the current stream and never wait for the device.
#include <dlfcn.h>

#include <tuple>

#include "cuda/driver.h"
#include "tensors.h"

namespace kvplan {
namespace {

// The current stream of a device. The function lives in torch's CUDA library, which this one must not need.
void* current_stream(int32_t device) {
  using Get = int32_t (*)(int32_t, void**);
  static const Get get = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<Get>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  }();
  STD_TORCH_CHECK(get != nullptr, "this torch has no CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get(device, &stream));
  return stream;
}

// What launch.h asks of a device: the one that a tensor lies on, with its current stream.
class Device {
 public:
  explicit Device(const Tensor& tensor) : index_(index_of(tensor)), guard_(index_), stream_(current_stream(index_)) {
    cuda::prepare(index_);
  }

  int64_t* allocate(int64_t words) {
    // Freed when this call returns; torch gives it to nobody before the stream has come so far.
    kept_.push_back(new_tensor({words}));
    return static_cast<int64_t*>(kept_.back().data_ptr());
  }
  Tensor new_tensor(std::initializer_list<int64_t> sizes) const {
    return new_words(sizes, aoti_torch_device_type_cuda(), index_);
  }
  void fill(void* at, int byte, int64_t nbytes) { cuda::fill(stream_, at, byte, nbytes); }
  template <class Args>
  void run(cuda::Kernel kernel, int64_t blocks, const Args& args) {
    cuda::run(stream_, kernel, blocks, const_cast<Args*>(&args));
  }
  int64_t processors() const { return cuda::processors(index_); }

  void check_here(const Tensor& tensor, const char* what) const {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device() == index_, what, " must be on device ", index_);
  }
  // The address of a result, which may also be pinned host memory.
  template <class T>
  T* writable(const Tensor& tensor, const char* what) const {
    if (tensor.is_cpu()) {
      const uint64_t address = tensor.numel() == 0 ? 0 : cuda::mapped(tensor.data_ptr());
      STD_TORCH_CHECK(address != 0 || tensor.numel() == 0, what, " must be on device ", index_, " or in pinned memory");
      return reinterpret_cast<T*>(address);
    }
    check_here(tensor, what);
    return static_cast<T*>(tensor.data_ptr());
  }

 private:
  static int32_t index_of(const Tensor& tensor) {
    STD_TORCH_CHECK(tensor.is_cuda(), "all tensors but a result in pinned memory must be on one CUDA device");
    return tensor.get_device();
  }

  struct Guard {
    explicit Guard(int32_t device) { TORCH_ERROR_CODE_CHECK(aoti_torch_create_device_guard(device, &handle)); }
    ~Guard() { aoti_torch_delete_device_guard(handle); }
    Guard(const Guard&) = delete;
    DeviceGuardHandle handle = nullptr;
  };

  int32_t index_;
  Guard guard_;
  void* stream_;
  std::vector<Tensor> kept_;
};

std::tuple<Tensor, Tensor> page_indices(const Tensor& slots, int64_t page_size, const std::optional<Tensor>& requests,
                                        const std::optional<Tensor>& lengths) {
  Device device(slots);
  if (requests) device.check_here(*requests, "rows");
  if (lengths) device.check_here(*lengths, "lengths");
  const Slots view = slots_of(slots, page_size, requests, lengths);
  const int64_t columns = ceil_div(view.row_length, page_size);
  Tensor pages = slots.dim() == 1 ? device.new_tensor({columns}) : device.new_tensor({view.num_requests, columns});
  Tensor bad = device.new_tensor({view.num_requests});
  cuda::page_indices(device, cuda::PageArgs{view.data, view.wide, view.stride, view.num_rows, view.row_length, view.requests,
                                            view.lengths, view.num_requests, page_size,
                                            static_cast<int64_t*>(pages.data_ptr()), columns,
                                            static_cast<uint64_t*>(bad.data_ptr())});
  return {pages, bad};
}

void plan_(const Tensor& tables, const Tensor& job, const Tensor& pages, const std::vector<int64_t>& sizes,
           const Tensor& table, const Tensor& info) {
  Device device(pages);
  device.check_here(tables, "tables");
  device.check_here(job, "job");
  check_table(table, "table");
  cuda::PlanInput in{};
  int64_t given, info_words;
  in.tables = rows<const int64_t>(tables, "tables", &in.tables_words);
  in.job = rows<const int64_t>(job, "job", &given);
  rows<int64_t>(info, "info", &info_words);
  in.wide = check_ids(pages, "pages");
  in.pages = pages.data_ptr();
  STD_TORCH_CHECK(static_cast<int64_t>(sizes.size()) == words_of<JobSize>(), "sizes must be the first ",
                  words_of<JobSize>(), " words of the job");
  in.size = *reinterpret_cast<const JobSize*>(sizes.data());
  for (const int64_t size : sizes)
    STD_TORCH_CHECK(size >= 0 && size <= kMostDescriptors, "sizes are not those of a job");
  STD_TORCH_CHECK(in.size.pages == pages.numel() && in.tables_words >= words_of<Header>() &&
                      given == job_words(in.size),
                  "sizes, job and pages do not belong together");
  constexpr int64_t kFacts = 6;  // five words of status, and where the last descriptor ends
  const int64_t cuts = info_words - kFacts;
  STD_TORCH_CHECK(cuts >= 0 && (in.size.requests == 0 ? cuts == 0 : cuts % in.size.requests == 0),
                  "info must have ", kFacts, " + segments * requests words");
  in.segments = in.size.requests == 0 ? 0 : cuts / in.size.requests;
  in.table = device.writable<uint64_t>(table, "table");
  in.room = table.size(1);
  in.info = device.writable<int64_t>(info, "info");
  cuda::plan(device, in);
}

std::tuple<Tensor, Tensor> find_runs(const Tensor& src, const Tensor& dst, const std::optional<Tensor>& indptr) {
  Device device(src);
  device.check_here(dst, "dst");
  int64_t n, m, cuts = 2;
  const auto* from = rows<const int64_t>(src, "src", &n);
  const auto* to = rows<const int64_t>(dst, "dst", &m);
  STD_TORCH_CHECK(n == m, "src and dst must be of one length");
  const int64_t* given = nullptr;
  if (indptr) {
    device.check_here(*indptr, "indptr");
    given = rows<const int64_t>(*indptr, "indptr", &cuts);
  }
  STD_TORCH_CHECK(cuts > (n > 0 ? 1 : 0), "indptr must rise from 0 to the length of src");
  Tensor runs = device.new_tensor({3, n});
  Tensor run_indptr = device.new_tensor({cuts});
  cuda::find_runs(device, from, to, n, given, cuts - 1, static_cast<int64_t*>(runs.data_ptr()),
                  static_cast<int64_t*>(run_indptr.data_ptr()));
  return {runs, run_indptr};
}

std::tuple<Tensor, Tensor> expand(const Tensor& entries, const Tensor& runs, const Tensor& indptr, const Tensor& steps,
                                  int64_t capacity) {
  Device device(runs);
  device.check_here(entries, "entries");
  device.check_here(indptr, "indptr");
  device.check_here(steps, "steps");
  int64_t num_entries, words, cuts, groups;
  const auto* entry = rows<const Entry>(entries, "entries", &num_entries);
  const auto* run = rows<const int64_t>(runs, "runs", &words);
  const auto* given = rows<const int64_t>(indptr, "indptr", &cuts);
  const auto* step = rows<const Steps>(steps, "steps", &groups);
  STD_TORCH_CHECK(runs.dim() == 2 && runs.size(0) == 3 && cuts == groups + 1 && capacity >= 0,
                  "runs must be [3, R], and indptr must have a row more than steps");
  Tensor table = device.new_tensor({3, capacity});
  Tensor count = device.new_tensor({1});
  cuda::expand(device, entry, num_entries, run, words / 3, given, step, groups, static_cast<uint64_t*>(table.data_ptr()),
               capacity, static_cast<int64_t*>(count.data_ptr()));
  return {table, count};
}

void copy_(const Tensor& table, const std::optional<Tensor>& count, const std::vector<Tensor>& read,
           const std::vector<Tensor>& written, const std::vector<int64_t>& homes) {
  Device device(table);
  check_table(table, "table");
  const int64_t* n = nullptr;
  if (count) {
    int64_t words;
    device.check_here(*count, "count");
    n = rows<const int64_t>(*count, "count", &words);
    STD_TORCH_CHECK(words == 1, "count must be one number");
  }
  std::vector<Moved> moved = moved_sources(read, written, homes);
  const std::vector<Moved> targets = moved_from(written, homes.data() + read.size());
  const auto num_read = static_cast<int>(moved.size());
  moved.insert(moved.end(), targets.begin(), targets.end());
  STD_TORCH_CHECK(moved.size() <= cuda::kMostMoved, moved.size(), " of the tensors read or written have been moved; at most ",
                  cuda::kMostMoved, " may be");
  if (table.size(1) > 0)
    cuda::copy(device, static_cast<const uint64_t*>(table.data_ptr()), table.size(1), n, moved.data(), num_read,
               static_cast<int>(targets.size()));
}

// Compiled device code, a uint8 tensor on the CPU that the caller keeps; see kvplan/ops/kernels.py. With it CUDA tensors have
// their ops; without, they are free for another back end to register.
void load_kernels(const Tensor& image) {
  STD_TORCH_CHECK(image.is_cpu() && image.is_contiguous() && image.numel() > 0, "image must be bytes on the CPU");
  cuda::use_kernels(image.data_ptr());
  using Library = torch::stable::detail::StableLibrary;
  static const auto* registered = [] {
    auto* library = new Library(Library::Kind::IMPL, "kvplan", "CUDA", __FILE__, __LINE__);  // for good
    library->impl("plan_", TORCH_BOX(&plan_));
    library->impl("page_indices", TORCH_BOX(&page_indices));
    library->impl("find_runs", TORCH_BOX(&find_runs));
    library->impl("expand", TORCH_BOX(&expand));
    library->impl("copy_", TORCH_BOX(&copy_));
    return library;
  }();
  static_cast<void>(registered);
}

}  // namespace
}  // namespace kvplan

STABLE_TORCH_LIBRARY_IMPL(kvplan, CPU, m) { m.impl("load_kernels", TORCH_BOX(&kvplan::load_kernels)); }
