#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <utility>
#include <vector>

// Device memory, streams and graphs for the tests and benchmarks of every kernel.

namespace mrrope::testing {

inline void check(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

class DeviceMemory {
public:
    explicit DeviceMemory(size_t bytes) {
        if (bytes > 0) check(cudaMalloc(&memory_, bytes));
    }
    template <class T>
    explicit DeviceMemory(const std::vector<T>& values) : DeviceMemory(values.size() * sizeof(T)) {
        upload(values);
    }
    DeviceMemory(DeviceMemory&& other) noexcept : memory_(std::exchange(other.memory_, nullptr)) {}
    DeviceMemory& operator=(DeviceMemory&&) = delete;
    ~DeviceMemory() { cudaFree(memory_); }

    std::byte* data() const { return static_cast<std::byte*>(memory_); }

    template <class T>
    const T* as() const {
        return static_cast<const T*>(memory_);
    }

    template <class T>
    void upload(const std::vector<T>& values) {
        if (values.empty()) return;
        check(cudaMemcpy(memory_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
        check(cudaDeviceSynchronize());  // small copies may return early, and non-blocking streams do not wait for them
    }
    template <class T>
    void download(std::vector<T>& values) const {
        if (!values.empty())
            check(cudaMemcpy(values.data(), memory_, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    }

private:
    void* memory_ = nullptr;
};

class Stream {
public:
    Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    ~Stream() { cudaStreamDestroy(stream_); }
    operator cudaStream_t() const { return stream_; }

private:
    cudaStream_t stream_ = nullptr;
};

// A CUDA graph of what a call launches.
class Recording {
public:
    template <class Call>
    Recording(cudaStream_t stream, Call&& call) {
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        call(stream);
        check(cudaStreamEndCapture(stream, &graph_));
    }
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;
    ~Recording() { cudaGraphDestroy(graph_); }

    size_t launches() const {
        size_t count = 0;
        check(cudaGraphGetNodes(graph_, nullptr, &count));
        return count;
    }

    void play(cudaStream_t stream) const {
        cudaGraphExec_t executable = nullptr;
        check(cudaGraphInstantiate(&executable, graph_, 0));
        check(cudaGraphLaunch(executable, stream));
        check(cudaStreamSynchronize(stream));
        check(cudaGraphExecDestroy(executable));
    }

private:
    cudaGraph_t graph_ = nullptr;
};

}  // namespace mrrope::testing
