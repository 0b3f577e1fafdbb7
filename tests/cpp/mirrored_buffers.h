#pragma once

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <vector>

#include "device_memory.h"

namespace mrrope::testing {

// Device copies of host buffers. A pointer into a host buffer is translated to the same byte of its copy, so that a
// case's arguments need no second way to be built.
class MirroredBuffers {
public:
    // The host buffer must outlive this.
    template <class T>
    void add(const std::vector<T>& host) {
        mirrors_.push_back(
            {reinterpret_cast<const std::byte*>(host.data()), host.size() * sizeof(T), nullptr, DeviceMemory(host)});
    }

    // fetch() copies it back.
    template <class T>
    void add_fetched(std::vector<T>& host) {
        add(host);
        mirrors_.back().fetched = reinterpret_cast<std::byte*>(host.data());
    }

    template <class T>
    T* on_device(T* host) const {
        if (host == nullptr) return nullptr;
        const auto* byte = reinterpret_cast<const std::byte*>(host);
        for (const Mirror& mirror : mirrors_) {
            if (byte >= mirror.host && byte < mirror.host + mirror.size) {
                return reinterpret_cast<T*>(mirror.device.data() + (byte - mirror.host));
            }
        }
        // A pointer into a buffer without bytes, which nothing may read.
        if (std::ranges::any_of(mirrors_, [](const Mirror& mirror) { return mirror.size == 0; })) return nullptr;
        throw std::logic_error("a pointer into no mirrored buffer");
    }

    // Copies a host buffer to the device again.
    template <class T>
    void upload(const std::vector<T>& host) {
        check(cudaMemcpy(on_device(const_cast<T*>(host.data())), host.data(), host.size() * sizeof(T),
                         cudaMemcpyHostToDevice));
        check(cudaDeviceSynchronize());
    }

    void fetch() const {
        check(cudaDeviceSynchronize());
        for (const Mirror& mirror : mirrors_) {
            if (mirror.fetched == nullptr || mirror.size == 0) continue;
            check(cudaMemcpy(mirror.fetched, mirror.device.data(), mirror.size, cudaMemcpyDeviceToHost));
        }
    }

private:
    struct Mirror {
        const std::byte* host;
        size_t size;
        std::byte* fetched;
        DeviceMemory device;
    };
    std::vector<Mirror> mirrors_;
};

}  // namespace mrrope::testing
