// Wait for other threads, for the tensor memory accelerator (TMA) and for other kernels. Source of the formats: PTX
// ISA, sections "mbarrier", "barrier.cluster" and "griddepcontrol".
#pragma once
#include "types.cuh"

DEVICE void init(uint64& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals));
}

DEVICE void arrive(uint32 barrier) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory"); }
DEVICE void arrive(uint64& barrier) { arrive(shared_address(&barrier)); }

// Threads of a warp that arrive in `arrive_as_warp`: one elected thread, after all threads' accesses. Compute
// Sanitizer's racecheck sees no order through another thread's arrival: for it, EVERY_THREAD_ARRIVES is defined.
#ifdef EVERY_THREAD_ARRIVES
constexpr int WARP_ARRIVALS = 32;
#else
constexpr int WARP_ARRIVALS = 1;
#endif

DEVICE void arrive_as_warp(uint64& barrier) {
  if (WARP_ARRIVALS == 32) return arrive(barrier);
  asm volatile(
      "{\n.reg .pred elected;\n"
      "elect.sync _|elected, -1;\n"
      "@elected mbarrier.arrive.shared.b64 _, [%0];\n}" ::"r"(shared_address(&barrier))
      : "memory");
}

// Arrive, and let the phase wait for `bytes` bytes from the TMA.
DEVICE void arrive_expecting(uint64& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Wait until a barrier's phase of this parity is over; the barrier may be an address in shared memory.
DEVICE void wait(uint32 barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
DEVICE void wait(uint64& barrier, int parity) { wait(shared_address(&barrier), parity); }

// Wait for `threads` threads at a numbered hardware barrier; __syncthreads() uses number 0.
DEVICE void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Make writes to shared memory visible to the TMA and the tensor cores.
DEVICE void fence_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Wait for all threads of a cluster, and see their writes.
DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Let the stream's next kernel start, if its launch allows it, as soon as all blocks of this kernel have called or
// ended. Before Hopper launches do not allow it.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Wait until the stream's previous kernel is over, and see its writes.
DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
