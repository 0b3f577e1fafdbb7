#include <cuda_runtime.h>
#include <mrrope/frequency_table.h>
#include <mrrope/rotary.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

// Rotate on the GPU and compare with the CPU, without torch. Without a GPU the example tests linking only.
int main() {
    const mrrope::FrequencyTable t = mrrope::build_table({.rotary_dim = 64, .original_max_position = 4096});
    std::vector<uint64_t> table = mrrope::packed(t);
    std::vector<int64_t> positions{3, 50000};
    std::vector<float> heads(2 * 64, 1.0f);

    mrrope::RotaryArgs args;
    args.q.heads = 1;
    args.q.in_strides = args.q.out_strides = {.token = 64};
    args.batch = 1;
    args.tokens = 2;
    args.head_dim = args.rotary_dim = 64;

    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        mrrope::rotary_cuda({}, nullptr);
        std::printf("mrrope::cuda: linked; no GPU found\n");
        return 0;
    }
    const auto on_device = [](const auto& values) {
        void* memory = nullptr;
        const size_t bytes = values.size() * sizeof(values[0]);
        cudaMalloc(&memory, bytes);
        cudaMemcpy(memory, values.data(), bytes, cudaMemcpyHostToDevice);
        return memory;
    };
    args.q.in = args.q.out = on_device(heads);
    args.positions.data = on_device(positions);
    args.table = static_cast<const uint64_t*>(on_device(table));
    mrrope::rotary_cuda(args, nullptr);
    std::vector<float> rotated(heads.size());
    cudaMemcpy(rotated.data(), args.q.out, rotated.size() * sizeof(float), cudaMemcpyDeviceToHost);

    args.q.in = args.q.out = heads.data();
    args.positions.data = positions.data();
    args.table = table.data();
    mrrope::rotary_cpu(args);
    float worst = 0.0f;
    for (size_t i = 0; i < heads.size(); ++i) worst = std::fmax(worst, std::abs(rotated[i] - heads[i]));
    std::printf("mrrope::cuda: largest difference to the CPU %.1e\n", worst);
    return worst < 1e-6f ? 0 : 1;
}
