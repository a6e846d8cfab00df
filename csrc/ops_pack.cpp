// The op `pack` on CPU tensors: tensors -> plain structs, and registration. Its schema is in kvplan/ops/schemas.py.
#include <algorithm>
#include <memory>
#include <tuple>

#include "cpu/pack.h"
#include "new_table.h"
#include "tensors.h"

namespace kvplan {
namespace {

constexpr int64_t kMostPieces = int64_t{1} << 24;

// The three rows of a table.
cpu::Table rows_of(const Tensor& table) {
  auto* at = static_cast<uint64_t*>(table.data_ptr());
  const int64_t step = table.stride(0);
  return {at, at + step, at + 2 * step};
}

class TensorRows : public cpu::Rows {
 public:
  using Rows::Rows;

  // int64 [3, size].
  Tensor tensor() const {
    if (tensors_[0].size(1) == size()) return tensors_[0];
    bool cold;
    Tensor exact = new_table(size(), &cold);
    const cpu::Table to = rows_of(exact);
    std::copy_n(table_.src, size(), to.src);
    std::copy_n(table_.dst, size(), to.dst);
    std::copy_n(table_.nbytes, size(), to.nbytes);
    return exact;
  }

 private:
  cpu::Table allocate(int64_t n) override {
    bool cold;
    tensors_[1] = tensors_[0];
    tensors_[0] = new_table(n, &cold);
    cpu::Table table = rows_of(tensors_[0]);
    table.cold = cold;
    return table;
  }

  std::array<Tensor, 2> tensors_{new_words({3, 0}), new_words({3, 0})};  // the latest, and the one before
};

// What is made of a table.
struct Made {
  TensorRows copies, merged;
  cpu::Pieces pieces;
  std::vector<int64_t> starts;

  // `most`: descriptors there can be on either side. Where packing pays, there are few merged ones.
  explicit Made(int64_t most) : copies(most, most), merged(std::max<int64_t>(most / 16, 4096), most) {}
  int64_t make(const cpu::PackInput& in) { return cpu::pack(in, &copies, &merged, &pieces, &starts); }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> pack(const Tensor& table, const std::vector<int64_t>& cuts, bool read,
                                                int64_t piece, const Tensor& edges) {
  STD_TORCH_CHECK(table.scalar_type() == ScalarType::Long && table.dim() == 2 && table.size(0) == 3 &&
                      (table.size(1) <= 1 || table.stride(1) == 1),
                  "table must be int64 [3, N], the words of a row side by side");
  STD_TORCH_CHECK(edges.dim() == 1, "edges must be a contiguous int64 tensor");
  STD_TORCH_CHECK(piece > 0, "piece is ", piece, "; it must be at least 1");
  const int64_t n = table.size(1);
  STD_TORCH_CHECK(!cuts.empty() && cuts[0] == 0 && cuts.back() == n && std::is_sorted(cuts.begin(), cuts.end()),
                  "cuts must rise from 0 to the table's ", n);
  const cpu::Table given = rows_of(table);
  int64_t num_edges;
  const auto* edge = reinterpret_cast<const uint64_t*>(rows<const int64_t>(edges, "edges", &num_edges));
  const cpu::PackInput in{given.src, given.dst, given.nbytes, n, cuts.data(), static_cast<int64_t>(cuts.size()) - 1,
                          read, piece, edge, num_edges};
  auto made = std::make_unique<Made>(n);
  int64_t found = made->make(in);
  if (found == cpu::kNoRoom) {
    int64_t total;
    found = cpu::survey(in, &total);
    STD_TORCH_CHECK(found >= 0 || total / piece <= kMostPieces, "piece is ", piece, "; so small that ", total,
                    " bytes make more than 2^24 pieces");
    if (found < 0) {
      made = std::make_unique<Made>(n + total / piece);  // each cut ends a piece that is full
      found = made->make(in);
    }
    STD_TORCH_CHECK(found != cpu::kNoRoom, "the table was written by another thread while it was packed");
  }
  Tensor info = new_words({static_cast<int64_t>(cuts.size()) + 1});
  auto* facts = static_cast<int64_t*>(info.data_ptr());
  *facts++ = found;
  if (found >= 0) {
    std::fill_n(facts, cuts.size(), 0);
    Tensor pieces = new_words({3, 1});
    std::fill_n(static_cast<int64_t*>(pieces.data_ptr()), 3, 0);
    return {new_words({3, 0}), new_words({3, 0}), pieces, info};
  }
  std::copy(made->starts.begin(), made->starts.end(), facts);
  Tensor pieces = new_words({3, static_cast<int64_t>(made->pieces[0].size())});
  auto* cut = static_cast<int64_t*>(pieces.data_ptr());
  for (const auto& row : made->pieces) cut = std::copy(row.begin(), row.end(), cut);
  return {made->copies.tensor(), made->merged.tensor(), pieces, info};
}

}  // namespace
}  // namespace kvplan

STABLE_TORCH_LIBRARY_IMPL(kvplan, CPU, m) { m.impl("pack", TORCH_BOX(&kvplan::pack)); }
