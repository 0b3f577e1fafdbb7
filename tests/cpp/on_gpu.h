#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

namespace mrrope::testing {

// Base of tests that need a GPU: skipped without one. A test must not leave a CUDA error behind.
class OnGpu : public ::testing::Test {
protected:
    void SetUp() override {
        int devices = 0;
        const cudaError_t status = cudaGetDeviceCount(&devices);
        if (status != cudaSuccess || devices == 0) {
            GTEST_SKIP() << "no CUDA device: " << (status == cudaSuccess ? "none found" : cudaGetErrorString(status));
        }
    }

    void TearDown() override {
        if (IsSkipped()) return;
        EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    }
};

}  // namespace mrrope::testing
