// Types and helpers that every header uses.
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

#define DEVICE __device__ __forceinline__

// Check a compile-time flag from the host.
#define ASSERT_FLAG(NAME, MEANING) static_assert(NAME == 0 || NAME == 1, #NAME " must be 0 or 1: " MEANING)

DEVICE uint32 shared_address(const void* p) { return static_cast<uint32>(__cvta_generic_to_shared(p)); }

// Keep the compiler from moving uses of x to before this point, or from remembering how x was computed.
template <int N>
DEVICE void pin(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}
template <typename Integer, int N>
DEVICE void pin(Integer (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(x[i])::"memory");
}
