// Numbers of codes of four bits.
#pragma once

#include "../simd.hpp"

namespace greenroom {

// Twice the numbers of e2m1, plus 12, so that they have no sign.
constexpr int TWICE_E2M1_OFFSET = 12;
constexpr uint8_t TWICE_E2M1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// Twice the numbers of e2m1 in float32. The zero of code 8 has a sign in some formats.
INLINE Floats twice_e2m1(float eighth) {
    return lanes_of<float>([=](int i) {
        return i == 8 ? eighth : (float)(TWICE_E2M1[i] - TWICE_E2M1_OFFSET);
    });
}

// The numbers of iq4_nl and iq4_xs, plus 127.
constexpr int IQ4_OFFSET = 127;
constexpr uint8_t IQ4[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                             128, 140, 152, 165, 180, 196, 216, 240};

INLINE Floats iq4_numbers() {
    return lanes_of<float>([](int i) { return (float)(IQ4[i] - IQ4_OFFSET); });
}

}  // namespace greenroom
