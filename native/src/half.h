// IEEE fp16 in portable arithmetic: the packer runs before a backend is chosen, so it may use no instruction of one.
#pragma once

#include <bit>
#include <cstdint>

namespace paceline::packing {

// Exact. No fp32 number on the way is subnormal, as the caller's thread may flush those to zero.
inline float from_half(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    const uint32_t exponent = magnitude >= 0x7c00 ? 224u << 23 : 112u << 23;
    const float subnormal = float(int(magnitude)) * 0x1p-24f;
    return std::bit_cast<float>(sign | (magnitude < 0x400 ? std::bit_cast<uint32_t>(subnormal) : (magnitude << 13) + exponent));
}

constexpr float LARGEST_HALF = 65504.0f;

// Nearest, ties to even; what is too large becomes the largest finite fp16, NaN becomes 0.
inline uint16_t to_half(float value) {
    const uint16_t sign = std::bit_cast<uint32_t>(value) >> 16 & 0x8000u;
    const float magnitude = std::bit_cast<float>(std::bit_cast<uint32_t>(value) & 0x7fffffffu);
    if (!(magnitude == magnitude)) return 0;
    if (magnitude >= LARGEST_HALF) return sign | 0x7bff;
    if (magnitude < 0x1p-14f) return sign | uint16_t(std::bit_cast<uint32_t>(magnitude + 0.5f) - std::bit_cast<uint32_t>(0.5f));
    const uint32_t bits = std::bit_cast<uint32_t>(magnitude) - (112u << 23);
    return sign | uint16_t((bits + 0xfffu + (bits >> 13 & 1)) >> 13);
}

inline float load_half_bytes(const uint8_t* p) { return from_half(uint16_t(p[0] | p[1] << 8)); }

inline void store_half_bytes(uint8_t* p, uint16_t half) {
    p[0] = uint8_t(half);
    p[1] = uint8_t(half >> 8);
}

}  // namespace paceline::packing
