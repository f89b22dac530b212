// One backend: compiled once for each instruction set, with its flags and PL_ISA set to its name.
#include <utility>

#define PL_STRING_(text) #text
#define PL_NAME_(isa) PL_STRING_(isa)
#if defined(PL_ISA_AVX512)
#include "vec/avx512.h"
#elif defined(PL_ISA_AVX2) || defined(PL_ISA_AVX2VNNI)
#include "vec/avx2.h"
#elif defined(PL_ISA_NEON)
#include "vec/neon.h"
#else
#include "vec/portable.h"
#endif

#include "attention.h"
#include "linear.h"
#include "rows.h"

namespace paceline::PL_ISA {

template <Format FORMAT, int... ROWS> void fill(BlockKernel* rows, std::integer_sequence<int, ROWS...>) {
    ((rows[ROWS + 1] = block<FORMAT, ROWS + 1, true>), ...);
    if (!asks_for_one_row()) rows[1] = block<FORMAT, 1, false>;
}

template <int... FORMAT> void fill(Backend& backend, std::integer_sequence<int, FORMAT...>) {
    (fill<static_cast<Format>(FORMAT)>(backend.block[FORMAT], std::make_integer_sequence<int, TILE>()), ...);
}

const Backend& table() {
    static const Backend made = [] {
        Backend backend{PL_NAME_(PL_ISA), {}, quantize, rms_norm, gate, rotate, to_half, attend, row_best, draw};
        fill(backend, std::make_integer_sequence<int, FORMATS>());
        return backend;
    }();
    return made;
}

}  // namespace paceline::PL_ISA
