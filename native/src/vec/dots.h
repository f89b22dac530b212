// For instruction sets whose dot product is exact at every width.
#pragma once

#include "../kernels.h"

namespace paceline::PL_ISA {

// sum[r] += QUADS quads of weights, of BITS bits, times row r's inputs from `first` on. Exact.
template <int BITS, int QUADS, int ROWS> PL_INLINE void add_dots(const W* w, const Activations* x, int first, I (&sum)[ROWS]) {
    for (int j = 0; j < QUADS; ++j)
        for (int r = 0; r < ROWS; ++r) sum[r] = dot<(BITS > 7)>(sum[r], w[j], x[r].q + first + 4 * j);
}

}  // namespace paceline::PL_ISA
