// Which rows of two page lists meet: the arithmetic progression of index pairs of one group in one request.
#pragma once
#include "arith.h"
#include "entry.h"

namespace kvplan {

// Pair k (0 <= k < count) joins local row src_first + k * src_step with dst_first + k * dst_step.
struct Pairs {
  int64_t count;
  int64_t src_first, src_step;
  int64_t dst_first, dst_step;
};

// Tokens sent, from src_start on; the window's own number, or all that the source list covers.
KVPLAN_HD bool tokens_sent(const Space& space, const Window& window, int64_t* tokens) {
  if (window.num_tokens < 0) return mul(window.src_pages, space.src_tokens, tokens);
  *tokens = window.num_tokens;
  return true;
}

// Checks the positions of both lists of one space, and their lengths against what is sent.
KVPLAN_HD Status check_window(const Space& space, const Window& window) {
  const int64_t dst_start = window.dst_start < 0 ? window.src_start : window.dst_start;
  if (window.src_start % space.src_align != 0) return {Code::kSrcVirtual, 0, 0, window.src_start, space.src_align};
  if (dst_start % space.dst_align != 0) return {Code::kDstVirtual, 0, 0, dst_start, space.dst_align};
  const int64_t src_pages = window.src_pages, dst_pages = window.dst_pages;
  int64_t tokens;
  if (!tokens_sent(space, window, &tokens)) return {Code::kOverflow};
  const int64_t src_needed = ceil_div(tokens, space.src_tokens);
  if (src_pages != src_needed) return {Code::kSrcLength, 0, 0, src_pages, src_needed};
  if (window.dst_start < 0) {
    const int64_t needed = ceil_div(tokens, space.dst_tokens);
    if (dst_pages != needed) return {Code::kDstLength, 0, 0, dst_pages, needed};
    return {};
  }
  int64_t end;
  if (!add(window.src_start, tokens, &end)) return {Code::kOverflow};
  const int64_t needed = end > window.dst_start ? ceil_div(end - window.dst_start, space.dst_tokens) : 0;
  if (dst_pages < needed) return {Code::kDstCover, 0, 0, dst_pages, needed};
  return {};
}

// The part of the destination list that holds the tokens sent. The window has passed check_window.
struct PageRange {
  int64_t first, count;
};

KVPLAN_HD PageRange pages_written(const Space& space, const Window& window) {
  int64_t tokens = 0;
  tokens_sent(space, window, &tokens);
  const int64_t ahead = window.dst_start < 0 ? 0 : window.src_start - window.dst_start;
  if (tokens == 0 || ahead + tokens <= 0) return {0, 0};
  const int64_t first = ahead < 0 ? 0 : ahead / space.dst_tokens;
  return {first, ceil_div(ahead + tokens, space.dst_tokens) - first};
}

// The greatest common divisor of a and b, both above 0, and a number `inverse` in [0, b) for which
// a * inverse leaves the rest `divisor` (modulo b). Euclid's algorithm, extended.
struct Bezout {
  int64_t divisor, inverse;
};

KVPLAN_HD Bezout bezout(int64_t a, int64_t b) {
  int64_t rest = b, next_rest = a % b, factor = 0, next_factor = 1;
  while (next_rest != 0) {
    const int64_t quotient = rest / next_rest;
    const int64_t rest_after = rest % next_rest, factor_after = factor - quotient * next_factor;
    rest = next_rest, next_rest = rest_after;
    factor = next_factor, next_factor = factor_after;
  }
  return {rest, factor < 0 ? factor + b : factor};
}

// The pairs of `group` in one request. Positions count rows from src_start; the destination list begins
// `ahead` rows before; below 0, it begins that many rows later, and what lies before is not sent.
// Both sides hold position q iff q % src.size == src.rank and (q + ahead) % dst.size == dst.rank.
// The first such q is the answer of a linear congruence; the others follow in steps of the least common multiple of both
// sizes. A search would take as many steps as a size has, which a peer chooses.
KVPLAN_HD Status pairs_of(const Group& group, const Space& space, const Window& window, Pairs* pairs) {
  int64_t tokens;
  if (!tokens_sent(space, window, &tokens)) return {Code::kOverflow};
  const Side &src = group.src, &dst = group.dst;
  const int64_t dst_start = window.dst_start < 0 ? window.src_start : window.dst_start;
  if ((window.src_start - dst_start) % group.compression != 0) return {Code::kAlignment, 0, 0, 0, group.compression};
  const int64_t ahead = (window.src_start - dst_start) / group.compression;
  const int64_t rows = ceil_div(tokens, group.compression);
  const Bezout common = bezout(src.size, dst.size);
  const int64_t turns = dst.size / common.divisor;  // of the source's ranks, until the positions repeat
  int64_t period;
  if (!mul(src.size, turns, &period)) return {Code::kOverflow};
  // src.rank + turn * src.size + ahead leaves the rest dst.rank, modulo dst.size.
  int64_t missing = (dst.rank - (src.rank + ahead % dst.size) % dst.size) % dst.size;
  if (missing < 0) missing += dst.size;
  int64_t first = period, turn;
  if (missing % common.divisor == 0) {
    if (!mul(missing / common.divisor, common.inverse % turns, &turn)) return {Code::kOverflow};
    first = src.rank + turn % turns * src.size;
  }
  *pairs = {0, 0, period / src.size, 0, period / dst.size};
  if (first >= period) return {};
  if (first < -ahead) first += ceil_div(-ahead - first, period) * period;
  if (first >= rows) return {};
  pairs->count = (rows - 1 - first) / period + 1;
  pairs->src_first = (first - src.rank) / src.size;
  pairs->dst_first = (first + ahead - dst.rank) / dst.size;
  return {};
}

}  // namespace kvplan
