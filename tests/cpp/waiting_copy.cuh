#pragma once

#include "device/dependent_launch.cuh"
#include "foreign_kernels.h"

namespace mrrope::testing {
namespace {

struct CopyLaunch {
    const int* from;
    int* to;
};

__global__ void waiting_copy(const CopyLaunch launch) {
    pdl_wait();
    launch.to[threadIdx.x] = launch.from[threadIdx.x];
}

constexpr const auto& waiting_copy_kernel = pdl_kernel<waiting_copy>;

}  // namespace
}  // namespace mrrope::testing
