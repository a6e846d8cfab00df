// Tensors -> plain pointers, for the ops of every device. Built on torch's stable ABI, so that one binary serves torch
// 2.11 and newer. Python (kvplan/ops/calls.py) checks what a user passes; the checks here keep memory safe.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "job.h"

namespace kvplan {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// An uninitialised contiguous int64 tensor.
inline Tensor new_words(std::initializer_list<int64_t> sizes, int32_t device_type = aoti_torch_device_type_cpu(),
                        int32_t device_index = 0) {
  const int64_t* const shape = sizes.begin();
  std::array<int64_t, 2> strides{1, 1};  // no tensor here has more dimensions
  if (sizes.size() == 2) strides[0] = std::max<int64_t>(shape[1], 1);
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), shape, strides.data(),
                                                  aoti_torch_dtype_int64(), device_type, device_index, &handle));
  return Tensor(handle);
}

// Data of a contiguous int64 tensor with rows as wide as T.
template <class T>
T* rows(const Tensor& tensor, const char* what, int64_t* count) {
  constexpr int64_t columns = words_of<T>();
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long && tensor.is_contiguous(), what,
                  " must be a contiguous int64 tensor");
  STD_TORCH_CHECK(tensor.numel() % columns == 0, what, " must have rows of ", columns, " words");
  *count = tensor.numel() / columns;
  return static_cast<T*>(tensor.data_ptr());
}

// Whether a list of ids is int64 (else int32).
inline bool check_ids(const Tensor& tensor, const char* what) {
  const bool wide = tensor.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK((wide || tensor.scalar_type() == ScalarType::Int) && tensor.dim() == 1 && tensor.is_contiguous(), what,
                  " must be a contiguous 1-D int32 or int64 tensor");
  return wide;
}

inline void check_table(const Tensor& table, const char* what) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Long && table.dim() == 2 && table.size(0) == 3 &&
                      table.is_contiguous(),
                  what, " must be a contiguous int64 [3, N] tensor");
}

// Of tensors that a table knows by their homes, those that lie elsewhere now.
inline std::vector<Moved> moved_from(const std::vector<Tensor>& tensors, const int64_t* homes) {
  std::vector<Moved> moved;
  for (const Tensor& tensor : tensors) {
    const auto home = static_cast<uint64_t>(*homes++);
    const auto now = reinterpret_cast<uint64_t>(tensor.data_ptr());
    if (home == now || tensor.numel() == 0) continue;
    int64_t last = 0;  // element
    for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
    moved.push_back({home, static_cast<uint64_t>(last + 1) * tensor.element_size(), now});
  }
  return moved;
}

// What is read may also be what is written: then the part that is read comes first.
inline std::vector<Moved> moved_sources(const std::vector<Tensor>& read, const std::vector<Tensor>& written,
                                        const std::vector<int64_t>& homes) {
  STD_TORCH_CHECK(homes.size() == read.size() + written.size(), "homes must have an address for each tensor read or written");
  std::vector<Moved> moved = moved_from(read, homes.data());
  // A tensor that is named as written alone may be read as well. One that is named as read, and has not moved, hides none.
  for (const Moved& other : moved_from(written, homes.data() + read.size())) {
    bool named = false;
    for (size_t i = 0; i < read.size(); ++i) named = named || static_cast<uint64_t>(homes[i]) == other.home;
    if (!named) moved.push_back(other);
  }
  return moved;
}

// Slots of tokens: one list [T], or a table [R, L] with the rows and lengths of B requests.
struct Slots {
  const void* data;
  bool wide;
  int64_t stride;                // from one row of the table to the next
  int64_t num_rows, row_length;
  const int64_t* requests;       // [B] row of each request; nullptr: all rows in turn
  const int64_t* lengths;        // [B] tokens of each; nullptr: whole rows
  int64_t num_requests;
};

inline Slots slots_of(const Tensor& slots, int64_t page_size, const std::optional<Tensor>& requests,
                      const std::optional<Tensor>& lengths) {
  STD_TORCH_CHECK(page_size > 0, "page_size must be positive");
  const bool wide = slots.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || slots.scalar_type() == ScalarType::Int, "slots must be int32 or int64");
  STD_TORCH_CHECK(slots.dim() == 1 || slots.dim() == 2, "slots must be [T] or [R, L]");
  const int64_t last = slots.dim() - 1;
  STD_TORCH_CHECK(slots.size(last) <= 1 || slots.stride(last) == 1, "the slots of a row must lie side by side");
  STD_TORCH_CHECK(slots.dim() == 2 || (!requests && !lengths), "rows and lengths go with slots [R, L]");
  Slots view{slots.data_ptr(), wide, last == 0 ? 0 : slots.stride(0), last == 0 ? 1 : slots.size(0), slots.size(last),
             nullptr, nullptr, last == 0 ? 1 : slots.size(0)};
  if (requests) view.requests = rows<const int64_t>(*requests, "rows", &view.num_requests);
  if (lengths) {
    int64_t count;
    view.lengths = rows<const int64_t>(*lengths, "lengths", &count);
    STD_TORCH_CHECK(count == view.num_requests, "lengths must have one number a request");
  }
  return view;
}

}  // namespace kvplan
