// Descriptors -> local copies, merged descriptors and pieces, by way of staging. One pass.
#include "pack.h"

#include <algorithm>

#include "../arith.h"
#include "clones.h"
#include "past_cache.h"

namespace kvplan::cpu {

namespace {

constexpr int64_t kBlock = 256;  // descriptors that are looked at together, in the nearest cache
constexpr int64_t kGroup = 8;    // of these, a line of words

// Descriptors of a block, read once: what is checked is what is used.
struct Block {
  alignas(64) uint64_t src[kBlock], dst[kBlock], nbytes[kBlock];
  alignas(64) int64_t at[kBlock];  // byte of staging with which each begins
  int64_t size;
};

// What is known of a block at once.
struct Facts {
  uint64_t wrong;  // not 0: some descriptor is empty, has more than 2^53 bytes, or ends past 2^64
  uint64_t total;  // bytes, where none is wrong: so few that their sum is below 2^63
  uint64_t low, high;  // first and last of the remote addresses
};

bool accepted(uint64_t src, uint64_t dst, int64_t nbytes, int64_t at) {
  int64_t end;
  return add(at, nbytes, &end) && address_fits(src, 0, 1, nbytes) && address_fits(dst, 0, 1, nbytes);
}

// No branch, so that many are looked at in one step.
KVPLAN_CLONES void look_at(const Block& block, const uint64_t* remote, Facts* facts) {
  uint64_t wrong = 0, total = 0, low = UINT64_MAX, high = 0;
  for (int64_t k = 0; k < block.size; ++k) {
    const uint64_t last = block.nbytes[k] - 1;
    wrong |= last >> 53;  // also where there are none
    wrong |= static_cast<uint64_t>(block.src[k] + last < last) | static_cast<uint64_t>(block.dst[k] + last < last);
    total += block.nbytes[k];
    low = std::min(low, remote[k]);
    high = std::max(high, remote[k]);
  }
  *facts = {wrong, total, low, high};
}

// How many begin where the one before ends.
KVPLAN_CLONES int64_t count_joined(const uint64_t* address, const uint64_t* nbytes, int64_t n) {
  int64_t count = 0;
  for (int64_t k = 1; k < n; ++k) count += (address[k] == address[k - 1] + nbytes[k - 1]) & (address[k] != 0);
  return count;
}

// Calls begin(k) for each k from 1 that does not begin where the one before ends.
template <class Begin>
void for_each_break(const uint64_t* address, const uint64_t* nbytes, int64_t n, const Begin& begin) {
  const auto apart = [&](int64_t k) { return address[k] ^ (address[k - 1] + nbytes[k - 1]); };
  for (int64_t first = 1; first < n; first += kGroup) {
    const int64_t last = std::min(first + kGroup, n);
    uint64_t any = 0;
    for (int64_t k = first; k < last; ++k) any |= apart(k) | static_cast<uint64_t>(address[k] == 0);
    if (any == 0) continue;
    for (int64_t k = first; k < last; ++k)
      if (apart(k) != 0 || address[k] == 0) begin(k);
  }
}

// Writes rows. Single ones are put together in the cache: a cold table is written past it, in whole lines.
class Writer {
 public:
  explicit Writer(Rows* out) : out_(out) {}

  void add(uint64_t src, uint64_t dst, uint64_t nbytes) {
    words_[0][count_] = src, words_[1][count_] = dst, words_[2][count_] = nbytes;
    if (++count_ == kBlock) flush();
  }
  void add_many(const uint64_t* src, const uint64_t* dst, const uint64_t* nbytes, int64_t n) {
    flush();
    fits_ = fits_ && out_->add(src, dst, nbytes, n);
  }
  void flush() {
    fits_ = fits_ && out_->add(words_[0], words_[1], words_[2], count_);
    count_ = 0;
  }
  bool fits() const { return fits_; }

 private:
  Rows* out_;
  int64_t count_ = 0;
  bool fits_ = true;
  alignas(64) uint64_t words_[3][kBlock];
};

// One side of what is packed: stretches that follow one another in staging. The last is open until the next begins.
class Stretches {
 public:
  Stretches(Rows* out, bool staging_first) : writer_(out), staging_first_(staging_first) {}

  // Whether `address` goes on where the open stretch ends. Nothing does at 2^64, nor where a piece has ended.
  bool meets(uint64_t address) const { return (address == end_) & (end_ != 0); }
  void go_on(uint64_t nbytes) { end_ += nbytes; }
  void interrupt() { end_ = 0; }
  void begin(uint64_t address, int64_t at) {
    close(at);
    address_ = end_ = address;
    at_ = at;
    ++begun_;
  }

  // A block, none of whose descriptors passes 64 bits: what goes on is joined.
  void add(const uint64_t* address, const Block& block) {
    const int64_t n = block.size;
    const bool met = meets(address[0]);
    if (!met && count_joined(address, block.nbytes, n) == 0) {
      close(block.at[0]);
      const auto* at = reinterpret_cast<const uint64_t*>(block.at);
      writer_.add_many(staging_first_ ? at : address, staging_first_ ? address : at, block.nbytes, n - 1);
      begun_ += n;
      address_ = address[n - 1];
      at_ = block.at[n - 1];
    } else {
      if (!met) begin(address[0], block.at[0]);
      for_each_break(address, block.nbytes, n, [&](int64_t k) { begin(address[k], block.at[k]); });
    }
    end_ = address[n - 1] + block.nbytes[n - 1];
  }

  void finish(int64_t at) {
    close(at);
    writer_.flush();
  }
  int64_t begun() const { return begun_; }
  bool fits() const { return writer_.fits(); }

 private:
  void close(int64_t at) {
    if (begun_ == 0) return;
    const auto offset = static_cast<uint64_t>(at_), nbytes = static_cast<uint64_t>(at - at_);
    writer_.add(staging_first_ ? offset : address_, staging_first_ ? address_ : offset, nbytes);
  }

  Writer writer_;
  const bool staging_first_;
  uint64_t address_ = 0, end_ = 0;
  int64_t at_ = 0;  // byte of staging
  int64_t begun_ = 0;
};

// Where descriptors may not be merged. What was looked up last is kept: neighbours mostly lie between the same edges.
class Edges {
 public:
  Edges(const uint64_t* edges, int64_t n) : first_(edges), last_(edges + n) { look_up(0); }

  bool is_one(uint64_t address) { return between(address - 1, address); }  // address > 0

  // Whether one is above `low`, and not above `high`.
  bool between(uint64_t low, uint64_t high) {
    if (low < below_ || (low >= above_ && !none_above_)) look_up(low);
    return !none_above_ && high >= above_;
  }

 private:
  void look_up(uint64_t address) {
    const uint64_t* const next = std::upper_bound(first_, last_, address);
    below_ = next == first_ ? 0 : next[-1];
    above_ = next == last_ ? UINT64_MAX : *next;
    none_above_ = next == last_;
  }

  const uint64_t *first_, *last_;
  uint64_t below_, above_;  // none lies between them
  bool none_above_;
};

class Packing {
 public:
  Packing(const PackInput& in, Rows* copies, Rows* merged, Pieces* pieces)
      : in_(in), pieces_(*pieces), copies_(copies, in.read), merged_(merged, !in.read), edges_(in.edges, in.num_edges) {}

  int64_t run(std::vector<int64_t>* starts) {
    for (int64_t segment = 0; segment < in_.segments; ++segment) {
      starts->push_back(static_cast<int64_t>(pieces_[0].size()));
      room_ = 0;
      for (int64_t i = in_.cuts[segment]; i < in_.cuts[segment + 1]; i += block_.size) {
        block_.size = std::min(kBlock, in_.cuts[segment + 1] - i);
        std::copy_n(in_.src + i, block_.size, block_.src);
        std::copy_n(in_.dst + i, block_.size, block_.dst);
        std::copy_n(in_.nbytes + i, block_.size, block_.nbytes);
        const int64_t bad = place_together() ? kAllWell : place_one_by_one();
        if (bad >= 0) return i + bad;
        if (!fits()) return kNoRoom;
      }
    }
    starts->push_back(static_cast<int64_t>(pieces_[0].size()));
    begin_piece();
    copies_.finish(at_);
    merged_.finish(at_);
    return fits() ? kAllWell : kNoRoom;
  }

 private:
  bool fits() const { return copies_.fits() && merged_.fits(); }
  const uint64_t* local() const { return in_.read ? block_.dst : block_.src; }
  const uint64_t* remote() const { return in_.read ? block_.src : block_.dst; }

  // The whole block, where nothing is wrong with it and it lies within one piece and between two edges; else false.
  bool place_together() {
    Facts facts;
    look_at(block_, remote(), &facts);
    const auto total = static_cast<int64_t>(facts.total);
    int64_t end;
    if (facts.wrong != 0 || total > room_ || !::kvplan::add(at_, total, &end) || edges_.between(facts.low, facts.high))
      return false;
    for (int64_t k = 0; k < block_.size; ++k) {
      block_.at[k] = at_;
      at_ += static_cast<int64_t>(block_.nbytes[k]);
    }
    room_ -= total;
    copies_.add(local(), block_);
    merged_.add(remote(), block_);
    return true;
  }

  int64_t place_one_by_one() {
    for (int64_t k = 0; k < block_.size; ++k) {
      if (block_.nbytes[k] == 0) continue;
      const auto nbytes = static_cast<int64_t>(block_.nbytes[k]);
      if (!accepted(block_.src[k], block_.dst[k], nbytes, at_)) return k;
      if (nbytes <= room_)
        place(local()[k], remote()[k], nbytes);
      else
        place_in_new_pieces(local()[k], remote()[k], nbytes);
    }
    return kAllWell;
  }

  void place(uint64_t local, uint64_t remote, int64_t nbytes) {
    const auto size = static_cast<uint64_t>(nbytes);
    if (!copies_.meets(local)) copies_.begin(local, at_);
    if (!merged_.meets(remote) || edges_.is_one(remote)) merged_.begin(remote, at_);
    copies_.go_on(size);
    merged_.go_on(size);
    at_ += nbytes;
    room_ -= nbytes;
  }

  // What does not fit into the open piece begins the next one; what is larger than a piece is cut.
  void place_in_new_pieces(uint64_t local, uint64_t remote, int64_t nbytes) {
    while (nbytes > 0 && fits()) {
      begin_piece();
      room_ = in_.piece;
      const int64_t part = std::min(nbytes, in_.piece);
      place(local, remote, part);
      local += static_cast<uint64_t>(part);
      remote += static_cast<uint64_t>(part);
      nbytes -= part;
    }
  }

  void begin_piece() {
    copies_.interrupt();
    merged_.interrupt();
    pieces_[0].push_back(copies_.begun());
    pieces_[1].push_back(merged_.begun());
    pieces_[2].push_back(at_);
  }

  const PackInput& in_;
  Pieces& pieces_;
  Block block_;
  Stretches copies_, merged_;
  Edges edges_;
  int64_t at_ = 0;    // bytes of staging that are taken
  int64_t room_ = 0;  // bytes left in the open piece
};

}  // namespace

bool Rows::add(const uint64_t* src, const uint64_t* dst, const uint64_t* nbytes, int64_t n) {
  while (n > room_ - size_) {
    if (room_ == most_) return false;
    const Table before = table_;
    room_ = std::min(next_, most_);
    next_ = most_;
    table_ = allocate(room_);
    std::copy_n(before.src, size_, table_.src);
    std::copy_n(before.dst, size_, table_.dst);
    std::copy_n(before.nbytes, size_, table_.nbytes);
  }
  const auto put = [&](uint64_t* row, const uint64_t* words) {
    if (table_.cold)
      copy_cold(row + size_, words, n);
    else
      std::copy_n(words, n, row + size_);
  };
  put(table_.src, src);
  put(table_.dst, dst);
  put(table_.nbytes, nbytes);
  size_ += n;
  return true;
}

int64_t pack(const PackInput& in, Rows* copies, Rows* merged, Pieces* pieces, std::vector<int64_t>* starts) {
  const int64_t found = Packing(in, copies, merged, pieces).run(starts);
  if (copies->cold() || merged->cold()) written_past_cache();
  return found;
}

int64_t survey(const PackInput& in, int64_t* total) {
  *total = 0;
  for (int64_t i = 0; i < in.n; ++i) {
    const auto nbytes = static_cast<int64_t>(in.nbytes[i]);
    if (nbytes == 0) continue;
    if (!accepted(in.src[i], in.dst[i], nbytes, *total)) return i;
    *total += nbytes;
  }
  return kAllWell;
}

}  // namespace kvplan::cpu
