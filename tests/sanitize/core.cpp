// The stages on blocks of exactly their size, so that a bound that is off by one leaves one. Built by
// tests/test_sanitizers.py as it is, and with mistakes in the sources: each of these must be found.
#include <cstdio>
#include <memory>
#include <vector>

#include "cpu/descriptors.cpp"
#include "cpu/pages.cpp"
#include "cpu/runs.cpp"

namespace {

using namespace kvplan;

template <class T>
std::unique_ptr<T[]> block(std::vector<T> words) {
  std::unique_ptr<T[]> copy(new T[words.size()]);
  std::copy(words.begin(), words.end(), copy.get());
  return copy;
}

int64_t slots() {
  const auto ids = block<int64_t>({8, 9, 10, 11, 4, 5, INT64_MIN});
  const auto pages = block<int64_t>({0, 0});
  return cpu::page_indices({ids.get(), 7, true}, 4, pages.get());
}

int64_t runs() {
  const auto src = block<int32_t>({3, 4, 5}), dst = block<int32_t>({7, 8, 9});
  const Side whole{1, 0, 1, 1, 1};
  const Group group{0, 4, whole, whole};
  const cpu::Runs found = cpu::find_runs(group, {3, 0, 1, 0, 1}, {src.get(), 3, false}, {dst.get(), 3, false}, true);
  return found.with_columns([](const auto& columns) { return columns.size; });
}

int64_t descriptors() {
  const auto src = block<int64_t>({3}), dst = block<int64_t>({7}), count = block<int64_t>({5});
  const auto from = block<uint64_t>({0, 0, 0, 0, 0}), to = block<uint64_t>({0, 0, 0, 0, 0}), nbytes = block<uint64_t>({0, 0, 0, 0, 0});
  cpu::expand({4096, 64, 8192, 128, 64, 0}, {1, 1}, cpu::RunColumns<int64_t>{src.get(), dst.get(), count.get(), 1, 5},
              {from.get(), to.get(), nbytes.get()});
  return static_cast<int64_t>(from[4] + to[4] + nbytes[4]);
}

}  // namespace

int main() {
  std::printf("%lld %lld %lld\n", static_cast<long long>(slots()), static_cast<long long>(runs()),
              static_cast<long long>(descriptors()));
}
