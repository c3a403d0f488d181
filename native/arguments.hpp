// The arguments of kernels: structures that Python fills by the names of their fields.
//
// SHARED declares a structure and keeps its declaration as a string in the library, from which
// Python makes a ctypes.Structure of the same fields and checks its size
// (runtime/kernels/native/library.py). Fields are int64_t, int32_t, float, pointers, other shared
// structures, and arrays of these.
#pragma once

#include <cstdint>

#define EXPORT extern "C" [[gnu::visibility("default")]]

#define SHARED(name, ...)                                             \
    struct name {                                                     \
        __VA_ARGS__                                                   \
    };                                                                \
    extern "C" [[gnu::visibility("default"), gnu::weak]] const char fields_of_##name[]; \
    const char fields_of_##name[] = #__VA_ARGS__;                     \
    extern "C" [[gnu::visibility("default"), gnu::weak]] const int64_t bytes_of_##name; \
    const int64_t bytes_of_##name = sizeof(name);
