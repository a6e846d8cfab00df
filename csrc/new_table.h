// Memory for tables that an op on the CPU returns.
#pragma once
#include "cpu/blocks.h"
#include "tensors.h"

namespace kvplan {

// An uninitialised table of n descriptors; *cold says whether it is to be written past the cache.
inline Tensor new_table(int64_t n, bool* cold) {
  const size_t nbytes = 3 * static_cast<size_t>(n) * sizeof(int64_t);
  *cold = false;
  if (nbytes < cpu::Blocks::kLarge) return new_words({3, n});
  const auto block = cpu::Blocks::instance().take(nbytes);
  *cold = !block.warm;
  return torch::stable::from_blob(block.data, {3, n}, {n, 1}, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                  ScalarType::Long, [block](void*) { cpu::Blocks::instance().give(block); });
}

}  // namespace kvplan
